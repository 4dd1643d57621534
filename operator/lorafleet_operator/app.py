"""One operator process: takes the lease, lists everything, then watches and reconciles until it ends.

Caller: `__main__`.

main thread, main loop:  lease · workers · pool connections · heartbeat · resync
thread "kopf":           watches, hands events over
threads "http-PORT":     probes and metrics
"""

import asyncio
import contextlib
import logging
import signal
import time
from http.server import ThreadingHTTPServer

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
from lorafleet_operator.settings import Settings
from lorafleet_operator.store import KINDS, Key, Kind, Object, Store, pool_key_of

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_WATCH_ENDED = 1
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
        self._stop = asyncio.Event()
        self._exit_code = EXIT_OK

    async def run(self) -> int:
        """Runs until a signal, a newer operator or the end of the watches.

        Returns:
            The exit code.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, EXIT_OK, f"signal {number.name}")
        servers = self._serve()
        watcher = Watcher(self._access, self._settings.namespace, self._seen, self._watch_ended)
        self._health.watching = lambda: watcher.alive
        tasks = [asyncio.create_task(self._beat())]
        try:
            primed = asyncio.create_task(self._begin())
            await asyncio.wait([primed, asyncio.create_task(self._stop.wait())], return_when=asyncio.FIRST_COMPLETED)
            if primed.done():
                primed.result()
                watcher.start()
                self._health.ready = True
                tasks += [
                    asyncio.create_task(run_workers(self._controller, self._settings.workers)),
                    asyncio.create_task(self._resync()),
                    asyncio.create_task(self._lease.hold(self._fenced)),
                ]
                await self._stop.wait()
            else:
                primed.cancel()
        finally:
            await self._close(watcher, tasks, servers)
        return self._exit_code

    async def _close(
        self, watcher: Watcher, tasks: list[asyncio.Task[None]], servers: list[ThreadingHTTPServer]
    ) -> None:
        if watcher.alive:
            await watcher.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._links.close()
        if self._exit_code != EXIT_FENCED:  # a fenced one leaves the others time: it waits for its own lease to expire
            await self._lease.release()
        await self._kube.close()
        for server in servers:
            await asyncio.to_thread(server.shutdown)
            server.server_close()

    def _serve(self) -> list[ThreadingHTTPServer]:
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
        self._end(EXIT_FENCED, f"fenced: another operator works here: {why}")

    def _watch_ended(self, error: BaseException | None) -> None:
        self._end(EXIT_WATCH_ENDED, f"the watches ended: {error}")

    def _end(self, code: int, why: str) -> None:
        if not self._stop.is_set():
            logger.log(logging.INFO if code == EXIT_OK else logging.ERROR, "ending: %s", why)
            self._exit_code = code
            self._stop.set()


async def run(settings: Settings) -> int:
    """Runs one operator process; see Process.run.

    Raises:
        ConfigError: kubeconfig or service account is not usable.
    """
    return await Process(settings).run()
