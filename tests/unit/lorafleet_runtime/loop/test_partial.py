"""Groups of an unfinished batch: a suspension or a stop keeps them, and whatever dies, each is trained on once."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.loop import saving
from lorafleet_runtime.loop.saving import checkpoint, drain
from lorafleet_runtime.types import Artifact, BatchResult, Cursor, DroppedGroup, PromptGroup, Sample, VersionId
from support.fake_actors import FakeTrainer
from support.fleets import World, build_world, ended, running
from support.runs import put


@dataclass
class Sampler:
    """Answers groups below `limit` at once, the others when it is raised; rewards are the group's index."""

    world: World
    limit: int
    _raised: asyncio.Event = field(default_factory=asyncio.Event)

    def install(self) -> None:
        worker = self.world.worker
        run_group = worker.run_group

        async def waiting(uid: str, index: int, version: Any, engine: Any) -> Any:
            while index >= self.limit:
                await self._raised.wait()
            group = await run_group(uid, index, version, engine)
            if isinstance(group, DroppedGroup):
                return group
            assert isinstance(group, PromptGroup)
            samples = tuple(Sample(s.token_ids, s.sampler_logprobs, float(index), 0.5, False) for s in group.samples)
            return PromptGroup(uid, group.version, index, group.prompt_ids, samples)

        worker.run_group = waiting  # type: ignore[method-assign]

    def allow(self, limit: int) -> None:
        self.limit = limit
        self._raised.set()
        self._raised = asyncio.Event()


SPEC: dict[str, Any] = {"rolloutBatchSize": 4, "numStep": 3, "saveTimeoutSeconds": 1}
STEPS = {1: (0, 1, 2, 3), 2: (4, 5, 6, 7), 3: (8, 9, 10, 11)}


def suspend(world: World, generation: int = 2, **changes: Any) -> None:
    put(world.registry, "a", generation=generation, **(SPEC | changes), suspend=True)


def resume(world: World, generation: int = 3, **changes: Any) -> None:
    put(world.registry, "a", generation=generation, **(SPEC | changes))


async def at(world: World, step: int, groups: int) -> None:
    run = world.registry.runs["a"]
    await world.until(lambda: (run.step, run.accumulated_groups) == (step, groups))


def sampled(world: World) -> list[int]:
    return sorted(index for handle in world.workers for _, index, _ in handle.target.groups)


async def finish(world: World, sampler: Sampler) -> None:
    """The run goes on to its end, and no group is in two steps or in none."""
    sampler.allow(12)
    await world.until(lambda: world.registry.runs["a"].state == "COMPLETED")
    assert world.steps("a") == STEPS


async def save_behind(world: World, gate: "Gate", tell: Callable[[], object]) -> None:
    """While the gate holds a batch, the run is told to end; its save waits for that batch, which then ends."""
    await gate.reached.wait()
    tell()
    await world.until(lambda: world.fleet.states["a"].saving.locked())
    gate.open.set()
    await world.until(lambda: "a" not in world.registry.runs or ended(world, "a"))


async def lose_trainer(world: World) -> None:
    """The trainer is dead and the loop knows it."""
    world.trainers[-1].dead = True
    await asyncio.gather(world.fleet.trainer.call("slots"), return_exceptions=True)


async def suspended_with_two_groups(world: World, **changes: Any) -> Sampler:
    """One step made, groups 4 and 5 of the next accumulated, then suspended."""
    sampler = Sampler(world, limit=6)
    sampler.install()
    put(world.registry, "a", **(SPEC | changes))
    await at(world, step=1, groups=2)
    suspend(world, **changes)
    await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
    return sampler


