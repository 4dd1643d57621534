"""Two operators that share no Lease, on one API server and one runtime: the older one is fenced and does no harm."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from lorafleet_api.v1alpha1 import names
from lorafleet_operator.errors import ApiUnavailable
from lorafleet_operator.status.writer import StatusWriter
from support.fake_api import FakeApi, Object
from support.operator_process import World, with_settings
from support.operator_world import UID, flags, pool_object, run_object, view


def play(scenario: Callable[[World, World, list[Object]], Awaitable[None]]) -> tuple[World, World, list[Object]]:
    """Starts the older one with a training run, then the newer one; returns both and every status that was stored."""

    async def main() -> tuple[World, World, list[Object]]:
        older = World()
        seen: list[Object] = []
        async with older:
            older.api.add("adapterruns", run_object(finalizer=False, numStep=5))
            await older.until(lambda: older.run_is("Registered"))
            newer = World(beside=older)
            watched = older.api.on_change

            def change(kind: str, event: str, obj: Object) -> None:
                if kind == names.RUN_PLURAL and "status" in obj:
                    seen.append(obj["status"])
                watched(kind, event, obj)

            older.api.on_change = change
            async with newer:
                await newer.until(lambda: bool(older.fenced))
                await scenario(older, newer, seen)
            return older, newer, seen

    return asyncio.run(main())


async def train(older: World, newer: World, seen: list[Object]) -> None:
    """The run goes on and completes under the newer operator."""
    newer.runtime.step(UID, 2)
    await newer.until(lambda: newer.status().get("step") == 2)
    newer.runtime.step(UID, 3)
    newer.runtime.complete(UID)
    await newer.until(lambda: newer.run_is("Complete") and newer.run_is("Deregistered"))


def test_the_older_one_is_fenced_and_the_newer_one_is_not() -> None:
    older, newer, _ = play(train)
    assert "older than" in older.fenced[0]
    assert newer.fenced == []
    assert newer.pool_status()["operatorEpoch"] == newer.runtime.operator_epoch


def test_no_run_is_registered_twice_or_taken_away() -> None:
    older, _, _ = play(train)
    assert older.runtime.admitted.count(UID) == 1
    before_end = [call for call in older.runtime.calls if call[0] == "DELETE"]
    assert len(before_end) <= 1  # forgetting the ended run


def test_no_condition_goes_back() -> None:
    _, _, seen = play(train)
    registered = [flags(status)["Registered"] for status in seen]
    assert registered.index(False) >= registered.count(True)  # True until its one change at the end
    steps = [status.get("step", 0) for status in seen]
    assert steps == sorted(steps)


def test_one_that_sees_one_namespace_takes_no_run_of_another_away() -> None:
    """Neither by its first PUT /v1/pool nor by looking for runs without an object."""
    stranger = run_object(finalizer=False, poolRef={"name": "demo", "namespace": "team"}, numStep=9)
    stranger["metadata"] |= {"namespace": "lab", "uid": "lab-uid"}

    async def scenario() -> World:
        async with World(pool=pool_object(allowedNamespaces=["lab"])) as older:
            older.api.add("adapterruns", run_object(finalizer=False, numStep=5))
            older.api.add("adapterruns", stranger)
            await older.until(lambda: older.run_is("Registered") and "lab-uid" in older.runtime.engine)
            newer = World(with_settings(namespace="team"), beside=older)
            async with newer:
                await newer.until(lambda: bool(older.fenced))
                newer.runtime.step(UID, 2)
                await newer.until(lambda: newer.status().get("step") == 2)
                assert not await older_is_alone(older)
                assert "lab-uid" in older.runtime.engine
                assert ("DELETE", "/v1/adapters/lab-uid") not in older.runtime.calls
            return older

    older = asyncio.run(scenario())
    assert older.runtime.admitted.count("lab-uid") == 1


async def older_is_alone(older: World) -> bool:
    """What a fenced operator waits for."""
    assert older.links is not None
    return await older.links.rivals_silent()


def test_a_fenced_one_is_alone_once_nothing_was_heard_of_the_newer_one_for_long() -> None:
    async def after(older: World, newer: World, seen: list[Object]) -> None:
        assert not await older_is_alone(older)
        older.runtime.operator_epoch += 1  # a third one, which ends those two
        older.runtime.heard = time.monotonic() - 10.0  # of 16: poll_seconds is 1
        assert not await older_is_alone(older)
        older.runtime.heard = time.monotonic() - 60.0
        assert await older_is_alone(older)
        older.unreachable = True
        older.runtime.heard = time.monotonic()
        assert await older_is_alone(older)

    play(after)


def test_a_write_of_a_fenced_operator_that_was_in_flight_is_not_repeated() -> None:
    """The API server's 409 makes the writer compute again: by then it must not write."""

    async def scenario() -> tuple[FakeApi, int]:
        api = FakeApi()
        old = api.add("adapterruns", run_object())
        stale = dict(old, metadata=dict(old["metadata"]))
        kube = api.client()
        fenced = False

        def may_write() -> None:
            if fenced:
                raise ApiUnavailable("fenced")

        def answered(method: str, path: str) -> None:
            nonlocal fenced
            fenced = True

        kube.may_write = may_write
        api.edit("adapterruns", "team", "r", lambda run: run.update(status={"step": 9}))  # the newer operator's
        api.on_answer = answered
        try:
            await StatusWriter(kube, 100.0).write("adapterruns", stale, lambda run: {"step": 3})
        except ApiUnavailable:
            return api, len(api.writes)
        raise AssertionError("the write went through")

    api, writes = asyncio.run(scenario())
    assert api.objects["adapterruns", "team", "r"]["status"] == {"step": 9}
    assert writes == 1


def test_api_owned_runs_are_not_the_operator_s_business() -> None:
    async def scenario() -> World:
        async with World() as world:
            world.api.add("adapterruns", run_object(finalizer=False, numStep=5))
            await world.until(lambda: world.run_is("Registered"))
            world.runtime.views["mine"] = view().model_copy(update={"uid": "mine", "owner": "api", "namespace": "api"})
            world.runtime.engine["mine"] = "mine@1.9.v1"
            world.runtime.trainer[1] = "mine"
            world.runtime.step(UID, 1)
            await world.until(lambda: world.status().get("step") == 1)
            world.runtime.step(UID, 4)
            world.runtime.complete(UID)
            await world.until(lambda: world.run_is("Deregistered"))
            return world

    world = asyncio.run(scenario())
    assert "mine" in world.runtime.views
    assert ("DELETE", "/v1/adapters/mine") not in world.runtime.calls
    assert not any("mine" in str(event) for event in world.api.events)
    assert "mine" not in str(world.pool_status())
