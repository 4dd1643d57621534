"""The connection to one pool's runtime: raises the operator epoch, hands over the runs, follows the listing.

    connect: Secret ─▶ GET /v1/pool ─▶ raise operatorEpoch (once per process) ─▶ PUT /v1/pool ─▶ LIST ─▶ ready
    follow:  LIST?after=BOOT,REVISION (long poll) ─▶ changed uids to the queue
             another boot epoch or not synced ─▶ connect again
    no answer: not ready, backoff up to 5 s, connect again
    409: a newer operator owns the runtime ─▶ this process must end

Consumes: the pool object, the uids that own runs, answers of the runtime. Produces: `link` (an immutable snapshot) and
calls of `on_change`. Waits: in the long poll or a backoff. Unblocked by: a change in the runtime, or `stop`.
All on the main event loop. It decides nothing about runs.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.wire import AdapterList, AdapterView, PoolView, PutAdapter, PutPool
from lorafleet_operator.errors import (
    ApiRefused,
    NotFound,
    OperatorError,
    RuntimeFenced,
    RuntimeUnauthorized,
    RuntimeUnavailable,
)
from lorafleet_operator.pool.backoff import Backoff
from lorafleet_operator.pool.client import RuntimeClient, open_runtime
from lorafleet_operator.reconcile.observed import Object, PoolLink, holders_of
from lorafleet_operator.reconcile.pool import config_mismatch
from lorafleet_operator.settings import Settings

logger = logging.getLogger(__name__)

MIN_POLL_GAP = 0.1
"""Seconds between two listings, so that a busy runtime's changes come in batches."""

SILENT_SECONDS = 15.0
"""An operator from which nothing was heard for a long poll and this is taken for gone."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a connection needs from the rest of the operator."""

    token: Callable[[], Awaitable[str]]
    """Reads the bearer token from the pool's Secret."""
    raise_epoch: Callable[[int], Awaitable[int]]
    """Raises operatorEpoch in the pool's status above the given one, by optimistic lock; returns the new one."""
    uids: Callable[[], Awaitable[list[str]]]
    """Lists, freshly from the API server, the uids whose runs this pool must keep."""
    on_change: Callable[[Iterable[str]], None]
    """The views of these uids, or the slots, changed."""
    on_link: Callable[[], None]
    """The link itself changed: connected, disconnected, or another reason why not."""
    on_fenced: Callable[[str], None]
    """A newer operator owns the runtime."""


