"""Storage that neither takes a checkpoint nor refuses it: it holds no slot for ever, and at most four copies."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Damaged, RunError
from lorafleet_runtime.loop import loading, saving
from lorafleet_runtime.storage import newest_step
from lorafleet_runtime.trainer.actor import LANES, TrainerActor
from lorafleet_runtime.types import Artifact, Loaded, LoadRequest
from support.fake_actors import FakeTrainer
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


ENDS = [("suspend", reasons.SUSPENDED_REASON), ("cancel", reasons.CANCELLED)]


@pytest.mark.parametrize(("how", "reason"), ENDS)
async def test_a_run_that_ends_early_gives_its_slot_back_without_its_last_checkpoint(
    world: World, how: str, reason: str
) -> None:
    hang(world)
    async with running(world):
        put(world.registry, "a", **LONG)
        run = world.registry.runs["a"]
        await world.until(lambda: run.step >= 2)
        put(world.registry, "a", generation=2, **LONG, **{how: True})
        await world.until(lambda: ended(world, "a"))
        assert (world.registry.slots().used, run.reason) == (0, reason)
        if how == "suspend":
            assert world.node["a"].step == run.step


@contextmanager
def unreadable(world: World, where: str) -> Iterator[Callable[[], None]]:
    """Nothing of run a is read from when the function is called on: neither its directory's listing, which the loop
    asks for, nor what the trainer reads beside its work."""
    mended, hung = threading.Event(), False

    def newest(directory: Path) -> Path | None:
        if hung and where == "directory" and directory.name == "a":
            mended.wait(60)
        return newest_step(directory)

    def configure(trainer: FakeTrainer) -> None:
        async def hanging(request: LoadRequest) -> None:
            if hung and where == "trainer" and request.uid == "a":
                await asyncio.Event().wait()

        trainer.prepare = hanging  # type: ignore[method-assign, assignment]

    def begin() -> None:
        nonlocal hung
        hung = True

    world.configure_trainer = configure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "newest_step", newest)
        yield begin
        mended.set()


@pytest.mark.parametrize("where", ["directory", "trainer"])
async def test_a_run_that_cannot_be_loaded_in_time_fails_and_others_go_on(world: World, where: str) -> None:
    with unreadable(world, where) as begin:
        begin()
        async with running(world):
            put(world.registry, "a", saveTimeoutSeconds=1)
            await world.until(lambda: world.registry.runs["a"].state == "PENDING")
            for uid in "bc":  # in turn: there are two slots
                put(world.registry, uid)
                await world.until(lambda uid=uid: ended(world, uid))  # type: ignore[misc]
            await world.until(lambda: ended(world, "a"))
            assert world.registry.slots().used == 0
    run = world.registry.runs["a"]
    assert (run.state, run.reason) == ("FAILED", reasons.STORAGE_ERROR)
    assert run.message.startswith("saveTimeoutSeconds: ") and "team/run-a/a could not be read within 1 s" in run.message
    assert [world.registry.runs[uid].state for uid in "bc"] == ["COMPLETED"] * 2


@pytest.mark.parametrize("where", ["directory", "trainer"])
@pytest.mark.parametrize(("how", "reason"), [*ENDS, ("complete", reasons.STORAGE_ERROR)])
async def test_a_run_that_cannot_be_loaded_for_its_last_save_ends_in_time(
    world: World, where: str, how: str, reason: str
) -> None:
    """Its trainer died before."""
    with unreadable(world, where) as begin:
        async with running(world):
            put(world.registry, "a", **LONG)
            run = world.registry.runs["a"]
            await world.until(lambda: run.step >= 2)
            begin()
            world.trainers[0].dead = True
            if how == "complete":
                world.registry._complete(run)
            else:
                put(world.registry, "a", generation=2, **LONG, **{how: True})
            await world.until(lambda: ended(world, "a"))
            assert (world.registry.slots().used, run.reason) == (0, reason)
            if how == "suspend":
                assert world.node["a"].step == run.step


async def test_a_fault_in_looking_at_the_storage_is_told_at_once() -> None:
    def broken() -> Path:
        raise ValueError("a mistake")

    async with asyncio.timeout(30):
        with pytest.raises(ValueError, match="a mistake"):
            await loading._look(broken)


async def test_a_run_whose_checkpoints_are_all_damaged_fails_at_once(world: World) -> None:
    """Nothing was refused: they were read."""
    text = "checkpoint step_2 is damaged (state.json); restore it"

    def configure(trainer: FakeTrainer) -> None:
        def damaged(request: LoadRequest) -> Loaded:
            asked.append(request.uid)
            raise Damaged(reasons.STORAGE_ERROR, text)

        trainer.load = damaged  # type: ignore[method-assign]

    asked: list[str] = []
    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "a", saveTimeoutSeconds=3600)
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.reason, run.message, asked) == ("FAILED", reasons.STORAGE_ERROR, text, ["a"])


async def end_without_saves(world: World, uids: str) -> None:
    """Nothing of these runs is left but what hangs in the storage."""
    for uid in uids:
        put(world.registry, uid, **LONG)
    await world.until(lambda: all(run.step >= 1 for run in world.registry.runs.values()))
    for uid in uids:
        world.registry.delete(uid)
    await world.until(lambda: world.registry.runs == {})


@pytest.fixture
def large(tmp_path: Path) -> World:
    """Six slots."""
    world = build_world(tmp_path, slots=6)
    world.registry.sync([])
    return world


async def test_no_more_than_four_copies_wait_for_the_storage_whoever_gave_up_on_them(large: World) -> None:
    world, mended = large, hang(large)
    async with running(world):
        await end_without_saves(world, "abcdef")
        assert len(world.trainer.captures) == 4
        put(world.registry, "late", numStep=1)
        await world.until(lambda: "late" in world.fleet.states and world.fleet.states["late"].saving.locked())
        assert len(world.trainer.captures) == 4  # those writes have not ended
        mended.set()
        await world.until(lambda: ended(world, "late"))
    assert (world.disk["late"].step, len(world.trainer.captures)) == (1, 5)


async def test_the_copies_that_died_with_a_trainer_take_no_place(large: World) -> None:
    world, mended = large, hang(large)
    async with running(world):
        await end_without_saves(world, "abcd")
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
    methods = (TrainerActor.saved, TrainerActor.snapshotted, TrainerActor.prepare, TrainerActor.pid)
    lanes = [getattr(method, "__ray_concurrency_group__") for method in methods]  # noqa: B009
    assert len(set(lanes)) == 4
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
