"""Storage that neither takes a checkpoint nor refuses it: it holds no slot for ever, and at most four copies."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.loop import saving
from lorafleet_runtime.trainer.actor import LANES, TrainerActor
from lorafleet_runtime.types import Artifact
from support.fleets import World, build_world, ended, running
from support.runs import activate, put


def hang(world: World) -> asyncio.Event:
    """Nothing is written before the event is set."""
    mended = asyncio.Event()
    world.configure_trainer = lambda trainer: setattr(trainer, "writing", mended)
    return mended


LONG = {"numStep": 1000, "saveTimeoutSeconds": 1}


async def test_a_completed_run_fails_when_its_last_checkpoint_is_not_written_in_time(world: World) -> None:
    hang(world)
    async with running(world):
        put(world.registry, "a", saveTimeoutSeconds=1)
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.reason) == ("FAILED", reasons.STORAGE_ERROR)
    assert run.message.startswith("saveTimeoutSeconds: no last checkpoint within 1 s")


async def test_a_suspended_run_gives_its_slot_back_and_keeps_its_snapshot(world: World) -> None:
    hang(world)
    async with running(world):
        put(world.registry, "a", **LONG)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        put(world.registry, "a", generation=2, **LONG, suspend=True)
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
        assert world.registry.slots().used == 0
        assert world.node["a"].step == world.registry.runs["a"].step


async def test_a_cancelled_run_gives_its_slot_back(world: World) -> None:
    hang(world)
    async with running(world):
        put(world.registry, "a", **LONG)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        put(world.registry, "a", generation=2, **LONG, cancel=True)
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].reason == reasons.CANCELLED


async def test_no_more_than_four_copies_wait_for_the_storage_whoever_gave_up_on_them(tmp_path: Path) -> None:
    world = build_world(tmp_path, slots=6)
    world.registry.sync([])
    mended = hang(world)
    async with running(world):
        for uid in "abcdef":
            put(world.registry, uid, **LONG)
        await world.until(lambda: all(run.step >= 1 for run in world.registry.runs.values()))
        for uid in "abcdef":
            world.registry.delete(uid)
        await world.until(lambda: world.registry.runs == {})
        assert len(world.trainer.captures) == 4
        put(world.registry, "late", numStep=1)
        await world.until(lambda: "late" in world.fleet.states and world.fleet.states["late"].saving.locked())
        assert len(world.trainer.captures) == 4  # those writes have not ended
        mended.set()
        await world.until(lambda: ended(world, "late"))
    assert (world.disk["late"].step, len(world.trainer.captures)) == (1, 5)


async def test_the_copies_that_died_with_a_trainer_take_no_place(tmp_path: Path) -> None:
    world = build_world(tmp_path, slots=6)
    world.registry.sync([])
    mended = hang(world)
    async with running(world):
        for uid in "abcd":
            put(world.registry, uid, **LONG)
        await world.until(lambda: all(run.step >= 1 for run in world.registry.runs.values()))
        for uid in "abcd":
            world.registry.delete(uid)
        await world.until(lambda: world.registry.runs == {})
        world.configure_trainer = lambda trainer: None
        world.trainers[0].dead = True
        mended.set()  # as Ray does at a death, this ends the waits; nothing of a dead trainer is written
        put(world.registry, "late", numStep=1)
        await world.until(lambda: ended(world, "late"))
    assert (world.registry.runs["late"].state, world.disk["late"].step) == ("COMPLETED", 1)


async def test_the_time_for_trying_again_begins_with_the_first_refusal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for a batch, or for other runs' saves, is not the storage's refusal."""
    world.registry.observe_trainer({})
    activate(world.registry, "a")
    now, artifact = 0.0, Artifact("/step_1", 1, "digest")
    outcomes: list[RunError | Artifact] = [RunError(reasons.STORAGE_ERROR, "disk full"), artifact]

    async def slow(*_: object) -> Artifact:
        nonlocal now
        now += 100.0 if len(outcomes) == 2 else 0.0
        outcome = outcomes.pop(0)
        if isinstance(outcome, RunError):
            raise outcome
        return outcome

    monkeypatch.setattr(saving, "checkpoint", slow)
    monkeypatch.setattr(saving, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now))
    assert await saving._save_in_time(world.fleet, world.registry.runs["a"], limit=1) == artifact


def test_the_process_number_is_told_while_every_save_hangs() -> None:
    lanes = [getattr(method, "__ray_concurrency_group__") for method in (TrainerActor.saved, TrainerActor.pid)]  # noqa: B009
    assert len(set(lanes)) == 2
    assert set(lanes) == set(LANES)


async def test_a_checkpoint_that_ends_after_its_run_was_told_to_end_otherwise_is_not_written_again(
    world: World,
) -> None:
    mended = hang(world)
    async with running(world):
        put(world.registry, "a", **LONG | {"saveTimeoutSeconds": 600})
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        put(world.registry, "a", generation=2, **LONG | {"saveTimeoutSeconds": 600}, suspend=True)
        await world.until(lambda: len(world.trainer.captures) == 1)
        put(world.registry, "a", generation=3, **LONG | {"saveTimeoutSeconds": 600}, cancel=True)
        mended.set()
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.reason, len(world.trainers[0].target.captures)) == (reasons.CANCELLED, 1)
    assert run.artifact is not None and run.artifact.step == run.step
