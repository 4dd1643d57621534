"""The runtime stops: nothing more is sampled or trained, and every run is saved, also beside a batch that hangs."""

import asyncio
from pathlib import Path

from lorafleet_runtime.loop.sampling import allowance
from lorafleet_runtime.loop.saving import drain
from lorafleet_runtime.loop.training import take_batch
from lorafleet_runtime.types import BatchResult, PromptGroup
from support.fleets import World, build_world, running
from support.runs import put


class Held:
    """Keeps every accumulate call from now on in the trainer until it is opened."""

    def __init__(self, world: World) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self.groups: list[PromptGroup] = []
        accumulate = world.trainer.accumulate

        async def held(groups: list[PromptGroup]) -> BatchResult:
            self.groups += groups
            self.reached.set()
            await self.open.wait()
            return accumulate(groups)

        world.trainer.accumulate = held  # type: ignore[method-assign, assignment]


async def test_beside_a_batch_that_takes_too_long_every_run_is_saved_at_its_last_step(tmp_path: Path) -> None:
    world = build_world(tmp_path, slots=4, rollout={"globalBatchSize": 2})
    world.registry.sync([])
    async with running(world):
        for uid in "abcd":
            put(world.registry, uid, numStep=1000, checkpoint={"intervalSteps": 1000})
        await world.until(lambda: all(run.step >= 2 for run in world.registry.runs.values()))
        held = Held(world)
        await held.reached.wait()
        stop = asyncio.create_task(drain(world.fleet, batch_seconds=0.0))
        await world.until(lambda: len(world.doing("save")) == 4)
        steps = {uid: run.step for uid, run in world.registry.runs.items()}
        held.open.set()
        await stop
        assert {uid: (kept.step, kept.cursor.low, kept.partial) for uid, kept in world.disk.items()} == {
            uid: (step, 2 * step, ()) for uid, step in steps.items()
        }


async def test_a_batch_that_ends_in_time_is_saved_with_the_rest_and_none_follows(world: World) -> None:
    async with running(world):
        put(world.registry, "a", numStep=1000, rolloutBatchSize=8, maxStaleness=3, checkpoint={"intervalSteps": 1})
        await world.until(lambda: world.registry.runs["a"].step >= 1)
        held = Held(world)
        await held.reached.wait()
        stop = asyncio.create_task(drain(world.fleet))
        await world.until(lambda: world.fleet.stopping)
        held.open.set()
        await stop
        run, kept = world.registry.runs["a"], world.disk["a"]
        batch = [g.index for g in held.groups]
        trained = [index for _, index, _ in world.trained()]
        assert trained[-len(batch) :] == batch
        assert (kept.step, kept.cursor.low) == (run.step, len(trained))
        assert len(kept.partial) == run.accumulated_groups
        assert take_batch(world.fleet) == []
        world.fleet.buffers.clear("a")
        assert allowance(world.fleet, run) == 0
        world.fleet.stopping = False
        assert allowance(world.fleet, run) > 0  # all that keeps it from more is the stop