async def test_a_suspension_keeps_the_groups_of_the_unfinished_batch(world: World) -> None:
    async with running(world):
        sampler = await suspended_with_two_groups(world)
        kept = world.disk["a"]
        assert (kept.step, kept.cursor, [g.index for g in kept.partial]) == (1, Cursor(6), [4, 5])
        resume(world)
        await world.until(lambda: world.registry.runs["a"].state == "ACTIVE")
        assert world.registry.view("a").accumulated_groups == 2
        sampler.allow(8)
        await world.until(lambda: world.registry.runs["a"].step == 2)
        assert world.registry.runs["a"].progress.reward_mean == (4 + 5 + 6 + 7) / 4  # the saved samples count too
        await finish(world, sampler)
    assert sampled(world) == list(range(12))


async def test_a_trainer_that_dies_after_the_resumption_loads_the_saved_groups_once_more(world: World) -> None:
    async with running(world):
        sampler = await suspended_with_two_groups(world)
        resume(world)
        sampler.allow(7)
        await world.until(lambda: world.registry.runs["a"].accumulated_groups == 3)
        incarnation = world.registry.runs["a"].incarnation
        await lose_trainer(world)
        await world.until(lambda: world.registry.runs["a"].accumulated_groups == 3)
        assert [g.index for g in world.trainer.accumulated["a"]] == [4, 5, 6]
        await finish(world, sampler)
    assert world.registry.runs["a"].incarnation == incarnation  # nothing had to be published again
    assert sampled(world) == list(range(12))


async def test_a_lost_node_sends_the_run_back_to_the_saved_groups(world: World) -> None:
    async with running(world):
        sampler = await suspended_with_two_groups(world)
        resume(world)
        sampler.allow(9)
        await at(world, step=2, groups=1)
        world.node.clear()
        await lose_trainer(world)
        await finish(world, sampler)
    assert world.registry.runs["a"].artifact is not None


async def test_a_second_suspension_keeps_the_groups_of_both(world: World) -> None:
    async with running(world):
        sampler = await suspended_with_two_groups(world)
        resume(world)
        sampler.allow(7)
        await world.until(lambda: world.registry.runs["a"].accumulated_groups == 3)
        suspend(world, generation=4)
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
        assert [g.index for g in world.disk["a"].partial] == [4, 5, 6]
        resume(world, generation=5)
        await finish(world, sampler)
    assert sampled(world) == list(range(12))


async def test_groups_of_the_first_step_are_kept_in_step_0(world: World) -> None:
    async with running(world):
        sampler = Sampler(world, limit=2)
        sampler.install()
        put(world.registry, "a", **SPEC)
        await world.until(lambda: world.registry.runs["a"].accumulated_groups == 2)
        suspend(world)
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
        assert (world.disk["a"].step, len(world.disk["a"].partial)) == (0, 2)
        resume(world)
        await finish(world, sampler)
    assert sampled(world) == list(range(12))


async def test_a_suspension_before_the_first_group_writes_nothing(world: World) -> None:
    async with running(world):
        sampler = Sampler(world, limit=0)
        sampler.install()
        put(world.registry, "a", **SPEC)
        await world.until(lambda: world.registry.runs["a"].state == "ACTIVE")
        suspend(world)
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
    assert world.disk == {}


async def test_a_deletion_saves_the_step_boundary_only(world: World) -> None:
    async with running(world):
        Sampler(world, limit=6).install()
        put(world.registry, "a", **SPEC)
        await at(world, step=1, groups=2)
        world.registry.delete("a")
        await world.until(lambda: "a" not in world.registry.runs)
    assert (world.disk["a"].step, world.disk["a"].cursor, world.disk["a"].partial) == (1, Cursor(4), ())


async def test_a_stop_keeps_the_groups_for_the_next_runtime(world: World, tmp_path: Path) -> None:
    async with running(world):
        Sampler(world, limit=6).install()
        put(world.registry, "a", **SPEC)
        await at(world, step=1, groups=2)
        await drain(world.fleet)
    assert world.node["a"].step == world.disk["a"].step == 1
    (tmp_path / "next").mkdir()
    after = build_world(tmp_path / "next")
    after.disk, after.node = world.disk, world.node
    after.registry.sync(["a"])
    async with running(after):
        put(after.registry, "a", **SPEC)
        await after.until(lambda: ended(after, "a"))
    assert world.steps("a") | after.steps("a") == STEPS
    assert sampled(world) + sampled(after) == list(range(12))


