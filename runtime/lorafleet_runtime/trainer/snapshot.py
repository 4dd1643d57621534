"""The state after a run's last step, in a folder of the trainer's own node: what its successor goes on from.

Called by rank.py after each step. A checkpoint (checkpoint.py) is durable and servable and is written now and then; a
snapshot is neither, but there is one for every step, so a trainer or runtime process that dies costs no committed step.
It is not fsynced: it must outlive a process, not the operating system, and one from before a reboot is never read.
"""

import json
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lorafleet_runtime.errors import ConfigError
from lorafleet_runtime.trainer.checkpoint import FORMAT, Identity, TrainState
from lorafleet_runtime.trainer.restore import check_identity
from lorafleet_runtime.types import Cursor

log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Snapshots:
    """One file per run.

    Args:
        folder: on the trainer's node, of this pool alone; None keeps no snapshots.

    Raises:
        ConfigError: the folder cannot be made, or belongs to somebody else.
    """

    def __init__(self, folder: Path | None) -> None:
        """Make the folder."""
        self._folder = folder
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            owner = folder.stat().st_uid
        except OSError as error:
            raise ConfigError(f"TMPDIR: {folder} cannot be made ({error}); name a writable folder") from error
        if owner != os.getuid():  # a stranger's file would become a run's weights
            raise ConfigError(f"TMPDIR: {folder} belongs to user {owner}; name a folder of your own")

    @property
    def records(self) -> Path | None:
        """Folder where records wait for storage, of this boot: nothing in it is synced either."""
        return None if self._folder is None else self._folder / f"records-{_boot_id()}"

    def write(self, identity: Identity, state: TrainState) -> None:
        """Replace the run's snapshot. A failure costs the snapshot, never the step."""
        if self._folder is None:
            return
        path = self._path(identity.uid)
        tensors = {"master": state.master, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        temporary = path.with_suffix(".tmp")
        try:
            about = {
                "format": FORMAT, "boot": _boot_id(), "identity": asdict(identity), "step": state.step,
                "target_step": state.target_step, "cursor": asdict(state.cursor),
                "incarnation": state.incarnation, "use_rslora": state.use_rslora,
            }  # fmt: skip
            host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(host, temporary, metadata={"about": json.dumps(about)})
            temporary.replace(path)
        except (OSError, RuntimeError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            log.error("run %s: no snapshot of step %d (%s); free space in %s", identity.uid, state.step, error, path)

    def read(self, identity: Identity) -> TrainState | None:
        """The run's last state, or None where there is none that can be trusted.

        Raises:
            RunError: CheckpointMismatch naming the field that differs.
        """
        if self._folder is None:
            return None
        path = self._path(identity.uid)
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["about"])
                if about["boot"] != _boot_id():
                    return None
                check_identity(path, about, identity)
                cursor = Cursor(about["cursor"]["low"], tuple(about["cursor"]["consumed"]))
                return TrainState(
                    about["step"], about["target_step"], cursor, about["incarnation"], about["use_rslora"],
                    *(file.get_tensor(name) for name in ("master", "exp_avg", "exp_avg_sq")),
                )  # fmt: skip
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            log.error("run %s: snapshot %s cannot be read (%s); using the checkpoint", identity.uid, path, error)
            return None

    def remove(self, uid: str) -> None:
        """Forget the run; one without a snapshot is fine. What cannot be removed is left for `retain`."""
        if self._folder is None:
            return
        try:
            self._path(uid).unlink(missing_ok=True)
        except OSError as error:
            log.error("run %s: its snapshot cannot be removed (%s); it goes at the next start", uid, error)

    def retain(self, uids: Collection[str]) -> None:
        """Remove the snapshots of every other run, and what interrupted writes left."""
        if self._folder is None:
            return
        kept = {self._path(uid) for uid in uids}
        for path in self._folder.iterdir():
            if path not in kept:
                with suppress(OSError):  # another user's, or a folder: not ours
                    path.unlink(missing_ok=True)

    def _path(self, uid: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{uid}{_SUFFIX}"


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
