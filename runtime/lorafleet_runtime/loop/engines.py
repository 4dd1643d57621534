"""The runtime's end of the engines: adoption, publishing, restart.

A version counts as published when every ready engine has it. An engine becomes ready only when it has every live
version. Both checks run without an await between looking and deciding, so neither can miss the other.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lorafleet_runtime.errors import Retryable
from lorafleet_runtime.remote import call
from lorafleet_runtime.types import EngineStatus, Manifest, VersionId

log = logging.getLogger(__name__)


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
    """All engines of the pool; every live version is on each of them."""

    def __init__(self, spawner: EngineSpawner, replicas: int, observe: Callable[[EngineStatus], None]) -> None:
        self._spawner = spawner
        self._observe = observe
        self._engines = [_Engine(f"engine-{i}") for i in range(replicas)]
        self._live: dict[str, _Live] = {}
        self._any_ready = asyncio.Event()

    async def start(self) -> None:
        """Adopt running engines, start the missing ones, and wait for all."""
        await asyncio.gather(*(self._bring_up(e, adopt=True) for e in self._engines))

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

    async def publish(self, version: VersionId, manifest: Manifest, buffer: Any) -> None:
        """Put a version on every ready engine and verify it there.

        Raises:
            RunError: an engine refused it; the old version keeps serving.
        """
        done: set[int] = set()
        while pending := [e for e in self._engines if e.ready and id(e.actor) not in done]:
            for engine in pending:
                done.add(id(engine.actor))
                await self._publish_one(engine, version, manifest, buffer)
        if not any(e.ready for e in self._engines):
            log.warning("%s: no engine is ready; it is published when one is", version.name)
        self._live[version.uid] = _Live(version, manifest, buffer)

    async def _publish_one(self, engine: _Engine, version: VersionId, manifest: Manifest, buffer: Any) -> None:
        delay = 0.1
        while engine.ready:
            actor = engine.actor
            try:
                await call(actor.publish.remote(version, manifest, buffer))
                return
            except Retryable as error:
                if not await self._alive(engine, actor):
                    return
                log.info("%s on %s: %s; waiting", version.name, engine.name, error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, 2.0)

    async def retire_others(self, uid: str, keep: VersionId | None) -> None:
        """Remove the run's versions other than `keep` from every engine, each once its requests have ended."""
        await asyncio.gather(*(self._retire_on(e, uid, keep) for e in self._engines if e.ready))

    async def _retire_on(self, engine: _Engine, uid: str, keep: VersionId | None) -> None:
        actor = engine.actor
        try:
            status: EngineStatus = await call(actor.list.remote())
            for name in status.adapters:
                if name.startswith(f"{uid}@") and (keep is None or name != keep.name):
                    await call(actor.retire.remote(VersionId.parse(name)))
            await self._refresh_one(engine)
        except Retryable:
            await self._alive(engine, actor)

    async def clear(self, uid: str) -> None:
        """Abort the run's requests and remove all its versions from every engine."""
        self._live.pop(uid, None)
        await self.abort(uid)
        await self.retire_others(uid, None)

    async def abort(self, uid: str) -> None:
        """Abort the run's requests everywhere."""
        for engine in self._engines:
            if engine.ready:
                actor = engine.actor
                try:
                    await call(actor.abort.remote(f"{uid}::"))
                except Retryable:
                    await self._alive(engine, actor)

    async def refresh(self) -> None:
        """Ask every engine what it holds; a dead one is restarted."""
        await asyncio.gather(*(self._refresh_one(e) for e in self._engines if e.ready))

    async def _refresh_one(self, engine: _Engine) -> None:
        actor = engine.actor
        try:
            status: EngineStatus = await call(actor.list.remote())
        except Retryable:
            await self._alive(engine, actor)
            return
        engine.pids, engine.listed_at = status.pids, status.listed_at
        self._tell(engine, status.adapters)

    def _tell(self, engine: _Engine, adapters: tuple[str, ...]) -> None:
        engine.adapters = adapters
        self._observe(EngineStatus(engine.name, engine.ready, adapters, time.time(), engine.pids))

    async def _alive(self, engine: _Engine, actor: Any) -> bool:
        """Whether the engine still answers; a dead one is replaced in the background."""
        if engine.actor is not actor or not engine.ready:
            return False
        try:
            await call(actor.list.remote())
        except Retryable as error:
            log.error("%s died (%s); starting a new one", engine.name, error)
            engine.ready = False
            self._tell(engine, engine.adapters)
            engine.restart = asyncio.create_task(self._replace(engine))
            return False
        return True

    async def check(self, actor: Any) -> None:
        """A caller saw Retryable from this engine: find out whether it is dead."""
        for engine in self._engines:
            if engine.actor is actor:
                await self._alive(engine, actor)

    async def _replace(self, engine: _Engine) -> None:
        delay = 1.0
        while True:
            try:
                await asyncio.to_thread(self._spawner.reap, engine.actor, engine.pids, engine.listed_at)
                self._tell(engine, ())
                await self._bring_up(engine, adopt=False)
            except Exception:
                log.exception("%s did not start; next try in %.0f s", engine.name, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, 60.0)
            else:
                return

    async def _bring_up(self, engine: _Engine, *, adopt: bool) -> None:
        index = self._engines.index(engine)
        engine.actor = (self._spawner.adopt(index) if adopt else None) or self._spawner.spawn(index)
        status: EngineStatus = await call(engine.actor.start.remote())
        engine.pids, engine.listed_at = status.pids, status.listed_at
        for name in status.adapters:  # of an earlier runtime: nobody can ask for them any more
            version = VersionId.parse(name)
            if self._live.get(version.uid) is None or self._live[version.uid].version != version:
                await call(engine.actor.abort.remote(f"{version.uid}::"))
                await call(engine.actor.retire.remote(version))
        await call(engine.actor.probe.remote())
        held: set[VersionId] = set()
        while missing := [live for live in self._live.values() if live.version not in held]:
            for live in missing:
                await call(engine.actor.publish.remote(live.version, live.manifest, live.buffer))
                held.add(live.version)
        engine.in_flight = 0
        engine.ready = True
        self._any_ready.set()
        await self._refresh_one(engine)
        log.info("%s is ready", engine.name)
