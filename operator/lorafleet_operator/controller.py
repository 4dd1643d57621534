"""Carries plans out: takes keys from the queue, asks the pure planner, does what the plan says, in its order.

    watches, lists ─▶ store ─┐
    pool connections ────────┴▶ queue ─▶ worker: observe ─▶ plan ─▶ finalizer · status · PUT | DELETE · Events

Consumes: keys. Produces: writes to the API server, calls to runtimes, timers in the queue. Waits: on the queue.
Unblocked by: watch events, changes in a runtime's listing, timers. All on the main event loop; one worker per key.
Safe to be killed at any await: every step can be repeated, and the next process decides from what is stored.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import partial

from lorafleet_api.v1alpha1 import names, reasons
from lorafleet_operator import metrics
from lorafleet_operator.errors import Conflict, Invalid, NotFound, OperatorError, RuntimeFenced, SpecRefused
from lorafleet_operator.kube.client import KubeClient
from lorafleet_operator.pool.backoff import Backoff
from lorafleet_operator.pool.links import Links
from lorafleet_operator.queue import KeyedQueue
from lorafleet_operator.reconcile import conditions
from lorafleet_operator.reconcile.observed import Object, Observed, Refusal
from lorafleet_operator.reconcile.plan import Notice, Plan
from lorafleet_operator.reconcile.pool import pool_status
from lorafleet_operator.reconcile.run import plan_run
from lorafleet_operator.reconcile.throttle import Intervals, is_place, write_in
from lorafleet_operator.settings import Settings
from lorafleet_operator.status.writer import StatusWriter, Turns
from lorafleet_operator.store import Key, Store, pool_key_of

logger = logging.getLogger(__name__)

POOL_PROGRESS_SECONDS = 2.0
FINALIZER_TRIES = 8
REJECTED_RETRY_SECONDS = 30.0
BUSY_RETRY_SECONDS = 1.0
"""A place in the queue lets everything else be written first."""


class Controller:
    """Reconciles every key that the queue hands out."""

    def __init__(
        self,
        store: Store,
        queue: KeyedQueue[Key],
        kube: KubeClient,
        settings: Settings,
        links: Links,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._queue = queue
        self._kube = kube
        self._settings = settings
        self._links = links
        self._clock = clock
        self._writer = StatusWriter(kube, settings.writes_per_second)
        self._refusals: dict[str, Refusal] = {}
        self._written: dict[Key, float] = {}  # monotonic: a step of the wall clock must not hold up progress
        self._places: Turns[Key] = Turns(settings.places_per_second)
        self._backoff: dict[Key, Backoff] = {}

    async def work(self) -> None:
        """One worker: reconciles keys until cancelled."""
        while True:
            key = await self._queue.get()
            started = time.monotonic()
            try:
                again_in = await self.reconcile(key)
                self._backoff.pop(key, None)
                metrics.RECONCILES.labels(key.kind, "ok").inc()
                if again_in is not None:
                    self._queue.add(key, again_in)
            except OperatorError as error:
                self._retry(key, f"{type(error).__name__}: {error}")
            except Exception:
                logger.exception("%s: reconciling failed", key)
                self._retry(key, "unexpected")
            finally:
                metrics.RECONCILE_SECONDS.labels(key.kind).observe(time.monotonic() - started)
                self._queue.done(key)

    def _retry(self, key: Key, why: str) -> None:
        delay = self._backoff.setdefault(key, Backoff(0.5, 15.0)).next()
        logger.warning("%s %s/%s: again in %.1f s: %s", key.kind, key.namespace, key.name, delay, why)
        metrics.RECONCILES.labels(key.kind, "error").inc()
        self._queue.add(key, delay)

    async def reconcile(self, key: Key) -> float | None:
        """Does for one object what is to be done now.

        Returns:
            Seconds until it should be looked at again though nothing changed, or None.
        """
        obj = self._store.get(key)
        if key.kind == "adapterpools":
            return await self._reconcile_pool(key, obj)
        if obj is None:
            self._written.pop(key, None)
            self._places.drop(key)
            return None
        return await self._reconcile_run(key, obj)

    async def _reconcile_pool(self, key: Key, pool: Object | None) -> float | None:
        waits = [self._links.ensure(key, pool), self._links.sweep(key)]
        if pool is not None:
            waits.append(await self._write_status(key, pool, partial(self._pool_status, key), POOL_PROGRESS_SECONDS))
        return _earliest(waits)

    def _pool_status(self, key: Key, pool: Object) -> Object:
        return pool_status(pool, self._links.link(key), self._clock())

    def _observe(self, run: Object) -> Observed:
        pool_key = pool_key_of(run)
        uid = run["metadata"]["uid"]
        pool = self._store.get(pool_key)
        return Observed(
            run=run,
            pool=pool,
            link=self._links.link(pool_key),
            refusal=self._refusals.get(uid),
            delete_confirmed=self._links.delete_confirmed(pool_key, uid),
            now=self._clock(),
        )

    def _plan(self, run: Object) -> Plan:
        return plan_run(self._observe(run), self._settings)

    async def _reconcile_run(self, key: Key, run: Object) -> float | None:
        plan = self._plan(run)
        if plan.add_finalizer:
            await self._set_finalizer(key, run, present=True)
            return 0.0
        waits = [plan.again_in]
        if plan.status is not None:
            waits.append(await self._write_status(key, run, lambda fresh: self._plan(fresh).status, self._interval()))
        if _flags(run) != _flags(self._store.get(key)):
            await self._record(run, plan.notices)
            waits.append(0.0)
        elif plan.remove_finalizer:
            await self._record(run, plan.notices)
        await self._call_runtime(run, plan)
        if plan.remove_finalizer:
            await self._set_finalizer(key, self._store.get(key) or run, present=False)
        if plan.delete_object:
            logger.info("%s/%s: ttlSecondsAfterFinished passed; deleting the object", key.namespace, key.name)
            await self._kube.delete(key.kind, key.namespace, key.name, run["metadata"]["uid"])
        return _earliest(waits)

    def _interval(self) -> float:
        """DESIGN: at most one progress write per run per max(15 s, active runs / 10 per second)."""
        return max(self._settings.progress_seconds, self._links.active_runs() / 10.0)

    def _place_interval(self) -> float:
        """A place in the queue alone is written once a minute per run; in a short queue, where people compare places,
        as often as `places_per_second` lets all of them. In a long one, `Turns` makes it rarer than once a minute."""
        all_once = self._links.queued_runs() / self._settings.places_per_second
        return min(self._settings.queue_position_seconds, max(1.0, all_once))

    async def _write_status(
        self, key: Key, obj: Object, compute: Callable[[Object], Object | None], interval: float
    ) -> float | None:
        """Writes the status if it differs and its time has come; else says when that will be."""
        desired = compute(obj)
        if desired is None:
            return None
        since = time.monotonic() - self._written.get(key, -math.inf)
        stored = obj.get("status") or {}
        intervals = Intervals(interval, self._place_interval(), self._settings.queue_position_seconds)
        wait = write_in(stored, desired, since, intervals)
        if wait == 0.0 and is_place(stored, desired):
            wait = BUSY_RETRY_SECONDS if self._writer.busy else self._places.wait(key, time.monotonic())
        elif wait is None or wait == 0.0:
            self._places.drop(key)
        if wait is None or wait > 0.0:
            return wait
        try:
            written = await self._writer.write(key.kind, obj, compute)
        except NotFound:
            self._store.remove(key, obj["metadata"]["uid"])
            return None
        except Invalid:
            return REJECTED_RETRY_SECONDS  # already loud; the rest of the plan goes on
        self._written[key] = time.monotonic()
        self._store.put(key, written)
        return None

    async def _call_runtime(self, run: Object, plan: Plan) -> None:
        pool_key, uid = pool_key_of(run), run["metadata"]["uid"]
        try:
            if plan.put is not None:
                await self._links.put(pool_key, uid, plan.put)
                self._refusals.pop(uid, None)
            elif plan.delete:
                await self._links.delete(pool_key, uid)
        except SpecRefused as refusal:
            generation = plan.put.generation if plan.put is not None else 0
            self._refusals[uid] = Refusal(generation, refusal.reason, refusal.message)
            self._queue.add(Key.of_run(run))
        except RuntimeFenced:
            logger.info("fenced; no more calls")

    async def _record(self, run: Object, notices: tuple[Notice, ...]) -> None:
        for notice in notices:
            if notice.reason == reasons.FORCE_RELEASED:
                metrics.FORCED_RELEASES.inc()
            about: Object | None = run
            if notice.on_pool:
                about = self._store.get(pool_key_of(run))
            if about is not None:
                await self._writer.event(about, notice.kind, notice.reason, notice.message)

    async def _set_finalizer(self, key: Key, run: Object, *, present: bool) -> None:
        """Adds or removes our finalizer, guarded by resourceVersion so that no other writer's is lost."""
        for _ in range(FINALIZER_TRIES):
            meta = run["metadata"]
            others = [name for name in meta.get("finalizers") or [] if name != names.FINALIZER]
            wanted = [*others, names.FINALIZER] if present else others
            body = {"metadata": {"resourceVersion": meta["resourceVersion"], "uid": meta["uid"], "finalizers": wanted}}
            try:
                written = await self._kube.patch(key.kind, key.namespace, key.name, body)
            except NotFound:
                self._drop(key, run)
                return
            except Conflict:
                run = await self._read_again(key, run)
                continue
            if not present and "deletionTimestamp" in meta and not wanted:
                self._drop(key, run)
            else:
                self._store.put(key, written)
            return
        raise Conflict(f"{key.namespace}/{key.name}: metadata changed {FINALIZER_TRIES} times meanwhile")

    async def _read_again(self, key: Key, run: Object) -> Object:
        fresh = await self._kube.get(key.kind, key.namespace, key.name)
        if fresh["metadata"]["uid"] != run["metadata"]["uid"]:
            raise Conflict(f"{key.namespace}/{key.name}: another object has this name now")
        self._store.put(key, fresh)
        return fresh

    def _drop(self, key: Key, run: Object) -> None:
        uid = run["metadata"]["uid"]
        self._store.remove(key, uid)
        self._refusals.pop(uid, None)
        self._written.pop(key, None)
        self._links.forget(pool_key_of(run), uid)


async def run_workers(controller: Controller, count: int) -> None:
    """Runs `count` workers until cancelled."""
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(controller.work())


def _flags(obj: Object | None) -> list[tuple[str, str, str]]:
    return conditions.flags((obj or {}).get("status") or {})


def _earliest(waits: Iterable[float | None]) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)
