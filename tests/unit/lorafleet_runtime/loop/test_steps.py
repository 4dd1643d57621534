"""A step counts once its snapshot is written: what a trainer may lose, nobody was told of. Others do not wait."""

import asyncio
from typing import Any

import pytest

from lorafleet_runtime.loop.saving import drain
from lorafleet_runtime.loop.trainer import TrainerHandle, TrainerLost
from lorafleet_runtime.types import Cursor, StepResult, VersionId
from support.fake_actors import FakeTrainer, Handle, Kept
from support.fleets import World, ended, running
from support.runs import put

ONE: dict[str, Any] = {"rolloutBatchSize": 1, "maxStaleness": 3, "checkpoint": {"intervalSteps": 100}}


def hold(world: World, uid: str = "a") -> asyncio.Event:
    """Nothing of the run is snapshotted by the first trainer before the event is set."""
    written = asyncio.Event()

    def configure(trainer: FakeTrainer) -> None:
        if not world.trainers:
            trainer.snapshotting[uid] = written

    world.configure_trainer = configure
    return written


def made(world: World, uid: str = "a") -> list[int]:
    """Steps that the first trainer made of the run."""
    return [step for who, step, _ in world.trainers[0].target.stepped if who == uid]


def published(world: World, uid: str = "a") -> list[str]:
    """Versions of the run that the engine was given, in order."""
    return [name for name in world.engines[0].target.history if name.startswith(f"{uid}@")]


def listen(world: World) -> list[tuple[str, int]]:
    """(uid, step) of every step that is told of from now on."""
    told: list[tuple[str, int]] = []
    stepped = world.registry.stepped

    def telling(result: StepResult, now: float) -> bool:
        told.append((result.uid, result.step))
        return stepped(result, now)

    world.registry.stepped = telling  # type: ignore[method-assign]
    return told


async def die(world: World) -> None:
    """The loop finds the first trainer dead."""
    world.trainers[0].dead = True
    await asyncio.gather(world.fleet.trainer.call("slots"), return_exceptions=True)


async def test_other_runs_train_while_a_snapshot_is_written(world: World) -> None:
    written = hold(world)
    async with running(world):
        put(world.registry, "a", **ONE)
        put(world.registry, "b", **ONE, numStep=8)
        await world.until(lambda: ended(world, "b"))
        run = world.registry.runs["a"]
        assert (made(world), run.step, run.weight_version, run.accumulated_groups) == ([1], 0, 1, 1)
        assert world.trainer.accumulated["a"] == []  # nor is it given more than its batch
        assert published(world) == [VersionId("a", "1.1", 1).name]
        written.set()
        await world.until(lambda: ended(world, "a"))
    assert world.trained().count(("a", 0, 1)) == 1
    assert (world.registry.runs["a"].step, world.disk["a"].step) == (3, 3)


async def test_a_step_that_was_lost_with_its_snapshot_is_made_again_of_the_same_groups(world: World) -> None:
    written = hold(world)
    told = listen(world)
    async with running(world):
        put(world.registry, "a", **ONE)
        await world.until(lambda: made(world) == [1])
        world.trainers[0].target.torn.add("a")
        await die(world)
        written.set()
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.step, run.incarnation, told) == ("COMPLETED", 3, "1.1", [("a", 1), ("a", 2), ("a", 3)])
    assert world.steps("a") == {1: (0,), 2: (1,), 3: (2,)}
    assert sorted(index for _, index, _ in world.worker.groups) == [0, 1, 2]  # none is sampled again
    assert published(world) == [VersionId("a", "1.1", n).name for n in (1, 2, 3)]  # each name once


async def test_a_step_whose_snapshot_was_written_is_not_made_again_though_nobody_was_told(world: World) -> None:
    written = hold(world)
    async with running(world):
        put(world.registry, "a", **ONE)
        await world.until(lambda: made(world) == [1])
        world.node["a"] = Kept(1, Cursor(1), "1.1")  # its file is there, the answer is not
        world.trainers[0].target.torn.add("a")
        await die(world)
        written.set()
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.step, run.incarnation) == ("COMPLETED", 3, "1.2")
    assert world.trained() == [("a", 0, 1), ("a", 1, 2), ("a", 2, 3)]


