"""In-process stand-ins for Ray actors, so that the loop runs without Ray; a test can kill, block or make them lie."""

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.types import (
    Artifact,
    BatchResult,
    Cursor,
    DatasetInfo,
    DroppedGroup,
    EngineStatus,
    Loaded,
    LoadRequest,
    Manifest,
    PolicySums,
    PromptGroup,
    Retention,
    RunBatchStats,
    RunFault,
    Sample,
    StepResult,
    VersionId,
)

_BUFFERS = itertools.count()

MANIFEST = Manifest(4, 4, ("q_proj",), "/model", "float32", (), 0, "digest")

POLICY = PolicySums(
    tokens=4, mismatch=0.1, entropy=6.0, kl_sampler_k1=-0.2, kl_sampler=0.4, kl_base_tokens=4, kl_base=0.8, clipped=1,
    corrected=3,
)  # fmt: skip
"""What every accumulated batch shows of its run's policy."""


class Kept(NamedTuple):
    """What a file of a run says."""

    step: int
    cursor: Cursor
    incarnation: str
    partial: tuple[PromptGroup, ...] = ()
    """Groups accumulated since the step."""
    score: float | None = None


Stored = dict[str, Kept]
"""By uid."""


class Handle:
    """Looks like a Ray actor handle over a plain object; `dead` ends every call with Retryable.

    Of a target that names `BESIDE`, the other methods are worked on one at a time, in the order in which they were
    sent, as by the real trainer: one that waits holds up those behind it.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self._beside: frozenset[str] | None = getattr(target, "BESIDE", None)
        self._lane = asyncio.Lock()
        self._death = asyncio.Event()

    @property
    def dead(self) -> bool:
        return self._death.is_set()

    @dead.setter
    def dead(self, dead: bool) -> None:
        assert dead
        self._death.set()

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)


class _Method:
    def __init__(self, handle: Handle, name: str, num_returns: int = 1) -> None:
        self._handle = handle
        self._name = name
        self._returns = num_returns

    def options(self, num_returns: int) -> "_Method":
        return _Method(self._handle, self._name, num_returns)

    def remote(self, *args: Any) -> Any:
        if self._returns == 2:
            return asyncio.ensure_future(self._run(*args)), f"buffer {next(_BUFFERS)} of {args[0]}"
        return asyncio.ensure_future(self._run(*args))

    async def _run(self, *args: Any) -> Any:
        work = asyncio.ensure_future(self._work(*args))
        death = asyncio.ensure_future(self._handle._death.wait())
        death.add_done_callback(lambda _: work.cancel())
        work.add_done_callback(lambda _: death.cancel())
        await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)  # goes on when nobody waits any more
        if not work.done() or work.cancelled():
            raise Retryable("actor lost")
        return work.result()

    async def _work(self, *args: Any) -> Any:
        handle = self._handle
        free = handle._beside is None or self._name in handle._beside
        async with nullcontext() if free else handle._lane:
            await asyncio.sleep(0)
            if handle.dead:
                raise Retryable("actor lost")
            result = getattr(handle.target, self._name)(*args)
            result = await result if asyncio.iscoroutine(result) else result
            if handle.dead:
                raise Retryable("actor lost")
            return result


class FakeTrainer:
    """Counts groups and steps; keeps checkpoints in `disk` and snapshots in `node`, which outlive it."""

    BESIDE = frozenset({"start", "saved", "snapshotted", "prepare"})

    def __init__(self, disk: Stored, node: Stored) -> None:
        self.disk = disk
        self.node = node
        self.loaded: dict[str, list[int]] = {}
        """uid -> [slot, step]"""
        self.accumulated: dict[str, list[PromptGroup]] = {}
        """Since the last step, by uid."""
        self.stepped: list[tuple[str, int, tuple[int, ...]]] = []
        """(uid, step, the groups that it is made of), in order."""
        self.incarnations: dict[str, str] = {}
        self.trained: list[tuple[str, int, int]] = []
        """(uid, group index, step it went into), in order."""
        self.on_accumulate: Callable[[list[PromptGroup]], None] = lambda groups: None
        self.faults: dict[str, RunFault] = {}
        self.checkpoint_error: Exception | None = None
        self.writing: asyncio.Event | None = None
        """Saves wait for it."""
        self.snapshotting: dict[str, asyncio.Event] = {}
        """The snapshots of these runs are written when it is set, unless they are in `torn` by then."""
        self.torn: set[str] = set()
        self._staged: dict[str, tuple[str, Kept]] = {}
        self._captured: dict[str, tuple[str, Kept, str]] = {}
        self.captures: list[tuple[str, Kept, str]] = []
        """Everything that was captured, in order: (uid, what, path)."""
        self.retentions: list[Retention] = []
        """What was to stay with each of them."""

    def start(self) -> dict[int, str]:
        return self.slots()

    def slots(self) -> dict[int, str]:
        return {slot: uid for uid, (slot, _) in self.loaded.items()}

    def prepare(self, request: LoadRequest) -> None:
        return None

    def load(self, request: LoadRequest) -> Loaded:
        stored = [place[request.uid] for place in (self.disk, self.node) if request.uid in place]
        kept = max(stored, key=lambda state: state.step, default=Kept(0, Cursor(), ""))
        self.loaded[request.uid] = [request.slot, kept.step]
        self.accumulated[request.uid] = list(kept.partial)
        self.incarnations[request.uid] = kept.incarnation
        rewards = [sample.reward for group in kept.partial for sample in group.samples]
        return Loaded(
            request.uid, kept.step, kept.cursor, kept.incarnation, len(kept.partial), sum(rewards), len(rewards),
            durable_step=self.disk[request.uid].step if request.uid in self.disk else None,
            policy=sum([POLICY] * bool(kept.partial), PolicySums()),
        )  # fmt: skip

    def accumulate(self, groups: list[PromptGroup]) -> BatchResult:
        self.on_accumulate(groups)
        stats = []
        faults = []
        for uid in dict.fromkeys(g.uid for g in groups):
            mine = [g for g in groups if g.uid == uid]
            if uid in self.faults:
                faults.append(self.faults[uid])
                continue
            self.accumulated[uid] += mine
            self.trained += [(uid, g.index, self.loaded[uid][1] + 1) for g in mine]
            stats.append(RunBatchStats(uid, len(mine), 2 * len(mine), 4, POLICY, 0.1, 0.0))
        return BatchResult(tuple(stats), tuple(faults), 0.01, 8)

    def step(self, uid: str, cursor: Cursor, incarnation: str) -> StepResult:
        entry = self.loaded[uid]
        entry[1] += 1
        self.stepped.append((uid, entry[1], tuple(group.index for group in self.accumulated[uid])))
        self.accumulated[uid] = []
        self.incarnations[uid] = incarnation
        ticket = f"{id(self)}.{next(_BUFFERS)}"
        self._staged[ticket] = (uid, Kept(entry[1], cursor, incarnation))
        if uid not in self.snapshotting:
            self.node[uid] = self._staged[ticket][1]
        return StepResult(uid, entry[1], 1e-3, 0.5, snapshot=ticket)

    async def snapshotted(self, ticket: str) -> bool:
        if ticket not in self._staged:
            return False
        uid, kept = self._staged.pop(ticket)
        if uid in self.snapshotting:
            await self.snapshotting[uid].wait()
            if uid not in self.torn:
                self.node[uid] = kept
        return True

    def export(self, uid: str) -> Manifest:
        assert uid in self.loaded
        return MANIFEST

    def capture(
        self, uid: str, directory: str, cursor: Cursor, partial: bool = False, retention: Retention = Retention(1)
    ) -> str:
        step = self.loaded[uid][1]
        ticket = f"{id(self)}.{next(_BUFFERS)}"
        sums = tuple(self.accumulated[uid]) if partial else ()
        kept = Kept(step, cursor, self.incarnations[uid], sums, retention.score)
        self._captured[ticket] = (uid, kept, f"{directory}/step_{step}")
        self.captures.append(self._captured[ticket])
        self.retentions.append(retention)
        return ticket

    async def saved(self, ticket: str) -> Artifact | None:
        if ticket not in self._captured:
            return None
        uid, state, path = self._captured.pop(ticket)
        if self.writing is not None:
            await self.writing.wait()
        if self.checkpoint_error is not None:
            raise self.checkpoint_error
        self.disk[uid] = state
        return Artifact(path, state.step, "digest")

    def drop(self, uid: str, keep_snapshot: bool = False) -> None:
        self.loaded.pop(uid, None)
        if not keep_snapshot:
            self.node.pop(uid, None)

    def retain(self, uids: list[str]) -> None:
        for uid in self.node.keys() - set(uids):
            del self.node[uid]


class FakeEngine:
    """Holds adapter names; `lie` makes retire succeed without removing anything."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.adapters: set[str] = set()
        self.lie = False
        self.refuse: set[str] = set()
        self.history: list[str] = []

    def start(self) -> EngineStatus:
        return self.list()

    def list(self) -> EngineStatus:
        return EngineStatus(self.name, True, tuple(sorted(self.adapters)), time.time())

    def probe(self) -> None:
        return None

    def publish(self, version: VersionId, manifest: Manifest, buffer: object) -> None:
        if version.uid in self.refuse:
            raise RunError("PublishError", f"{version.name}: refused")
        self.adapters.add(version.name)
        self.history.append(version.name)

    def retire(self, version: VersionId) -> None:
        if not self.lie:
            self.adapters.discard(version.name)

    def abort(self, prefix: str) -> int:
        return 0


