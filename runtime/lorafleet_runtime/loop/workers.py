"""The runtime's end of the rollout workers: which worker serves which run, and reopening after a restart."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.remote import call
from lorafleet_runtime.types import DatasetInfo, DroppedGroup, PromptGroup, VersionId

log = logging.getLogger(__name__)


class WorkerSet:
    """Rollout workers; each run lives on one of them, by turns."""

    def __init__(self, spawn: Callable[[int], Any], count: int) -> None:
        self._spawn = spawn
        self._actors = [spawn(i) for i in range(count)]
        self._home: dict[str, int] = {}
        self._open: dict[str, Any] = {}
        """The actor that has the run open."""
        self._digests: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._turn = 0

    @property
    def opened(self) -> set[str]:
        """Runs that a worker has open."""
        return set(self._open)

    async def open(self, uid: str, spec: AdapterRunSpec, started: bool) -> DatasetInfo:
        """Open data and reward of a run; one that had started needs its initFrom no more.

        Raises:
            RunError: they are unusable, or the data changed since the run first opened them.
            Retryable: the worker died; a new one is there for the next try.
        """
        async with self._locks.setdefault(uid, asyncio.Lock()):
            return await self._open_here(uid, spec, started)

    async def _open_here(self, uid: str, spec: AdapterRunSpec, started: bool) -> DatasetInfo:
        if uid not in self._home:
            self._home[uid] = self._turn % len(self._actors)
            self._turn += 1
        actor = self._actors[self._home[uid]]
        try:
            info: DatasetInfo = await call(actor.open.remote(uid, spec.to_wire(), started))
        except Retryable:
            self._replace(uid, actor)
            raise
        self._open[uid] = actor  # before the check below: whatever happens, `close` must reach it
        known = self._digests.setdefault(uid, info.digest)
        if known != info.digest:
            text = f"data: the usable rows of {spec.data} changed while the run was training; restore the file"
            raise RunError(reasons.DATA_ERROR, text)
        return info

    async def run_group(
        self, uid: str, spec: AdapterRunSpec, index: int, version: VersionId, engine: Any
    ) -> PromptGroup | DroppedGroup:
        """Sample and score one prompt group.

        Raises:
            RunError: the run's reward failed and its policy is Fail.
            Retryable: engine or worker is away.
        """
        async with self._locks.setdefault(uid, asyncio.Lock()):  # of all groups that find it closed, one opens it
            if self._open.get(uid) is not self._actors[self._home.get(uid, 0)]:
                await self._open_here(uid, spec, started=True)
            actor = self._open[uid]
        try:
            return await call(actor.run_group.remote(uid, index, version, engine))
        except Retryable:
            await self._check(uid, actor)
            raise

    async def close(self, uid: str) -> None:
        """Release the run's data and reward process."""
        async with self._locks.setdefault(uid, asyncio.Lock()):
            actor = self._open.pop(uid, None)
            for known in (self._home, self._digests):
                known.pop(uid, None)
            if actor is not None:
                try:
                    await call(actor.close.remote(uid))
                except Retryable:
                    log.info("run %s: its worker is gone already", uid)
        self._locks.pop(uid, None)

    async def _check(self, uid: str, actor: Any) -> None:
        try:
            await call(actor.ready.remote())
        except Retryable:
            self._replace(uid, actor)

    def _replace(self, uid: str, actor: Any) -> None:
        index = self._home.get(uid)
        if index is not None and self._actors[index] is actor:
            log.error("rollout worker %d died; starting a new one", index)
            self._actors[index] = self._spawn(index)
