"""Races and faults between the loop and its actors; each of these went wrong once."""

import asyncio
from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.loop import sampling
from lorafleet_runtime.types import DatasetInfo, DroppedGroup, PromptGroup, VersionId
from support.fake_actors import Handle
from support.fleets import World, ended, running
from support.runs import put, run_spec


async def test_one_death_starts_one_engine_however_many_groups_notice(world: World) -> None:
    async with running(world):
        world.worker.gate = asyncio.Event()
        put(world.registry, "a", rolloutBatchSize=8)
        await world.until(lambda: (s := world.fleet.states.get("a")) is not None and s.in_flight == 8)
        world.engines[0].dead = True
        world.worker.gate.set()
        await world.until(lambda: ended(world, "a"))
    assert len(world.engines) == 2
    assert world.reaped == [world.engines[0]]


async def test_a_publish_that_lands_after_the_end_leaves_nothing_on_the_engine(world: World) -> None:
    async with running(world):
        engine = world.engines[0].target
        gate, publish = asyncio.Event(), engine.publish

        async def slow(version: VersionId, manifest: object, buffer: object) -> None:
            if version.n == 2:
                await gate.wait()
            publish(version, manifest, buffer)

        engine.publish = slow
        put(world.registry, "a", numStep=2, maxStaleness=1)
        await world.until(lambda: world.registry.runs["a"].state == "CLEANUP")
        gate.set()
        await world.until(lambda: ended(world, "a"))
        assert engine.adapters == set()


async def test_a_run_that_finds_no_room_can_still_be_deleted(world: World) -> None:
    async with running(world):

        def full(version: VersionId, manifest: object, buffer: object) -> None:
            raise Retryable("engine full")

        world.engines[0].target.publish = full
        put(world.registry, "a")
        await world.until(lambda: world.registry.runs["a"].loaded)
        assert not world.registry.delete("a")
        await world.until(lambda: "a" not in world.registry.runs)


async def test_an_engine_that_cannot_be_adopted_is_replaced(world: World) -> None:
    broken = Handle(type("Broken", (), {"start": lambda self: (_ for _ in ()).throw(Retryable("core died"))})())
    spawner = world.fleet.engines._spawner
    spawner.adopt = lambda index: broken  # type: ignore[method-assign]
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: ended(world, "a"))
    assert world.reaped == [broken]
    assert world.registry.runs["a"].state == "COMPLETED"


async def test_an_adopted_engine_loses_what_an_earlier_runtime_published(world: World) -> None:
    spawner = world.fleet.engines._spawner
    old = spawner.spawn(0)
    old.target.adapters.add("gone@0.7.v3")
    spawner.adopt = lambda index: old  # type: ignore[method-assign]
    async with running(world):
        assert old.target.adapters == set()
        assert world.reaped == []


async def test_the_resync_retires_what_belongs_to_no_run(world: World) -> None:
    async with running(world):
        world.engines[0].target.adapters.add("gone@0.7.v3")
        await world.fleet.engines.resync(world.registry.holds_slot)
        assert world.engines[0].target.adapters == set()


async def test_a_refused_adapter_does_not_keep_a_new_engine_from_the_others(world: World) -> None:
    async with running(world):
        put(world.registry, "bad", numStep=1000)
        put(world.registry, "good", numStep=60)
        await world.until(lambda: all(world.registry.runs[u].step >= 2 for u in ("bad", "good")))
        spawner = world.fleet.engines._spawner
        spawn = spawner.spawn

        def picky(index: int) -> Any:
            handle = spawn(index)
            handle.target.refuse.add("bad")
            return handle

        spawner.spawn = picky  # type: ignore[method-assign]
        world.engines[0].dead = True
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    assert world.registry.runs["bad"].reason == reasons.PUBLISH_ERROR
    assert world.registry.runs["good"].state == "COMPLETED"
    assert len(world.engines) == 2


async def test_a_suspect_without_enough_groups_does_not_block_its_neighbours(world: World) -> None:
    def drop(uid: str, index: int) -> DroppedGroup | None:
        if uid == "suspect" and index > 0:
            return DroppedGroup(uid, VersionId(uid, "1.1", 1), index, "filtered")
        return None

    async with running(world):
        world.worker.on_group = drop
        world.fleet.blame.suspects.add("suspect")
        put(world.registry, "suspect")
        put(world.registry, "good", numStep=10)
        await world.until(lambda: ended(world, "good"))


