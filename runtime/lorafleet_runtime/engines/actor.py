"""The engine as a Ray actor: detached and named, so that it outlives the runtime process and can be adopted again.

Imports no torch and no vllm: both are imported in `start`, after the environment is set.
"""

import os
from collections.abc import Buffer, Sequence
from typing import TYPE_CHECKING, Any

import ray

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.engines.settings import EngineConfig, environment
from lorafleet_runtime.errors import Retryable
from lorafleet_runtime.types import Completion, EngineStatus, Manifest, SamplingParams, VersionId

if TYPE_CHECKING:
    from lorafleet_runtime.engines.engine import Engine

Completions = list[Completion]

RAY_NAMESPACE = "lorafleet"
RESOURCE = "lorafleet_engine"
"""Custom Ray resource of the nodes that engines are placed on."""


class EngineActor:
    """Forwards every call to the Engine; `docs/interfaces.md` section 5 is its contract.

    Args:
        config: how to start the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._engine: Engine | None = None

    async def start(self) -> EngineStatus:
        """Start vLLM, which takes 10 to 170 seconds and blocks this actor; idempotent.

        Raises:
            ConfigError: the base model cannot be read.
        """
        if self._engine is None:
            os.environ.update(environment(self._config))
            from lorafleet_runtime.engines.compat import VllmBackend
            from lorafleet_runtime.engines.engine import Engine
            from lorafleet_runtime.publish.base_model import read_base_model

            config = self._config
            base = read_base_model(config.model, config.revision, config.target_modules)
            self._engine = Engine(config, base, VllmBackend(config, base))
        return await self._engine.list()

    async def publish(self, version: VersionId, manifest: Manifest, buffer: Buffer) -> None:
        """See Engine.publish. Give the buffer as an object reference: Ray moves it to this node once."""
        await self._live().publish(version, manifest, buffer)

    async def generate(
        self, request_id: str, version: VersionId | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Completions:
        """See Engine.generate."""
        return await self._live().generate(request_id, version, prompt_ids, params)

    async def abort(self, prefix: str) -> int:
        """See Engine.abort."""
        return await self._live().abort(prefix)

    async def retire(self, version: VersionId) -> None:
        """See Engine.retire."""
        await self._live().retire(version)

    async def retire_all_except(self, versions: Sequence[VersionId]) -> tuple[VersionId, ...]:
        """See Engine.retire_all_except."""
        return await self._live().retire_all_except(versions)

    async def list(self) -> EngineStatus:
        """See Engine.list."""
        return await self._live().list()

    async def probe(self) -> None:
        """See Engine.probe."""
        await self._live().probe()

    async def shutdown(self) -> None:
        """See Engine.shutdown; kill the actor afterwards."""
        if self._engine is not None:
            await self._engine.shutdown()
            self._engine = None

    def _live(self) -> "Engine":
        if self._engine is None:
            raise Retryable(f"engine {self._config.name}: not started; call start first")
        return self._engine


def engine_options(spec: AdapterPoolSpec, name: str, local: bool) -> dict[str, Any]:
    """Ray options of one engine's actor.

    Args:
        spec: the pool.
        name: of the engine; also the actor's name.
        local: one machine without custom resources; CPUs are shared by explicit thread counts, not by Ray.

    Returns:
        Arguments of `ray.remote(EngineActor).options`.
    """
    options: dict[str, Any] = {
        "name": name,
        "namespace": RAY_NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": 0,  # an engine without its adapters is of no use: whoever restarts it publishes again
        # Every prompt group in flight is one call, and listing, publishing and aborting must never queue behind them.
        "max_concurrency": 1000 + 2 * spec.rollout.max_in_flight_groups,
        "runtime_env": {"env_vars": dict(spec.env)},
    }
    if not local:
        options["resources"] = {RESOURCE: 1}
        options["num_gpus"] = spec.engines.tensor_parallel
    return options


def create_engine(spec: AdapterPoolSpec, config: EngineConfig, local: bool) -> Any:
    """Create the actor; call its `start` before anything else.

    Returns:
        The actor's handle.

    Raises:
        ValueError: an actor of this name lives; find it with find_engine.
    """
    return ray.remote(EngineActor).options(**engine_options(spec, config.name, local)).remote(config)


def find_engine(name: str) -> Any | None:
    """The handle of a living engine actor, or None."""
    try:
        return ray.get_actor(name, namespace=RAY_NAMESPACE)
    except ValueError:
        return None
