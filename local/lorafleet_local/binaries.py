"""The control plane's binaries: built once from the pinned Go modules under tools/, cached outside the tree.

Called by hack/setup.sh (as a script, before the environment exists, hence standard library only) and by
`controlplane`, which only looks them up. A binary is current when the digest beside it is that of the go.mod, go.sum
and linker flags it was built from; the build is serialized over checkouts and the rename is atomic.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lorafleet_local.paths import cache_dir, locked, repo_root

KUBERNETES_VERSION = "1.37.2"
ETCD_VERSION = "3.6.15"
_PROGRESS_SECONDS = 15.0


class BinaryError(Exception):
    """A control-plane binary is missing or cannot be built; the message names the fix."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One binary and the pinned module that it is built from."""

    name: str
    version: str
    module: str
    """Folder under tools/ with go.mod and go.sum."""
    package: str
    """Go import path of the main package."""
    ldflags: str
    about: str
    """What a first build costs, for the progress line."""


_KUBE_LDFLAGS = (
    "-s -w"
    f" -X k8s.io/component-base/version.gitVersion=v{KUBERNETES_VERSION}"
    " -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37"
)

TOOLS = (
    Tool("etcd", ETCD_VERSION, "etcd", "go.etcd.io/etcd/server/v3", "-s -w", "about 20 s on 2 cores"),
    Tool(
        "kube-apiserver", KUBERNETES_VERSION, "kube", "k8s.io/kubernetes/cmd/kube-apiserver", _KUBE_LDFLAGS,
        "about 6 min on 2 cores",
    ),
    Tool(
        "kube-controller-manager", KUBERNETES_VERSION, "kube", "k8s.io/kubernetes/cmd/kube-controller-manager",
        _KUBE_LDFLAGS, "about 90 s on 2 cores",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Binaries:
    """Paths of the control plane's executables."""

    etcd: Path
    apiserver: Path
    controller_manager: Path


def find_binaries() -> Binaries:
    """The binaries, from `KUBEBUILDER_ASSETS` where it has them, else from the cache.

    Raises:
        BinaryError: one is missing or was built from other pins.
    """
    paths = []
    for tool in TOOLS:
        path = _from_assets(tool) or _cached(tool)
        if path is None:
            raise BinaryError(f"{tool.name} {tool.version} is not built (looked in {_bin_dir()}); run `make setup`")
        paths.append(path)
    return Binaries(*paths)


def build_missing(go: str) -> None:
    """Build every binary that is neither in `KUBEBUILDER_ASSETS` nor current in the cache.

    Args:
        go: the Go command.

    Raises:
        BinaryError: go failed; its last lines are in the message.
    """
    for tool in TOOLS:
        if _from_assets(tool) or _cached(tool):
            continue
        target = _target(tool)
        with locked(target.with_name(f".{target.name}.lock")):
            if _cached(tool) is None:  # another checkout may have built it while this one waited
                _build(tool, go, target)


def _bin_dir() -> Path:
    return cache_dir() / "bin"


def _target(tool: Tool) -> Path:
    return _bin_dir() / f"{tool.name}-{tool.version}"


def _from_assets(tool: Tool) -> Path | None:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    path = Path(assets) / tool.name if assets else None
    return path if path is not None and os.access(path, os.X_OK) else None


def _cached(tool: Tool) -> Path | None:
    path = _target(tool)
    try:
        current = path.with_name(path.name + ".sha256").read_text().strip() == pin_digest(tool)
    except OSError:
        return None
    return path if current and os.access(path, os.X_OK) else None


def pin_digest(tool: Tool) -> str:
    """SHA-256 over everything that decides what is built: go.mod, go.sum, package and linker flags."""
    folder = repo_root() / "tools" / tool.module
    digest = hashlib.sha256(f"{tool.package}\n{tool.ldflags}\n".encode())
    for name in ("go.mod", "go.sum"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _build(tool: Tool, go: str, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    log = target.with_name(f"{target.name}.log")
    command = [
        go, "build", "-mod=readonly", "-trimpath", "-ldflags", tool.ldflags, "-o", str(temporary), tool.package,
    ]  # fmt: skip
    folder = repo_root() / "tools" / tool.module
    print(f"building {tool.name} {tool.version} ({tool.about}, once)", flush=True)
    started = time.monotonic()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, "CGO_ENABLED": "0"}, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                _report_until_done(process, tool, started)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if process.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BinaryError(f"go build of {tool.name} failed with {process.returncode} (log: {log}):\n{tail}")
        os.rename(temporary, target)
        target.with_name(target.name + ".sha256").write_text(pin_digest(tool) + "\n")
    finally:
        temporary.unlink(missing_ok=True)
    print(f"built {tool.name} {tool.version} in {time.monotonic() - started:.0f} s", flush=True)


def _report_until_done(process: subprocess.Popen[bytes], tool: Tool, started: float) -> None:
    while True:
        try:
            process.wait(timeout=_PROGRESS_SECONDS)
            return
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - started
            print(f"  still building {tool.name} {tool.version}: {elapsed:.0f} s ({tool.about}, once)", flush=True)


def main() -> int:
    """Build what is missing; the argument is the Go command."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the half-written file is removed
    try:
        build_missing(sys.argv[1] if len(sys.argv) > 1 else "go")
    except BinaryError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
