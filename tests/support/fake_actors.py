"""In-process stand-ins for Ray actors, so that the loop runs without Ray; a test can kill, block or make them lie."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

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
    PromptGroup,
    RunBatchStats,
    RunFault,
    Sample,
    StepResult,
    VersionId,
)

_BUFFERS = itertools.count()

MANIFEST = Manifest(4, 4, ("q_proj",), "/model", "float32", (), 0, "digest")


Stored = dict[str, tuple[int, Cursor, str]]
"""uid -> (step, cursor, incarnation)"""


class Handle:
    """Looks like a Ray actor handle over a plain object; `dead` makes every call raise Retryable."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle = handle
        self._name = name

    def options(self, **_: object) -> "_Method":
        return self

    def remote(self, *args: Any) -> Any:
        if self._name == "export":
            return asyncio.ensure_future(self._run(*args)), f"buffer {next(_BUFFERS)} of {args[0]}"
        return asyncio.ensure_future(self._run(*args))

    async def _run(self, *args: Any) -> Any:
        await asyncio.sleep(0)
        if self._handle.dead:
            raise Retryable("actor lost")
        result = getattr(self._handle.target, self._name)(*args)
        result = await result if asyncio.iscoroutine(result) else result
        if self._handle.dead:
            raise Retryable("actor lost")
        return result


class FakeTrainer:
    """Counts groups and steps; keeps checkpoints in `disk` and snapshots in `node`, which outlive it."""

    def __init__(self, disk: Stored, node: Stored) -> None:
        self.disk = disk
        self.node = node
        self.loaded: dict[str, list[int]] = {}
        """uid -> [slot, step, accumulated groups]"""
        self.incarnations: dict[str, str] = {}
        self.trained: list[tuple[str, int, int]] = []
        """(uid, group index, step it went into), in order."""
        self.on_accumulate: Callable[[list[PromptGroup]], None] = lambda groups: None
        self.faults: dict[str, RunFault] = {}
        self.checkpoint_error: Exception | None = None

    def start(self) -> dict[int, str]:
        return self.slots()

    def slots(self) -> dict[int, str]:
        return {slot: uid for uid, (slot, _, _) in self.loaded.items()}

    def load(self, request: LoadRequest) -> Loaded:
        stored = [place[request.uid] for place in (self.disk, self.node) if request.uid in place]
        step, cursor, incarnation = max(stored, key=lambda state: state[0], default=(0, Cursor(), ""))
        self.loaded[request.uid] = [request.slot, step, 0]
        self.incarnations[request.uid] = incarnation
        return Loaded(request.uid, step, cursor, incarnation)

    def accumulate(self, groups: list[PromptGroup]) -> BatchResult:
        self.on_accumulate(groups)
        stats = []
        faults = []
        for uid in dict.fromkeys(g.uid for g in groups):
            mine = [g for g in groups if g.uid == uid]
            if uid in self.faults:
                faults.append(self.faults[uid])
                continue
            self.loaded[uid][2] += len(mine)
            self.trained += [(uid, g.index, self.loaded[uid][1] + 1) for g in mine]
            stats.append(RunBatchStats(uid, len(mine), 2 * len(mine), 4, 0.1, 0.1, 4, 0.0))
        return BatchResult(tuple(stats), tuple(faults), 0.01, 8)

    def step(self, uid: str, cursor: Cursor, incarnation: str) -> StepResult:
        entry = self.loaded[uid]
        entry[1] += 1
        entry[2] = 0
        self.incarnations[uid] = incarnation
        self.node[uid] = (entry[1], cursor, incarnation)
        return StepResult(uid, entry[1], 1e-3, 0.5)

    def export(self, uid: str) -> Manifest:
        assert uid in self.loaded
        return MANIFEST

    def checkpoint(self, uid: str, directory: str, cursor: Cursor) -> Artifact:
        if self.checkpoint_error is not None:
            raise self.checkpoint_error
        step = self.loaded[uid][1]
        self.disk[uid] = (step, cursor, self.incarnations[uid])
        return Artifact(f"{directory}/step_{step}", step, "digest")

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
