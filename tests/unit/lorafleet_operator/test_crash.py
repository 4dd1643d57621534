"""The operator is killed before or after the effect of each of its calls in turn; a new one must finish the work.

Whatever the moment: one registration per uid, no lost end, nothing left on trainer or engine, the object gone.
"""

import asyncio

import pytest

from support.operator_process import World
from support.operator_world import UID, run_object

CALLS = 26
"""Calls of the whole life below, without the long polls; test_life_has_no_more_calls_than_are_covered checks it."""

SURE_CALLS = 18
"""So many calls a life has at least, so that these kills do happen."""


async def life(world: World) -> None:
    """Create, train, complete, deregister, delete."""
    world.api.add("adapterruns", run_object(finalizer=False, numStep=5))
    await world.until(lambda: UID in world.runtime.views and world.runtime.views[UID].registered)
    world.runtime.step(UID, 5)
    world.runtime.complete(UID)
    await world.until(lambda: world.run_is("Complete") and world.run_is("Deregistered"))
    await world.until(lambda: UID not in world.runtime.views)
    world.api.delete("adapterruns", "team", "r")
    await world.until(lambda: world.run() is None)


def registrations(world: World) -> int:
    """Times the runtime gave the run a slot."""
    return world.runtime.admitted.count(UID)


@pytest.mark.parametrize("phase", ["before", "after"])
@pytest.mark.parametrize("call", range(1, CALLS + 1))
def test_killed_at_any_call_of_a_whole_life(call: int, phase: str) -> None:
    async def scenario() -> World:
        async with World() as world:
            world.kill_at = (call, phase)
            await life(world)
            return world

    world = asyncio.run(scenario())
    assert registrations(world) == 1
    assert not world.held()
    assert not world.fenced
    assert world.kill_at is None or call > SURE_CALLS


def test_life_has_no_more_calls_than_are_covered() -> None:
    async def scenario() -> int:
        async with World() as world:
            await life(world)
            return world.calls

    assert asyncio.run(scenario()) <= CALLS


@pytest.mark.parametrize("phase", ["before", "after"])
@pytest.mark.parametrize("call", range(6, 20))
def test_killed_at_any_call_of_a_deletion_midway(call: int, phase: str) -> None:
    async def scenario() -> World:
        async with World() as world:
            world.kill_at = (call, phase)
            world.api.add("adapterruns", run_object(finalizer=False))
            await world.until(lambda: UID in world.runtime.views)
            world.api.delete("adapterruns", "team", "r")
            await world.until(lambda: world.run() is None)
            return world

    world = asyncio.run(scenario())
    assert not world.held()
    assert registrations(world) == 1
