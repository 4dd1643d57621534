"""All pool connections: one per AdapterPool with an endpoint, started and stopped as pools come and go.

Caller: the controller. A connection outlives its deleted pool for a short while, so that runs that were deleted with
it (a whole namespace, say) are still deregistered.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.wire import PutAdapter, SlotsView
from lorafleet_operator.errors import Conflict, OperatorError, RuntimeUnavailable
from lorafleet_operator.kube.client import KubeClient
from lorafleet_operator.pool.client import RuntimeClient, open_runtime
from lorafleet_operator.pool.connection import Hooks, PoolConnection
from lorafleet_operator.queue import KeyedQueue
from lorafleet_operator.reconcile import conditions
from lorafleet_operator.reconcile.observed import Object, PoolLink
from lorafleet_operator.settings import Settings
from lorafleet_operator.store import Key, Store, pool_key_of

logger = logging.getLogger(__name__)

EPOCH_TRIES = 10
BLOCKED_RETRY_SECONDS = 5.0
SWEEP_SECONDS = 5.0
"""A run without an object that the runtime still has is deleted again this often."""


@dataclass(slots=True)
class _Entry:
    connection: PoolConnection
    task: asyncio.Task[None]
    uid: str
    spec: Object
    gone_since: float | None = None


class Links:
    """Connections by pool.

    Args:
        store: objects; read for orphans and for which runs to wake.
        queue: woken on changes.
        kube: Secrets, pool status, lists.
        settings: namespace and times.
        on_fenced: called when a newer operator owns a runtime.
        opener: makes a runtime client from URL and token.
    """

    def __init__(
        self,
        store: Store,
        queue: KeyedQueue[Key],
        kube: KubeClient,
        settings: Settings,
        on_fenced: Callable[[str], None],
        opener: Callable[[str, str], RuntimeClient] = open_runtime,
    ) -> None:
        self._store = store
        self._queue = queue
        self._kube = kube
        self._settings = settings
        self._on_fenced = on_fenced
        self._opener = opener
        self._entries: dict[Key, _Entry] = {}
        self._blocked: dict[Key, PoolLink] = {}
        self._sweeps: dict[tuple[Key, str], asyncio.Task[None]] = {}

    def link(self, pool: Key) -> PoolLink | None:
        """What the connection knows now."""
        entry = self._entries.get(pool)
        return entry.connection.link if entry is not None else self._blocked.get(pool)

    def connected(self) -> list[tuple[str, str, bool]]:
        """Namespace, name and readiness of every connection, for metrics."""
        return [(key.namespace, key.name, entry.connection.link.ready) for key, entry in list(self._entries.items())]

    def delete_confirmed(self, pool: Key, uid: str) -> bool:
        """See PoolConnection.delete_confirmed."""
        entry = self._entries.get(pool)
        return entry is not None and entry.connection.delete_confirmed(uid)

    def forget(self, pool: Key, uid: str) -> None:
        """The run's object is gone."""
        entry = self._entries.get(pool)
        if entry is not None:
            entry.connection.forget(uid)

    async def put(self, pool: Key, uid: str, body: PutAdapter) -> None:
        """See PoolConnection.put."""
        await self._connection(pool).put(uid, body)

    async def delete(self, pool: Key, uid: str) -> None:
        """See PoolConnection.delete."""
        await self._connection(pool).delete(uid)

    def _connection(self, pool: Key) -> PoolConnection:
        entry = self._entries.get(pool)
        if entry is None:
            raise RuntimeUnavailable(f"pool {pool.namespace}/{pool.name}: no connection")
        return entry.connection

    def ensure(self, key: Key, pool: Object | None) -> float | None:
        """Starts, restarts or ends the connection as the pool object says.

        Returns:
            Seconds until it should be called again, or None.
        """
        entry = self._entries.get(key)
        self._blocked.pop(key, None)
        if pool is None:
            return self._linger(key, entry)
        spec = pool.get("spec") or {}
        uid = pool["metadata"]["uid"]
        if entry is not None and (entry.uid != uid or entry.spec != spec):
            self._stop(key)
            entry = None
        if entry is None and spec.get("endpoint") is not None:
            owner = self._owner_of(_url(spec))
            if owner is not None:
                message = f"endpoint.url: AdapterPool {owner.namespace}/{owner.name} already adopts {_url(spec)}"
                self._blocked[key] = PoolLink(False, reasons.ENDPOINT_IN_USE, message, time.time())
                return BLOCKED_RETRY_SECONDS
            self._entries[key] = self._start(key, pool, spec)
            self._wake_runs(key)
        elif entry is not None:
            entry.gone_since = None
        return None

    def _linger(self, key: Key, entry: _Entry | None) -> float | None:
        if entry is None:
            for run in self._store.runs_of(key):
                self._queue.add(run)
            return None
        if entry.gone_since is None:
            entry.gone_since = time.monotonic()
        left = entry.gone_since + self._settings.pool_linger_seconds - time.monotonic()
        if left > 0 and self._store.runs_of(key):
            return min(left + 0.05, 1.0)
        logger.info("pool %s/%s is gone; disconnecting", key.namespace, key.name)
        self._stop(key)
        self._wake_runs(key)
        return None

    def _owner_of(self, url: str) -> Key | None:
        """The pool that is connected to `url`; two would fence each other, and with that this operator."""
        return next((key for key, entry in self._entries.items() if entry.connection.url == url), None)

    def _start(self, key: Key, pool: Object, spec: Object) -> _Entry:
        hooks = Hooks(
            token=lambda: self._read_token(key, spec),
            raise_epoch=lambda floor: self._raise_epoch(key, floor),
            uids=lambda: self._uids(key),
            on_change=lambda uids: self._changed(key, uids),
            on_link=lambda: self._wake_runs(key),
            on_fenced=self._on_fenced,
        )
        connection = PoolConnection(_url(spec), spec, hooks, self._settings, self._opener)
        task = asyncio.get_running_loop().create_task(connection.run(), name=f"pool {key.namespace}/{key.name}")
        task.add_done_callback(_report)
        return _Entry(connection, task, pool["metadata"]["uid"], spec)

    def _stop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.task.cancel()

    def tasks(self) -> list[asyncio.Task[None]]:
        """The running connections and deletions."""
        return [*(entry.task for entry in self._entries.values()), *self._sweeps.values()]

    async def close(self) -> None:
        """Ends every connection."""
        tasks = self.tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def rivals_silent(self) -> bool:
        """Whether no newer operator spoke to any of the runtimes lately. Asked after `close`."""
        silent = await asyncio.gather(*(entry.connection.rivals_silent() for entry in self._entries.values()))
        return all(silent)

    async def _read_token(self, key: Key, spec: Object) -> str:
        ref = spec["endpoint"]["tokenSecretRef"]
        return await self._kube.secret_value(key.namespace, ref["name"], ref.get("key", "token"))

    async def _raise_epoch(self, key: Key, floor: int) -> int:
        for _ in range(EPOCH_TRIES):
            pool = await self._kube.get(key.kind, key.namespace, key.name)
            epoch = max(int((pool.get("status") or {}).get("operatorEpoch", 0)), floor) + 1
            version = pool["metadata"]["resourceVersion"]
            body = {"metadata": {"resourceVersion": version}, "status": {"operatorEpoch": epoch}}
            try:
                written = await self._kube.patch(key.kind, key.namespace, key.name, body, subresource="status")
            except Conflict:
                continue
            self._store.put(key, written)
            return epoch
        raise Conflict(f"pool {key.namespace}/{key.name}: status.operatorEpoch changed {EPOCH_TRIES} times meanwhile")

    async def _uids(self, key: Key) -> list[str]:
        listing = await self._kube.list("adapterruns", self._settings.namespace)
        live = []
        for run in listing.items:
            finished = conditions.is_true(run.get("status") or {}, reasons.FINISHED)
            if pool_key_of(run) == key and not finished:
                live.append(run["metadata"]["uid"])
        return sorted(live)

    def _changed(self, key: Key, uids: Iterable[str]) -> None:
        self._queue.add(key)
        for uid in uids:
            run = self._store.run_by_uid(uid)
            if run is not None:
                self._queue.add(run)

    def _wake_runs(self, key: Key) -> None:
        self._queue.add(key)
        for run in self._store.runs_of(key):
            self._queue.add(run)

    def active_runs(self) -> int:
        """Slots in use over all pools."""
        return sum(slots.used for slots in self._slots())

    def queued_runs(self) -> int:
        """Runs that wait for a slot, over all pools."""
        return sum(slots.queued for slots in self._slots())

    def _slots(self) -> list[SlotsView]:
        links = [entry.connection.link for entry in self._entries.values()]
        return [link.listing.slots for link in links if link.listing is not None]

    def sweep(self, key: Key) -> float | None:
        """Deregisters our runs whose objects are gone: no adapter outlives its run. Runs of namespaces that this
        operator does not watch are another's.

        Returns:
            Seconds until it should be called again, or None when there are none.
        """
        link = self.link(key)
        if link is None or not link.ready or link.listing is None:
            return None
        ours = self._settings.namespace
        views = [v for v in link.listing.adapters if v.owner == "operator" and ours in (None, v.namespace)]
        orphans = [view.uid for view in views if self._store.run_by_uid(view.uid) is None]
        for uid in orphans:
            if (key, uid) not in self._sweeps:
                task = asyncio.get_running_loop().create_task(self._delete_orphan(key, uid), name=f"sweep of {uid}")
                task.add_done_callback(_report)
                self._sweeps[key, uid] = task
        return SWEEP_SECONDS if orphans else None

    async def _delete_orphan(self, key: Key, uid: str) -> None:
        logger.warning("pool %s/%s: run %s has no object any more; deregistering it", key.namespace, key.name, uid)
        try:
            await self.delete(key, uid)
        except OperatorError as error:
            logger.warning("pool %s/%s: run %s not deregistered yet: %s", key.namespace, key.name, uid, error)
        finally:
            self._sweeps.pop((key, uid), None)


def _url(spec: Object) -> str:
    return str(spec["endpoint"]["url"]).rstrip("/")


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s ended", task.get_name(), exc_info=task.exception())
