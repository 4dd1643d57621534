"""Advantages over a step's whole batch: the figures by hand, and what the loop does for a run that waits for it."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lorafleet_runtime.loop.buffers import CursorTracker
from lorafleet_runtime.loop.fleet import RunState
from lorafleet_runtime.loop.training import take_batch, wait_for_batch
from lorafleet_runtime.loop.whiten import whitening
from lorafleet_runtime.types import Cursor, Loaded, PromptGroup, Sample, VersionId
from support.fleets import World, build_world, ended, running
from support.runs import DATASET, put

RUN: dict[str, Any] = {"algorithm": {"advantage": "reinforce"}, "rolloutBatchSize": 3, "numStep": 1}


def scored(uid: str, index: int, rewards: Sequence[float], *, n: int = 1, incarnation: str = "1.1") -> PromptGroup:
    samples = tuple(Sample((5,), (-0.5,), r, r, False) for r in rewards)
    return PromptGroup(uid, VersionId(uid, incarnation, n), index, (1, 2), samples, ("",) * len(samples))


def advantages(groups: Sequence[PromptGroup]) -> list[float]:
    return [s.advantage for group in groups for s in group.samples]


BATCH = [scored("a", 0, (3, 1)), scored("a", 1, (1, -1))]


def test_batch_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    # mean 1, centred (2, 0, 0, -2), squares 8, variance 8 / 3
    found = whitening(0, BATCH, std_norm=True)
    expected = 2 / (math.sqrt(8 / 3) + 1e-6)
    got = advantages([found.apply(group) for group in BATCH])
    assert got == pytest.approx([expected, 0.0, 0.0, -expected], rel=1e-14)


def test_without_std_norm_only_the_mean_is_taken_off() -> None:
    found = whitening(0, BATCH, std_norm=False)
    assert advantages([found.apply(group) for group in BATCH]) == [2.0, 0.0, 0.0, -2.0]


@pytest.mark.parametrize("std_norm", [True, False])
@pytest.mark.parametrize("rewards", [(0.1, 0.1, 0.1), (1e9,), (-3.0, -3.0)])
def test_equal_rewards_give_exact_zeros(rewards: tuple[float, ...], std_norm: bool) -> None:
    groups = [scored("a", i, rewards) for i in range(3)]
    found = whitening(0, groups, std_norm)
    assert all(found.apply(group).is_constant for group in groups)


def test_everything_but_the_advantage_stays() -> None:
    (changed,) = [whitening(0, BATCH, True).apply(BATCH[0])]
    assert [s.reward for s in changed.samples] == [3, 1]
    assert advantages(BATCH) == [3, 1, 1, -1]
    assert (changed.index, changed.version, changed.prompt_ids) == (0, BATCH[0].version, (1, 2))


REWARDS = {0: (1.0, 0.0), 1: (1.0, 1.0), 2: (0.0, 0.0)}
"""By group index. Mean 1/2, six squares of 1/4, variance 1.5 / 5."""
SCALE = 1 / (math.sqrt(0.3) + 1e-6)


def one_group_a_slice(tmp_path: Path) -> World:
    world = build_world(tmp_path, rollout={"globalBatchSize": 2})
    world.registry.sync([])
    return world


def score(world: World, uid: str, index: int) -> PromptGroup:
    run = world.registry.runs[uid]
    assert run.version is not None
    rewards = [10 * (index // 3) + r for r in REWARDS[index % 3]]  # each step has a mean of its own
    return scored(uid, index, rewards, n=run.version.n, incarnation=run.version.incarnation)


def by_index(calls: Sequence[Sequence[PromptGroup]], uid: str = "a") -> list[tuple[int, list[float]]]:
    return [(g.index, [s.advantage for s in g.samples]) for groups in calls for g in groups if g.uid == uid]


def expected(index: int) -> list[float]:
    return pytest.approx([(r - 0.5) * SCALE for r in REWARDS[index % 3]], rel=1e-12)  # type: ignore[return-value]


async def test_slices_of_a_batch_share_one_mean(tmp_path: Path) -> None:
    world, calls = one_group_a_slice(tmp_path), list[list[PromptGroup]]()
    world.configure_trainer = lambda t: setattr(t, "on_accumulate", calls.append)
    async with running(world):
        world.worker.on_group = lambda uid, index: score(world, uid, index)
        put(world.registry, "a", **(RUN | {"numStep": 2}))
        await world.until(lambda: ended(world, "a"))
    assert [len(groups) for groups in calls] == [1] * 6
    assert by_index(calls) == [(i, expected(i)) for i in range(6)]


async def test_slices_that_a_dead_trainer_had_come_back_with_the_same_advantages(tmp_path: Path) -> None:
    world, calls = one_group_a_slice(tmp_path), list[list[PromptGroup]]()

    def die_in_the_second_slice(groups: list[PromptGroup]) -> None:
        calls.append(groups)
        if len(calls) == 2:
            world.trainers[-1].dead = True

    world.configure_trainer = lambda t: setattr(t, "on_accumulate", die_in_the_second_slice)
    async with running(world):
        world.worker.on_group = lambda uid, index: score(world, uid, index)
        put(world.registry, "a", **RUN)
        await world.until(lambda: ended(world, "a"))
    assert by_index(calls) == [(i, expected(i)) for i in (0, 1, 0, 1, 2)]
    assert world.registry.runs["a"].step == 1


async def test_another_incarnation_fixes_its_own_figures(tmp_path: Path) -> None:
    world, calls = one_group_a_slice(tmp_path), list[list[PromptGroup]]()

    def die_without_a_snapshot(groups: list[PromptGroup]) -> None:
        calls.append(groups)
        if len(calls) == 5:  # in the second step, whose figures are fixed
            world.trainers[-1].dead = True
            world.node.clear()

    def sample(uid: str, index: int) -> PromptGroup:
        version = world.registry.runs[uid].version
        assert version is not None
        shift = 0.0 if version.incarnation == "1.1" else 10.0
        rewards = [shift + r for r in REWARDS[index % 3]]
        return scored(uid, index, rewards, n=version.n, incarnation=version.incarnation)

    world.configure_trainer = lambda t: setattr(t, "on_accumulate", die_without_a_snapshot)
    async with running(world):
        world.worker.on_group = sample
        put(world.registry, "a", **(RUN | {"numStep": 2}))
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].incarnation == "1.2"
    assert by_index(calls)[5:] == [(i, expected(i)) for i in range(6)]


async def test_stale_groups_leave_before_the_batch_is_fixed(world: World) -> None:
    calls: list[list[PromptGroup]] = []
    world.configure_trainer = lambda t: setattr(t, "on_accumulate", calls.append)
    async with running(world):
        world.worker.on_group = lambda uid, index: score(world, uid, index)
        world.worker.gate = asyncio.Event()
        put(world.registry, "a", **RUN)
        await world.until(lambda: world.fleet.states.get("a") is not None and world.fleet.states["a"].in_flight == 3)
        for index, old in enumerate([{"n": 0}, {"incarnation": "0.9"}, {"n": 0}]):
            world.fleet.buffers.add(scored("a", 90 + index, (100.0, 100.0), **old))  # type: ignore[arg-type]
        world.fleet.signal.set()
        await world.until(lambda: world.fleet.buffers.count("a") == 0)
        world.worker.gate.set()
        await world.until(lambda: ended(world, "a"))
    assert by_index(calls) == [(i, expected(i)) for i in range(3)]
    assert world.registry.runs["a"].progress.dropped["stale"] == 2


async def test_a_run_that_waits_for_its_batch_holds_nobody_up(world: World) -> None:
    last = asyncio.Event()
    async with running(world):
        worker = world.worker
        usual = worker.run_group

        async def slow_last(uid: str, index: int, *rest: object) -> object:
            if (uid, index) == ("a", 2):
                await last.wait()
            return await usual(uid, index, *rest)  # type: ignore[arg-type]

        worker.run_group = slow_last  # type: ignore[assignment,method-assign]
        put(world.registry, "a", **RUN)
        await world.until(lambda: world.fleet.buffers.count("a") == 2)
        put(world.registry, "b", numStep=3)
        await world.until(lambda: ended(world, "b"))
        assert (world.fleet.buffers.count("a"), world.registry.runs["a"].accumulated_groups) == (2, 0)
        last.set()
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].step == 1


async def test_a_suspect_whose_whole_batch_is_stale_keeps_nobody_from_training(world: World) -> None:
    registry, fleet = world.registry, world.fleet
    registry.observe_trainer({})
    for uid, spec in {"a": RUN, "b": {"rolloutBatchSize": 3}}.items():
        put(registry, uid, **spec)
        registry.checked(uid, DATASET)
        registry.assign()
        registry.loaded(Loaded(uid, 0, Cursor()), now=1.0)
        registry.published(uid, 1, now=2.0)
        run = registry.runs[uid]
        fleet.states[uid] = RunState(run.incarnation, CursorTracker(Cursor()), Cursor())
    fleet.blame.suspects.add("a")
    for index in range(3):
        fleet.buffers.add(scored("a", index, (1, 0), n=0, incarnation=registry.runs["a"].incarnation))
        fleet.buffers.add(scored("b", index, (1, 0), incarnation=registry.runs["b"].incarnation))
    async with asyncio.timeout(5):
        await wait_for_batch(fleet)
    assert [group.uid for group in take_batch(fleet)] == ["b", "b", "b"]
    assert fleet.buffers.count("a") == 0
