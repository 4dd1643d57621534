"""The parts of one running pool, and what is known per run beside the registry."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet_runtime.config.config import RuntimeConfig
from lorafleet_runtime.loop.blame import Blame
from lorafleet_runtime.loop.buffers import Buffers, CursorTracker
from lorafleet_runtime.loop.engines import EngineSet
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.loop.trainer import Doing, TrainerHandle
from lorafleet_runtime.loop.whiten import Whitening
from lorafleet_runtime.loop.workers import WorkerSet
from lorafleet_runtime.loop.writer import BackgroundWriter
from lorafleet_runtime.loop.writing import Writing
from lorafleet_runtime.metrics import RuntimeMetrics
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.storage import run_directory
from lorafleet_runtime.types import Cursor, PromptGroup

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
    """Held from a batch's way to the trainer until its groups are committed, and stepped where they fill a batch (or
    `stepping` is held until then): what the trainer has accumulated is then what the cursors say. Taken before
    `RunState.stepping`."""
    company: Company = field(default_factory=Company)
    """Joined by every load and every save; one that may have killed a trainer goes alone (`keep_company`). Taken after
    `RunState.saving`, before `accumulating`, and that before all places for snapshots."""
    stopping: bool = False
    """The runtime is about to stop: nothing more is sampled or trained."""
    blame: Blame = field(init=False)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Nobody is to blame for anything."""
        self.blame = Blame(self.registry)

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
        self.blame.forget(uid)

    async def keep_company(
        self, held: AsyncExitStack, alone: bool, limit: float, stepping: asyncio.Lock | None = None
    ) -> None:
        """Join the other saves and loads; or be alone: no save, load, batch or snapshot is under way, nor begins.

        Where the runtime stops nobody is failed any more, and nobody waits.

        Args:
            held: until it is closed.
            alone: what is to be done may have killed a trainer.
            limit: seconds that others' saves and loads may take to end, one after the other; where one takes longer,
                this goes on beside them, and a death then says less.
            stepping: of the run itself. While it is held nobody else waits for this run.
        """
        if self.stopping:
            return
        if not alone:
            await held.enter_async_context(self.company.join())
            return
        while True:
            if stepping is not None:
                async with stepping:
                    pass
            async with AsyncExitStack() as tried:
                try:
                    async with self.trainer.patience(limit):
                        await tried.enter_async_context(self.company.join(alone=True))
                except TimeoutError:  # waiting for others is no fault of the storage, nor of this run
                    await held.enter_async_context(self.company.join())
                    return
                await tried.enter_async_context(self.accumulating)
                if stepping is not None and stepping.locked():
                    continue
                tried.callback((await self.trainer.snapshot_permit(alone=True)).release)
                held.push_async_callback(tried.pop_all().aclose)
                return

    @asynccontextmanager
    async def between_batches(self, stepping: asyncio.Lock) -> AsyncIterator[None]:
        """Hold `accumulating` while the run makes no step: nobody else waits for that step's snapshot."""
        while True:
            async with stepping:
                pass
            async with self.accumulating:
                if not stepping.locked():  # else its last batch ended meanwhile
                    yield
                    return

    def on_trainer_lost(self, under_way: Collection[Doing] = (), why: str = "") -> None:
        """Live runs load again; the groups that the dead trainer had are trained on once more.

        Args:
            under_way: what it may have died of.
            why: for people.
        """
        self.registry.trainer_lost()
        for uid, state in self.states.items():
            if self.registry.holds_slot(uid):
                log.warning("run %s: the trainer died; the run loads again", uid, extra=about(uid))
            self.buffers.give_back(uid, state.taken)
            state.tracker.release(group.index for group in state.taken)  # until then a checkpoint must not have them
            state.taken.clear()
            state.in_training = 0
        self.swept = False  # it may have died before it removed what it was told to
        self.blame.died(under_way, why)

    async def cancel(self) -> None:
        """End the background tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
