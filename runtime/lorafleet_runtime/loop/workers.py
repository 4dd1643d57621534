"""The runtime's end of the rollout workers: which worker serves which run, and reopening after a restart."""

import logging
from collections.abc import Callable
from typing import Any

from lorafleet_runtime.errors import Retryable
from lorafleet_runtime.remote import call
from lorafleet_runtime.types import DatasetInfo, DroppedGroup, PromptGroup, VersionId

log = logging.getLogger(__name__)


class WorkerSet:
    """Rollout workers; each run lives on one of them, by turns."""

    def __init__(self, spawn: Callable[[int], Any], count: int) -> None:
        self._spawn = spawn
        self._actors = [spawn(i) for i in range(count)]
        self._home: dict[str, int] = {}
        self._opened: dict[str, Any] = {}
        """The actor that has the run open."""
        self._turn = 0

    async def open(self, uid: str, spec: dict[str, Any]) -> DatasetInfo:
        """Open data and reward of a run.

        Raises:
            RunError: they are unusable.
            Retryable: the worker died; a new one is there for the next try.
        """
        if uid not in self._home:
            self._home[uid] = self._turn % len(self._actors)
            self._turn += 1
        actor = self._actors[self._home[uid]]
        try:
            info: DatasetInfo = await call(actor.open.remote(uid, spec))
        except Retryable:
            self._replace(uid, actor)
            raise
        self._opened[uid] = actor
        return info

    async def run_group(
        self, uid: str, spec: dict[str, Any], index: int, version: VersionId, engine: Any
    ) -> PromptGroup | DroppedGroup:
        """Sample and score one prompt group.

        Raises:
            RunError: the run's reward failed and its policy is Fail.
            Retryable: engine or worker is away.
        """
        if self._opened.get(uid) is not self._actors[self._home.get(uid, 0)]:
            await self.open(uid, spec)
        actor = self._opened[uid]
        try:
            return await call(actor.run_group.remote(uid, index, version, engine))
        except Retryable:
            await self._check(uid, actor)
            raise

    async def close(self, uid: str) -> None:
        """Release the run's data and reward process."""
        actor = self._opened.pop(uid, None)
        self._home.pop(uid, None)
        if actor is None:
            return
        try:
            await call(actor.close.remote(uid))
        except Retryable:
            log.info("run %s: its worker is gone already", uid)

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
