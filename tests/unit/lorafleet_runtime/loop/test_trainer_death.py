"""What a dying trainer costs: no step, no group, and no run but the one that kills it."""

import asyncio
from collections.abc import Callable

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.types import Cursor, Loaded, LoadRequest, Manifest, PromptGroup, StepResult, VersionId
from support.fake_actors import FakeEngine, FakeTrainer, Kept
from support.fleets import World, die_after_step, ended, running
from support.runs import put


async def test_a_dead_trainer_costs_no_step_and_no_group(world: World) -> None:
    calls = 0

    def die_once(groups: list[PromptGroup]) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            world.trainers[-1].dead = True

    world.configure_trainer = lambda t: setattr(t, "on_accumulate", die_once)
    async with running(world):
        put(world.registry, "a", numStep=8, rolloutBatchSize=1)
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.step, run.restarts, run.incarnation) == ("COMPLETED", 8, 1, "1.1")
    lost, trained = world.trainers[0].target.trained, world.trainers[1].target.trained
    assert lost == [("a", i, i + 1) for i in range(6)]
    assert trained == [("a", i, i + 1) for i in range(5, 8)]  # the batch that died is trained again, as it was
    assert sorted({index for _, index, _ in world.worker.groups}) == list(range(8))  # and nothing is sampled again
    assert len(world.worker.groups) == 8


async def test_a_trainer_without_snapshots_resumes_from_the_last_checkpoint(world: World) -> None:
    def die_once(groups: list[PromptGroup]) -> None:
        if groups[0].index == 5 and len(world.trainers) == 1:
            world.trainers[-1].dead = True
            world.node.clear()

    world.configure_trainer = lambda t: setattr(t, "on_accumulate", die_once)
    async with running(world):
        put(world.registry, "a", numStep=6, checkpoint={"intervalSteps": 2}, rolloutBatchSize=1)
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.step, run.restarts, run.incarnation) == ("COMPLETED", 6, 1, "1.2")
    survived = world.trainers[0].target.trained[:4] + world.trainers[1].target.trained
    assert survived == [("a", i, i + 1) for i in range(6)]


async def test_a_step_whose_answer_was_lost_is_not_made_again(world: World) -> None:
    die_after_step(world, 3)
    async with running(world):
        put(world.registry, "a", numStep=5, rolloutBatchSize=1)
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"
    assert world.trained() == [("a", i, i + 1) for i in range(5)]


async def test_a_step_whose_version_was_not_exported_before_the_trainer_died_is_not_made_again(world: World) -> None:
    """Nobody was told of it, so it begins another registration, with the step made."""

    def die_in_export(trainer: FakeTrainer) -> None:
        export = trainer.export

        def dying(uid: str) -> Manifest:
            if trainer.loaded[uid][1] == 2 and len(world.trainers) == 1:
                world.trainers[-1].dead = True
            return export(uid)

        trainer.export = dying  # type: ignore[method-assign]

    world.configure_trainer = die_in_export
    async with running(world):
        put(world.registry, "a", numStep=4, rolloutBatchSize=1, maxStaleness=0)
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.incarnation, run.step) == ("COMPLETED", "1.2", 4)
    assert world.trained() == [("a", index, index + 1) for index in range(4)]
    assert [version for _, _, version in world.worker.groups] == [1, 2, 1, 2]


async def test_groups_that_finish_while_the_trainer_restarts_are_kept(world: World) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def slow_start(trainer: FakeTrainer) -> dict[int, str]:
        started.set()
        await release.wait()
        return trainer.slots()

    async with running(world):
        world.worker.gate = asyncio.Event()
        put(world.registry, "a", rolloutBatchSize=2, maxStaleness=3)
        await world.until(lambda: world.fleet.states.get("a") is not None and world.fleet.states["a"].in_flight == 6)
        world.configure_trainer = lambda t: setattr(t, "start", lambda: slow_start(t))
        world.trainers[0].dead = True
        await asyncio.gather(world.fleet.trainer.call("slots"), started.wait(), return_exceptions=True)
        world.worker.gate.set()
        await world.until(lambda: world.fleet.buffers.count("a") == 6)
        release.set()
        await world.until(lambda: ended(world, "a"))
    assert sorted(index for _, index, _ in world.worker.groups) == list(range(6))


async def test_versions_whose_buffers_died_with_the_trainers_node_reach_a_new_engine(world: World) -> None:
    lost: list[object] = []

    async with running(world):
        world.worker.gate = asyncio.Event()  # the run stays at its first version
        put(world.registry, "a")
        await world.until(lambda: world.registry.runs["a"].state == "ACTIVE")
        publish = FakeEngine.publish

        def unless_lost(engine: FakeEngine, version: VersionId, manifest: Manifest, buffer: object) -> None:
            if buffer in lost:
                raise Retryable("ObjectLostError: the node that held the buffer died")
            publish(engine, version, manifest, buffer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeEngine, "publish", unless_lost)
            lost.append(world.fleet.engines._live["a"].buffer)
            world.trainers[0].dead = world.engines[0].dead = True
            await asyncio.gather(
                world.fleet.trainer.call("slots"), world.fleet.engines.refresh(), return_exceptions=True
            )
            world.worker.gate.set()
            await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"
    assert len(world.engines) == 2


