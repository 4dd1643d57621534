"""Puts the parts of a pool together from its configuration; needs an initialised Ray."""

from lorafleet_runtime.config.config import RuntimeConfig
from lorafleet_runtime.loop.actors import Actors
from lorafleet_runtime.loop.engines import EngineSet
from lorafleet_runtime.loop.fleet import Fleet
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.loop.trainer import TrainerHandle
from lorafleet_runtime.loop.workers import WorkerSet
from lorafleet_runtime.metrics import RuntimeMetrics
from lorafleet_runtime.registry.registry import Registry


def build_fleet(config: RuntimeConfig, registry: Registry, signal: Signal, metrics: RuntimeMetrics) -> Fleet:
    """Make the parts of the pool. Nothing has started yet."""
    actors = Actors(config, registry.boot_epoch)
    fleet: Fleet
    trainer = TrainerHandle(actors.trainer, lambda *lost: fleet.on_trainer_lost(*lost), registry.observe_trainer)
    fleet = Fleet(
        config=config,
        registry=registry,
        signal=signal,
        trainer=trainer,
        engines=EngineSet(actors, config.pool.spec.engines.replicas, registry.observe_engine, registry.fail),
        workers=WorkerSet(actors.worker, config.pool.spec.rollout.workers),
        metrics=metrics,
    )
    return fleet
