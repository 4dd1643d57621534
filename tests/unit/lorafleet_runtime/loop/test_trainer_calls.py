"""Calls to the trainer that nobody waits for, or that end together with it: what is said of the runs behind them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lorafleet_runtime.errors import RuntimeFault
from lorafleet_runtime.loop import saving
from lorafleet_runtime.loop.saving import checkpoint
from lorafleet_runtime.loop.trainer import Doing, TrainerHandle, TrainerLost
from lorafleet_runtime.loop.training import _train_on
from lorafleet_runtime.types import Artifact, BatchResult, PromptGroup, StepResult
from support.clock import run_jumping
from support.fake_actors import FakeTrainer, Handle
from support.fleets import World, build_world, ended, running, standing
from support.runs import group, put


class Watched(asyncio.Lock):
    """Tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = asyncio.Event()

    async def acquire(self) -> bool:  # type: ignore[override]
        if self.locked():
            self.wanted.set()
        return await super().acquire()


async def test_a_last_capture_behind_a_batch_that_raises_is_made_again(world: World) -> None:
    batch = asyncio.Event()

    def raise_once(trainer: FakeTrainer) -> None:
        if world.trainers:
            return
        accumulate = trainer.accumulate

        async def raising(groups: list[PromptGroup]) -> BatchResult:
            if any(g.uid == "other" for g in groups):
                batch.set()
                await world.until(lambda: world.doing("save") == ["done"])
                raise RuntimeError("kernel fault")
            return accumulate(groups)

        def behind(*_: object) -> str:
            raise RuntimeFault("the trainer failed in the middle of a batch")

        trainer.accumulate, trainer.capture = raising, behind  # type: ignore[method-assign, assignment]

    async def abort(prefix: str) -> int:  # a save begins with it
        await batch.wait()
        return 0

    world.configure_trainer = raise_once
    async with running(world):
        world.engines[0].target.abort = abort
        put(world.registry, "done", numStep=1)
        await world.until(lambda: world.registry.runs["done"].state == "RETIRING")
        put(world.registry, "other", numStep=2)
        await world.until(lambda: ended(world, "done") and ended(world, "other"))
    assert world.registry.runs["done"].state == "COMPLETED"
    assert (world.disk["done"].step, len(world.trainers)) == (1, 2)


async def test_a_run_that_loads_and_loses_its_trainer_in_its_step_loads_once_more(world: World) -> None:
    """It is ACTIVE as soon as it is loaded, for its version is on the engines; load() then waits for that step."""
    stepping, lock = asyncio.Event(), Watched()

    def die_in_the_second_batch(groups: list[PromptGroup]) -> None:
        if world.registry.runs["a"].step == 1:
            world.trainers[0].dead = True

    async def die_in_the_step(*_: object) -> StepResult:
        stepping.set()
        await lock.wanted.wait()
        world.trainers[1].dead = True
        return StepResult("a", 2, 0.0, 0.0)

    async def slots_once_it_steps() -> dict[int, str]:
        await stepping.wait()
        return {0: "a"}

    def configure(trainer: FakeTrainer) -> None:
        if not world.trainers:
            trainer.on_accumulate = die_in_the_second_batch
        elif len(world.trainers) == 1:
            world.fleet.states["a"].stepping = lock
            trainer.start, trainer.step = dict, die_in_the_step  # type: ignore[method-assign, assignment]
            trainer.slots = slots_once_it_steps  # type: ignore[method-assign, assignment]
            trainer.BESIDE = FakeTrainer.BESIDE | {"slots"}  # the loop hears of its answer late

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "a", numStep=3, backoffLimit=5, checkpoint={"intervalSteps": 100})
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, world.disk["a"].step, len(world.trainers)) == ("COMPLETED", 3, 3), run.message


def write_in_turn(world: World, seconds: float) -> None:
    """The storage takes one checkpoint at a time, each for so long."""
    saved, disk = world.trainer.saved, asyncio.Lock()

    async def slowly(ticket: str) -> Artifact | None:
        async with disk:
            await asyncio.sleep(seconds)
            return await saved(ticket)

    world.trainer.saved = slowly  # type: ignore[method-assign]


