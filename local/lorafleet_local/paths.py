"""Where the one-machine edition keeps its files: a cache shared by all checkouts, a state folder per checkout.

Called by every module of this package; owns names of folders and starts nothing. Standard library only, because
`binaries` runs before the environment exists.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """The cache outside the tree: binaries and converted models, shared by all checkouts.

    `LORAFLEET_CACHE_DIR` overrides `${XDG_CACHE_HOME:-~/.cache}/lorafleet`.
    """
    override = os.environ.get("LORAFLEET_CACHE_DIR")
    if override:
        return Path(override).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "lorafleet"


def repo_root() -> Path:
    """The checkout this package is installed from (editable).

    Raises:
        FileNotFoundError: the package is not installed from a checkout.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "tools" / "kube" / "go.mod").is_file():
        raise FileNotFoundError(
            f"{root}: no LoraFleet checkout here (tools/kube/go.mod is missing); run from a clone with `make setup`"
        )
    return root


def state_dir() -> Path:
    """The state folder of this checkout; `LORAFLEET_STATE_DIR` overrides `.lorafleet/`."""
    override = os.environ.get("LORAFLEET_STATE_DIR")
    return Path(override).absolute() if override else repo_root() / ".lorafleet"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
