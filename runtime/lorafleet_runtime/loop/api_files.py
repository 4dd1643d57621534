"""The files of API-owned runs on storage, read at a start and removed again. Called by `api_runs`, which writes them.

A file that cannot be used is reported and left alone.
"""

import contextlib
import json
import logging
from pathlib import Path

from pydantic import ValidationError

from lorafleet_runtime.loop.api_config import NAME
from lorafleet_runtime.registry.api_owned import NAMESPACE, Record
from lorafleet_runtime.storage import (
    STATE_FILE,
    WEIGHTS_FILE,
    latest_checkpoint,
    run_directory,
    step_of,
    sync_directory,
)
from lorafleet_runtime.types import Artifact

log = logging.getLogger(__name__)


def read_records(folder: Path) -> list[Record]:
    """Every usable record, oldest first."""
    records = [r for path in sorted(folder.glob("[!.]*.json")) if (r := _read(path)) is not None]
    return sorted(records, key=lambda r: (r.created, r.uid))


def newest_checkpoint(root: Path, record: Record) -> Artifact | None:
    """The run's newest whole checkpoint."""
    newest = latest_checkpoint(run_directory(root, NAMESPACE, record.name, record.uid))
    if newest is None:
        return None
    digest = json.loads((newest / STATE_FILE).read_text())["files"][WEIGHTS_FILE].get("sha256", "")
    return Artifact(str(newest), step_of(newest), digest)


def remove_durably(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        OSError: the storage refuses.
    """
    path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):  # nothing was ever written there
        sync_directory(path.parent)


def _read(path: Path) -> Record | None:
    try:
        record = Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        log.error("%s is no record of a run (%s); skipped; restore it from a backup or remove it", path, why)
        return None
    if f"{record.uid}.json" != path.name or not NAME.fullmatch(record.name):
        log.error("%s names uid %s and run %r; skipped; give the file its own name", path, record.uid, record.name)
        return None
    return record