class PoolConnection:
    """Keeps one runtime connected.

    Args:
        url: base URL of the runtime.
        spec: the AdapterPool's spec, sent along to find differences.
        hooks: the rest of the operator.
        settings: length of a long poll, and the namespace whose runs `hooks.uids` lists.
        opener: makes a client from URL and token.
    """

    def __init__(
        self,
        url: str,
        spec: Object,
        hooks: Hooks,
        settings: Settings,
        opener: Callable[[str, str], RuntimeClient] = open_runtime,
    ) -> None:
        self.url = url
        self.spec = spec
        self._hooks = hooks
        self._poll_seconds = settings.poll_seconds
        self._namespaces = None if settings.namespace is None else [settings.namespace]
        self._opener = opener
        self._client: RuntimeClient | None = None
        self._token: str | None = None
        self._epoch: int | None = None
        self._gone: set[str] = set()
        self.link = PoolLink(False, reasons.SYNCING, f"connecting to {url}", time.time())

    async def run(self) -> None:
        """Connects and follows until cancelled or fenced."""
        backoff = Backoff()
        try:
            while True:
                try:
                    await self._connect()
                    backoff.reset()
                    await self._follow()
                    continue
                except RuntimeFenced as error:
                    self._lose(reasons.FENCED, str(error))
                    self._hooks.on_fenced(f"{self.url}: {error}")
                    return
                except RuntimeUnauthorized as error:
                    self._lose(reasons.UNAUTHORIZED, str(error))
                except RuntimeUnavailable as error:
                    self._lose(reasons.RUNTIME_UNREACHABLE, str(error))
                except OperatorError as error:
                    self._lose(reasons.SYNCING, f"the API server does not answer: {error}")
                except Exception as error:
                    # The loop's boundary: a connection that ends would leave its runs alone for ever.
                    logger.exception("runtime %s: unexpected", self.url)
                    self._lose(reasons.RUNTIME_UNREACHABLE, f"unexpected: {type(error).__name__} {error}")
                await asyncio.sleep(backoff.next())
        finally:
            await self._close()

    async def put(self, uid: str, body: PutAdapter) -> None:
        """PUT of a run; the answered view counts until the next listing.

        Raises:
            SpecRefused, RuntimeUnavailable, RuntimeUnauthorized: see errors.
        """
        self._gone.discard(uid)
        view = await self._guarded(self._ready_client().put_adapter(uid, body))
        self._take_view(view)

    async def delete(self, uid: str) -> None:
        """DELETE of a run; on the answer "gone" a fresh listing is read, which alone is evidence."""
        epoch = self._epoch or 0
        gone = await self._guarded(self._ready_client().delete_adapter(uid, epoch))
        if not gone:
            self._gone.discard(uid)
            return
        boot = self.link.boot_epoch
        listing = await self._guarded(self._ready_client().list(epoch, None, 0.0))
        if listing.boot_epoch == boot:
            self._gone.add(uid)
            self._take_listing(listing)
            self._hooks.on_change([uid])

    def delete_confirmed(self, uid: str) -> bool:
        """A DELETE was answered "gone" in this boot epoch, and the link's listing was asked for after that."""
        return uid in self._gone

    def forget(self, uid: str) -> None:
        """The run's object is gone."""
        self._gone.discard(uid)

    async def rivals_silent(self) -> bool:
        """Whether no newer operator spoke to the runtime lately. Asked after the end of `run`.

        A live one speaks at least once per long poll. A runtime that does not answer obeys nobody.
        """
        if self._token is None or self._epoch is None:
            return True
        client = self._opener(self.url, self._token)
        try:
            view = await client.get_pool()
        except OperatorError as error:
            logger.info("runtime %s: %s", self.url, error)
            return True
        finally:
            await client.close()
        silent = view.operator_silent_seconds
        longest = self._poll_seconds + SILENT_SECONDS
        return view.operator_epoch <= self._epoch or silent is None or silent >= longest

    async def _connect(self) -> None:
        await self._close()
        self._token = await self._read_token()
        client = self._client = self._opener(self.url, self._token)
        view = await client.get_pool()
        if self._epoch is None:
            self._epoch = await self._hooks.raise_epoch(view.operator_epoch)
            logger.info("runtime %s: operator epoch %d, boot epoch %d", self.url, self._epoch, view.boot_epoch)
        uids = await self._hooks.uids()
        body = PutPool(operator_epoch=self._epoch, uids=uids, namespaces=self._namespaces, spec=self.spec)
        view = await self._guarded(client.put_pool(body))
        listing = await self._guarded(client.list(self._epoch, None, 0.0))
        if not listing.synced or listing.boot_epoch != view.boot_epoch:
            raise RuntimeUnavailable(f"{self.url}: not synced after PUT /v1/pool (boot epoch {listing.boot_epoch})")
        self._gone.clear()
        self._become_ready(view, listing)

    async def _read_token(self) -> str:
        try:
            return await self._hooks.token()
        except NotFound as error:
            if self._token is not None:
                return self._token  # the Secret went with its namespace; the runs there still need deregistering
            raise RuntimeUnauthorized(f"endpoint.tokenSecretRef: {error.message}; create it") from error
        except ApiRefused as error:
            raise RuntimeUnauthorized(f"endpoint.tokenSecretRef: {error}") from error

    def _become_ready(self, view: PoolView, listing: AdapterList) -> None:
        synced = f"boot epoch {listing.boot_epoch}, operator epoch {self._epoch}"
        before = self.link
        self.link = PoolLink(
            ready=True,
            reason=reasons.SYNCED,
            message=synced,
            since=before.since if before.ready else time.time(),
            boot_epoch=listing.boot_epoch,
            operator_epoch=self._epoch,
            listing=listing,
            versions=tuple(sorted(view.versions.items())),
            mismatch=config_mismatch(self.spec, view.spec),
        )
        self._hooks.on_link()

    async def _follow(self) -> None:
        while True:
            client, link = self._client, self.link
            if client is None or link.listing is None or self._epoch is None:
                return
            after = (link.listing.boot_epoch, link.listing.revision)
            listing = await self._guarded(client.list(self._epoch, after, self._poll_seconds))
            if listing.boot_epoch != link.boot_epoch or not listing.synced:
                logger.warning("runtime %s: boot epoch %s, was %s", self.url, listing.boot_epoch, link.boot_epoch)
                self.link = replace(self.link, ready=False, reason=reasons.SYNCING, message="the runtime restarted")
                return
            started = time.monotonic()
            self._take_listing(listing)
            # Large listings cost time to read; the gap keeps following at about a tenth of one core.
            await asyncio.sleep(max(MIN_POLL_GAP, 5.0 * (time.monotonic() - started)))

    def _take_listing(self, listing: AdapterList) -> None:
        before = self.link.listing
        if before is not None and listing.boot_epoch == before.boot_epoch and listing.revision < before.revision:
            return  # an older answer that was overtaken
        self.link = replace(self.link, listing=listing)
        changed = _changed_uids(before, listing)
        if changed or before is None or before.slots != listing.slots:
            self._hooks.on_change(changed)

    def _take_view(self, view: AdapterView) -> None:
        listing = self.link.listing
        if listing is None:
            return
        others = [other for other in listing.adapters if other.uid != view.uid]
        listing = listing.model_copy(update={"adapters": [*others, view]})
        self.link = replace(self.link, listing=listing)
        self._hooks.on_change([view.uid])

    def _lose(self, reason: str, message: str) -> None:
        before = self.link
        since = time.time() if before.ready else before.since
        self.link = replace(before, ready=False, reason=reason, message=message, since=since)
        if before.ready or before.reason != reason:
            logger.warning("runtime %s: %s: %s", self.url, reason, message)
            self._hooks.on_link()

    def _ready_client(self) -> RuntimeClient:
        if self._client is None or not self.link.ready:
            raise RuntimeUnavailable(f"{self.url}: {self.link.message}")
        return self._client

    async def _guarded[T](self, call: Awaitable[T]) -> T:
        """Believes a 409 only if the runtime also names a newer operator; ends this operator if so."""
        try:
            return await call
        except RuntimeFenced as error:
            client = self._client
            view = await client.get_pool() if client is not None else None
            if view is not None and self._epoch is not None and view.operator_epoch <= self._epoch:
                raise RuntimeUnavailable(f"{self.url}: 409 without a newer operator: {error}") from error
            self._hooks.on_fenced(f"{self.url}: {error}")
            raise

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _all_uids(listing: AdapterList | None) -> set[str]:
    """Every uid that the runtime knows, or that its trainer or an engine holds."""
    if listing is None:
        return set()
    held = {name.rpartition("@")[0] or name for engine in listing.engines for name in engine.adapters}
    return {view.uid for view in listing.adapters} | held | set(listing.trainer.slots.values())


def _changed_uids(before: AdapterList | None, after: AdapterList) -> set[str]:
    """Uids whose view or holders differ."""
    if before is None:
        return _all_uids(after)
    old, new = {v.uid: v for v in before.adapters}, {v.uid: v for v in after.adapters}
    changed = {uid for uid in old.keys() | new.keys() if old.get(uid) != new.get(uid)}
    if _presence(before) != _presence(after):
        uids = _all_uids(before) | _all_uids(after)
        changed |= {uid for uid in uids if holders_of(before, uid) != holders_of(after, uid)}
    return changed


def _presence(listing: AdapterList) -> tuple[object, ...]:
    engines = tuple((engine.engine, tuple(sorted(engine.adapters))) for engine in listing.engines)
    return (tuple(sorted(listing.trainer.slots.items())), engines)