async def test_a_trainer_that_dies_after_an_unfinished_batch_was_saved_trains_on_no_group_twice(world: World) -> None:
    async with running(world):
        sampler = Sampler(world, limit=6)
        sampler.install()
        put(world.registry, "a", **SPEC)
        await at(world, step=1, groups=2)
        await checkpoint(world.fleet, world.registry.runs["a"], partial=True)
        await lose_trainer(world)
        await finish(world, sampler)


async def test_a_save_whose_answer_was_lost_with_the_trainer_is_made_again(world: World) -> None:
    def lose_one_answer(trainer: FakeTrainer) -> None:
        saved = trainer.saved

        async def losing(ticket: str) -> Artifact | None:
            artifact = await saved(ticket)
            if len(world.trainers) == 1:
                world.trainers[0].dead = True
            return artifact

        trainer.saved = losing  # type: ignore[method-assign]

    world.configure_trainer = lose_one_answer
    async with running(world):
        sampler = await suspended_with_two_groups(world)
        assert len(world.trainers) == 2
        assert [g.index for g in world.disk["a"].partial] == [4, 5]
        resume(world)
        await finish(world, sampler)


async def test_groups_that_could_not_be_saved_are_sampled_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_RETRY_SECONDS", 0.02)
    async with running(world):
        sampler = Sampler(world, limit=6)
        sampler.install()
        put(world.registry, "a", **SPEC, checkpoint={"intervalSteps": 1})
        await world.until(lambda: world.registry.runs["a"].accumulated_groups == 2 and "a" in world.disk)
        world.trainer.checkpoint_error = RunError(reasons.STORAGE_ERROR, "disk full")
        suspend(world, checkpoint={"intervalSteps": 1})
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
        assert world.disk["a"].partial == ()
        world.trainer.checkpoint_error = None
        resume(world, checkpoint={"intervalSteps": 1})
        await finish(world, sampler)
    assert sampled(world) == sorted([*range(12), 4, 5])


class Gate:
    """Holds one accumulate call of the trainer until it is opened."""

    def __init__(self, trainer: FakeTrainer, call: int) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self._accumulate, self._calls, self._held = trainer.accumulate, 0, call
        trainer.accumulate = self._wait  # type: ignore[method-assign, assignment]

    async def _wait(self, groups: list[PromptGroup]) -> BatchResult:
        self._calls += 1
        if self._calls == self._held:
            self.reached.set()
            await self.open.wait()
        return self._accumulate(groups)


@pytest.mark.parametrize(("num_step", "end"), [(3, "SUSPENDED"), (1, "COMPLETED")])
async def test_a_batch_that_fills_while_its_run_suspends_is_stepped(world: World, num_step: int, end: str) -> None:
    async with running(world):
        Sampler(world, limit=4).install()
        world.worker.gate = asyncio.Event()  # so that all four go in one batch
        put(world.registry, "a", **(SPEC | {"numStep": num_step}))
        await world.until(lambda: world.fleet.states.get("a") is not None and world.fleet.states["a"].in_flight == 4)
        gate = Gate(world.trainer, call=1)
        world.worker.gate.set()
        await save_behind(world, gate, lambda: suspend(world, numStep=num_step))
    assert world.registry.runs["a"].state == end
    assert (world.disk["a"].step, world.disk["a"].cursor, world.disk["a"].partial) == (1, Cursor(4), ())
    assert world.steps("a") == {1: STEPS[1]}


