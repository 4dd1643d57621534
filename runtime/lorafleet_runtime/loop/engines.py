"""The runtime's end of the engines: adoption, publishing, restart.

A version counts as published when every ready engine has it. An engine becomes ready only when its own listing shows
every live version and nothing else. Both checks run without an await between looking and deciding, so neither can miss
the other. Whatever an engine lists that nobody wants any more is retired by the resync.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.remote import call
from lorafleet_runtime.types import EngineStatus, Manifest, RunFault, VersionId

log = logging.getLogger(__name__)

_START_SECONDS = 900.0
_CALL_SECONDS = 180.0
"""An engine that does not answer for this long is taken for dead. A busy one answers between two of its steps."""


class EngineSpawner(Protocol):
    """How engine actors come to be; the real one is in loop/actors.py."""

    def adopt(self, index: int) -> Any | None:
        """The running engine of that index, or None."""

    def spawn(self, index: int) -> Any:
        """A new engine actor."""

    def reap(self, actor: Any, pids: tuple[int, ...], listed_at: float) -> None:
        """End the actor and the processes that it reported at that time."""


@dataclass(slots=True)
class _Engine:
    name: str
    actor: Any = None
    ready: bool = False
    in_flight: int = 0
    pids: tuple[int, ...] = ()
    listed_at: float = 0.0
    adapters: tuple[str, ...] = ()
    """The last listing; a dead engine keeps it until its processes are reaped."""
    restart: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Live:
    version: VersionId
    manifest: Manifest
    buffer: Any


class EngineSet:
    """All engines of the pool; every live version is on each of them.

    Args:
        spawner: makes, adopts and ends engine actors.
        replicas: how many engines.
        observe: told every listing.
        fail: told of a run whose live version a new engine refuses.
    """

    def __init__(
        self,
        spawner: EngineSpawner,
        replicas: int,
        observe: Callable[[EngineStatus], None],
        fail: Callable[[RunFault], None],
    ) -> None:
        self._spawner = spawner
        self._observe = observe
        self._fail = fail
        self._engines = [_Engine(f"engine-{i}") for i in range(replicas)]
        self._live: dict[str, _Live] = {}
        self._publishing: set[VersionId] = set()
        """On their way to some engine: by `publish`, or to one that lost them."""
        self._settled = Signal()
        """Set when a version is no longer on its way."""
        self._any_ready = asyncio.Event()

    async def start(self) -> None:
        """Adopt running engines, start the missing ones, and wait for all."""
        await asyncio.gather(*(self._adopt_or_start(e) for e in self._engines))

    async def acquire(self) -> Any:
        """The ready engine with the fewest requests; waits for one. Pair with `release`."""
        while True:
            ready = [e for e in self._engines if e.ready]
            if ready:
                engine = min(ready, key=lambda e: e.in_flight)
                engine.in_flight += 1
                return engine.actor
            self._any_ready.clear()
            await self._any_ready.wait()

    def release(self, actor: Any) -> None:
        """The request that `acquire` was for has ended."""
        for engine in self._engines:
            if engine.actor is actor and engine.in_flight:
                engine.in_flight -= 1

    async def publish(
        self, version: VersionId, manifest: Manifest, buffer: Any, wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Put a version on every ready engine and verify it there.

        Args:
            version: its identity.
            manifest: of the buffer.
            buffer: reference to the flat buffer.
            wanted: false once the run has ended; then publishing stops and the version does not become live.

        Returns:
            Whether the version is live now.

        Raises:
            RunError: an engine refused it; the old version keeps serving.
        """
        self._publishing.add(version)
        try:
            done: set[int] = set()
            while wanted() and (pending := [e for e in self._engines if e.ready and id(e.actor) not in done]):
                for engine in pending:
                    done.add(id(engine.actor))
                    await self._publish_one(engine, version, manifest, buffer, wanted)
            if not wanted():
                return False
            self._live[version.uid] = _Live(version, manifest, buffer)
            return True
        finally:
            self._publishing.discard(version)
            self._settled.set()

    async def renew(self, version: VersionId, manifest: Manifest, buffer: Any) -> None:
        """The live version in a new buffer, put where it is missing: the old one may be lost with its node."""
        live = self._live.get(version.uid)
        if live is not None and live.version == version:
            self._live[version.uid] = _Live(version, manifest, buffer)
            await asyncio.gather(*(self._mend(engine) for engine in self._engines if engine.ready))

    async def _publish_one(
        self, engine: _Engine, version: VersionId, manifest: Manifest, buffer: Any, wanted: Callable[[], bool]
    ) -> None:
        delay = 0.1
        while engine.ready and wanted():
            actor = engine.actor
            try:
                await _ask(actor.publish.remote(version, manifest, buffer))
                return
            except Retryable as error:
                if not await self._alive(engine, actor):
                    return
                log.info("%s on %s: %s; waiting", version.name, engine.name, error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, 2.0)

    async def retire_others(self, uid: str, keep: VersionId | None, oldest_useful: int = 0) -> None:
        """Remove the run's versions other than `keep` from every engine, each once its requests have ended.

        Requests of versions below `oldest_useful` are aborted: their samples would be thrown away as stale.
        """
        await asyncio.gather(*(self._retire_on(e, uid, keep, oldest_useful) for e in self._engines if e.ready))

    async def _retire_on(self, engine: _Engine, uid: str, keep: VersionId | None, oldest_useful: int) -> None:
        actor = engine.actor
        try:
            status: EngineStatus = await _ask(actor.list.remote())
            mine = [VersionId.parse(name) for name in status.adapters if name.startswith(f"{uid}@")]
            others = [version for version in mine if version != keep and version not in self._publishing]
            for version in others:
                if keep is not None and (version.incarnation != keep.incarnation or version.n < oldest_useful):
                    await _ask(actor.abort.remote(f"{uid}::{version.incarnation}::v{version.n}::"))
            # Side by side: one slow request must not keep the versions after it resident.
            await asyncio.gather(*(call(actor.retire.remote(version)) for version in others))
            await self._refresh_one(engine)
        except Retryable:
            await self._alive(engine, actor)

    async def clear(self, uid: str) -> None:
        """Abort the run's requests and remove all its versions from every engine, also those still on their way."""
        self._live.pop(uid, None)
        while any(version.uid == uid for version in self._publishing):
            await self._settled.wait()
        self._live.pop(uid, None)
        await self.abort(uid)
        await self.retire_others(uid, None)

    async def abort(self, uid: str) -> None:
        """Abort the run's requests everywhere."""
        for engine in self._engines:
            if engine.ready:
                actor = engine.actor
                try:
                    await _ask(actor.abort.remote(f"{uid}::"))
                except Retryable:
                    await self._alive(engine, actor)

    async def refresh(self) -> None:
        """Ask every engine what it holds; a dead one is restarted."""
        await asyncio.gather(*(self._refresh_one(e) for e in self._engines if e.ready))

    async def resync(self, is_live: Callable[[str], bool]) -> None:
        """Compare every engine's listing with what should be there, and mend the difference.

        What belongs to no live run is retired; a live version that an engine lost is published there again.
        """
        await self.refresh()
        for uid in {name.rpartition("@")[0] for e in self._engines for name in e.adapters}:
            if not is_live(uid):
                log.warning("run %s has ended, but an engine still lists it; retiring it", uid)
                await self.clear(uid)
        for engine in [e for e in self._engines if e.ready]:
            await self._mend(engine)

    async def _mend(self, engine: _Engine) -> None:
        actor = engine.actor
        try:
            status: EngineStatus = await _ask(actor.list.remote())
            for live in list(self._live.values()):
                missing = live.version.name not in status.adapters and live.version not in self._publishing
                if missing and self._live.get(live.version.uid) is live:
                    log.warning("%s lost %s; publishing it again", engine.name, live.version.name)
                    await self._restore(actor, live)
        except Retryable as error:
            if await self._alive(engine, actor):
                log.info("%s: %s; the next resync tries again", engine.name, error)

    async def _refresh_one(self, engine: _Engine) -> None:
        actor = engine.actor
        try:
            status: EngineStatus = await _ask(actor.list.remote())
        except Retryable:
            await self._alive(engine, actor)
            return
        if engine.actor is actor:
            engine.pids, engine.listed_at = status.pids, status.listed_at
            self._tell(engine, status.adapters)

    def _tell(self, engine: _Engine, adapters: tuple[str, ...]) -> None:
        engine.adapters = adapters
        self._observe(EngineStatus(engine.name, engine.ready, adapters, time.time(), engine.pids))

    async def check(self, actor: Any, version: VersionId) -> bool:
        """A request of this version met Retryable on this engine: a dead one is replaced, a lost version put back.

        Returns:
            True when the engine lives and holds the version, so that the failure is the request's own.
        """
        for engine in [e for e in self._engines if e.actor is actor and e.ready]:
            await self._refresh_one(engine)
            if engine.actor is not actor or not engine.ready:
                return False
            if version.name in engine.adapters:
                return True
            await self._mend(engine)
        return False

    async def _alive(self, engine: _Engine, actor: Any) -> bool:
        """Whether the engine still answers; a dead one is replaced in the background, once."""
        if engine.actor is not actor or not engine.ready:
            return False
        try:
            await _ask(actor.list.remote())
        except Retryable as error:
            if engine.actor is actor and engine.ready:  # of all that asked, the first one replaces it
                log.error("%s died (%s); starting a new one", engine.name, error)
                engine.ready = False
                self._tell(engine, engine.adapters)
                engine.restart = asyncio.create_task(self._replace(engine))
            return False
        return True

    async def _replace(self, engine: _Engine) -> None:
        delay = 1.0
        while True:
            try:
                await asyncio.to_thread(self._spawner.reap, engine.actor, engine.pids, engine.listed_at)
                self._tell(engine, ())
                engine.actor = self._spawner.spawn(self._engines.index(engine))
                await self._bring_up(engine)
            except Exception:
                log.exception("%s did not start; next try in %.0f s", engine.name, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, 60.0)
            else:
                return

    async def _adopt_or_start(self, engine: _Engine) -> None:
        index = self._engines.index(engine)
        adopted = self._spawner.adopt(index)
        if adopted is not None:
            engine.actor = adopted
            try:
                await self._bring_up(engine)
                return
            except Exception:
                log.exception("%s cannot be adopted; starting a new one", engine.name)
                await asyncio.to_thread(self._spawner.reap, adopted, engine.pids, engine.listed_at)
        engine.actor = self._spawner.spawn(index)
        await self._bring_up(engine)

    async def _bring_up(self, engine: _Engine) -> None:
        """Start, probe, and bring the listing to exactly the live versions; then take traffic."""
        actor = engine.actor
        status: EngineStatus = await _ask(actor.start.remote(), _START_SECONDS)
        engine.pids, engine.listed_at = status.pids, status.listed_at
        await _ask(actor.probe.remote())
        lost: set[VersionId] = set()
        while True:
            status = await _ask(actor.list.remote())  # raises when it is the engine that is away
            self._tell(engine, status.adapters)
            held = {VersionId.parse(name) for name in status.adapters}
            missing = [live for live in self._live.values() if live.version not in held | lost]
            surplus = held - {live.version for live in self._live.values()}
            if not missing and not surplus:
                break
            for version in surplus:
                await _ask(actor.abort.remote(f"{version.uid}::{version.incarnation}::v{version.n}::"))
                await _ask(actor.retire.remote(version))
            for live in missing:
                try:
                    await self._restore(actor, live)
                except Retryable as error:
                    log.warning("%s: %s has to wait for the next resync: %s", engine.name, live.version.name, error)
                    lost.add(live.version)
        engine.in_flight = 0
        engine.ready = True
        self._any_ready.set()
        self._tell(engine, status.adapters)
        log.info("%s is ready", engine.name)

    async def _restore(self, actor: Any, live: _Live) -> None:
        mine = live.version not in self._publishing
        self._publishing.add(live.version)
        try:
            await _ask(actor.publish.remote(live.version, live.manifest, live.buffer))
        except RunError as error:  # its own run's fault must not keep the engine from the others
            if self._live.get(live.version.uid) is live:
                del self._live[live.version.uid]
            self._fail(error.fault(live.version.uid))
        finally:
            if mine:
                self._publishing.discard(live.version)
            self._settled.set()


async def _ask[T](reference: Awaitable[T], seconds: float = _CALL_SECONDS) -> T:
    """Await an engine's answer; none in time means the engine is away.

    Raises:
        Retryable: no answer in time, or the actor is dead.
    """
    try:
        async with asyncio.timeout(seconds):
            return await call(reference)
    except TimeoutError as error:
        raise Retryable(f"no answer in {seconds:.0f} s") from error