async def test_groups_that_find_a_run_closed_open_it_once(world: World) -> None:
    opens: list[str] = []
    async with running(world):
        put(world.registry, "a", rolloutBatchSize=8, numStep=30)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        world.workers[0].dead = True
        await world.until(lambda: len(world.workers) == 2)
        inner = world.worker.open

        def opening(uid: str, spec: dict[str, Any], started: bool) -> DatasetInfo:
            opens.append(uid)
            return inner(uid, spec, started)

        world.worker.open = opening  # type: ignore[method-assign]
        await world.until(lambda: ended(world, "a"))
    assert (opens, world.registry.runs["a"].state) == (["a"], "COMPLETED")


async def test_a_straggler_of_an_ended_incarnation_cannot_fail_the_new_one(world: World) -> None:
    async with running(world):
        gate, late = asyncio.Event(), asyncio.Event()

        async def on_group(uid: str, index: int, version: VersionId, engine: Handle) -> PromptGroup | DroppedGroup:
            if version.incarnation == "1.1" and index == 5:
                await gate.wait()
                late.set()
                raise RunError(reasons.REWARD_ERROR, "the reward process exited with code -9")
            return await inner(uid, index, version, engine)

        inner = world.worker.run_group
        world.worker.run_group = on_group  # type: ignore[method-assign]
        put(world.registry, "a", numStep=30, maxStaleness=1)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        put(world.registry, "a", generation=2, numStep=30, maxStaleness=1, suspend=True)
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
        put(world.registry, "a", generation=3, numStep=30, maxStaleness=1)
        await world.until(lambda: world.registry.runs["a"].state == "ACTIVE")
        gate.set()
        await late.wait()
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"


async def test_a_queued_run_that_goes_away_is_closed_in_its_worker(world: World) -> None:
    closed: list[str] = []
    async with running(world):
        world.worker.close = lambda uid: closed.append(uid)  # type: ignore[method-assign]
        for number, uid in enumerate("abc"):
            put(world.registry, uid, created=float(number), numStep=10_000)
        await world.until(lambda: world.registry.runs["c"].queue_position == 1)
        assert world.registry.delete("c")
        await world.until(lambda: closed == ["c"])


async def test_an_unexpected_publish_error_fails_the_run_instead_of_leaving_it_waiting(world: World) -> None:
    async with running(world):
        publish = world.engines[0].target.publish

        def odd(version: VersionId, manifest: object, buffer: object) -> None:
            if version.n == 2:
                raise TypeError("odd")
            publish(version, manifest, buffer)

        world.engines[0].target.publish = odd
        put(world.registry, "a")
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].reason == reasons.INTERNAL_ERROR


async def test_changed_data_is_refused_when_a_run_is_opened_again(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=1000)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        world.fleet.workers._digests["a"] = "another"
        world.workers[0].dead = True
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].reason == reasons.DATA_ERROR


async def test_the_resync_spares_a_run_that_registers_while_it_lists(world: World) -> None:
    async with running(world):
        engine = world.engines[0].target
        gate, listing = asyncio.Event(), engine.list

        async def slow() -> object:
            status = listing()
            await gate.wait()
            return status

        engine.list = slow
        resync = asyncio.create_task(world.fleet.engines.resync(world.registry.holds_slot))
        await asyncio.sleep(0)
        engine.list = listing
        put(world.registry, "a", numStep=1000)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        gate.set()
        await resync
        step = world.registry.runs["a"].step
        await world.until(lambda: world.registry.runs["a"].step > step + 2)


async def test_the_resync_publishes_again_what_an_engine_lost(world: World) -> None:
    async with running(world):
        world.worker.gate = asyncio.Event()
        put(world.registry, "a")
        await world.until(lambda: world.registry.runs["a"].state == "ACTIVE")
        world.engines[0].target.adapters.clear()
        await world.fleet.engines.resync(world.registry.holds_slot)
        assert world.engines[0].target.adapters == {"a@1.1.v1"}


