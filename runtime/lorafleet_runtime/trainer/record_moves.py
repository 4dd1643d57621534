"""Brings a run's records from its trainer's node to storage, in order and beside the steps.

Called by record.py and rank.py. A step must not wait for storage, which all runs share and which may hang: it leaves
its record in a folder of the node, and the thread that writes checkpoints moves it. That thread works in order, so a
checkpoint of step N is on storage only after the records up to N, but for those that storage refused.
"""

import logging
import shutil
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from lorafleet_runtime.trainer.record_files import (
    RUN_FILE,
    move_pair,
    move_start,
    recorded_steps,
    remove_pair,
    step_name,
    trim,
)

FOLDER = "records"
"""Below a run's directory on storage."""

Defer = Callable[[Callable[[], None]], None]
"""Runs a job later, in the order in which jobs were given, beside the caller; the job raises nothing."""

MOST_WAITING = 64
"""Steps of a run that wait on the node; the oldest goes when there are more."""

log = logging.getLogger(__name__)


def at_once(job: Callable[[], None]) -> None:
    """A Defer without another thread."""
    job()


class Outbox:
    """The records of a run since one load. Each load writes to a folder of its own: what an earlier one left is moved
    first, and cannot be taken for what comes now.

    Args:
        uid: of the run.
        directory: of its records on storage.
        folder: of the run on the node; None writes to storage at once.
        defer: queue of the thread that writes to storage.
    """

    def __init__(self, uid: str, directory: Path, folder: Path | None, defer: Defer) -> None:
        self._uid = uid
        self._directory = directory
        self._folder = folder
        self._defer = defer
        self._older: list[Path] = []
        self.place = directory
        """Where records are written."""
        if folder is not None:
            with suppress(OSError):  # then nothing can be written there either, and the first record tells
                self._older = sorted(path for path in folder.iterdir() if path.name.isdigit())
            number = int(self._older[-1].name) + 1 if self._older else 1
            self.place = folder / f"{number:08d}"
        self._behind: tuple[int, bool] | None = None
        self._queued = self._closed = False
        self._notes: deque[str] = deque()

    @property
    def durable(self) -> bool:
        """What is written to `place` stays there."""
        return self._folder is None

    def begin(self, step: int, fresh: bool) -> None:
        """Forget records beyond `step`, or with `fresh` all of them; call `send` once the new ones begin."""
        for older in self._older:
            if fresh:
                shutil.rmtree(older, ignore_errors=True)
                continue
            with suppress(OSError):
                for number in recorded_steps(older):
                    if number > step:
                        remove_pair(older, step_name(number))
        if not self.durable:
            with suppress(OSError):  # the first record tells; the next load must not take the same name
                self.place.mkdir(parents=True, exist_ok=True)
        self._behind = (step, fresh)

    def send(self) -> None:
        """Have the thread move what is there by then."""
        if self._folder is not None:
            self._shorten()
        if not self._queued:  # the job that waits finds this record too
            self._queued = True
            self._defer(self._move)

    def _shorten(self) -> None:
        try:
            for number in recorded_steps(self.place)[:-MOST_WAITING]:
                self._tell(f"the record of step {number} is given up, {MOST_WAITING} newer ones wait for the storage")
                remove_pair(self.place, step_name(number))
        except OSError as error:
            self._tell(f"{self.place} on the trainer's node cannot be looked through ({error})")

    def close(self) -> None:
        """The run leaves its slot: try once more what was refused, and leave no empty folder."""
        if self._folder is not None:
            self._closed = True
            self.send()

    def notes(self) -> list[str]:
        """What went wrong since the last call."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def _move(self) -> None:
        self._queued = False  # before looking: what comes after is a job of its own
        try:
            while self._older:
                self._empty(self._older[0])
                shutil.rmtree(self._older.pop(0), ignore_errors=True)
            self._trim()
            if self._folder is not None:
                self._empty(self.place)
        except OSError as error:
            waiting = "" if self.durable else "; they wait on the trainer's node and are tried again with the next step"
            self._tell(f"records cannot be written to {self._directory} ({error}){waiting}")
        if self._closed and self._folder is not None:
            for path in (self.place, self._folder):
                with suppress(OSError):  # what is left waits for the next load on this node
                    path.rmdir()

    def _trim(self) -> None:
        if self._behind is None:
            return
        step, fresh = self._behind
        if self.durable:
            self._behind = None  # later it would find records of this load
        trim(self._directory, step, fresh)
        self._behind = None
        if not fresh and not (self._directory / RUN_FILE).exists():
            self._tell(f"{self._directory / RUN_FILE} is missing, so no step can be replayed")

    def _empty(self, source: Path) -> None:
        if (source / RUN_FILE).exists():
            move_start(source, self._directory)
        for number in recorded_steps(source):
            try:
                move_pair(source, self._directory, step_name(number))
            except ValueError as error:
                self._tell(f"the record of step {number} is given up, {source} holds a damaged one ({error})")
                remove_pair(source, step_name(number))

    def _tell(self, what: str) -> None:
        log.error("run %s: recordSteps: %s", self._uid, what)
        self._notes.append(what)


def forward(root: Path, storage: Path, uids: Collection[str], defer: Defer) -> None:
    """Move what runs other than `uids` left on this node: they ended while no trainer could.

    Args:
        root: holds {namespace}/{name}/{uid} of the runs.
        storage: holds their directories.
        uids: live runs.
        defer: queue of the thread that writes to storage.
    """
    for folder in root.glob("*/*/*"):
        if folder.name not in uids:
            Outbox(folder.name, storage / folder.relative_to(root) / FOLDER, folder, defer).close()


def clear_of_other_boots(root: Path) -> None:
    """Remove what is as old as an earlier boot: it was never synced."""
    for path in root.parent.glob(f"{root.name.partition('-')[0]}-*"):
        if path != root:
            shutil.rmtree(path, ignore_errors=True)
