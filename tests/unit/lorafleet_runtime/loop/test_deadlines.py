"""Deadlines: activeDeadlineSeconds counts from the first registration, registrationDeadlineSeconds from creation."""

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.loop.lifecycle import enforce_deadlines
from lorafleet_runtime.types import Cursor, Loaded
from support.fleets import World
from support.runs import DATASET, put, run_spec

FIRST = 100.0
"""Unix seconds of the first registration."""


@pytest.fixture
def world(world: World) -> World:
    world.registry.observe_trainer({})
    return world


def register(world: World, now: float) -> None:
    world.registry.checked("a", DATASET)
    world.registry.assign()
    world.registry.loaded(Loaded("a", 0, Cursor()), now)
    world.registry.published("a", 1, now)
    assert world.registry.runs["a"].state == "ACTIVE"


def over(world: World, now: float) -> bool:
    enforce_deadlines(world.fleet, now)
    run = world.registry.runs["a"]
    return run.ending is not None and run.ending.reason == reasons.DEADLINE_EXCEEDED


def test_the_active_deadline_counts_from_the_first_registration_over_a_suspension(world: World) -> None:
    put(world.registry, "a", created=1.0, activeDeadlineSeconds=60)
    assert not over(world, FIRST)  # waiting does not count
    register(world, FIRST)
    assert not over(world, FIRST + 59)
    put(world.registry, "a", generation=2, activeDeadlineSeconds=60, suspend=True)
    world.registry.saved("a", None, FIRST + 59)
    assert world.registry.cleaned("a")
    assert not over(world, FIRST + 70)  # a suspended run does not fail
    put(world.registry, "a", generation=3, activeDeadlineSeconds=60)
    assert world.registry.runs["a"].start_time == FIRST
    assert over(world, FIRST + 61)
    message = world.registry.runs["a"].message
    assert message.startswith("activeDeadlineSeconds: 60 s passed at step 0 of") and "raise it" in message


def test_the_active_deadline_counts_on_after_a_restart_of_the_runtime(world: World) -> None:
    spec = run_spec(activeDeadlineSeconds=60)
    world.registry.put("a", spec, namespace="t", name="a", generation=1, created=1.0, start_time=FIRST)
    register(world, FIRST + 50)
    assert world.registry.view("a").start_time == FIRST
    assert not over(world, FIRST + 59)
    assert over(world, FIRST + 61)


def test_an_active_deadline_may_be_raised_while_the_run_trains(world: World) -> None:
    put(world.registry, "a", activeDeadlineSeconds=60)
    register(world, FIRST)
    put(world.registry, "a", generation=2, activeDeadlineSeconds=90)
    assert not over(world, FIRST + 61)
    assert over(world, FIRST + 91)


def test_the_registration_deadline_counts_from_creation_and_ends_with_the_registration(world: World) -> None:
    put(world.registry, "a", created=1.0, registrationDeadlineSeconds=60)
    assert not over(world, 60.0)
    assert over(world, 62.0)
    other = world.registry.runs.pop("a")
    assert other.message.startswith("registrationDeadlineSeconds: 60 s passed")
    put(world.registry, "a", created=1.0, registrationDeadlineSeconds=60)
    register(world, 50.0)
    assert not over(world, 1000.0)
