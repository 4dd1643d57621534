"""Many loads at once: what one waits for others is no fault of the storage, and their number is bounded."""

import asyncio
from pathlib import Path

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.types import Loaded, LoadRequest
from support.fake_actors import FakeTrainer
from support.fleets import World, build_world, ended, running
from support.runs import put

FAST = {"rolloutBatchSize": 1, "numStep": 2, "saveTimeoutSeconds": 1}


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = build_world(tmp_path, slots=6)
    world.registry.sync([])
    return world


async def complete(world: World, uids: str) -> None:
    for uid in uids:
        put(world.registry, uid, **FAST)
    await world.until(lambda: all(ended(world, uid) for uid in uids), 20)
    runs = world.registry.runs
    assert {uid: (runs[uid].state, runs[uid].message) for uid in uids if runs[uid].state != "COMPLETED"} == {}


def die_in_read(world: World, trainer: FakeTrainer, number: int, seconds: float = 0.0) -> None:
    """The first trainer dies in its read of that number; each read takes so long."""
    first, begun = not world.trainers, list[str]()

    async def prepare(request: LoadRequest) -> None:
        begun.append(request.uid)
        if first and len(begun) == number:
            world.trainers[0].dead = True
        await asyncio.sleep(seconds)

    trainer.prepare = prepare  # type: ignore[method-assign, assignment]


async def test_a_death_during_many_loads_fails_none_of_them(world: World) -> None:
    """Each then loads alone, one after the other, and all of that takes longer than any of them may."""
    world.configure_trainer = lambda trainer: die_in_read(world, trainer, 4, seconds=0.4)
    async with running(world):
        await complete(world, "abcdef")


async def test_a_trainer_that_is_away_for_longer_than_a_load_may_take_fails_nobody(world: World) -> None:
    def configure(trainer: FakeTrainer) -> None:
        number = len(world.trainers)

        async def start() -> dict[int, str]:
            await asyncio.sleep(2.5 if number == 1 else 0)
            return {}

        die_in_read(world, trainer, 2)
        trainer.start = start  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    async with running(world):
        await complete(world, "ab")
        assert len(world.trainers) == 2


async def test_storage_that_reads_one_run_after_the_other_is_in_time(world: World) -> None:
    disk = asyncio.Lock()

    def configure(trainer: FakeTrainer) -> None:
        async def prepare(request: LoadRequest) -> None:
            async with disk:
                await asyncio.sleep(0.4)

        trainer.prepare = prepare  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    async with running(world):
        await complete(world, "abcdef")


async def test_few_states_are_held_while_a_batch_keeps_loads_waiting(world: World) -> None:
    held, most, go, busy = set[str](), 0, asyncio.Event(), asyncio.Event()

    def configure(trainer: FakeTrainer) -> None:
        load, accumulate = trainer.load, trainer.accumulate

        def prepare(request: LoadRequest) -> None:
            nonlocal most
            held.add(request.uid)
            most = max(most, len(held))

        def loading(request: LoadRequest) -> Loaded:
            held.discard(request.uid)
            return load(request)

        async def waiting(groups: object) -> object:
            if not go.is_set():
                busy.set()
                await go.wait()
            return accumulate(groups)  # type: ignore[arg-type]

        trainer.prepare, trainer.load, trainer.accumulate = prepare, loading, waiting  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "a", **FAST)
        await busy.wait()
        for uid in "bcdef":
            put(world.registry, uid, **FAST)
        await world.until(lambda: len(held) == 4)
        go.set()
        await world.until(lambda: all(ended(world, uid) for uid in "abcdef"), 20)
    assert most == 4


async def test_reads_that_hang_do_not_pile_up(world: World) -> None:
    """They keep their places; who comes then is told after its time, and those that train go on."""

    def configure(trainer: FakeTrainer) -> None:
        accumulate = trainer.accumulate

        async def slowly(groups: object) -> object:
            await asyncio.sleep(0.02)
            return accumulate(groups)  # type: ignore[arg-type]

        trainer.accumulate = slowly  # type: ignore[method-assign, assignment]

        async def prepare(request: LoadRequest) -> None:
            if request.uid in "bcdef":
                await asyncio.Event().wait()

        trainer.prepare = prepare  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "a", **{**FAST, "numStep": 1000})
        await world.until(lambda: world.registry.runs["a"].state == "ACTIVE")
        for uid in "bcdef":
            put(world.registry, uid, **FAST)
        await world.until(lambda: all(ended(world, uid) for uid in "bcdef"), 20)
        step = world.registry.runs["a"].step
        await world.until(lambda: world.registry.runs["a"].step > step)
    assert {world.registry.runs[uid].reason for uid in "bcdef"} == {reasons.STORAGE_ERROR}


async def test_an_export_that_kills_the_trainer_is_counted(world: World) -> None:
    def configure(trainer: FakeTrainer) -> None:
        def export(uid: str) -> None:
            world.trainers[-1].dead = True

        trainer.export = export  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "a", **{**FAST, "backoffLimit": 0})
        await world.until(lambda: ended(world, "a"), 20)
    assert world.registry.runs["a"].reason == reasons.TRAINER_CRASHED