async def test_groups_on_their_way_through_the_trainer_are_in_the_saved_sum_and_the_cursor(world: World) -> None:
    async with running(world):
        sampler = Sampler(world, limit=1)
        sampler.install()
        put(world.registry, "a", **SPEC)
        await world.until(lambda: world.registry.runs["a"].accumulated_groups == 1)
        gate = Gate(world.trainer, call=1)
        sampler.allow(2)
        await save_behind(world, gate, lambda: suspend(world))
    assert (world.disk["a"].cursor, [g.index for g in world.disk["a"].partial]) == (Cursor(2), [0, 1])


async def test_a_batch_that_is_normalised_as_a_whole_is_sampled_again_as_a_whole(tmp_path: Path) -> None:
    world = build_world(tmp_path, rollout={"globalBatchSize": 4})  # two groups at a time
    world.registry.sync([])
    spec: dict[str, Any] = {"algorithm": {"advantage": "reinforce"}}
    async with running(world):
        sampler = Sampler(world, limit=8)
        sampler.install()
        gate = Gate(world.trainer, call=4)
        put(world.registry, "a", **SPEC, **spec)
        await gate.reached.wait()
        assert (world.registry.runs["a"].step, world.registry.runs["a"].accumulated_groups) == (1, 2)
        suspend(world, **spec)
        await world.until(lambda: world.doing("save") == ["a"])
        gate.open.set()
        await world.until(lambda: world.registry.runs["a"].state == "SUSPENDED")
        assert (world.disk["a"].cursor, world.disk["a"].partial) == (Cursor(4), ())
        resume(world, **spec)
        await finish(world, sampler)


@pytest.mark.parametrize("dropped", [(), (5,)])
async def test_a_group_that_waits_to_be_trained_again_is_in_no_saved_cursor(
    tmp_path: Path, dropped: tuple[int, ...]
) -> None:
    """Two groups are accumulated, the trainer dies, and the run is suspended when one of them is trained again."""
    world = build_world(tmp_path, rollout={"globalBatchSize": 2})  # one group at a time
    world.registry.sync([])
    first, second = [index for index in (4, 5, 6) if index not in dropped][:2]
    async with running(world):
        sampler = Sampler(world, limit=second + 1)
        sampler.install()
        world.worker.on_group = lambda uid, index: (
            DroppedGroup(uid, VersionId(uid, "1.1", 1), index, "filtered") if index in dropped else None
        )
        put(world.registry, "a", **SPEC)
        await at(world, step=1, groups=2)
        gates: list[Gate] = []
        world.configure_trainer = lambda trainer: gates.append(Gate(trainer, call=1))
        await lose_trainer(world)
        await world.until(lambda: bool(gates))
        await save_behind(world, gates[0], lambda: suspend(world))
        assert (world.disk["a"].cursor, [g.index for g in world.disk["a"].partial]) == (Cursor(second), [first])
        resume(world)
        sampler.allow(20)
        await world.until(lambda: world.registry.runs["a"].state == "COMPLETED")
    used = [index for index in range(12 + len(dropped)) if index not in dropped]
    assert world.steps("a") == {1 + n: tuple(used[4 * n : 4 * n + 4]) for n in range(3)}


@pytest.mark.parametrize("end", ["cancelled", "deleted"])
async def test_a_batch_with_restored_groups_that_fills_while_its_run_ends_is_stepped(world: World, end: str) -> None:
    """Saved whole it would be loaded by a run that waits for no group any more, and never step."""
    async with running(world):
        sampler = await suspended_with_two_groups(world)
        world.worker.gate = asyncio.Event()  # so that both go in one batch
        resume(world)
        sampler.allow(8)
        await world.until(lambda: world.registry.runs["a"].state == "ACTIVE")
        await world.until(lambda: world.fleet.states["a"].in_flight == 2)
        gate = Gate(world.trainer, call=1)
        world.worker.gate.set()
        cancel = partial(put, world.registry, "a", generation=4, **SPEC, cancel=True)
        await save_behind(world, gate, partial(world.registry.delete, "a") if end == "deleted" else cancel)
    assert (world.disk["a"].step, world.disk["a"].cursor, world.disk["a"].partial) == (2, Cursor(8), ())
