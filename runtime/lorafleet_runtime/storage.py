"""Where things lie on shared storage. Imports no torch; the trainer writes checkpoints, this module names them."""

import errno
import glob
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from lorafleet_runtime.errors import ConfigError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
CHECKPOINT_FILES = frozenset({WEIGHTS_FILE, CONFIG_FILE, OPTIMIZER_FILE, STATE_FILE})
"""What a checkpoint directory holds."""

ASIDE = ".old-"
"""Prefix of a checkpoint that is being replaced; it counts until the new one is in place."""

DAMAGED = ".damaged-"
"""Prefix of a checkpoint that could not be read and was passed over; nothing here looks at it again."""

_STEP = re.compile(rf"({re.escape(ASIDE)})?step_(\d+)")


def run_directory(root: Path, namespace: str, name: str, uid: str) -> Path:
    """`{root}/{namespace}/{name}/{uid}`: everything one run writes.

    Raises:
        ValueError: a part would leave its folder (names reach here from the HTTP API too).
    """
    for field, part in (("namespace", namespace), ("name", name), ("uid", uid)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", part):
            raise ValueError(f"{field}: {part!r} is no path segment; use letters, digits, '.', '_' and '-'")
    return root / namespace / name / uid


def inside(root: Path, path: str | Path) -> Path:
    """A path on the storage, relative to its root or absolute, with symbolic links followed.

    Raises:
        ValueError: it lies outside the storage, or is no usable path; the text says which, and the fix.
    """
    try:
        base = root.resolve()
        resolved = (base / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links
        raise ValueError(f"is no usable path ({error}); give a path on the pool's storage") from error
    if not resolved.is_relative_to(base):
        raise ValueError("lies outside the pool's storage; give a path relative to the storage root")
    return resolved


def read_regular(path: Path, limit: int = -1) -> bytes:
    """The bytes of a regular file. A named pipe or a device would keep the reading thread for ever.

    Args:
        path: what to read.
        limit: most bytes read; -1 is all.

    Raises:
        OSError: it cannot be read; strerror says why.
    """
    # Not blocking, so that opening a pipe returns; checked on the open file, so that it cannot be swapped meanwhile.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with open(descriptor, "rb") as file:
        return file.read(limit)


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Whole checkpoints, oldest first: (step, path). One that was set aside counts where step_N itself is not whole."""
    return sorted({step: path for step, path in step_directories(directory) if is_whole(path)}.items())


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return next((path for _, path in reversed(step_directories(directory)) if is_whole(path)), None)


def newest_step(directory: Path) -> Path | None:
    """The newest step_N, whole or damaged, or None: what a run goes on from must say when that is not the newest."""
    return next((path for _, path in reversed(step_directories(directory))), None)


def has_checkpoint(root: Path, uid: str) -> bool:
    """Whether the run has a whole checkpoint, whatever its namespace and name."""
    return any(latest_checkpoint(path) is not None for path in root.glob(f"*/*/{glob.escape(uid)}"))


def step_directories(directory: Path) -> list[tuple[int, Path]]:
    """Everything named step_N or .old-step_N, whole or not: (step, path), oldest first, step_N after .old-step_N."""
    if not directory.is_dir():
        return []
    found = [(match, path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    found.sort(key=lambda item: (int(item[0][2]), item[0][1] is None))
    return [(int(match[2]), path) for match, path in found]


def step_of(path: Path) -> int:
    """N of a step_N or .old-step_N directory.

    Raises:
        ValueError: it has another name.
    """
    match = _STEP.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is no step_N directory")
    return int(match[2])


def is_whole(path: Path) -> bool:
    """Whether every file of a checkpoint is there at the size that its state.json says; reads no tensors."""
    try:
        files = json.loads((path / STATE_FILE).read_text())["files"]
        return {*files, STATE_FILE} >= CHECKPOINT_FILES and all(
            (path / name).stat().st_size == about["bytes"] for name, about in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def next_boot_epoch(root: Path, pool: str) -> int:
    """Raise and return the pool's boot counter; durable before it is returned.

    Raises:
        ConfigError: storage cannot be written, or the counter is damaged.
    """
    path = pool_directory(root, pool) / "boot.json"
    try:
        epoch = 1 + (int(json.loads(path.read_text())["bootEpoch"]) if path.exists() else 0)
        write_durably(path, {"bootEpoch": epoch})
    except OSError as error:
        raise ConfigError(f"storageRoot: {root} cannot be written ({error}); mount a writable volume") from error
    except (ValueError, KeyError, TypeError) as error:
        fix = 'write {"bootEpoch": N} to it, N above every bootEpoch in the status of the pool and its runs'
        raise ConfigError(f"{path} is damaged ({error}); {fix}") from error
    return epoch


def pool_directory(root: Path, pool: str) -> Path:
    """`{root}/.lorafleet/{pool}`: what outlives a runtime and belongs to no run. `pool` is {namespace}-{name}."""
    return root / ".lorafleet" / pool


def write_durably(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file so that after any crash either the old or the new content is there, whole.

    Raises:
        OSError: nothing has changed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("w") as file:
            json.dump(document, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename or removal in this directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
