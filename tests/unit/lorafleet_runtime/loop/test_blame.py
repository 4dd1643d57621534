"""Deaths beside the calls: in a snapshot, in a load, in a slice of a batch. The one that kills is found, no other."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.loop.trainer import Doing
from lorafleet_runtime.types import BatchResult, LoadRequest, PromptGroup
from support.fake_actors import FakeTrainer
from support.fleets import World, build_world, die_after_step, ended, running
from support.runs import activate, put

ONE: dict[str, Any] = {"rolloutBatchSize": 1, "maxStaleness": 3, "checkpoint": {"intervalSteps": 100}}


def kills_in_its_snapshot(world: World, killer: str) -> None:
    """The write of every snapshot of the run kills the trainer: in a batch of another run if there is one by then."""

    def configure(trainer: FakeTrainer) -> None:
        accumulate, snapshotted = trainer.accumulate, trainer.snapshotted
        begun, died, beside = asyncio.Event(), asyncio.Event(), asyncio.Event()
        trainer.snapshotting[killer] = begun  # nothing of it is on the disk

        async def writing(ticket: str) -> bool:
            if trainer._staged[ticket][0] != killer:
                return await snapshotted(ticket)
            begun.set()
            await asyncio.wait([asyncio.ensure_future(beside.wait())], timeout=0.1)
            trainer.torn.add(killer)
            next(handle for handle in world.trainers if handle.target is trainer).dead = True
            died.set()
            return await snapshotted(ticket)

        async def held(groups: list[PromptGroup]) -> BatchResult:
            if begun.is_set():
                beside.set()
                await died.wait()
            return accumulate(groups)

        trainer.snapshotted, trainer.accumulate = writing, held  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure


async def test_a_run_whose_snapshot_kills_the_trainer_is_failed_when_it_is_alone(world: World) -> None:
    kills_in_its_snapshot(world, "bad")
    async with running(world):
        put(world.registry, "bad", **ONE, backoffLimit=1, numStep=50)
        await world.until(lambda: ended(world, "bad"))
    bad = world.registry.runs["bad"]
    assert (bad.state, bad.reason, bad.crashes) == ("FAILED", reasons.TRAINER_CRASHED, 2)
    assert len(world.trainers) == 3


async def test_a_batch_beside_a_snapshot_that_kills_the_trainer_is_not_blamed(world: World) -> None:
    kills_in_its_snapshot(world, "bad")
    async with running(world):
        put(world.registry, "bad", **ONE, backoffLimit=0, numStep=50)
        put(world.registry, "good", **ONE, backoffLimit=0, numStep=100)
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    bad, good = world.registry.runs["bad"], world.registry.runs["good"]
    assert (bad.state, bad.reason) == ("FAILED", reasons.TRAINER_CRASHED)
    assert (good.state, good.crashes) == ("COMPLETED", 0), good.message
    assert len(world.trainers) <= 3


async def test_a_run_that_kills_the_trainer_in_the_last_part_of_its_batch_is_found(tmp_path: Path) -> None:
    world = build_world(tmp_path, rollout={"globalBatchSize": 4})  # two groups at a time
    world.registry.sync([])

    def good_is_not_being_read() -> bool:
        """Beside a read this death would count for nobody, and be one more."""
        read = Doing("load", "good") in world.fleet.trainer._work.beside
        return not read and (world.registry.runs["good"].loaded or world.doing("load") == ["good"])

    def configure(trainer: FakeTrainer) -> None:
        accumulate = trainer.accumulate

        async def dying(groups: list[PromptGroup]) -> BatchResult:
            if any((group.uid, group.index) == ("bad", 3) for group in groups):
                await world.until(good_is_not_being_read)
                world.trainers[-1].dead = True
            return accumulate(groups)

        trainer.accumulate = dying  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "bad", backoffLimit=1, rolloutBatchSize=4, numStep=50)
        put(world.registry, "good", **ONE, backoffLimit=0, numStep=100_000)
        await world.until(lambda: ended(world, "bad"))
        bad, good = world.registry.runs["bad"], world.registry.runs["good"]
        assert (bad.reason, good.crashes, good.ending) == (reasons.TRAINER_CRASHED, 0, None)
        assert len(world.trainers) <= 4
        world.registry.delete("good")


async def test_a_run_that_kills_the_trainer_while_it_is_read_is_found_beside_others(world: World) -> None:
    """Reads go on beside each other, and beside batches."""

    def configure(trainer: FakeTrainer) -> None:
        async def reading(request: LoadRequest) -> None:
            if request.uid == "bad":
                await asyncio.wait([asyncio.ensure_future(busy())], timeout=0.5)
                world.trainers[-1].dead = True
                await asyncio.Event().wait()

        async def busy() -> None:
            await world.until(lambda: bool(world.doing("batch")))

        trainer.prepare = reading  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "good", **ONE, backoffLimit=0, numStep=100_000)
        await world.until(lambda: world.registry.runs["good"].step >= 1)
        put(world.registry, "bad", backoffLimit=1)
        await world.until(lambda: ended(world, "bad"))
        bad, good = world.registry.runs["bad"], world.registry.runs["good"]
        assert (bad.reason, good.ending, good.crashes) == (reasons.TRAINER_CRASHED, None, 0)
        world.registry.delete("good")
    assert bad.message.startswith("the trainer died 2 times while it loaded this run; backoffLimit is 1")


async def test_a_step_that_waits_for_a_place_among_the_snapshots_holds_up_no_batch(tmp_path: Path) -> None:
    world = build_world(tmp_path, slots=6)
    world.registry.sync([])
    written, slow = asyncio.Event(), "abcde"
    world.configure_trainer = lambda trainer: trainer.snapshotting.update(dict.fromkeys(slow, written))
    async with running(world):
        for uid in slow:
            put(world.registry, uid, **ONE, numStep=2)
        await world.until(lambda: len(world.trainer.stepped) == 4)
        put(world.registry, "free", **ONE, numStep=100)
        await world.until(lambda: len({uid for uid, *_ in world.trained()}) == 6)
        assert len(world.trainer.stepped) == 4  # neither the fifth, nor the sixth
        written.set()
        await world.until(lambda: all(ended(world, uid) for uid in [*slow, "free"]))
    assert all(world.disk[uid].step == 2 for uid in slow)


async def test_a_trainer_that_dies_while_a_step_waits_for_a_place_makes_it_again(tmp_path: Path) -> None:
    world = build_world(tmp_path, slots=6)
    world.registry.sync([])
    written, slow = asyncio.Event(), "abcde"

    def configure(trainer: FakeTrainer) -> None:
        if not world.trainers:
            trainer.snapshotting.update(dict.fromkeys(slow, written))

    world.configure_trainer = configure
    async with running(world):
        for uid in slow:
            put(world.registry, uid, **ONE, numStep=2)
        await world.until(lambda: len(world.trained()) == 5 and len(world.trainer.stepped) == 4)
        world.trainers[0].dead = True
        await asyncio.gather(world.fleet.trainer.call("slots"), return_exceptions=True)
        await world.until(lambda: all(ended(world, uid) for uid in slow))
    assert all(world.steps(uid) == {1: (0,), 2: (1,)} for uid in slow)
    assert all(world.registry.runs[uid].state == "COMPLETED" for uid in slow)


@pytest.mark.parametrize("save_deaths", [0, 1])
async def test_a_suspension_in_a_last_batch_holds_up_nobody_while_its_snapshot_is_written(
    world: World, save_deaths: int
) -> None:
    """It asked to be between batches before that batch ended; with a save under suspicion also to be alone."""
    written, at_work, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def configure(trainer: FakeTrainer) -> None:
        trainer.snapshotting["a"] = written
        accumulate = trainer.accumulate

        async def held(groups: list[PromptGroup]) -> BatchResult:
            if groups[0].uid == "a":
                at_work.set()
                await go_on.wait()
            return accumulate(groups)

        trainer.accumulate = held  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "a", **ONE)
        await at_work.wait()
        world.registry.runs["a"].save_deaths = save_deaths
        put(world.registry, "a", generation=2, **ONE, suspend=True)
        await world.until(lambda: world.fleet.states["a"].saving.locked())
        await waiters(world.fleet.accumulating)
        go_on.set()
        put(world.registry, "b", **ONE, numStep=3)
        await world.until(lambda: ended(world, "b"))
        assert world.registry.runs["a"].step == 0
        written.set()
        await world.until(lambda: ended(world, "a"))
    assert (world.disk["a"].step, world.disk["a"].partial) == (1, ())


async def waiters(lock: asyncio.Lock) -> None:
    """Wait until somebody waits for the lock."""
    while not lock._waiters:
        await asyncio.sleep(0)


DEATHS: list[tuple[set[Doing], dict[str, int]]] = [
    ({Doing("snapshot", "a")}, {"crashes": 1}),
    ({Doing("batch", "a"), Doing("snapshot", "b")}, {}),
    ({Doing("batch", "a"), Doing("load", "b")}, {}),
    ({Doing("load", "a")}, {"load_deaths": 1}),
    ({Doing("load", "a"), Doing("snapshot", "b")}, {"load_deaths": 1}),
    ({Doing("save", "a"), Doing("batch", "b")}, {"save_deaths": 1}),
    (set(), {}),
]


@pytest.mark.parametrize(("under_way", "counted"), DEATHS)
def test_what_a_first_death_counts_for(world: World, under_way: set[Doing], counted: dict[str, int]) -> None:
    world.registry.observe_trainer({})
    for uid in "ab":
        activate(world.registry, uid)
    world.fleet.blame.died(under_way, "killed")
    run = world.registry.runs["a"]
    assert {name: n for name in ("crashes", "load_deaths", "save_deaths") if (n := getattr(run, name))} == counted
    training = {doing.uid for doing in under_way if doing.kind in ("batch", "snapshot")}
    assert world.fleet.blame.suspects == training


@pytest.mark.parametrize("kind", ["load", "save"])
def test_who_was_beside_others_is_not_failed_and_is_the_next_time(world: World, kind: Any) -> None:
    world.registry.observe_trainer({})
    activate(world.registry, "a")
    put(world.registry, "a", generation=2, backoffLimit=0)
    died: Callable[..., None] = lambda *doing: world.fleet.blame.died(set(doing), "killed")  # noqa: E731
    died(Doing(kind, "a"), Doing("snapshot", "b"))
    run = world.registry.runs["a"]
    assert run.ending is None
    died(Doing(kind, "a"))
    ending = world.registry.runs["a"].ending
    assert ending is not None
    assert ending.reason == reasons.TRAINER_CRASHED


async def test_a_step_that_nobody_heard_of_is_told_of_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    die_after_step(world, 2)
    async with running(world):
        put(world.registry, "a", **ONE)
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"
    assert caplog.text.count("run a: step 2 outlived its trainer") == 1
