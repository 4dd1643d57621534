"""A whole fleet over fake actors: registry and loop are real, trainer, engines and workers are in-process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet_runtime.config.config import PoolIdentity, RuntimeConfig
from lorafleet_runtime.loop.buffers import CursorTracker
from lorafleet_runtime.loop.driver import drive
from lorafleet_runtime.loop.engines import EngineSet
from lorafleet_runtime.loop.fleet import Fleet, RunState
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.loop.trainer import TrainerHandle
from lorafleet_runtime.loop.workers import WorkerSet
from lorafleet_runtime.metrics import RuntimeMetrics
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.types import Cursor, StepResult
from support.fake_actors import FakeEngine, FakeTrainer, FakeWorker, Handle, Stored
from support.runs import activate, pool_spec


@dataclass
class World:
    """The fleet and the fakes behind it."""

    fleet: Fleet
    registry: Registry
    disk: Stored
    node: Stored = field(default_factory=dict)
    trainers: list[Handle] = field(default_factory=list)
    engines: list[Handle] = field(default_factory=list)
    workers: list[Handle] = field(default_factory=list)
    reaped: list[Handle] = field(default_factory=list)
    configure_trainer: Callable[[FakeTrainer], None] = lambda trainer: None

    @property
    def trainer(self) -> FakeTrainer:
        """The newest trainer."""
        target: FakeTrainer = self.trainers[-1].target
        return target

    @property
    def worker(self) -> FakeWorker:
        """The newest worker."""
        target: FakeWorker = self.workers[-1].target
        return target

    async def until(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        """Wait for a state of the registry; woken by its changes."""
        async with asyncio.timeout(timeout):
            while not condition():
                await self.fleet.signal.wait(0.05)

    def doing(self, kind: str) -> list[str]:
        """Runs that the trainer was asked to do this for and has not answered, also where it has not begun."""
        work = self.fleet.trainer._work
        asked = [doing for ticket in work.queue for doing in ticket.doing]
        return [doing.uid for doing in [*asked, *work.beside] if doing.kind == kind]

    def trained(self) -> list[tuple[str, int, int]]:
        """(uid, group index, step) of every group that any trainer accumulated."""
        return [entry for handle in self.trainers for entry in handle.target.trained]

    def steps(self, uid: str) -> dict[int, tuple[int, ...]]:
        """The groups that each step of the run is made of; a step that was lost and made again counts as it is now."""
        made = [entry for handle in self.trainers for entry in handle.target.stepped]
        return {step: groups for who, step, groups in made if who == uid}


def ended(world: World, uid: str) -> bool:
    """Whether nothing of the run is held any more."""
    return world.registry.runs[uid].state in ("COMPLETED", "FAILED", "SUSPENDED")


def die_after_step(world: World, number: int) -> None:
    """The first trainer dies once it has made that step of a run, before anybody is told."""

    def configure(trainer: FakeTrainer) -> None:
        step = trainer.step

        def dying(uid: str, cursor: Cursor, incarnation: str) -> StepResult:
            result = step(uid, cursor, incarnation)
            if result.step == number and len(world.trainers) == 1:
                world.trainers[-1].dead = True
            return result

        trainer.step = dying  # type: ignore[method-assign]

    world.configure_trainer = configure


class _Spawner:
    def __init__(self, world: World) -> None:
        self._world = world

    def adopt(self, index: int) -> Any:
        return None

    def spawn(self, index: int) -> Handle:
        handle = Handle(FakeEngine(f"engine-{index}"))
        self._world.engines.append(handle)
        return handle

    def reap(self, actor: Handle, pids: tuple[int, ...], listed_at: float) -> None:
        self._world.reaped.append(actor)


def build_world(tmp_path: Path, **pool_changes: Any) -> World:
    """A fleet of fakes; nothing runs yet."""
    token = tmp_path / "token"
    token.write_text("secret")
    rollout = {"maxCoalesceWaitSeconds": 0.01} | pool_changes.pop("rollout", {})
    spec = pool_spec(rollout=rollout, **pool_changes)
    config = RuntimeConfig(
        pool=PoolIdentity(namespace="default", name="pool", spec=spec),
        port=1,
        token_file=token,
        storage_root=tmp_path / "storage",
    )
    signal = Signal()
    registry = Registry(spec, 1, notify=signal.set)
    world: World

    def trainer() -> Handle:
        fake = FakeTrainer(world.disk, world.node)
        world.configure_trainer(fake)
        world.trainers.append(Handle(fake))
        return world.trainers[-1]

    def worker(_: int) -> Handle:
        handles.append(Handle(FakeWorker()))
        return handles[-1]

    def world_kill(handle: Handle) -> None:
        handle.dead = True

    handles: list[Handle] = []
    fleet: Fleet
    holder: dict[str, Any] = {}
    on_lost = lambda *lost: holder["fleet"].on_trainer_lost(*lost)  # noqa: E731
    trainer_handle = TrainerHandle(trainer, on_lost, registry.observe_trainer, world_kill)
    workers = WorkerSet(worker, 1)
    fleet = Fleet(config, registry, signal, trainer_handle, None, workers, RuntimeMetrics(registry, "pool"))  # type: ignore[arg-type]
    holder["fleet"] = fleet
    world = World(fleet, registry, {}, workers=handles)
    fleet.engines = EngineSet(_Spawner(world), spec.engines.replicas, registry.observe_engine, registry.fail)
    return world


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    """Drive the fleet until the block ends."""
    task = asyncio.create_task(drive(world.fleet))
    try:
        await world.until(lambda: world.registry.listed and all(e.ready for e in world.registry.engines.values()))
        yield world
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def standing(world: World, *uids: str) -> None:
    """These runs are ACTIVE at step 1 and loaded, and no task of the loop runs: the test makes the calls."""
    await world.fleet.trainer.start()
    for uid in uids:
        activate(world.registry, uid, step=1)
        run = world.registry.runs[uid]
        assert run.slot is not None
        world.fleet.states[uid] = RunState(run.incarnation, CursorTracker(Cursor(2)), Cursor(2))
        world.trainer.loaded[uid], world.trainer.accumulated[uid] = [run.slot, 1], []
        world.trainer.incarnations[uid] = run.incarnation