@pytest.mark.parametrize("change", [{"cancel": True}, {"suspend": True}])
async def test_a_run_that_is_told_to_end_waits_for_its_step_and_others_do_not(
    world: World, change: dict[str, Any]
) -> None:
    written = hold(world)
    async with running(world):
        put(world.registry, "a", **ONE)
        await world.until(lambda: made(world) == [1])
        put(world.registry, "a", generation=2, **ONE, **change)
        await world.until(lambda: world.fleet.states["a"].saving.locked())
        put(world.registry, "b", **ONE)
        await world.until(lambda: ended(world, "b"))
        assert world.trainer.captures == [] or all(uid == "b" for uid, _, _ in world.trainer.captures)
        written.set()
        await world.until(lambda: ended(world, "a"))
    assert (world.registry.runs["a"].step, world.disk["a"].step, world.disk["a"].cursor) == (1, 1, Cursor(1))


async def test_a_run_that_is_deleted_meanwhile_has_no_more_steps(world: World) -> None:
    written, told = hold(world), listen(world)
    async with running(world):
        put(world.registry, "a", **ONE, deletionPolicy="Discard")
        await world.until(lambda: made(world) == [1])
        world.registry.delete("a")
        await world.until(lambda: "a" not in world.registry.runs)
        world.trainers[0].target.torn.add("a")
        written.set()
        put(world.registry, "b", **ONE)
        await world.until(lambda: ended(world, "b"))
    assert told == [("b", 1), ("b", 2), ("b", 3)]


async def test_a_stop_waits_for_the_steps_that_are_made(world: World) -> None:
    written = hold(world)
    async with running(world):
        put(world.registry, "a", **ONE)
        await world.until(lambda: made(world) == [1])
        stopping = asyncio.create_task(drain(world.fleet))
        await world.until(lambda: world.fleet.states["a"].saving.locked())
        assert not stopping.done()
        written.set()
        await stopping
    assert (world.disk["a"].step, world.disk["a"].cursor, world.registry.runs["a"].step) == (1, Cursor(1), 1)


async def test_a_last_step_that_turns_out_not_to_be_the_last_is_published(world: World) -> None:
    written = hold(world)
    async with running(world):
        put(world.registry, "a", **ONE | {"maxStaleness": 0}, numStep=1)
        await world.until(lambda: made(world) == [1])
        put(world.registry, "a", generation=2, **ONE | {"maxStaleness": 0}, numStep=3)
        written.set()
        await world.until(lambda: ended(world, "a"))
    assert [version for _, _, version in world.worker.groups] == [1, 2, 3]


async def test_a_fault_of_the_loop_in_a_step_ends_its_run_alone(world: World) -> None:
    stepped = world.registry.stepped

    def broken(result: StepResult, now: float) -> bool:
        if result.uid == "a":
            raise ValueError("a mistake")
        return stepped(result, now)

    world.registry.stepped = broken  # type: ignore[method-assign]
    async with running(world):
        put(world.registry, "a", **ONE)
        put(world.registry, "b", **ONE)
        await world.until(lambda: ended(world, "a") and ended(world, "b"))
    assert (world.registry.runs["a"].state, world.registry.runs["b"].state) == ("FAILED", "COMPLETED")
    assert "a mistake" in world.registry.runs["a"].message
    assert len(world.trainers) == 1


async def test_a_snapshot_that_this_trainer_did_not_take_is_lost() -> None:
    trainer = TrainerHandle(lambda: Handle(FakeTrainer({}, {})), lambda *_: None, lambda _: None, lambda _: None)
    with pytest.raises(TrainerLost):
        await trainer.snapshotted("of another")
    await trainer.start()
    with pytest.raises(TrainerLost, match="did not make the step"):
        await trainer.snapshotted("of another")
