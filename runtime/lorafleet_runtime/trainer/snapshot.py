"""The state after a run's last step, in a folder of the trainer's own node: what its successor goes on from.

Called by rank.py after each step. A checkpoint (checkpoint.py) is durable and servable and is written now and then; a
snapshot is neither, but there is one for every step, so a trainer or runtime process that dies costs no reported step:
the loop reports a step once `written` has answered. A thread of its own writes the files, so that other runs train
meanwhile: not that of the checkpoints, whose storage may hang. A snapshot is not fsynced: it must outlive a process,
not the operating system, and one from before a reboot is never read.
"""

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lorafleet_runtime.errors import ConfigError
from lorafleet_runtime.trainer.checkpoint import FORMAT, Identity, TrainState
from lorafleet_runtime.trainer.restore import check_identity
from lorafleet_runtime.types import Cursor

log = logging.getLogger(__name__)

PLACES = 4
"""Copies that wait or are written at a time, of all runs together: what bounds their memory on the host."""

PATIENCE_SECONDS = 30.0
"""One write that takes longer hangs: until it ends, runs step without new snapshots rather than not at all."""

_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp"
_TENSORS = ("master", "exp_avg", "exp_avg_sq")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class _Staged:
    """A copy on its way to its file; nobody changes its tensors."""

    uid: str
    step: int
    about: str
    """JSON."""
    tensors: dict[str, Tensor]
    copied: torch.cuda.Event | None
    """Until then a GPU still fills the tensors."""
    forgotten: bool = False
    """Its run was removed while it was being written."""
    renaming: bool = False
    """Too late for that: who removes the run waits."""

    def wait_for_copy(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class Snapshots:
    """One file per run, and at most one copy per run on its way there.

    `written` is for any thread, the rest for one: that of the trainer's calls. What `remove` and `retain` forget does
    not come back, whatever is being written at that moment; `read` gives the newest state, written or not.

    Args:
        folder: on the trainer's node, of this pool alone; None keeps no snapshots.

    Raises:
        ConfigError: the folder cannot be made, or belongs to somebody else.
    """

    def __init__(self, folder: Path | None) -> None:
        """Make the folder."""
        self._folder = folder
        self._name = uuid.uuid4().hex
        self._changed = threading.Condition()
        """Held for every look at what follows, never while the disk writes."""
        self._staged: dict[str, _Staged] = {}
        """By uid, in the order in which they are written."""
        self._current: _Staged | None = None
        self._since = 0.0
        """When the write of `_current` began, on the monotonic clock."""
        self._writer: threading.Thread | None = None
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

    def place(self, uid: str, step: int) -> bool:
        """Wait until the run's last snapshot is written and one of the PLACES is free; False if the disk hangs.

        Call before the copy is made: this is what bounds memory.
        """
        if self._folder is None:
            return False
        with self._changed:
            free = self._wait(lambda: uid not in self._staged and len(self._staged) < PLACES)
        if not free:
            log.error("run %s: no snapshot of step %d, a write to %s hangs; mend the disk", uid, step, self._folder)
        return free

    @staticmethod
    def copy(tensor: Tensor) -> Tensor:
        """A copy on the host. From a GPU it is pinned, and whole only once the stream got there; `add` sees to that.

        PyTorch keeps pinned memory that was freed and hands it out again: PLACES copies of it are made, then used anew.
        """
        kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return kept.copy_(tensor.detach(), non_blocking=True)

    def add(self, identity: Identity, state: TrainState) -> str:
        """Have the run's snapshot replaced, beside the calls that follow. A failure costs the snapshot, never the step.

        Args:
            identity: of the run, for which `place` was True.
            state: its tensors were made by `copy`, on the current stream.

        Returns:
            A ticket for `written`.
        """
        about = {
            "format": FORMAT, "boot": _boot_id(), "identity": asdict(identity), "step": state.step,
            "target_step": state.target_step, "cursor": asdict(state.cursor),
            "incarnation": state.incarnation, "use_rslora": state.use_rslora,
        }  # fmt: skip
        tensors = dict(zip(_TENSORS, (state.master, state.exp_avg, state.exp_avg_sq), strict=True))
        copied = None
        if state.master.is_pinned():
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        with self._changed:
            self._staged[identity.uid] = _Staged(identity.uid, state.step, json.dumps(about), tensors, copied)
            if self._writer is None:  # it ends when nothing is left to write
                self._writer = threading.Thread(target=self._work, name="snapshots", daemon=True)
                self._writer.start()
        return f"{self._name}/{identity.uid}"

    def written(self, ticket: str) -> bool:
        """Wait until a snapshot is written, has failed or was forgotten, or the disk hangs, which is logged.

        Returns:
            False for a ticket of another process: what it was given for may be lost.
        """
        name, _, uid = ticket.partition("/")
        if name != self._name:
            return False
        with self._changed:
            if not self._wait(lambda: uid not in self._staged):
                log.error("run %s goes on without its snapshot: a write to %s hangs", uid, self._folder)
        return True

    def read(self, identity: Identity) -> TrainState | None:
        """The run's last state, or None where there is none that can be trusted.

        Raises:
            RunError: CheckpointMismatch naming the field that differs.
        """
        if self._folder is None:
            return None
        path = self._path(identity.uid)
        with self._changed:
            staged = self._staged.get(identity.uid)
            if staged is not None and staged.forgotten:
                return None
        if staged is not None:
            staged.wait_for_copy()
            return _state(path, staged.about, staged.tensors, identity)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
                return _state(path, file.metadata()["about"], tensors, identity)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            log.error("run %s: snapshot %s cannot be read (%s); using the checkpoint", identity.uid, path, error)
            return None

    def remove(self, uid: str) -> None:
        """Forget the run; one without a snapshot is fine. What cannot be removed is left for `retain`."""
        if self._folder is None:
            return
        with self._changed:
            self._forget(uid)
            try:
                self._path(uid).unlink(missing_ok=True)
            except OSError as error:
                log.error("run %s: its snapshot cannot be removed (%s); it goes at the next start", uid, error)

    def retain(self, uids: Collection[str]) -> None:
        """Remove the snapshots of every other run, and what interrupted writes left."""
        if self._folder is None:
            return
        kept = {self._path(uid) for uid in uids}
        with self._changed:
            for uid in self._staged.keys() - set(uids):
                self._forget(uid)
            if self._current is not None:
                kept.add(self._path(self._current.uid).with_suffix(_TEMPORARY))
            for path in self._folder.iterdir():
                if path not in kept:
                    with suppress(OSError):  # another user's, or a folder: not ours
                        path.unlink(missing_ok=True)

    def _forget(self, uid: str) -> None:
        """With the lock held."""
        staged = self._staged.get(uid)
        if staged is not None and staged is self._current:
            staged.forgotten = True
            if staged.renaming:
                self._wait(lambda: staged is not self._current)
        elif staged is not None:
            del self._staged[uid]
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """With the lock held; False once a write has taken longer than a disk that works."""
        while not ready():
            left = PATIENCE_SECONDS
            if self._current is not None:
                left -= time.monotonic() - self._since
            if left <= 0:
                return False
            self._changed.wait(left)
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = next(iter(self._staged.values()), None)
                if self._current is None:
                    self._writer = None
                    return
                self._since = time.monotonic()
            try:
                self._write(self._current)
            except Exception:  # of one run; the others' snapshots have only this thread
                log.exception("run %s: no snapshot of step %d", self._current.uid, self._current.step)
            with self._changed:
                del self._staged[self._current.uid]
                self._current = None
                self._changed.notify_all()

    def _write(self, staged: _Staged) -> None:
        path = self._path(staged.uid)
        temporary = path.with_suffix(_TEMPORARY)
        try:
            staged.wait_for_copy()
            save_file(staged.tensors, temporary, metadata={"about": staged.about})
            with self._changed:
                staged.renaming = not staged.forgotten
            if staged.renaming:
                temporary.replace(path)
                if not staged.forgotten:
                    return
                path.unlink(missing_ok=True)  # who forgot it has waited in vain
        except (OSError, RuntimeError, SafetensorError) as error:
            log.error("run %s: no snapshot of step %d (%s); free space in %s", staged.uid, staged.step, error, path)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)

    def _path(self, uid: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{uid}{_SUFFIX}"


def _state(path: Path, text: str, tensors: Mapping[str, Tensor], identity: Identity) -> TrainState | None:
    """What a snapshot says; None for one from before a reboot."""
    about = json.loads(text)
    if about["boot"] != _boot_id():
        return None
    check_identity(path, about, identity)
    cursor = Cursor(about["cursor"]["low"], tuple(about["cursor"]["consumed"]))
    return TrainState(
        about["step"], about["target_step"], cursor, about["incarnation"], about["use_rslora"],
        tensors["master"], tensors["exp_avg"], tensors["exp_avg_sq"],
    )  # fmt: skip


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