class FakeWorker:
    """Answers each group at once with rewards 0 and 1; checks that the engine holds the version."""

    def __init__(self) -> None:
        self.on_group: Callable[[str, int], PromptGroup | DroppedGroup | None] = lambda uid, index: None
        self.open_error: dict[str, RunError] = {}
        self.groups: list[tuple[str, int, int]] = []
        """(uid, index, version)"""
        self.gate: asyncio.Event | None = None

    def ready(self) -> bool:
        return True

    def open(self, uid: str, spec: dict[str, Any], started: bool) -> DatasetInfo:
        if uid in self.open_error:
            raise self.open_error[uid]
        return DatasetInfo(10, 0, "d")

    async def run_group(self, uid: str, index: int, version: VersionId, engine: Handle) -> PromptGroup | DroppedGroup:
        if self.gate is not None:
            await self.gate.wait()
        if engine.dead or version.name not in engine.target.adapters:
            raise Retryable(f"{version.name} is not resident")
        self.groups.append((uid, index, version.n))
        special = self.on_group(uid, index)
        if special is not None:
            return special
        samples = tuple(Sample((5, 6), (-0.5, -0.5), float(r), r - 0.5, False) for r in (0, 1))
        return PromptGroup(uid, version, index, (1, 2), samples, ("a", "b"))

    def close(self, uid: str) -> None:
        return None
