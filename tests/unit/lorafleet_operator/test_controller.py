"""The operator as a whole against a fake API server and a fake runtime: what happens over time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from lorafleet_api.v1alpha1 import names, reasons
from support.operator_process import World, with_settings
from support.operator_world import UID, condition, pool_object, run_object

Scenario = Callable[[World], Awaitable[None]]


def play(scenario: Scenario, world: Callable[[], World] = World) -> World:
    """Runs a scenario in a world of its own."""

    async def inside() -> World:
        async with world() as opened:
            await scenario(opened)
            return opened

    return asyncio.run(inside())


async def train(world: World, **spec: Any) -> None:
    """Creates the run and waits until it is registered."""
    world.api.add("adapterruns", run_object(finalizer=False, numStep=5, **spec))
    await world.until(lambda: world.run_is("Registered"))


def edit(world: World, **spec: Any) -> None:
    """A user's change of the spec."""
    world.api.edit("adapterruns", "team", "r", lambda obj: obj["spec"].update(spec))


def reason_of(world: World, kind: str) -> str:
    """Reason of a stored condition."""
    return str(condition(world.status(), kind)["reason"]) if world.status() else ""


def annotate(world: World, value: str) -> None:
    """Another controller's write."""
    world.api.edit("adapterruns", "team", "r", lambda obj: obj["metadata"].update(annotations={"storm": value}))


def puts(world: World) -> int:
    """PUTs of the run so far."""
    return world.runtime.calls.count(("PUT", f"/v1/adapters/{UID}"))


def test_progress_reaches_the_status() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.runtime.step(UID, 3)
        await world.until(lambda: world.status().get("step") == 3)

    status = play(scenario).status()
    assert (status["targetStep"], status["rewardMean"], status["weightVersion"]) == (5, 0.3, 4)


def test_a_wall_clock_that_steps_back_holds_up_no_progress() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.wall = lambda: time.time() - 3600.0
        world.runtime.step(UID, 4)
        await world.until(lambda: world.status().get("step") == 4, 10.0)

    play(scenario)


def test_suspend_and_resume_keep_the_step() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.runtime.step(UID, 2)
        edit(world, suspend=True)
        await world.until(lambda: world.run_is("Suspended"))
        assert UID not in world.runtime.engine
        edit(world, suspend=False)
        await world.until(lambda: world.run_is("Registered"))

    world = play(scenario)
    assert world.status()["step"] == 2
    assert not world.run_is("Suspended")
    assert world.status()["restarts"] == 0


def test_cancel_ends_and_keeps_the_record() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        edit(world, cancel=True)
        await world.until(lambda: world.run_is("Deregistered"))

    world = play(scenario)
    assert world.run_is("Finished")
    assert reason_of(world, "Ready") == reasons.CANCELLED
    assert not world.run_is("Complete") and not world.run_is("Failed")


def test_runtime_restart_registers_again_and_counts() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.runtime.restart()
        await world.until(lambda: world.status().get("bootEpoch") == 2)
        await world.until(lambda: world.run_is("Registered"))

    world = play(scenario)
    assert world.status()["restarts"] == 1
    assert ("PUT", "/v1/pool") in world.runtime.calls[-4:]
    assert puts(world) == 2


def test_refused_spec_fails_the_run_with_field_and_fix() -> None:
    problem = {
        "title": "RankTooLarge",
        "status": 422,
        "detail": "rank 64 is above the pool's maxRank 32",
        "field": "rank",
    }

    async def scenario(world: World) -> None:
        world.runtime.refusals["r"] = problem | {"value": 64, "fix": "use at most 32"}
        world.api.add("adapterruns", run_object(finalizer=False, rank=64))
        await world.until(lambda: world.run_is("Deregistered"))

    world = play(scenario)
    failed = condition(world.status(), "Failed")
    assert failed["reason"] == reasons.RANK_TOO_LARGE
    assert failed["message"] == "rank 64 is above the pool's maxRank 32; use at most 32"
    assert puts(world) == 1


def test_lying_delete_keeps_the_object_until_the_listing_agrees() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.runtime.lies = True
        world.api.delete("adapterruns", "team", "r")
        await world.until(lambda: "although" in condition(world.status(), "Deregistered")["message"])
        assert not world.run_is("Deregistered")
        world.runtime.lies = False
        world.runtime.finish_cleanup(UID)
        await world.until(lambda: world.run() is None)

    assert not play(scenario).held()


def test_slow_delete_is_awaited() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.runtime.slow_delete = True
        world.api.delete("adapterruns", "team", "r")
        await world.until(lambda: reason_of(world, "Registered") == reasons.DELETED)
        assert world.run() is not None
        world.runtime.finish_cleanup(UID)
        await world.until(lambda: world.run() is None)

    assert not play(scenario).held()


def test_deleted_record_is_an_event_on_the_pool() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.api.delete("adapterruns", "team", "r")
        await world.until(lambda: world.run() is None)

    events = play(scenario).api.events
    assert [e["reason"] for e in events if e["involvedObject"]["kind"] == "AdapterPool"] == [reasons.DEREGISTERED]


def test_run_whose_object_vanished_is_deregistered() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.api.edit("adapterruns", "team", "r", lambda obj: obj["metadata"].update(finalizers=[]))
        world.api.delete("adapterruns", "team", "r")
        await world.until(lambda: not world.held())

    play(scenario)


def test_pool_deleted_with_its_runs_is_cleared_while_its_runtime_answers() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.api.delete("adapterpools", "team", "demo")
        world.api.delete("adapterruns", "team", "r")
        await world.until(lambda: world.run() is None)

    assert not play(scenario).held()


