"""The driver loop over fake actors: whole lives of runs, and what happens when a part dies or lies."""

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.types import DroppedGroup, RunFault, VersionId
from support.fleets import World, ended, running
from support.runs import put


async def test_a_run_completes_and_leaves_nothing_behind(world: World) -> None:
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: ended(world, "a"))
    run = world.registry.runs["a"]
    assert (run.state, run.step, run.visible_outcome) == ("COMPLETED", 3, "Complete")
    assert run.artifact is not None
    assert run.artifact.step == 3
    assert world.trainer.loaded == {}
    assert world.engines[0].target.adapters == set()


async def test_on_policy_samples_always_come_from_the_weights_they_train(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=4)
        await world.until(lambda: ended(world, "a"))
    version_of = {index: n for _, index, n in world.worker.groups}
    assert world.trained() == [("a", i, i // 2 + 1) for i in range(8)]
    assert [version_of[i] for i in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]


async def test_three_runs_on_two_slots_all_complete(world: World) -> None:
    async with running(world):
        for number, uid in enumerate("abc"):
            put(world.registry, uid, created=float(number), rolloutBatchSize=number + 1)
        await world.until(lambda: all(ended(world, u) for u in "abc"))
    assert {u: world.registry.runs[u].step for u in "abc"} == {"a": 3, "b": 3, "c": 3}
    for uid, groups in (("a", 3), ("b", 6), ("c", 9)):
        assert sorted(i for u, i, _ in world.trained() if u == uid) == list(range(groups))


async def test_bad_data_fails_before_a_slot_is_taken(world: World) -> None:
    async with running(world):
        world.worker.open_error["bad"] = RunError(reasons.DATA_ERROR, "data: no.jsonl is missing; fix the path")
        put(world.registry, "bad")
        put(world.registry, "good")
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    bad = world.registry.runs["bad"]
    assert (bad.state, bad.reason, bad.incarnation) == ("FAILED", reasons.DATA_ERROR, "")
    assert world.registry.runs["good"].state == "COMPLETED"


async def test_a_reward_fault_fails_its_run_only(world: World) -> None:
    def on_group(uid: str, index: int) -> None:
        if uid == "bad" and index == 3:
            raise RunError(reasons.REWARD_ERROR, "it raised")

    async with running(world):
        world.worker.on_group = on_group
        put(world.registry, "bad")
        put(world.registry, "good")
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    assert world.registry.runs["bad"].reason == reasons.REWARD_ERROR
    assert world.registry.runs["good"].state == "COMPLETED"
    assert world.engines[0].target.adapters == set()


async def test_a_fault_in_the_batch_fails_its_run_only(world: World) -> None:
    world.configure_trainer = lambda t: t.faults.update(bad=RunFault("bad", reasons.NON_FINITE, "NaN"))
    async with running(world):
        put(world.registry, "bad")
        put(world.registry, "good")
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    assert world.registry.runs["bad"].reason == reasons.NON_FINITE
    assert world.registry.runs["good"].step == 3


async def test_a_refused_adapter_fails_its_run_only(world: World) -> None:
    async with running(world):
        world.engines[0].target.refuse.add("bad")
        put(world.registry, "bad")
        put(world.registry, "good")
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    assert world.registry.runs["bad"].reason == reasons.PUBLISH_ERROR
    assert world.registry.runs["good"].state == "COMPLETED"


async def test_dropped_groups_are_replaced_by_the_next_prompts(world: World) -> None:
    def on_group(uid: str, index: int) -> DroppedGroup | None:
        return DroppedGroup(uid, VersionId(uid, "1.1", 1), index, "rewardError") if index == 1 else None

    async with running(world):
        world.worker.on_group = on_group
        put(world.registry, "a", numStep=1)
        await world.until(lambda: ended(world, "a"))
    assert [i for _, i, _ in world.trained()] == [0, 2]
    assert world.registry.runs["a"].progress.dropped == {"rewardError": 1}


async def test_a_dead_engine_is_reaped_and_gets_every_live_version(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=50)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        world.engines[0].dead = True
        await world.until(lambda: ended(world, "a"))
    assert world.reaped == [world.engines[0]]
    assert len(world.engines) == 2
    assert world.registry.runs["a"].step == 50
    assert world.registry.runs["a"].restarts == 0


async def test_a_dead_worker_is_replaced_and_the_group_sampled_again(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=20)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        world.workers[0].dead = True
        await world.until(lambda: ended(world, "a"))
    assert len(world.workers) == 2
    assert sorted(i for _, i, _ in world.trained()) == list(range(40))


async def test_deregistered_waits_for_an_engine_that_lies(world: World) -> None:
    async with running(world):
        world.engines[0].target.lie = True
        put(world.registry, "a")
        await world.until(lambda: world.registry.runs["a"].state == "CLEANUP")
        await world.until(lambda: not world.registry.presence("a").trainer)
        await world.fleet.signal.wait(0.7)
        assert world.registry.runs["a"].state == "CLEANUP"
        assert world.registry.presence("a").engines == ["engine-0"]
        world.engines[0].target.lie = False
        await world.until(lambda: ended(world, "a"))


async def test_delete_midway_leaves_no_trace(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=1000)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        assert not world.registry.delete("a")
        await world.until(lambda: "a" not in world.registry.runs)
        assert world.trainer.loaded == {}
        assert world.engines[0].target.adapters == set()
        assert world.fleet.states == {}
    assert world.disk["a"][0] >= 2  # deletionPolicy Save


async def test_suspend_and_resume_continue_at_the_same_step(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=30)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        put(world.registry, "a", generation=2, numStep=30, suspend=True)
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
        step = world.registry.runs["a"].step
        assert world.disk["a"][0] == step
        assert world.registry.slots().used == 0
        put(world.registry, "a", generation=3, numStep=30)
        await world.until(lambda: ended(world, "a") and world.registry.runs["a"].state == "COMPLETED")
    counted = [entry for entry in world.trained() if entry[2] > step]
    assert sorted(i for _, i, _ in counted) == list(range(2 * step, 60))


async def test_old_versions_leave_the_engine(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=1000)
        await world.until(lambda: world.registry.runs["a"].weight_version >= 5)
        await world.until(lambda: len(world.engines[0].target.adapters) <= 2)


async def test_an_overdue_run_is_failed(world: World) -> None:
    async with running(world):
        put(world.registry, "a", registrationDeadlineSeconds=1, created=1.0)
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].reason == reasons.DEADLINE_EXCEEDED
