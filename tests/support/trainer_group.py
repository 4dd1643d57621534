"""Real trainers of several ranks behind plain blocking calls; they need `local_ray`."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cloudpickle import register_pickle_by_value

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.remote import call
from lorafleet_runtime.trainer.actor import start_trainer
from lorafleet_runtime.trainer.group import TrainerGroup
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Artifact, Cursor, Manifest


def make_group(model: Path, storage: Path, dp: int, tp: int, dtype: str = "float32", **trainer: Any) -> TrainerGroup:
    """A trainer that has not started: 8 slots, one thread per rank; `trainer` holds camelCase fields."""
    spec = {
        "baseModel": {"path": str(model), "dtype": dtype},
        "slots": 8,
        "maxRank": 16,
        "trainer": {"dataParallel": dp, "tensorParallel": tp, "numThreads": 1} | trainer,
        "env": {"TMPDIR": str(storage)},  # snapshots lie there
    }
    storage.mkdir(exist_ok=True)
    pool = AdapterPoolSpec.model_validate(spec)
    return start_trainer(pool, str(model), str(storage), "team/pool", local_resources=True)


class GroupUnderTest:
    """Blocking calls to a trainer, as the loop makes them."""

    def __init__(self, group: TrainerGroup) -> None:
        self.group = group
        self._loop = asyncio.new_event_loop()

    def call(self, method: str, *arguments: Any) -> Any:
        """Rank 0's answer, once all ranks have answered."""
        return self.wait(call(getattr(self.group, method).remote(*arguments)))

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    def export(self, uid: str) -> tuple[Manifest, bytes]:
        manifest, buffer = self.group.export.options(num_returns=2).remote(uid)
        return self.wait(call(manifest)), ray.get(buffer)

    def checkpoint(self, uid: str, directory: Path, cursor: Cursor = Cursor(), partial: bool = False) -> Artifact:
        """Captured, and written."""
        artifact: Artifact = self.call("saved", self.call("capture", uid, str(directory), cursor, partial))
        return artifact

    def each(self, look: Callable[[TrainerRank], Any]) -> list[Any]:
        """`look(rank)` in every rank's process, all at the same time, for what no call of the contract gives."""
        register_pickle_by_value(sys.modules[look.__module__])  # the ranks cannot import tests
        wrapped = lambda actor: look(actor._rank)  # noqa: E731
        return list(ray.get([actor.__ray_call__.remote(wrapped) for actor in self.group.actors]))

    def processes(self) -> list[psutil.Process]:
        """Of all ranks, in order."""
        return [psutil.Process(pid) for pid in ray.get([actor.pid.remote() for actor in self.group.actors])]

    def stop(self) -> None:
        self.group.kill()
        self._loop.close()


@contextlib.contextmanager
def running_group(
    model: Path, storage: Path, dp: int, tp: int, dtype: str = "float32", **trainer: Any
) -> Iterator[GroupUnderTest]:
    """A started trainer."""
    under_test = GroupUnderTest(make_group(model, storage, dp, tp, dtype, **trainer))
    try:
        under_test.call("start")
        yield under_test
    finally:
        under_test.stop()
