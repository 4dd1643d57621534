"""One operator process: takes the lease, lists everything, then watches and reconciles until it ends.

Caller: `__main__`.

main thread, main loop:  lease · workers · pool connections · heartbeat · resync
thread "kopf":           watches, hands events over
threads "http-PORT":     probes and metrics

A task or thread that ends by itself ends the process: its supervisor starts a whole one. A fenced operator writes
nothing more and stays until the other one is silent; started again at once, the two would fence each other in turn.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from http.server import ThreadingHTTPServer
from typing import Any

from lorafleet_operator import metrics
from lorafleet_operator.controller import Controller, run_workers
from lorafleet_operator.errors import OperatorError
from lorafleet_operator.handlers.watch import Watcher
from lorafleet_operator.health import Health, serve
from lorafleet_operator.kube.access import load_access
from lorafleet_operator.kube.client import KubeClient, open_client
from lorafleet_operator.kube.lease import Lease
from lorafleet_operator.pool.backoff import Backoff
from lorafleet_operator.pool.links import Links
from lorafleet_operator.queue import KeyedQueue
from lorafleet_operator.rivals import wait_until_alone
from lorafleet_operator.settings import Settings
from lorafleet_operator.store import KINDS, Key, Kind, Object, Store, pool_key_of

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_BROKEN = 1
EXIT_FENCED = 3
HEARTBEAT_SECONDS = 1.0
PING_SECONDS = 15.0


class Process:
    """Wires the parts together and owns their lifetimes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._access = load_access(settings.kubeconfig)
        self._kube: KubeClient = open_client(self._access)
        self._lease = Lease(self._kube, settings.lease_home, settings.identity, settings.lease_seconds)
        self._kube.may_write = self._lease.check
        self._store = Store()
        self._queue: KeyedQueue[Key] = KeyedQueue()
        self._links = Links(self._store, self._queue, self._kube, settings, self._fenced)
        self._controller = Controller(self._store, self._queue, self._kube, settings, self._links)
        self._health = Health()
        self._health.standing_by = lambda: self._lease.standing_by
        self._stop = asyncio.Event()
        self._signalled = asyncio.Event()
        self._exit_code = EXIT_OK

    async def run(self) -> int:
        """Runs until a signal, a newer operator or the end of the watches or of a task.

        Returns:
            The exit code.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, number)
        servers = self._serve()
        watcher = Watcher(self._access, self._settings.namespace, self._seen, self._watch_ended)
        self._health.watching = lambda: watcher.alive
        beat = self._background("heartbeat", self._beat())
        tasks: list[asyncio.Task[None]] = []
        try:
            if await _unless(self._stop, self._begin()):
                watcher.start()
                self._health.ready = True
                tasks = [
                    self._background("workers", run_workers(self._controller, self._settings.workers)),
                    self._background("resync", self._resync()),
                    self._background("lease", self._lease.hold(self._fenced)),
                ]
                await self._stop.wait()
        finally:
            await _cancel(tasks)
            await self._links.close()
            if watcher.alive:
                await watcher.stop()
            await self._hold_back()
            await _cancel([beat])
            await self._close(servers)
        return self._exit_code

    def _background(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task without which the operator is of no use: its end ends the process."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.error("task %s died", task.get_name(), exc_info=error)
        self._end(EXIT_BROKEN, f"task {task.get_name()} ended: {error!r}")

    async def _hold_back(self) -> None:
        """A fenced operator waits, without writing, until it would not take the others' work away again."""
        if self._exit_code == EXIT_FENCED:
            logger.error(
                "fenced: nothing more is written; waiting until the other operator is silent. Stop one of the two"
            )
            waiting = wait_until_alone(self._lease, self._links, self._settings.lease_seconds)
            await _unless(self._signalled, waiting)

    async def _close(self, servers: list[ThreadingHTTPServer]) -> None:
        try:
            await self._lease.release()
        except Exception:
            # The end of the process: whatever broke it may break this too, and the lease expires by itself.
            logger.exception("the lease was not released")
        await self._kube.close()
        for server in servers:
            await asyncio.to_thread(server.shutdown)
            server.server_close()

    def _serve(self) -> list[ThreadingHTTPServer]:
        metrics.LEADING.set_function(lambda: float(self._lease.held))
        with contextlib.suppress(KeyError):
            metrics.REGISTRY.register(metrics.RunCollector(self._store, self._links.connected))
        ports = sorted({self._settings.metrics_port, self._settings.health_port} - {0})
        return [serve(self._settings.host, port, self._health, metrics.REGISTRY) for port in ports]

    async def _begin(self) -> None:
        await self._lease.acquire()
        await self._prime()

    async def _prime(self) -> None:
        """Lists pools and runs before anything is decided: no run may be missing from the first PUT /v1/pool."""
        backoff = Backoff(0.5, 5.0)
        while True:
            try:
                for kind in KINDS:
                    await self._list(kind)
            except OperatorError as error:
                logger.error("cannot list yet, trying again: %s", error)
                await asyncio.sleep(backoff.next())
            else:
                return

    async def _list(self, kind: Kind) -> None:
        listing = await self._kube.list(kind, self._settings.namespace)
        self._store.replace_all(kind, listing.items, listing.version)
        for key in self._store.keys(kind):
            self._queue.add(key)

    def _seen(self, kind: Kind, event: str | None, obj: Object) -> None:
        """One watch event, on the main loop."""
        meta = obj["metadata"]
        key = Key(kind, meta["namespace"], meta["name"])
        if event == "DELETED":
            removed = self._store.remove(key, meta["uid"])
            if removed is not None and kind == "adapterruns":
                self._queue.add(pool_key_of(removed))
        elif not self._store.put(key, obj):
            return
        self._queue.add(key)
        if kind == "adapterpools":
            for run in self._store.runs_of(key):
                self._queue.add(run)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            try:
                for kind in KINDS:
                    await self._list(kind)
            except OperatorError as error:
                logger.warning("resync: %s", error)

    async def _beat(self) -> None:
        last_ping = 0.0
        while True:
            expected = time.monotonic() + HEARTBEAT_SECONDS
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            self._health.heartbeat = now
            metrics.LOOP_LAG.set(max(now - expected, 0.0))
            metrics.QUEUE_LENGTH.set(len(self._queue))
            metrics.QUEUE_OLDEST.set(self._queue.oldest_seconds)
            if now - last_ping >= PING_SECONDS:
                last_ping = now
                with contextlib.suppress(OperatorError):
                    await self._kube.ping(self._settings.namespace)
            metrics.API_LAST_SUCCESS.set(self._kube.last_success or 0.0)

    def _fenced(self, why: str) -> None:
        self._lease.give_up()
        self._health.ready, self._health.fenced = False, why
        self._end(EXIT_FENCED, f"fenced: another operator works here: {why}")

    def _watch_ended(self, error: BaseException | None) -> None:
        self._end(EXIT_BROKEN, f"the watches ended: {error}")

    def _signal(self, number: signal.Signals) -> None:
        self._signalled.set()
        self._end(EXIT_OK, f"signal {number.name}")

    def _end(self, code: int, why: str) -> None:
        if not self._stop.is_set():
            logger.log(logging.INFO if code == EXIT_OK else logging.ERROR, "ending: %s", why)
            self._exit_code = code
            self._stop.set()


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Does `work`, or cancels it once `event` is set. Whether it was done."""
    task, stop = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        await _cancel([task, stop])


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run(settings: Settings) -> int:
    """Runs one operator process; see Process.run.

    Raises:
        ConfigError: kubeconfig or service account is not usable.
    """
    return await Process(settings).run()
