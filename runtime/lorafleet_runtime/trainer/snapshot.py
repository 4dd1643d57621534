"""The state after a run's last step, in a folder of the trainer's own node: what its successor goes on from.

Called by rank.py after each step. A checkpoint (checkpoint.py) is durable and servable and is written now and then; a
snapshot is neither, but there is one for every step, so a trainer or runtime process that dies costs no reported step:
the loop reports a step once `written` has answered. A thread of its own writes and removes the files, so that other
runs train meanwhile: not that of the checkpoints, whose storage may hang. A snapshot is not fsynced: it must outlive a
process, not the operating system, and one from before a reboot is never read.
"""

import itertools
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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
"""One write or removal that takes longer hangs: until it ends, runs step without new snapshots rather than not at all.
Of each one, not of a wait for several: a slow disk is no hung one."""

_SUFFIX = ".safetensors"
_WRITING = ".writing-"
"""Prefix of a folder with one file that has no name yet: also of what safetensors itself writes beside it."""

_TENSORS = ("master", "exp_avg", "exp_avg_sq")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(eq=False, slots=True)
class _Write:
    """A copy on its way to its file; nobody changes its tensors."""

    uid: str
    step: int
    about: str
    """JSON."""
    tensors: dict[str, Tensor]
    copied: torch.cuda.Event | None
    """Until then a GPU still fills the tensors."""
    number: int

    def __str__(self) -> str:
        return f"run {self.uid}: no snapshot of step {self.step}"

    def wait_for_copy(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


@dataclass(eq=False, slots=True)
class _Removal:
    """Files to be removed."""

    uids: frozenset[str]
    others: bool = False
    """Those of all other runs instead."""

    def __str__(self) -> str:
        return f"snapshots of {'all but ' if self.others else ''}{', '.join(sorted(self.uids))} are not removed"

    def has(self, uid: str) -> bool:
        return (uid in self.uids) is not self.others


class Snapshots:
    """One file per run. One thread does everything that changes files, in order; no caller waits for the disk.

    For any thread. What was forgotten does not come back, whatever is being written at that moment; `read` gives the
    newest state, written or not.

    Args:
        folder: on the trainer's node, of this pool alone; None keeps no snapshots.

    Raises:
        ConfigError: the folder cannot be made, or belongs to somebody else.
    """

    def __init__(self, folder: Path | None) -> None:
        """Make the folder, and remove what interrupted writes of other processes left."""
        self._folder = folder
        self._name = uuid.uuid4().hex
        self._changed = threading.Condition()
        """Held for every look at what follows, never while the disk works."""
        self._jobs: list[_Write | _Removal] = []
        """The first one is under way."""
        self._since = 0.0
        """When it began, on the monotonic clock."""
        self._numbers = itertools.count()
        self._worker: threading.Thread | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            owner = folder.stat().st_uid
        except OSError as error:
            raise ConfigError(f"TMPDIR: {folder} cannot be made ({error}); name a writable folder") from error
        if owner != os.getuid():  # a stranger's file would become a run's weights
            raise ConfigError(f"TMPDIR: {folder} belongs to user {owner}; name a folder of your own")
        for left in folder.glob(f"{_WRITING}*"):
            shutil.rmtree(left, ignore_errors=True)

    @property
    def records(self) -> Path | None:
        """Folder where records wait for storage, of this boot: nothing in it is synced either."""
        return None if self._folder is None else self._folder / f"records-{_boot_id()}"

    def place(
        self, uid: str, step: int, elements: int, dtype: torch.dtype, pinned: bool = False
    ) -> Iterator[Tensor] | None:
        """Host memory for the copy of a state; None where there is no place or no memory. Waits for nothing.

        Before anything is copied: this is what bounds memory, and what may fail. That a place is free whenever the disk
        keeps up is for the caller to see to. PyTorch keeps pinned memory that was freed and hands it out again.

        Args:
            uid: of the run.
            step: that it has made.
            elements: of each tensor.
            dtype: of them.
            pinned: a GPU fills them.

        Returns:
            The tensors for `add`, to be filled on the current stream.
        """
        if self._folder is None:
            return None
        with self._changed:
            hangs, waiting = self._left() <= 0, sum(isinstance(job, _Write) for job in self._jobs)
        if hangs or waiting >= PLACES:
            log.error("run %s: no snapshot of step %d, %s is too slow or hangs; mend the disk", uid, step, self._folder)
            return None
        try:
            return iter([torch.empty(elements, dtype=dtype, pin_memory=pinned) for _ in _TENSORS])
        except (RuntimeError, MemoryError) as error:
            log.error("run %s: no snapshot of step %d, no memory on the host for its copy (%s)", uid, step, error)
            return None

    def add(self, identity: Identity, state: TrainState) -> str:
        """Have the run's snapshot replaced, beside the calls that follow. A failure costs the snapshot, never the step.

        Args:
            identity: of the run.
            state: its tensors are those of `place`, filled on the current stream.

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
            number = next(self._numbers)
            self._queue(_Write(identity.uid, state.step, json.dumps(about), tensors, copied, number))
        return f"{self._name}/{number}"

    def written(self, ticket: str) -> bool:
        """Wait until a snapshot is written, has failed or was forgotten, or the disk hangs, which is logged.

        Returns:
            False for a ticket of another process: what it was given for may be lost.
        """
        name, _, number = ticket.partition("/")
        if name != self._name:
            return False
        with self._changed:
            while own := [job for job in self._jobs if isinstance(job, _Write) and job.number == int(number)]:
                left = self._left()
                if left <= 0:
                    log.error("run %s goes on without its snapshot: %s hangs", own[0].uid, self._folder)
                    break
                self._changed.wait(left)
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
            jobs = [job for job in self._jobs if _is_about(job, identity.uid)]
        if jobs and isinstance(jobs[-1], _Removal):
            return None
        if jobs and isinstance(jobs[-1], _Write):
            jobs[-1].wait_for_copy()
            return _state(path, jobs[-1].about, jobs[-1].tensors, identity)
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
        self._forget(_Removal(frozenset({uid})))

    def retain(self, uids: Collection[str]) -> None:
        """Forget every other run."""
        self._forget(_Removal(frozenset(uids), others=True))

    def _forget(self, removal: _Removal) -> None:
        if self._folder is None:
            return
        with self._changed:  # of what it covers, only a write under way goes on, and is removed right after it
            later = [j for j in self._jobs[1:] if not (isinstance(j, _Write) and removal.has(j.uid))]
            del self._jobs[1:]
            self._queue(removal)
            self._jobs += later

    def _queue(self, job: _Write | _Removal) -> None:
        """With the lock held."""
        self._jobs.append(job)
        if self._worker is None:  # it ends when nothing is left to do
            self._since = time.monotonic()
            self._worker = threading.Thread(target=self._work, name="snapshots", daemon=True)
            self._worker.start()
        self._changed.notify_all()

    def _left(self) -> float:
        """With the lock held: seconds that the job under way still has; 0 or less once it hangs."""
        return PATIENCE_SECONDS - (time.monotonic() - self._since if self._jobs else 0.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._worker = None
                    return
                self._since = time.monotonic()
                job = self._jobs[0]
            try:
                if isinstance(job, _Write):
                    self._write(job)
                else:
                    self._remove(job)
            except Exception:  # of one run; the others' snapshots have only this thread
                log.exception("%s", job)
            with self._changed:
                del self._jobs[0]
                self._since = time.monotonic()
                self._changed.notify_all()

    def _write(self, job: _Write) -> None:
        path = self._path(job.uid)
        try:
            job.wait_for_copy()
            with TemporaryDirectory(prefix=_WRITING, dir=self._folder, ignore_cleanup_errors=True) as folder:
                whole = Path(folder) / path.name
                save_file(job.tensors, whole, metadata={"about": job.about})
                whole.replace(path)
        except (OSError, RuntimeError, SafetensorError) as error:
            log.error("%s (%s); free space in %s", job, error, path)

    def _remove(self, job: _Removal) -> None:
        assert self._folder is not None
        files = self._folder.glob(f"*{_SUFFIX}") if job.others else map(self._path, job.uids)
        for path in files:
            if job.has(path.name.removesuffix(_SUFFIX)):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.error("snapshot %s cannot be removed (%s); it goes at the next start", path, error)

    def _path(self, uid: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{uid}{_SUFFIX}"


def _is_about(job: _Write | _Removal, uid: str) -> bool:
    return job.has(uid) if isinstance(job, _Removal) else job.uid == uid


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