def test_saves_that_take_their_turns_on_a_slow_storage_all_end(tmp_path: Path) -> None:
    """Five, of which four have a place; the last one ends after three times the limit."""
    world = build_world(tmp_path, slots=5)
    world.registry.sync([])
    uids = "abcde"

    async def save_all() -> None:
        await standing(world, *uids)
        write_in_turn(world, 6)
        runs = [world.registry.runs[uid] for uid in uids]
        await asyncio.gather(*(checkpoint(world.fleet, run, limit=10) for run in runs))
        assert asyncio.get_running_loop().time() == pytest.approx(30, abs=0.1)

    run_jumping(save_all())
    assert world.disk.keys() == set(uids)


@pytest.mark.parametrize("end", ["deleted", "cancelled"])
def test_last_saves_that_take_their_turns_on_a_slow_storage_are_all_made(tmp_path: Path, end: str) -> None:
    """However the runs end. A write takes more than half of saveTimeoutSeconds, and the storage takes one at a time."""
    world = build_world(tmp_path, slots=5)
    world.registry.sync([])
    uids = "abcde"

    async def save_all() -> None:
        await standing(world, *uids)
        write_in_turn(world, 180)
        for uid in uids:
            if end == "deleted":
                world.registry.delete(uid)
            else:
                put(world.registry, uid, generation=2, cancel=True)
        await asyncio.gather(*(saving.save(world.fleet, world.registry.runs[uid]) for uid in uids))

    run_jumping(save_all())
    assert world.disk.keys() == set(uids)


def test_a_write_that_hangs_takes_no_more_than_its_time_after_the_last_that_ended(tmp_path: Path) -> None:
    world = build_world(tmp_path)
    world.registry.sync([])

    async def save_both() -> None:
        await standing(world, "slow", "hung")
        saved = world.trainer.saved

        async def writing(ticket: str) -> Artifact | None:
            hung = world.trainer._captured[ticket][0] == "hung"
            await asyncio.sleep(1000 if hung else 6)
            return await saved(ticket)

        world.trainer.saved = writing  # type: ignore[method-assign]
        slow = asyncio.create_task(checkpoint(world.fleet, world.registry.runs["slow"], limit=10))
        with pytest.raises(TimeoutError):
            await checkpoint(world.fleet, world.registry.runs["hung"], limit=10)
        assert asyncio.get_running_loop().time() == pytest.approx(16, abs=0.1)
        await slow

    run_jumping(save_both())


HOW = ["its own limit", "cancelled", "cancelled in its capture"]


async def give_up(world: World, how: str) -> None:
    """Wait in vain for a write of the run that hangs; with its capture behind the batch of another run, if so."""
    own = how == "its own limit"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None if own else 10):
            await checkpoint(world.fleet, world.registry.runs["a"], limit=10 if own else None)


