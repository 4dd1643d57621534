"""Checkpoints: on the way, at the end, at a stop, and on storage that refuses them."""

import asyncio
import logging
import math

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.loop import loading, saving
from lorafleet_runtime.loop.saving import drain
from lorafleet_runtime.types import Cursor, Loaded, LoadRequest, PolicySums, RunFault
from support.fake_actors import FakeTrainer, Kept
from support.fleets import World, ended, running
from support.runs import put


@pytest.fixture
def quick_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that failed is tried again at once."""
    monkeypatch.setattr(saving, "_RETRY_SECONDS", 0.02)


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
        kept = world.disk["a"]
    assert kept.step >= 3
    assert kept.cursor.low == 2 * kept.step + len(kept.partial)  # exactly the groups that are saved


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


def slow_disk(world: World) -> asyncio.Event:
    """Nothing is written before the event is set."""
    ready = asyncio.Event()
    world.configure_trainer = lambda t: setattr(t, "writing", ready)
    return ready


async def test_a_slow_disk_holds_up_no_run(world: World) -> None:
    ready = slow_disk(world)
    async with running(world):
        put(world.registry, "a", numStep=12, checkpoint={"intervalSteps": 1})
        put(world.registry, "b", numStep=12, checkpoint={"intervalSteps": 100})
        await world.until(lambda: all(world.registry.runs[u].step >= 11 for u in "ab"))
        assert world.disk == {}
        assert world.registry.runs["a"].artifact is None  # told only of what is durable
        ready.set()
        await world.until(lambda: ended(world, "a") and ended(world, "b"))
    assert (world.disk["a"].step, world.disk["b"].step) == (12, 12)


async def test_a_run_has_one_save_on_its_way_and_makes_up_for_those_that_waited(world: World) -> None:
    ready = slow_disk(world)
    async with running(world):
        put(world.registry, "a", numStep=1000, checkpoint={"intervalSteps": 2})
        await world.until(lambda: world.registry.runs["a"].step >= 9)
        assert [kept.step for _, kept, _ in world.trainer.captures] == [2]
        step = world.registry.runs["a"].step
        ready.set()
        await world.until(lambda: len(world.trainer.captures) >= 2)
        assert world.trainer.captures[1][1].step <= step + 2  # after its next step, not at the next interval
        world.registry.delete("a")


async def test_a_run_that_fails_while_its_save_is_on_the_way_leaves_a_whole_one(world: World) -> None:
    ready = slow_disk(world)
    async with running(world):
        put(world.registry, "a", numStep=1000, checkpoint={"intervalSteps": 2})
        await world.until(lambda: world.fleet.states.get("a") is not None and world.fleet.states["a"].saving.locked())
        lock = world.fleet.states["a"].saving
        world.registry.fail(RunFault("a", reasons.REWARD_ERROR, "it raised"))
        await world.until(lambda: ended(world, "a"))
        assert world.trainer.loaded == {}
        ready.set()
        async with lock:
            pass
    assert world.disk["a"] == Kept(2, Cursor(4), "1.1", (), 0.5)
    assert world.registry.runs["a"].artifact is None  # of a run that ended nothing is told any more


async def test_a_trainer_that_dies_with_a_save_on_its_way_saves_again(world: World) -> None:
    ready = slow_disk(world)
    async with running(world):
        put(world.registry, "a", numStep=1000, checkpoint={"intervalSteps": 2})
        await world.until(lambda: len(world.trainer.captures) == 1)
        world.trainers[0].dead = True
        ready.set()
        await world.until(lambda: world.registry.runs["a"].artifact is not None)
        run = world.registry.runs["a"]
        assert (run.restarts, run.incarnation) == (1, "1.1")
        assert len(world.trainers) == 2
        world.registry.delete("a")


async def test_the_score_of_a_checkpoint_is_the_mean_reward_since_the_one_before(world: World) -> None:
    rewards = {1: 0.0, 2: 1.0, 3: 0.5, 4: 0.25, 5: 1.0}

    async with running(world):
        commit = world.registry.commit

        def with_rewards(uid: str, groups: int, _: object, policy: PolicySums) -> bool:
            return commit(uid, groups, [rewards[world.registry.runs[uid].step + 1]] * 2 * groups, policy)

        world.registry.commit = with_rewards  # type: ignore[method-assign, assignment]
        put(world.registry, "a", numStep=5, checkpoint={"intervalSteps": 2})
        await world.until(lambda: ended(world, "a"))
    assert [(kept.step, kept.score) for _, kept, _ in world.trainer.captures] == [(2, 0.5), (4, 0.375), (5, 1.0)]


async def test_damaged_checkpoints_are_told_in_the_log_and_in_the_message(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    text = "checkpoint step_6 is damaged (optimizer.safetensors is cut); set aside as .damaged-step_6-1"

    def passing_over(trainer: FakeTrainer) -> None:
        trainer.load = lambda request: _found(trainer, request, text)  # type: ignore[method-assign]

    world.configure_trainer = passing_over
    async with running(world):
        put(world.registry, "a", numStep=1000)
        await world.until(lambda: world.registry.runs["a"].state == "ACTIVE")
        assert world.registry.view("a").message == f"training in slot 0; {text}"
        world.registry.delete("a")
    told = [r for r in caplog.records if text in r.getMessage()]
    assert [r.levelno for r in told] == [logging.WARNING]
    assert told[0].run["uid"] == "a"  # type: ignore[attr-defined]


def _found(trainer: FakeTrainer, request: LoadRequest, text: str) -> Loaded:
    trainer.loaded[request.uid], trainer.accumulated[request.uid] = [request.slot, 4], []
    trainer.incarnations[request.uid] = "0.1"
    return Loaded(request.uid, 4, Cursor(8), "0.1", passed_over=(text,))


async def test_a_checkpoint_that_is_not_there_any_more_is_written_again(world: World) -> None:
    """It was damaged and set aside, and the run goes on from its snapshot of the same step."""

    def stop_after_two(uid: str, index: int) -> None:
        if index == 1:
            world.worker.gate = asyncio.Event()

    async with running(world):
        world.worker.on_group = stop_after_two
        put(world.registry, "a", numStep=1000, rolloutBatchSize=1, checkpoint={"intervalSteps": 2})
        run = world.registry.runs["a"]
        await world.until(lambda: run.artifact is not None)
        del world.disk["a"]
        world.trainers[0].dead = True
        await asyncio.gather(world.fleet.trainer.call("slots"), return_exceptions=True)
        await world.until(lambda: run.loaded and run.state == "ACTIVE")
        assert (run.step, run.artifact) == (2, None)
        put(world.registry, "a", generation=2, numStep=1000, rolloutBatchSize=1, suspend=True)
        await world.until(lambda: run.state == "SUSPENDED")
    assert world.disk["a"].step == 2
    assert run.artifact is not None


async def test_which_checkpoints_stay_follows_an_edit_of_a_live_run(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=1000, checkpoint={"intervalSteps": 2, "keep": 3})
        await world.until(lambda: len(world.trainer.captures) == 1)
        edited = {"intervalSteps": 2, "keep": 7, "keepBest": True}
        put(world.registry, "a", generation=2, numStep=1000, checkpoint=edited)
        count = len(world.trainer.captures)
        await world.until(lambda: len(world.trainer.captures) > count + 1)
        found = [(kept.keep, kept.keep_best) for kept in world.trainer.retentions]
        world.registry.delete("a")
    assert (found[0], found[-1]) == ((3, False), (7, True))


def refusing_loads(world: World, times: float) -> None:
    """The storage cannot be read this often."""
    left = times

    def configure(trainer: FakeTrainer) -> None:
        load = trainer.load

        def refusing(request: LoadRequest) -> Loaded:
            nonlocal left
            left -= 1
            if left >= 0:
                raise RunError(reasons.STORAGE_ERROR, "checkpoint step_2 cannot be read (EIO)")
            return load(request)

        trainer.load = refusing  # type: ignore[method-assign]

    world.configure_trainer = configure


async def test_a_checkpoint_that_cannot_be_read_for_a_while_costs_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_RETRY_SECONDS", 0.1)
    refusing_loads(world, times=2)
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: "cannot be read (EIO); it is tried again" in world.registry.runs["a"].message)
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"


async def test_a_checkpoint_that_stays_unreadable_fails_the_run_after_a_time_that_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_RETRY_SECONDS", 0.1)
    refusing_loads(world, times=math.inf)
    async with running(world):
        put(world.registry, "a", saveTimeoutSeconds=1)
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.reason) == ("FAILED", reasons.STORAGE_ERROR)
    assert "cannot be read (EIO) (tried again for saveTimeoutSeconds 1)" in run.message


async def test_a_run_that_waits_for_unreadable_storage_can_be_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_RETRY_SECONDS", 0.1)
    refusing_loads(world, times=math.inf)
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: "it is tried again" in world.registry.runs["a"].message)
        world.registry.delete("a")
        await world.until(lambda: "a" not in world.registry.runs)
