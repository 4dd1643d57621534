"""Makes the Ray actors of a pool. The only module of the loop that knows their classes."""

import dataclasses
import logging
from typing import Any

import ray

from lorafleet_runtime.config.config import RuntimeConfig
from lorafleet_runtime.engines.actor import create_engine, find_engine
from lorafleet_runtime.engines.reap import reap
from lorafleet_runtime.engines.settings import engine_config
from lorafleet_runtime.rollout.actor import start_rollout_worker
from lorafleet_runtime.trainer.actor import start_trainer
from lorafleet_runtime.trainer.group import TrainerGroup

log = logging.getLogger(__name__)


class Actors:
    """Spawns trainer, engines and rollout workers with the pool's options."""

    def __init__(self, config: RuntimeConfig, boot_epoch: int) -> None:
        self._config = config
        self._spec = config.pool.spec
        self._boot_epoch = boot_epoch
        assert self._spec.base_model.path is not None  # load_config refuses a hub name
        self._model = self._spec.base_model.path
        self._workers = 0
        self._engines = 0

    def adopt(self, index: int) -> Any | None:
        """The engine that an earlier runtime process started, or None."""
        return find_engine(self._engine_name(index))

    def spawn(self, index: int) -> Any:
        """A new engine, with random numbers of its own: no two engines of the pool draw the same samples."""
        name = self._engine_name(index)
        self._engines += 1
        seed = (self._boot_epoch * 10_007 + self._engines) % 2**31
        config = dataclasses.replace(engine_config(self._spec, name), seed=seed)
        return create_engine(self._spec, config, self._config.local_resources)

    def reap(self, actor: Any, pids: tuple[int, ...], listed_at: float) -> None:
        """End the engine actor and the processes that it listed; blocks until they are gone."""
        ray.kill(actor)
        killed = reap(pids, listed_at)
        if killed:
            log.warning("reaped processes %s of a dead engine", killed)

    def trainer(self) -> TrainerGroup:
        """A new trainer, of all its ranks."""
        config = self._config
        pool = f"{config.pool.namespace}/{config.pool.name}"
        return start_trainer(self._spec, self._model, str(config.storage_root), pool, config.local_resources)

    def worker(self, index: int) -> Any:
        """A new rollout worker."""
        self._workers += 1  # a dead actor's name may still be taken, so no name is used twice
        options: dict[str, Any] = {"num_cpus": 0}
        if not self._config.local_resources:
            options["resources"] = {"lorafleet_rollout": 1}
        name = f"rollout-{index}-{self._boot_epoch}.{self._workers}"
        return start_rollout_worker(self._spec, self._model, str(self._config.storage_root), name, **options)

    def _engine_name(self, index: int) -> str:
        return f"{self._config.pool.namespace}.{self._config.pool.name}.engine-{index}"
