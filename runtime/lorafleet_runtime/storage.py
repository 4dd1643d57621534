"""Where things lie on shared storage. Imports no torch; the trainer writes checkpoints, this module names them."""

import json
import os
import re
from pathlib import Path

from lorafleet_runtime.errors import ConfigError

_STEP = re.compile(r"step_(\d+)")


def run_directory(root: Path, namespace: str, name: str, uid: str) -> Path:
    """`{root}/{namespace}/{name}/{uid}`: everything one run writes.

    Raises:
        ValueError: a part would leave its folder (names reach here from the HTTP API too).
    """
    for field, part in (("namespace", namespace), ("name", name), ("uid", uid)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", part):
            raise ValueError(f"{field}: {part!r} is no path segment; use letters, digits, '.', '_' and '-'")
    return root / namespace / name / uid


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first: (step, path). A checkpoint appears by rename, so a listed one is complete."""
    if not directory.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in directory.iterdir() if (m := _STEP.fullmatch(p.name))]
    return sorted((step, path) for step, path in found if (path / "state.json").is_file())


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = checkpoints(directory)
    return found[-1][1] if found else None


def next_boot_epoch(root: Path, pool: str) -> int:
    """Raise and return the pool's boot counter; durable before it is returned.

    Raises:
        ConfigError: storage cannot be written.
    """
    directory = root / ".lorafleet" / pool
    path = directory / "boot.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        epoch = 1 + (int(json.loads(path.read_text())["bootEpoch"]) if path.exists() else 0)
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump({"bootEpoch": epoch}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"storageRoot: {root} cannot be written ({error}); mount a writable volume") from error
    return epoch
