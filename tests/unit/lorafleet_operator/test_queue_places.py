"""A queued run's place in its status: the first at once, later ones soon where the queue is short."""

import asyncio

import pytest

from lorafleet_operator.status.writer import StatusWriter
from support.operator_process import World, with_settings
from support.operator_world import UID, run_object


def test_a_new_place_in_a_short_queue_shows_within_seconds() -> None:
    """Within queue_position_seconds, 60, two runs would show the same place."""

    async def scenario() -> None:
        async with World() as world:
            world.runtime.slots = 0
            world.api.add("adapterruns", run_object(finalizer=False))
            await world.until(lambda: world.status().get("queuePosition") == 1)
            world.runtime.update(UID, queue_position=2)
            await world.until(lambda: world.status().get("queuePosition") == 2)

    asyncio.run(scenario())


def test_places_of_many_runs_do_not_come_at_once_and_a_flip_does_not_wait_for_them() -> None:
    async def scenario() -> World:
        async with World(with_settings(places_per_second=0.01, queue_position_seconds=0.01)) as world:
            world.runtime.slots = 0
            uids = [f"uid-{number}" for number in range(4)]
            for uid in uids:
                run = run_object(finalizer=False)
                run["metadata"] |= {"name": uid, "uid": uid}
                world.api.add("adapterruns", run)
            await world.until(lambda: all(world.status(uid).get("queuePosition") == 1 for uid in uids))
            for uid in uids:
                world.runtime.update(uid, queue_position=7)
            await world.until(lambda: any(world.status(uid).get("queuePosition") == 7 for uid in uids))
            for uid in uids[:2]:
                world.runtime.update(uid, state="FAILED", outcome="Failed", reason="DataError", message="x")
            await world.until(lambda: world.run_is("Failed", uids[0]) and world.run_is("Failed", uids[1]))
            assert sum(world.status(uid).get("queuePosition") == 7 for uid in uids[2:]) <= 1
            return world

    asyncio.run(scenario())


def test_a_place_waits_while_others_wait_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with World(with_settings(queue_position_seconds=0.01)) as world:
            world.runtime.slots = 0
            other = run_object(finalizer=False)
            other["metadata"] |= {"name": "other", "uid": "other"}
            world.api.add("adapterruns", run_object(finalizer=False))
            world.api.add("adapterruns", other)
            await world.until(lambda: all(world.status(name).get("queuePosition") == 1 for name in ("r", "other")))
            monkeypatch.setattr(StatusWriter, "busy", True)
            world.runtime.update(UID, queue_position=7)
            for step in (1, 2):
                world.runtime.update("other", state="ACTIVE", registered=True, step=step, reason="Training")
                await world.until(lambda step=step: world.status("other").get("step") == step)  # type: ignore[misc]
            assert world.status().get("queuePosition") == 1
            monkeypatch.setattr(StatusWriter, "busy", False)
            await world.until(lambda: world.status().get("queuePosition") == 7)

    asyncio.run(scenario())