def test_pool_deleted_and_runtime_silent_does_not_keep_the_run() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.unreachable = True
        world.runtime.step(UID)  # wakes the long poll, which then fails
        await world.until(lambda: not world.links.connected()[0][2] if world.links else False)
        world.api.delete("adapterpools", "team", "demo")
        world.api.delete("adapterruns", "team", "r")
        await world.until(lambda: world.run() is None)

    play(scenario)


def test_silent_runtime_is_lost_after_the_grace_and_found_again() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.unreachable = True
        world.runtime.step(UID)
        await world.until(lambda: reason_of(world, "Registered") == reasons.RUNTIME_LOST)
        assert condition(world.pool_status(), "RuntimeReady")["reason"] == reasons.RUNTIME_UNREACHABLE
        world.unreachable = False
        await world.until(lambda: world.run_is("Registered"))

    world = play(scenario, lambda: World(with_settings(lost_grace_seconds=0.1)))
    assert world.status()["restarts"] == 0
    assert puts(world) == 1


def test_newer_operator_fences_this_one_and_nothing_is_put_after() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.runtime.operator_epoch += 1
        world.runtime.step(UID)
        await world.until(lambda: bool(world.fenced))

    world = play(scenario)
    assert "older than" in world.fenced[0]


def test_conflict_without_a_newer_operator_does_not_end_the_operator() -> None:
    async def scenario(world: World) -> None:
        world.runtime.conflicts = 1
        await train(world)

    assert not play(scenario).fenced


def test_epoch_is_above_the_pools_and_the_runtimes() -> None:
    async def scenario(world: World) -> None:
        world.runtime.operator_epoch = 41
        await world.until(lambda: world.pool_status().get("operatorEpoch") == 42)
        await world.until(lambda: world.runtime.operator_epoch == 42)

    play(scenario)


def test_wrong_token_is_named_and_a_corrected_secret_is_taken() -> None:
    async def scenario(world: World) -> None:
        await world.until(lambda: bool(world.pool_status().get("conditions")))
        await world.until(lambda: condition(world.pool_status(), "RuntimeReady")["reason"] == reasons.UNAUTHORIZED)
        world.runtime.token = "secret"
        await world.until(lambda: condition(world.pool_status(), "RuntimeReady")["status"] == "True")

    play(scenario, lambda: World(token="another"))


def test_second_pool_on_one_endpoint_is_refused_and_fences_nobody() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        twin = pool_object()
        twin["metadata"] |= {"name": "twin", "uid": "twin-uid"}
        world.api.add("adapterpools", twin)
        key = ("adapterpools", "team", "twin")
        await world.until(lambda: "conditions" in world.api.objects[key].get("status", {}))
        assert condition(world.api.objects[key]["status"], "Ready")["reason"] == reasons.ENDPOINT_IN_USE

    assert not play(scenario).fenced


def test_silent_api_server_is_waited_out_and_the_end_is_written_then() -> None:
    async def scenario(world: World) -> None:
        await train(world)

        def down(method: str, path: str) -> None:
            world._tick("before")
            raise httpx.ConnectError("down")

        up, world.api.on_call = world.api.on_call, down
        before = world.calls
        world.runtime.step(UID, 5)
        world.runtime.complete(UID)
        await world.until(lambda: world.calls > before)
        world.api.on_call = up
        await world.until(lambda: world.run_is("Deregistered"))

    assert play(scenario).run_is("Complete")


def test_storm_of_foreign_writes_loses_no_condition_and_no_foreign_one() -> None:
    foreign = {
        "type": "Paid",
        "status": "True",
        "reason": "Yes",
        "message": "",
        "lastTransitionTime": "2026-11-29T12:00:00Z",
    }

    async def scenario(world: World) -> None:
        await train(world)
        world.api.edit("adapterruns", "team", "r", lambda obj: obj["status"]["conditions"].append(foreign))
        world.runtime.step(UID, 5)
        world.runtime.complete(UID)
        for number in range(60):
            annotate(world, str(number))
            await asyncio.sleep(0)
        await world.until(lambda: world.run_is("Deregistered"))

    world = play(scenario)
    assert world.run_is("Complete")
    assert foreign in world.status()["conditions"]


def test_finalizer_of_others_stays() -> None:
    async def scenario(world: World) -> None:
        run = run_object(finalizer=False, numStep=5)
        run["metadata"]["finalizers"] = ["other.dev/x"]
        world.api.add("adapterruns", run)
        await world.until(lambda: world.run_is("Registered"))
        world.runtime.step(UID, 5)
        world.runtime.complete(UID)
        await world.until(lambda: world.run()["metadata"]["finalizers"] == ["other.dev/x"])  # type: ignore[index]

    play(scenario)


def test_settled_world_makes_no_more_writes() -> None:
    async def scenario(world: World) -> None:
        await train(world)
        world.runtime.step(UID, 5)
        world.runtime.complete(UID)
        await world.until(lambda: world.run_is("Deregistered") and not world.runtime.views)
        await world.until(lambda: names.FINALIZER not in (world.run() or {})["metadata"].get("finalizers", []))
        await asyncio.sleep(0.1)
        before = len(world.api.writes)
        world._watch("adapterruns", "MODIFIED", world.run() or {})
        world._watch("adapterpools", "MODIFIED", world.api.objects["adapterpools", "team", "demo"])
        await asyncio.sleep(0.1)
        assert len(world.api.writes) == before

    play(scenario)
