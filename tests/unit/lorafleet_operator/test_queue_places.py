"""A queued run's place in its status: the first at once, later ones soon where the queue is short."""

import asyncio

from support.operator_process import World
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