async def test_cleanup_waits_for_a_publish_also_after_the_trainer_died(world: World) -> None:
    async with running(world):
        engine = world.engines[0].target
        gate, publish = asyncio.Event(), engine.publish

        async def slow(version: VersionId, manifest: object, buffer: object) -> None:
            if version.n == 2:
                await gate.wait()
            publish(version, manifest, buffer)

        engine.publish = slow
        put(world.registry, "a", numStep=100, maxStaleness=1)
        await world.until(lambda: world.registry.runs["a"].step >= 1)
        world.registry.delete("a")
        world.fleet.on_trainer_lost()
        world.registry.observe_trainer({})
        await world.until(lambda: world.registry.runs["a"].state == "CLEANUP")
        gate.set()
        await world.until(lambda: "a" not in world.registry.runs)
        assert engine.adapters == set()


async def test_a_run_whose_data_kills_the_worker_ends_and_frees_the_kept_slot(world: World) -> None:
    world.registry.pool = world.registry.pool.model_copy(update={"slots": 1})
    async with running(world):

        def kill(uid: str, spec: dict[str, Any], started: bool) -> DatasetInfo:
            if uid == "old":
                raise Retryable("OutOfMemoryError")
            return original(world.workers[0].target, uid, spec, started)

        original = type(world.worker).open
        world.worker.open = kill  # type: ignore[method-assign]
        spec = run_spec(backoffLimit=0)
        world.registry.put("old", spec, namespace="t", name="old", generation=1, created=0.0, start_time=1.0)
        put(world.registry, "new", created=1.0)
        await world.until(lambda: ended(world, "old") and ended(world, "new"))
    assert world.registry.runs["old"].reason == reasons.DATA_ERROR
    assert world.registry.runs["new"].state == "COMPLETED"


async def test_a_run_that_drops_every_group_ends(world: World) -> None:
    async with running(world):
        world.worker.on_group = lambda uid, index: (
            DroppedGroup(uid, VersionId(uid, "1.1", 1), index, "rewardError", "no such tool") if uid == "bad" else None
        )
        put(world.registry, "bad", numStep=1000)
        put(world.registry, "good", numStep=20)
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    bad = world.registry.runs["bad"]
    assert (bad.state, bad.reason) == ("FAILED", reasons.REWARD_ERROR)
    assert "16 prompt groups in a row were dropped; last: no such tool" in bad.message
    assert world.registry.runs["good"].state == "COMPLETED"


async def test_a_group_that_a_living_engine_never_answers_fails_its_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_RETRY_SECONDS", 0.001)

    def refuse(uid: str, index: int) -> None:
        if (uid, index) == ("bad", 3):
            raise Retryable("vLLM failed it (ValueError)")

    async with running(world):
        world.worker.on_group = refuse
        put(world.registry, "bad", numStep=1000)
        put(world.registry, "good", numStep=20)
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    bad = world.registry.runs["bad"]
    assert (bad.state, bad.reason) == ("FAILED", reasons.INTERNAL_ERROR)
    assert "prompt group 3 failed 20 times" in bad.message
    assert world.registry.runs["good"].state == "COMPLETED"


async def test_a_version_that_an_engine_lost_is_put_back_and_no_run_fails_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(sampling, "_MAX_TRIES", 1)
    async with running(world):
        put(world.registry, "a", numStep=50)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        world.engines[0].target.adapters.clear()
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"


async def test_a_policy_that_diverges_fails_its_run_by_name_and_step_and_no_other(world: World) -> None:
    def sick(uid: str, index: int) -> PromptGroup | DroppedGroup | None:
        if uid == "a" and index == 2:
            raise RunError(reasons.NON_FINITE, "its policy has diverged")
        return None

    world.worker.on_group = sick
    async with running(world):
        put(world.registry, "a", numStep=4)
        put(world.registry, "b", numStep=4)
        await world.until(lambda: ended(world, "a") and ended(world, "b"))
    failed, other = world.registry.runs["a"], world.registry.runs["b"]
    assert (failed.state, failed.reason) == ("FAILED", reasons.NON_FINITE)
    assert failed.message == f"run {failed.name}, step {failed.step}: its policy has diverged"
    assert (other.state, other.step) == ("COMPLETED", 4)