async def test_the_snapshot_of_a_suspended_run_goes_with_the_run(world: World) -> None:
    async with running(world):
        put(world.registry, "a", suspend=True)
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
        world.node["a"] = Kept(3, Cursor(), "1.0")
        await world.until(lambda: "a" in world.fleet.unended)
        world.registry.delete("a")
        await world.until(lambda: "a" not in world.node)


async def test_snapshots_of_runs_that_ended_meanwhile_are_removed(world: World) -> None:
    world.node["gone"] = world.node["mine"] = Kept(3, Cursor(), "1.0")
    world.registry.sync(["mine"])
    async with running(world):
        await world.until(lambda: "gone" not in world.node)
    assert set(world.node) == {"mine"}


async def test_a_run_that_kills_the_trainer_is_found_and_failed(world: World) -> None:
    def die_on_bad(groups: list[PromptGroup]) -> None:
        if any(g.uid == "bad" for g in groups):
            world.trainers[-1].dead = True

    world.configure_trainer = lambda t: setattr(t, "on_accumulate", die_on_bad)
    async with running(world):
        put(world.registry, "bad", backoffLimit=1)
        put(world.registry, "good")
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    assert world.registry.runs["bad"].reason == reasons.TRAINER_CRASHED
    assert world.registry.runs["good"].state == "COMPLETED"


async def test_a_trainer_that_raises_in_a_batch_is_replaced(world: World) -> None:
    raised = False

    def raise_once(groups: list[PromptGroup]) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise RuntimeError("kernel fault")

    world.configure_trainer = lambda t: setattr(t, "on_accumulate", raise_once)
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: ended(world, "a"))
    assert [trainer.dead for trainer in world.trainers] == [True, False]
    assert world.registry.runs["a"].state == "COMPLETED"


async def test_a_step_that_is_refused_fails_its_run_and_no_trainer(world: World) -> None:
    def refusing(trainer: FakeTrainer) -> None:
        step = trainer.step

        def refused(uid: str, cursor: Cursor, incarnation: str) -> StepResult:
            if uid == "bad":
                raise RunError(reasons.NON_FINITE, "a weight is not finite; lower optimizer.lr")
            return step(uid, cursor, incarnation)

        trainer.step = refused  # type: ignore[method-assign]

    world.configure_trainer = refusing
    async with running(world):
        put(world.registry, "bad", numStep=3)
        put(world.registry, "good", numStep=3)
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    assert (world.registry.runs["bad"].state, world.registry.runs["bad"].reason) == ("FAILED", reasons.NON_FINITE)
    assert world.registry.runs["good"].state == "COMPLETED"
    assert len(world.trainers) == 1


async def test_a_trainer_that_cannot_be_ended_is_replaced_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(actor: object) -> None:
        raise RuntimeError("Ray is restarting")

    def die_once(groups: list[PromptGroup]) -> None:
        if len(world.trainers) == 1:
            world.trainers[-1].dead = True

    world.configure_trainer = lambda t: setattr(t, "on_accumulate", die_once)
    async with running(world):
        monkeypatch.setattr(world.fleet.trainer, "_kill", unreachable)
        put(world.registry, "a", numStep=2)
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"


def kills_when_loading(world: World, uid: str) -> Callable[[FakeTrainer], None]:
    def configure(trainer: FakeTrainer) -> None:
        load = trainer.load

        def dying(request: LoadRequest) -> Loaded:
            if request.uid == uid:
                world.trainers[-1].dead = True
            return load(request)

        trainer.load = dying  # type: ignore[method-assign]

    return configure


async def test_a_run_whose_load_kills_the_trainer_is_found_and_failed(world: World) -> None:
    world.configure_trainer = kills_when_loading(world, "bad")
    async with running(world):
        put(world.registry, "bad", backoffLimit=1)
        put(world.registry, "good", backoffLimit=0)
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    bad = world.registry.runs["bad"]
    assert (bad.state, bad.reason) == ("FAILED", reasons.TRAINER_CRASHED)
    assert "died 2 times while it loaded this run" in bad.message
    assert world.registry.runs["good"].state == "COMPLETED"
    assert len(world.trainers) == 3


async def test_a_run_whose_load_kills_the_trainer_can_be_deleted(world: World) -> None:
    async with running(world):
        put(world.registry, "bad", numStep=1000, backoffLimit=0)
        await world.until(lambda: world.registry.runs["bad"].step >= 2)
        world.configure_trainer = kills_when_loading(world, "bad")
        world.registry.delete("bad")
        world.trainers[0].dead = True
        await world.until(lambda: "bad" not in world.registry.runs)


async def test_a_first_publish_with_a_lost_buffer_is_made_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, tried = FakeEngine.publish, asyncio.Event()

    def unless_lost(engine: FakeEngine, version: VersionId, manifest: Manifest, buffer: object) -> None:
        if len(world.trainers) == 1:
            tried.set()
            raise Retryable("ObjectLostError: the node that held the buffer died")
        publish(engine, version, manifest, buffer)

    monkeypatch.setattr(FakeEngine, "publish", unless_lost)
    async with running(world):
        put(world.registry, "a")
        await tried.wait()
        world.trainers[0].dead = True
        await asyncio.gather(world.fleet.trainer.call("slots"), return_exceptions=True)
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"
