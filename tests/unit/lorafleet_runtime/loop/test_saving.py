"""Checkpoints: on the way, at the end, at a stop, and on storage that refuses them."""

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.loop import lifecycle
from lorafleet_runtime.loop.lifecycle import drain
from support.fleets import World, ended, running
from support.runs import put


@pytest.fixture
def quick_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that failed is tried again at once."""
    monkeypatch.setattr(lifecycle, "_SAVE_RETRY_SECONDS", 0.02)


async def test_a_suspension_is_saved_although_the_trainer_died_before(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=1000)
        await world.until(lambda: world.registry.runs["a"].step >= 3)
        world.trainers[-1].dead = True
        put(world.registry, "a", generation=2, suspend=True, numStep=1000)
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
    run = world.registry.runs["a"]
    assert run.artifact is not None
    assert run.artifact.step == run.step >= 3
    assert world.node == {}


async def test_a_suspension_that_cannot_be_saved_keeps_its_snapshot(world: World, quick_saves: None) -> None:
    full = RunError(reasons.STORAGE_ERROR, "disk full")
    world.configure_trainer = lambda t: setattr(t, "checkpoint_error", full)
    async with running(world):
        put(world.registry, "a", numStep=1000, saveTimeoutSeconds=1)
        await world.until(lambda: world.registry.runs["a"].step >= 3)
        put(world.registry, "a", generation=2, suspend=True, numStep=1000, saveTimeoutSeconds=1)
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
        step = world.registry.runs["a"].step
        world.trainer.checkpoint_error = None
        put(world.registry, "a", generation=3, numStep=1000)
        await world.until(lambda: world.registry.runs["a"].state == "ACTIVE")
        assert world.registry.runs["a"].start_step == step


async def test_a_checkpoint_on_the_way_that_cannot_be_written_is_tried_after_each_step(world: World) -> None:
    full = RunError(reasons.STORAGE_ERROR, "disk full")
    world.configure_trainer = lambda t: setattr(t, "checkpoint_error", full)
    async with running(world):
        put(world.registry, "a", numStep=1000, checkpoint={"intervalSteps": 50})
        await world.until(lambda: "disk full; it is tried again" in world.registry.runs["a"].message)
        world.trainer.checkpoint_error = None
        await world.until(lambda: world.registry.runs["a"].artifact is not None)
        assert 50 < world.disk["a"][0] < 100
        assert world.registry.runs["a"].message == "training in slot 0"
        world.registry.delete("a")


async def test_the_last_checkpoint_waits_for_the_storage(world: World, quick_saves: None) -> None:
    full = RunError(reasons.STORAGE_ERROR, "disk full")
    world.configure_trainer = lambda t: setattr(t, "checkpoint_error", full)
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: "disk full" in world.registry.runs["a"].message)
        assert world.registry.view("a").outcome is None
        world.trainer.checkpoint_error = None
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"


async def test_a_checkpoint_that_cannot_be_written_fails_the_run_instead_of_completing(
    world: World, quick_saves: None
) -> None:
    full = RunError(reasons.STORAGE_ERROR, "disk full")
    world.configure_trainer = lambda t: setattr(t, "checkpoint_error", full)
    async with running(world):
        put(world.registry, "a", saveTimeoutSeconds=1)
        await world.until(lambda: ended(world, "a"))
    assert (world.registry.runs["a"].state, world.registry.runs["a"].reason) == ("FAILED", reasons.STORAGE_ERROR)


async def test_a_stop_saves_a_run_whose_last_checkpoint_waits_for_storage(world: World) -> None:
    full = RunError(reasons.STORAGE_ERROR, "disk full")
    world.configure_trainer = lambda t: setattr(t, "checkpoint_error", full)
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: "disk full" in world.registry.runs["a"].message)
        world.trainer.checkpoint_error = None
        await drain(world.fleet)
        assert world.disk["a"][0] == 3


async def test_a_cancelled_run_that_cannot_be_saved_ends_all_the_same(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=1000)
        await world.until(lambda: world.registry.runs["a"].step >= 3)
        world.trainer.checkpoint_error = RuntimeError("CUDA error")
        put(world.registry, "a", generation=2, numStep=1000, cancel=True)
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].reason == reasons.CANCELLED


async def test_a_stop_saves_live_runs_at_their_last_step(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=1000, checkpoint={"intervalSteps": 500})
        await world.until(lambda: world.registry.runs["a"].step >= 3)
        await drain(world.fleet)
        step, cursor, _ = world.disk["a"]
    assert step >= 3
    assert cursor.low == 2 * step  # exactly the groups of the steps that are saved


async def test_a_trainer_that_dies_while_the_last_checkpoint_waits_costs_nothing(
    world: World, quick_saves: None
) -> None:
    full = RunError(reasons.STORAGE_ERROR, "disk full")
    world.configure_trainer = lambda t: setattr(t, "checkpoint_error", full if len(world.trainers) == 0 else None)
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: "disk full" in world.registry.runs["a"].message)
        world.trainers[0].dead = True
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.step, world.disk["a"][0]) == ("COMPLETED", 3, 3)
