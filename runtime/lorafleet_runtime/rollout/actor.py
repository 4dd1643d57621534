"""The rollout worker as a Ray actor.

Called by the loop. Adds nothing to `worker.RolloutWorker` but Ray: engine arguments are actor handles here, and their
errors come back as the runtime's own.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.remote import call
from lorafleet_runtime.types import (
    Completion,
    DatasetInfo,
    DroppedGroup,
    PromptGroup,
    SamplingParams,
    VersionId,
)

_SPARE_CALLS = 64  # room for open and close while every group slot is taken


class RemoteEngine:
    """An engine's actor handle with the engine's own async `generate`."""

    def __init__(self, handle: ActorHandle[Any]) -> None:
        self._handle = handle

    async def generate(
        self, request_id: str, version: VersionId | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """As `engines.Engine.generate`; an engine that died raises Retryable."""
        completions: list[Completion] = await call(
            self._handle.generate.remote(request_id, version, prompt_ids, params)
        )
        return completions


class RolloutActor:
    """`RolloutWorker` for Ray; see there for each call."""

    def __init__(self, pool_spec: Mapping[str, Any], model_path: str, storage_root: str) -> None:
        # Into this process' file of the Ray session: skipped rows, and the first of what rewards print.
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        from lorafleet_runtime.rollout.worker import RolloutWorker  # transformers must not load in the runtime process

        self._worker: RolloutWorker = RolloutWorker(pool_spec, model_path, storage_root)

    async def open(self, uid: str, spec: AdapterRunSpec | Mapping[str, Any], started: bool = False) -> DatasetInfo:
        """Read the run's data and start its reward."""
        return await self._worker.open(uid, spec, started)

    async def run_group(
        self, uid: str, index: int, version: VersionId, engine: ActorHandle[Any]
    ) -> PromptGroup | DroppedGroup:
        """Sample and score one group on the engine behind a handle."""
        return await self._worker.run_group(uid, index, version, RemoteEngine(engine))

    async def close(self, uid: str) -> None:
        """Forget a run."""
        await self._worker.close(uid)

    async def ready(self) -> bool:
        """True once the worker is up."""
        return True


def start_rollout_worker(
    pool_spec: AdapterPoolSpec, model_path: str, storage_root: str, name: str, **options: Any
) -> ActorHandle[Any]:
    """Start a worker actor.

    Args:
        pool_spec: the pool.
        model_path: directory with the base model's tokenizer and configs.
        storage_root: root of the pool's storage.
        name: the actor's name.
        options: further Ray actor options, as num_cpus and resources.
    """
    concurrency = pool_spec.rollout.max_in_flight_groups + _SPARE_CALLS
    environment = {"env_vars": dict(pool_spec.env)}  # reward processes inherit it: PYTHONPATH, keys of judges
    actor = ray.remote(RolloutActor).options(name=name, max_concurrency=concurrency, runtime_env=environment, **options)
    handle: ActorHandle[Any] = actor.remote(pool_spec.to_wire(), model_path, storage_root)
    return handle
