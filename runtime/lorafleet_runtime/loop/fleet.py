"""The parts of one running pool, and what is known per run beside the registry."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.config.config import RuntimeConfig
from lorafleet_runtime.loop.buffers import Buffers, CursorTracker
from lorafleet_runtime.loop.engines import EngineSet
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.loop.trainer import TrainerHandle, Writing
from lorafleet_runtime.loop.whiten import Whitening
from lorafleet_runtime.loop.workers import WorkerSet
from lorafleet_runtime.loop.writer import BackgroundWriter
from lorafleet_runtime.metrics import RuntimeMetrics
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.storage import run_directory
from lorafleet_runtime.types import Cursor, PromptGroup, RunFault

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunState:
    """What the loop keeps of one incarnation of a run."""

    incarnation: str
    tracker: CursorTracker
    step_cursor: Cursor
    """The cursor at the last step boundary: what a checkpoint taken now must say."""
    in_flight: int = 0
    in_training: int = 0
    """Groups taken from the buffer whose batch is not committed yet."""
    taken: list[PromptGroup] = field(default_factory=list)
    """Groups in training or accumulated since the last step: a trainer that dies has them no more."""
    tries: dict[int, int] = field(default_factory=dict)
    """Times that a group failed although its engine lives, by index."""
    whitening: Whitening | None = None
    """Of the batch under way, for a run whose advantages are normalised over it; `taken` stays raw."""
    drops_in_a_row: int = 0
    save_due: bool = False
    """The last checkpoint on the way could not be written, or had to wait for the one before."""
    writing: Writing | None = None
    """The last checkpoint on its way, also when nobody waits for it any more."""
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a checkpoint is on its way: one at a time. Taken before all others."""
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    stepping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights and step_cursor move together, so that a checkpoint sees both or neither."""


class Company:
    """Lets saves and loads go side by side, and a save under suspicion alone; in the order in which they come.

    Waiting for it is no waiting for the storage: who is let in counts its time from then on.
    """

    def __init__(self) -> None:
        """Nobody is in."""
        self._turn = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def join(self, alone: bool = False) -> AsyncIterator[None]:
        """Be in, together with the others; or wait until all are gone, and keep everybody out."""
        async with self._turn:
            if alone:
                await self._empty.wait()
                yield
                return
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()


@dataclass(slots=True)
class Fleet:
    """Everything that the three tasks of the loop share."""

    config: RuntimeConfig
    registry: Registry
    signal: Signal
    trainer: TrainerHandle
    engines: EngineSet
    workers: WorkerSet
    metrics: RuntimeMetrics
    buffers: Buffers = field(default_factory=Buffers)
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    """Writes the runs' logs and samples."""
    states: dict[str, RunState] = field(default_factory=dict)
    swept: bool = False
    """The snapshots of runs that ended while no runtime lived are removed."""
    unended: set[str] = field(default_factory=set)
    """Runs that at the last look could still come back for their snapshot."""
    accumulating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from a batch's way to the trainer until its groups are committed, and stepped where they fill a batch: what
    the trainer has accumulated is then what the cursors say. Taken before `RunState.stepping`."""
    company: Company = field(default_factory=Company)
    """Joined by every load and every save; a save that may have killed a trainer goes alone, beside no batch either, so
    that none takes another's blame. Taken after `RunState.saving`, before `accumulating`."""
    suspects: set[str] = field(default_factory=set)
    """Runs that were in a batch when the trainer died; they train alone until a batch succeeds."""
    cleared: set[str] = field(default_factory=set)
    """Runs whose save was under suspicion and went well alone. Each run is believed to be why once: at the next death
    beside its save, a suspect that is there too is counted. So the deaths that count for nobody come to an end."""
    stopping: bool = False
    """The runtime is about to stop: nothing more is sampled or trained."""
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def state(self, run: Run) -> RunState | None:
        """The state of this incarnation, or None before it is loaded."""
        state = self.states.get(run.uid)
        return state if state is not None and state.incarnation == run.incarnation else None

    def directory(self, run: Run) -> Path:
        """Where the run's checkpoints, samples and log lie."""
        return run_directory(self.config.storage_root, run.namespace, run.name, run.uid)

    def locate(self, uid: str) -> Path | None:
        """The directory of a run by its uid; None for one that is not known."""
        run = self.registry.runs.get(uid)
        return None if run is None else self.directory(run)

    def spawn(self, coroutine: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run in the background; an error that nobody expects is logged with its traceback."""
        task = asyncio.create_task(coroutine, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended with an error", task.get_name(), exc_info=error)
        self.signal.set()

    def forget(self, uid: str) -> None:
        """Drop what is kept of a run that left its slot."""
        self.buffers.clear(uid)
        self.states.pop(uid, None)
        self.suspects.discard(uid)
        self.cleared.discard(uid)

    def on_trainer_lost(self, saving: Collection[str] = ()) -> None:
        """Live runs load again; the groups that the dead trainer had are trained on once more.

        Args:
            saving: runs with a checkpoint on its way, which may be why it died.
        """
        self.registry.trainer_lost()
        for uid, state in self.states.items():
            if self.registry.holds_slot(uid):
                log.warning("run %s: the trainer died; the run loads again", uid, extra=about(uid))
            self.buffers.give_back(uid, state.taken)
            state.tracker.release(group.index for group in state.taken)  # until then a checkpoint must not have them
            state.taken.clear()
            state.in_training = 0
        for uid in sorted(saving):
            if (run := self.registry.runs.get(uid)) is not None:
                self.count_save_death(run, certain=len(saving) == 1 and run.save_deaths > 0)

    def may_be_for_a_save(self, uids: Collection[str], saving: Collection[str]) -> bool:
        """Whether a trainer that died while it worked for `uids` may have died of the saves beside them."""
        return bool(saving) and not (self.suspects.issuperset(uids) and self.cleared.issuperset(saving))

    def count_save_death(self, run: Run, certain: bool) -> None:
        """The trainer died during a save of this run; it saves alone from now on, until one succeeds.

        Args:
            run: whose checkpoint was on its way.
            certain: nothing else was on its way.
        """
        run.save_deaths += 1
        if certain:
            self.cleared.discard(run.uid)
        limit = run.spec.backoff_limit
        text = f"the trainer died {run.save_deaths} times while it saved this run; backoffLimit is {limit}"
        log.error("run %s: %s", run.uid, text, extra=about(run.uid))
        if certain and run.save_deaths > limit:
            self.registry.fail(RunFault(run.uid, reasons.TRAINER_CRASHED, text))

    async def cancel(self) -> None:
        """End the background tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
