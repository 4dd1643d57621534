"""A trainer of several processes on a real Ray: its lanes, its calls, and what a rank that dies costs."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from lorafleet_runtime.loop.trainer import Doing, TrainerHandle, TrainerLost
from lorafleet_runtime.storage import latest_checkpoint
from lorafleet_runtime.trainer.actor import LANES, TrainerActor
from lorafleet_runtime.trainer.group import TrainerGroup
from lorafleet_runtime.trainer.saves import Saves
from lorafleet_runtime.types import Artifact, Cursor, LoadRequest, StepResult
from support.trainer import export, make_groups, make_rank, make_request, relative, train_step
from support.trainer_group import GroupUnderTest, make_group, running_group

CONSTANT: dict[str, Any] = {"optimizer": {"lr": 1e-2}, "rolloutBatchSize": 2}


def test_calls_keep_their_order_and_their_thread_while_saves_wait(ray_here: None) -> None:
    class Probe(TrainerActor):
        """Records who calls; its saves wait until the last call."""

        def __init__(self) -> None:
            self._saves = Saves()
            self._gate = threading.Event()
            self._seen: list[tuple[int, int]] = []

        def capture(self, *_: Any) -> str:
            def write() -> Artifact:
                self._gate.wait()
                return Artifact("/path", len(self._seen), "digest")

            return self._saves.add(write)

        def accumulate(self, groups: Any) -> Any:
            self._seen.append((groups, threading.get_ident()))

        def slots(self) -> Any:
            self._gate.set()
            numbers, threads = zip(*self._seen, strict=True)
            return list(numbers), len(set(threads))

    actor = ray.remote(concurrency_groups=LANES)(Probe).options(num_cpus=0).remote()
    tickets: list[str] = ray.get([actor.capture.remote() for _ in range(LANES["saves"])])
    saves = [actor.saved.remote(ticket) for ticket in tickets]
    ready, _ = ray.wait(saves, timeout=0.1)
    assert not ready
    assert ray.get(actor.pid.remote(), timeout=30) > 0  # also when every place of that lane is taken
    calls = [actor.accumulate.remote(n) for n in range(200)]
    assert ray.get(actor.slots.remote()) == (list(range(200)), 1)
    artifacts: list[Artifact] = ray.get(saves)
    assert [artifact.step for artifact in artifacts] == [200] * len(saves)  # written after all those calls
    ray.get(calls)
    ray.kill(actor)


def weights(buffer: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(buffer), dtype=torch.float32)


def expected(model: Path, storage: Path) -> torch.Tensor:
    """What one rank in this process makes of the same groups in one step."""
    rank = make_rank(model, storage)
    rank.load(make_request("a", **CONSTANT))
    train_step(rank, "a", make_groups("a"))
    return weights(export(rank, "a")[1])


def test_a_tensor_parallel_trainer_answers_every_call(qwen3: Path, tmp_path: Path, ray_here: None) -> None:
    with running_group(qwen3, tmp_path / "two", 1, 2) as trainer:
        assert trainer.call("load", make_request("a", **CONSTANT)).step == 0
        assert trainer.call("slots") == {0: "a"}
        assert trainer.call("accumulate", make_groups("a")).stats[0].groups == 2
        assert trainer.call("step", "a", Cursor(), "1.1").step == 1
        manifest, buffer = trainer.export("a")
        assert manifest.num_bytes == len(buffer)
        assert relative(weights(buffer), expected(qwen3, tmp_path / "one")) < 1e-5
        artifact = trainer.checkpoint("a", tmp_path / "two" / "a")
        assert latest_checkpoint(tmp_path / "two" / "a") == Path(artifact.path)
        trainer.call("retain", [])
        trainer.call("drop", "a")
        assert trainer.each(lambda rank: rank.slots()) == [{}, {}]


class Loop:
    """The loop's handle of a data-parallel trainer, in a test's own event loop."""

    def __init__(self, model: Path, storage: Path) -> None:
        self.started: list[TrainerGroup] = []
        self.lost: list[frozenset[Doing]] = []
        self._arguments = (model, storage, 2, 1)
        self.handle = TrainerHandle(self._spawn, self._on_lost, lambda slots: None)

    def _spawn(self) -> TrainerGroup:
        self.started.append(make_group(*self._arguments))
        return self.started[-1]

    def _on_lost(self, under_way: frozenset[Doing], why: str) -> None:
        self.lost.append(under_way)

    async def load(self, request: LoadRequest) -> int:
        permit = await self.handle.read_permit(60)
        try:
            return (await self.handle.load(permit, 60, request)).step
        finally:
            permit.release()

    async def train(self, uid: str, step: int) -> None:
        groups = [replace(group, uid=uid) for group in make_groups("a", seed=step)]
        await self.handle.call("accumulate", groups)
        result: StepResult = await self.handle.call("step", uid, Cursor(), "1.1")
        assert result.step == step
        await self.handle.snapshotted(result.snapshot)  # before that, a rank that dies may take the step along

    async def export(self, uid: str) -> bytes:
        _, buffer = await self.handle.export(uid)
        return bytes(await buffer)


async def test_a_rank_killed_in_a_batch_costs_the_group_and_no_bit(qwen3: Path, tmp_path: Path, ray_here: None) -> None:
    loop = Loop(qwen3, tmp_path)
    await loop.handle.start()
    try:
        await loop.load(make_request("unharmed", 1, **CONSTANT))
        for step in (1, 2, 3):
            await loop.train("unharmed", step)
        unharmed = await loop.export("unharmed")
        await loop.load(make_request("a", **CONSTANT))
        await loop.train("a", 1)
        for step, victim in ((2, 1), (3, 0)):
            processes = GroupUnderTest(loop.started[-1]).processes()
            processes[victim].suspend()
            batch = [Doing("batch", f"a at {step}")]
            call = asyncio.ensure_future(loop.handle.call("accumulate", make_groups("a", seed=step), doing=batch))
            done, _ = await asyncio.wait([call], timeout=1.0)
            assert not done  # the other rank waits for this one
            processes[victim].kill()
            with pytest.raises(TrainerLost):
                await call
            assert loop.lost[step - 2 :] == [frozenset(batch)]
            assert await loop.load(make_request("a", **CONSTANT)) == step - 1
            await loop.train("a", step)
            _, alive = psutil.wait_procs(processes, timeout=30)
            assert not alive
        assert await loop.export("a") == unharmed
    finally:
        for group in loop.started:
            group.kill()