def hang(world: World, how: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Nothing is captured before the first event is set, where that is how it goes, and nothing written before the
    second is."""
    batch_ended, mended = asyncio.Event(), asyncio.Event()

    def configure(trainer: FakeTrainer) -> None:
        capture, trainer.writing = trainer.capture, mended

        async def behind(*arguments: Any) -> str:
            await batch_ended.wait()
            return capture(*arguments)

        trainer.capture = behind  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    if how != "cancelled in its capture":
        batch_ended.set()
    return batch_ended, mended


@pytest.mark.parametrize("how", HOW)
def test_a_write_that_nobody_waits_for_any_more_is_not_why_the_trainer_died(tmp_path: Path, how: str) -> None:
    world = build_world(tmp_path)
    world.registry.sync([])

    async def die_meanwhile() -> None:
        batch_ended, mended = hang(world, how)
        await standing(world, "a")
        await give_up(world, how)
        batch_ended.set()
        await world.fleet.trainer.call("slots")
        await world.until(lambda: len(world.trainer._captured) == 0)  # it is being written
        world.trainers[0].dead = True
        with pytest.raises(TrainerLost):
            await world.fleet.trainer.call("slots")
        assert world.registry.runs["a"].save_deaths == 0
        assert len(world.trainers[0].target.captures) == 1
        mended.set()

    run_jumping(die_meanwhile())


@pytest.mark.parametrize("how", HOW)
def test_a_run_whose_write_hangs_is_not_captured_once_more(tmp_path: Path, how: str) -> None:
    world = build_world(tmp_path)
    world.registry.sync([])

    async def try_twice() -> None:
        batch_ended, mended = hang(world, how)
        await standing(world, "a")
        for _ in range(2):
            await give_up(world, how)
            batch_ended.set()
        assert len(world.trainer.captures) == 1
        mended.set()
        writing = world.fleet.states["a"].writing
        assert writing is not None
        assert (await writing.written()).step == 1
        await checkpoint(world.fleet, world.registry.runs["a"], limit=10)
        assert len(world.trainer.captures) == 2

    run_jumping(try_twice())


async def test_a_run_whose_step_kills_the_trainer_beside_a_save_is_counted_the_second_time(world: World) -> None:
    """It was found suspect at the first death, and the run that saves was cleared. Its batch succeeds every time."""

    def dying(*_: object) -> StepResult:
        world.trainers[0].dead = True
        return StepResult("bad", 2, 0.0, 0.0)

    world.configure_trainer = lambda trainer: setattr(trainer, "writing", asyncio.Event())
    await standing(world, "bad", "saver")
    world.trainer.step = dying  # type: ignore[method-assign, assignment]
    save = asyncio.create_task(checkpoint(world.fleet, world.registry.runs["saver"]))
    await world.until(lambda: Doing("save", "saver") in world.fleet.trainer._work.beside)
    world.fleet.blame.suspects.add("bad")
    world.fleet.blame.cleared.add(Doing("save", "saver"))
    await _train_on(world.fleet, [group("bad", index) for index in (2, 3)])
    assert (world.registry.runs["bad"].crashes, world.fleet.blame.suspects) == (1, {"bad"})
    save.cancel()
    await asyncio.gather(save, return_exceptions=True)


@pytest.mark.parametrize(("indices", "left"), [((2,), {"a"}), ((2, 3), set())])
async def test_a_run_is_suspect_until_a_whole_step_went_well(
    world: World, indices: tuple[int, ...], left: set[str]
) -> None:
    """It may be the last part of its batch, the step or the snapshot that the trainer dies of."""
    await standing(world, "a")
    world.fleet.blame.suspects.add("a")
    alone = await world.fleet.trainer.snapshot_permit(alone=True)
    await _train_on(world.fleet, [group("a", index) for index in indices], alone)
    assert (world.registry.runs["a"].step, world.fleet.blame.suspects) == (len(indices), left)


class Slow:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    def start(self) -> dict[int, str]:
        return {}

    async def work(self) -> Any:
        await self.answer.wait()


@pytest.mark.parametrize("died_in_it", [True, False])
async def test_a_call_that_was_given_up_is_blamed_for_its_own_death_only(died_in_it: bool) -> None:
    slow = Slow()
    actor = Handle(slow)
    lost: list[frozenset[Doing]] = []
    trainer = TrainerHandle(lambda: actor, lambda under_way, _: lost.append(under_way), lambda _: None, lambda _: None)
    await trainer.start()
    first, second = Doing("batch", "first"), Doing("batch", "second")
    given_up = asyncio.create_task(trainer.call("work", doing=[first]))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    if not died_in_it:
        slow.answer.set()
        await trainer.call("work")
        slow.answer.clear()
    behind = asyncio.create_task(trainer.call("work", doing=[second]))
    await asyncio.sleep(0)
    actor.dead = True
    with pytest.raises(TrainerLost):
        await behind
    assert lost == [frozenset({first if died_in_it else second})]
