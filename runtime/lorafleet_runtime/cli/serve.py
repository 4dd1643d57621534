"""The runtime process: registry, HTTP API and driver loop on one event loop."""

import asyncio
import contextlib
import dataclasses
import logging
import signal as signals
from collections.abc import Iterator
from typing import Any

import ray
import uvicorn

from lorafleet_runtime.config.config import RuntimeConfig
from lorafleet_runtime.errors import ConfigError, Retryable
from lorafleet_runtime.http.app import create_app
from lorafleet_runtime.loop.build import build_fleet
from lorafleet_runtime.loop.driver import drive
from lorafleet_runtime.loop.fleet import Fleet
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.loop.lifecycle import drain
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.metrics import RuntimeMetrics
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.storage import next_boot_epoch

log = logging.getLogger(__name__)

_DRAIN_SECONDS = 12.0


def run(config: RuntimeConfig, ray_address: str) -> int:
    """Serve until SIGTERM (0) or until the loop fails (1, or 2 for a configuration that cannot work)."""
    pool = config.pool
    epoch = next_boot_epoch(config.storage_root, f"{pool.namespace}-{pool.name}")
    log.info("pool %s/%s, boot epoch %d", pool.namespace, pool.name, epoch)
    ray.init(address=ray_address, namespace="lorafleet", log_to_driver=False, logging_level=logging.WARNING)
    return asyncio.run(_serve(config, epoch))


class _Server(uvicorn.Server):
    """Leaves SIGTERM and SIGINT to `_serve`, which stops the loop too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


async def _serve(config: RuntimeConfig, epoch: int) -> int:
    wake = Signal()
    registry = Registry(config.pool.spec, epoch, notify=wake.set)
    metrics = RuntimeMetrics(registry, config.pool.name)
    fleet = build_fleet(config, registry, wake, metrics)
    view = FleetView(registry, wake, lambda uid, step: recent_samples(fleet, uid, step))
    app = create_app(view, lambda: config.token, metrics.collectors, adapter_runs=config.adapter_runs_api)
    server = _Server(
        uvicorn.Config(app, host=config.host, port=config.port, log_level="warning", timeout_graceful_shutdown=2)
    )
    stop = asyncio.Event()
    for number in (signals.SIGTERM, signals.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    web = asyncio.create_task(server.serve(), name="http")
    loop = asyncio.create_task(drive(fleet), name="loop")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    done, _ = await asyncio.wait({web, loop, stopping}, return_when=asyncio.FIRST_COMPLETED)
    code = 0 if stopping in done else _why(done)
    if stopping in done:
        await _drain(fleet)
    server.should_exit = True
    loop.cancel()
    await asyncio.gather(web, loop, return_exceptions=True)
    return code


async def _drain(fleet: Fleet) -> None:
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            await drain(fleet)
    except (TimeoutError, Retryable) as error:
        log.error("not every run was saved within %.0f s (%s); some resume from older steps", _DRAIN_SECONDS, error)


def _why(done: set[asyncio.Task[Any]]) -> int:
    for task in done:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ConfigError):
            raise error
        log.error("the %s task ended; the supervisor starts the runtime again", task.get_name(), exc_info=error)
    return 1


def recent_samples(fleet: Fleet, uid: str, step: int | None) -> list[dict[str, Any]]:
    """Recent prompt groups of a run as JSON: step, version, prompt index, and each response with reward and text."""
    state = fleet.states.get(uid)
    if state is None:
        return []
    return [
        {
            "step": at,
            "index": group.index,
            "version": group.version.n,
            "samples": [
                {**dataclasses.asdict(sample), "text": text}
                for sample, text in zip(group.samples, group.texts or [""] * len(group.samples), strict=True)
            ],
        }
        for at, group in state.recent
        if step is None or at == step
    ]
