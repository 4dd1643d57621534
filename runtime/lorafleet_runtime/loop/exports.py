"""Copies a run's checkpoints, as PEFT adapters, to the directory that the run's `save` names. Called by `api_runs`.

Only the two files that serve are copied. It writes inside the pool's storage alone, and never over a checkpoint: a
directory that holds one is somebody's progress.
"""

import os
import shutil
from pathlib import Path

from lorafleet_runtime.loop.api_config import ConfigProblem
from lorafleet_runtime.storage import CONFIG_FILE, STATE_FILE, WEIGHTS_FILE, inside, sync_directory
from lorafleet_runtime.types import Artifact

_FILES = (WEIGHTS_FILE, CONFIG_FILE)


def check_target(root: Path, save: str) -> Path:
    """The directory that `save` names, with symbolic links followed.

    Raises:
        ConfigProblem: it is outside the storage, the storage itself, the runtime's own folder, or no directory.
    """
    try:
        path = inside(root, save)
    except ValueError as error:
        raise ConfigProblem("save", save, str(error)) from error
    if path == root.resolve() or path.is_relative_to(root.resolve() / ".lorafleet"):
        raise ConfigProblem("save", save, "is not for exports; name a directory of its own on the pool's storage")
    if path.exists() and not path.is_dir():
        raise ConfigProblem("save", save, "is no directory; name one, or a path that does not exist yet")
    if any((child / STATE_FILE).exists() for child in (path.iterdir() if path.is_dir() else ())):
        raise ConfigProblem("save", save, "holds a run's checkpoints; name another directory")
    return path


def is_there(artifact: Artifact) -> bool:
    """The checkpoint has not been pruned."""
    return (Path(artifact.path) / WEIGHTS_FILE).is_file()


def export(root: Path, artifact: Artifact, save: str) -> None:
    """Copy the adapter to {save}/step_N; one that is there already is replaced whole.

    Raises:
        OSError: the storage refused, or the checkpoint is gone.
        ValueError: the target lies outside the storage by now, or holds a checkpoint.
    """
    target = inside(root, save)
    final, temporary = target / f"step_{artifact.step}", target / f".tmp-step_{artifact.step}"
    if (final / STATE_FILE).exists():
        raise ValueError(f"{final} is a run's checkpoint and is not written over; use another directory")
    target.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for name in _FILES:
            shutil.copyfile(Path(artifact.path) / name, temporary / name)
            with (temporary / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(target)
