"""A trainer that dies with checkpoints on their way: no run pays for another's, and the one that kills is found."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.loop.saving import checkpoint, drain
from lorafleet_runtime.loop.trainer import Doing
from lorafleet_runtime.types import Artifact, BatchResult, Loaded, LoadRequest, PromptGroup
from support.fake_actors import FakeTrainer
from support.fleets import World, build_world, ended, running, standing
from support.runs import activate, put


def kills_when_writing(world: World, uid: str) -> None:
    """Every write of this run kills the trainer, with a batch of `good` in it, at later times if there can be one."""

    def configure(trainer: FakeTrainer) -> None:
        working, died = asyncio.Event(), asyncio.Event()
        saved, accumulate = trainer.saved, trainer.accumulate
        first = not world.trainers

        async def dying(ticket: str) -> Artifact | None:
            if trainer._captured[ticket][0] == uid:
                with suppress(TimeoutError):
                    await asyncio.wait_for(working.wait(), None if first else 0.1)
                world.trainers[-1].dead = True
                died.set()
            return await saved(ticket)

        async def held(groups: list[PromptGroup]) -> BatchResult:
            if any(who == uid for who, *_ in trainer.captures) and {g.uid for g in groups} == {"good"}:
                working.set()
                await died.wait()
            return accumulate(groups)

        trainer.saved, trainer.accumulate = dying, held  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure


def all_kill_when_writing(world: World, uids: set[str]) -> None:
    """Every write of these runs kills the trainer: the first time all of them and one other are under way, as many as
    there can be, and later with whatever comes beside it in a while."""

    def configure(trainer: FakeTrainer) -> None:
        saved, capture, company = trainer.saved, trainer.capture, asyncio.Event()
        first, writing = not world.trainers, set[str]()

        def counted(*arguments: Any) -> str:
            ticket = capture(*arguments)
            if not first and len(trainer._captured) >= 2:
                company.set()
            return ticket

        async def dying(ticket: str) -> Artifact | None:
            uid = trainer._captured[ticket][0]
            if first and uid not in uids and writing - uids:
                return await saved(ticket)  # its place may be wanted
            writing.add(uid)
            if first and len(writing) == len(uids) + 1:
                company.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(company.wait(), None if first else 0.1)
            if uid in uids:
                world.trainers[-1].dead = True
            return await saved(ticket)

        trainer.capture, trainer.saved = counted, dying  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure


async def test_several_runs_whose_saves_kill_the_trainer_cost_one_restart_each_and_one_more(tmp_path: Path) -> None:
    world, bad, good = build_world(tmp_path, slots=6), {"bad-1", "bad-2", "bad-3"}, {"good-1", "good-2", "good-3"}
    world.registry.sync([])
    all_kill_when_writing(world, bad)
    async with running(world):
        for uid in sorted(bad | good):
            limit, steps = (1, 1000) if uid in bad else (0, 8)
            put(world.registry, uid, backoffLimit=limit, numStep=steps, checkpoint={"intervalSteps": 1})
        await world.until(lambda: all(ended(world, uid) for uid in bad | good))
    runs = world.registry.runs
    assert {uid: runs[uid].reason for uid in bad} == dict.fromkeys(bad, reasons.TRAINER_CRASHED)
    assert {uid: runs[uid].state for uid in good} == dict.fromkeys(good, "COMPLETED")
    assert len(world.trainers) - 1 <= len(bad) + 1


@pytest.mark.parametrize("spec", [{"numStep": 1000, "checkpoint": {"intervalSteps": 1}}, {"numStep": 1}])
async def test_a_run_whose_save_kills_the_trainer_is_found_and_failed(world: World, spec: dict[str, Any]) -> None:
    """On the way, and at its end."""
    kills_when_writing(world, "bad")
    async with running(world):
        put(world.registry, "bad", backoffLimit=1, **spec)
        put(world.registry, "good", backoffLimit=0, numStep=50, checkpoint={"intervalSteps": 1000})
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    bad, good = world.registry.runs["bad"], world.registry.runs["good"]
    assert (bad.state, bad.reason) == ("FAILED", reasons.TRAINER_CRASHED)
    assert bad.message == "the trainer died 2 times while it saved this run; backoffLimit is 1"
    assert (good.state, good.crashes) == ("COMPLETED", 0)
    assert len(world.trainers) == 3


async def test_a_run_whose_capture_kills_the_trainer_at_its_end_is_found_and_failed(world: World) -> None:
    def configure(trainer: FakeTrainer) -> None:
        capture = trainer.capture

        def dying(uid: str, *arguments: Any) -> str:
            if uid == "bad":
                world.trainers[-1].dead = True
            return capture(uid, *arguments)

        trainer.capture = dying  # type: ignore[method-assign, assignment]

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "bad", backoffLimit=1)
        put(world.registry, "good", backoffLimit=0, numStep=20)
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    assert world.registry.runs["bad"].reason == reasons.TRAINER_CRASHED
    assert world.registry.runs["good"].state == "COMPLETED"


async def test_a_run_whose_save_kills_the_trainer_can_be_deleted(world: World) -> None:
    kills_when_writing(world, "bad")
    async with running(world):
        put(world.registry, "bad", numStep=1000, backoffLimit=1)
        put(world.registry, "good", numStep=1000)
        await world.until(lambda: all(run.step >= 1 for run in world.registry.runs.values()))
        world.registry.delete("bad")
        await world.until(lambda: "bad" not in world.registry.runs)
        assert len(world.trainers) == 3
        world.registry.delete("good")


async def test_a_batch_that_kills_the_trainer_beside_a_save_is_found_and_the_saving_run_goes_on(world: World) -> None:
    written = asyncio.Event()

    def die_on_bad(groups: list[PromptGroup]) -> None:
        if any(g.uid == "bad" for g in groups):
            world.trainers[-1].dead = True
            written.set()

    def configure(trainer: FakeTrainer) -> None:
        trainer.on_accumulate, trainer.writing = die_on_bad, written

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "saver", numStep=1000, backoffLimit=0, checkpoint={"intervalSteps": 1})
        await world.until(lambda: len(world.trainer.captures) == 1)
        put(world.registry, "bad", backoffLimit=0)
        bad, saver = world.registry.runs["bad"], world.registry.runs["saver"]
        await world.until(lambda: ended(world, "bad"))
        assert (bad.state, bad.reason) == ("FAILED", reasons.TRAINER_CRASHED)
        assert len(world.trainers) - 1 <= 3
        step = saver.step
        await world.until(lambda: saver.step > step + 1 and saver.save_deaths == 0)
        world.registry.delete("saver")


def test_a_suspect_is_counted_beside_a_save_only_where_that_one_was_under_suspicion_before(world: World) -> None:
    """A save under suspicion is made without any batch; so a save that is beside one went well alone, or is new."""
    world.registry.observe_trainer({})
    activate(world.registry, "a")
    blame, saves = world.fleet.blame, {uid: Doing("save", uid) for uid in ("saver", "another", "third")}
    blame.training({"a"}, "it died", [saves["saver"]])
    blame.training({"a"}, "it died", [saves["another"]])
    blame.cleared |= {saves["saver"], saves["another"]}
    assert world.registry.runs["a"].crashes == 0
    blame.training({"a"}, "it died", [saves["saver"], saves["third"]])
    assert world.registry.runs["a"].crashes == 0
    blame.training({"a"}, "it died", [saves["saver"], saves["another"]])
    assert world.registry.runs["a"].crashes == 1


async def test_a_save_under_suspicion_is_made_beside_no_batch_and_no_load(world: World) -> None:
    written = asyncio.Event()
    world.configure_trainer = lambda trainer: setattr(trainer, "writing", written)
    async with running(world):
        put(world.registry, "bad", numStep=1000, checkpoint={"intervalSteps": 1})
        run = world.registry.runs["bad"]
        run.save_deaths = 1
        await world.until(lambda: len(world.trainer.captures) == 1)
        put(world.registry, "good", numStep=2)
        await world.until(lambda: world.registry.runs["good"].state == "PENDING")
        trained = len(world.trained())
        save = world.fleet.spawn(_ended(world), "the end of the save")
        await asyncio.wait([save], timeout=0.1)
        assert (len(world.trained()), world.registry.runs["good"].loaded) == (trained, False)
        written.set()
        await world.until(lambda: ended(world, "good"))
        assert run.save_deaths == 0
        world.registry.delete("bad")


async def test_a_save_under_suspicion_waits_for_all_others_and_keeps_them_out(world: World) -> None:
    """Also for one that nobody waits for any more: it has not ended."""
    written = asyncio.Event()
    world.configure_trainer = lambda trainer: setattr(trainer, "writing", written)
    await standing(world, "bad", "good")
    runs = world.registry.runs
    with pytest.raises(TimeoutError):
        await checkpoint(world.fleet, runs["good"], limit=0.05)
    runs["bad"].save_deaths = 1
    bad = asyncio.create_task(checkpoint(world.fleet, runs["bad"]))
    await world.until(world.fleet.accumulating.locked)  # it has come as far as that
    good = asyncio.create_task(checkpoint(world.fleet, runs["good"]))
    load = asyncio.create_task(_ended(world))
    await asyncio.wait([bad, good, load], timeout=0.1)
    assert [uid for uid, *_ in world.trainer.captures] == ["good"]
    order: list[str] = []
    for name, task in (("bad", bad), ("good", good), ("load", load)):
        task.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    written.set()
    await asyncio.gather(bad, good, load)
    assert (order[0], runs["bad"].save_deaths, world.fleet.blame.cleared) == ("bad", 0, {Doing("save", "bad")})
    assert [uid for uid, *_ in world.trainer.captures] == ["good", "bad", "good"]


async def test_a_stop_saves_those_last_whose_save_may_kill_the_trainer(world: World) -> None:
    await standing(world, "bad", "good")
    saved = world.trainer.saved

    async def slow(ticket: str) -> Artifact | None:
        for _ in range(100):
            await asyncio.sleep(0)
        return await saved(ticket)

    async def saving(ticket: str) -> Artifact | None:
        if world.trainer._captured[ticket][0] == "bad":
            world.trainers[-1].dead = True
            return None
        return await slow(ticket)

    world.trainer.saved = saving  # type: ignore[method-assign]
    world.registry.runs["bad"].save_deaths = 1
    await drain(world.fleet)
    assert world.disk.keys() == {"good"}


async def _ended(world: World) -> None:
    async with world.fleet.company.join():
        pass


async def test_a_load_beside_a_save_does_not_take_the_blame(world: World) -> None:
    written = asyncio.Event()

    def configure(trainer: FakeTrainer) -> None:
        load, trainer.writing = trainer.load, written

        def dying(request: LoadRequest) -> Loaded:
            if request.uid == "late" and len(world.trainers) == 1:
                world.trainers[0].dead = True
                written.set()
            return load(request)

        trainer.load = dying  # type: ignore[method-assign]

    world.configure_trainer = configure
    async with running(world):
        put(world.registry, "saver", numStep=1000, checkpoint={"intervalSteps": 1})
        await world.until(lambda: len(world.trainer.captures) == 1)
        put(world.registry, "late", backoffLimit=0)
        await world.until(lambda: ended(world, "late"))
        world.registry.delete("saver")
    assert world.registry.runs["late"].state == "COMPLETED"
