"""The runtime process: registry, HTTP API and driver loop on one event loop."""

import asyncio
import contextlib
import logging
import signal as signals
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import uvicorn

from lorafleet_runtime.config.config import RuntimeConfig
from lorafleet_runtime.errors import ConfigError, Retryable
from lorafleet_runtime.http.app import create_app
from lorafleet_runtime.loop.api_runs import ApiRuns
from lorafleet_runtime.loop.build import build_fleet
from lorafleet_runtime.loop.driver import drive
from lorafleet_runtime.loop.fleet import Fleet
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.loop.journal import Journal
from lorafleet_runtime.loop.operator_epoch import keep_operator_epoch, last_operator_epoch
from lorafleet_runtime.loop.saving import drain
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.metrics import RuntimeMetrics
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.storage import next_boot_epoch, pool_directory

log = logging.getLogger(__name__)

_DRAIN_SECONDS = 20.0
_FLUSH_SECONDS = 2.0


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
    view = FleetView(registry, wake, config.storage_root)
    Journal(fleet.writer, fleet.locate).install()
    folder = pool_directory(config.storage_root, f"{config.pool.namespace}-{config.pool.name}")
    registry.fence(last_operator_epoch(folder))
    api_runs = _api_runs(config, registry, wake, folder / "runs")
    app = create_app(view, lambda: config.token, metrics.collectors, adapter_runs=api_runs)
    server = _Server(
        uvicorn.Config(app, host=config.host, port=config.port, log_level="warning", timeout_graceful_shutdown=2)
    )
    stop = asyncio.Event()
    for number in (signals.SIGTERM, signals.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    web = asyncio.create_task(server.serve(), name="http")
    loop = asyncio.create_task(drive(fleet), name="loop")
    kept = asyncio.create_task(_keep(registry, wake, folder, api_runs), name="records")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    done, _ = await asyncio.wait({web, loop, kept, stopping}, return_when=asyncio.FIRST_COMPLETED)
    code = 0 if stopping in done else _why(done)
    if stopping in done:
        await _drain(fleet)
    server.should_exit = True
    loop.cancel()
    kept.cancel()
    await asyncio.gather(web, loop, kept, return_exceptions=True)
    await asyncio.to_thread(fleet.writer.flush, _FLUSH_SECONDS)
    return code


def _api_runs(config: RuntimeConfig, registry: Registry, wake: Signal, folder: Path) -> ApiRuns | None:
    if not config.adapter_runs_api:
        if any(folder.glob("*.json")):
            log.warning("adapterRunsApi: false: the API-owned runs recorded in %s stay where they are", folder)
        return None
    api_runs = ApiRuns(registry, wake, folder, config.storage_root)
    api_runs.restore()
    return api_runs


async def _keep(registry: Registry, wake: Signal, folder: Path, api_runs: ApiRuns | None) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_operator_epoch(registry, wake, folder))
        if api_runs is not None:
            tasks.create_task(api_runs.keep())


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
