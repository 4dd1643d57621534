"""A trainer that dies with checkpoints on their way: no run pays for another's, and the one that kills is found."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.loop.training import _suspect
from lorafleet_runtime.types import Artifact, BatchResult, Loaded, LoadRequest, PromptGroup
from support.fake_actors import FakeTrainer
from support.fleets import World, ended, running
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
        put(world.registry, "saver", numStep=30, backoffLimit=0, checkpoint={"intervalSteps": 1})
        await world.until(lambda: len(world.trainer.captures) == 1)
        put(world.registry, "bad", backoffLimit=0)
        await world.until(lambda: ended(world, "bad") and ended(world, "saver"))
    bad, saver = world.registry.runs["bad"], world.registry.runs["saver"]
    assert (bad.state, bad.reason) == ("FAILED", reasons.TRAINER_CRASHED)
    assert (saver.state, saver.save_deaths) == ("COMPLETED", 0)


def test_a_run_that_is_alone_with_a_save_at_two_deaths_is_counted_at_the_second(world: World) -> None:
    """A save under suspicion is made without any batch, so the second time it is the batch."""
    world.registry.observe_trainer({})
    activate(world.registry, "a")
    for crashes in (0, 1):
        _suspect(world.fleet, {"a"}, "it died", certain=False)
        assert world.registry.runs["a"].crashes == crashes


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


async def _ended(world: World) -> None:
    async with world.fleet.alone:
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
