"""A checkpoint on its way, for whoever waits for it. Made by trainer.py (`TrainerHandle.save`), used by saving.py."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lorafleet_runtime.types import Artifact


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint on its way. Who waits for it may give up: it goes on, and keeps its place until it has ended."""

    _captured: asyncio.Task[Any]
    _written: asyncio.Task[Artifact]

    async def captured(self) -> None:
        """Wait until the trainer has copied what is to be saved.

        Raises:
            RunError: the run's own fault.
            TrainerLost: the trainer died.
        """
        await asyncio.shield(self._captured)

    def once_captured(self, then: Callable[[], None]) -> None:
        """Call `then` when the trainer has copied it or will not any more: at once where that is so."""
        if self._captured.done():
            then()
        else:
            self._captured.add_done_callback(lambda _: then())

    async def written(self) -> Artifact:
        """Wait until the checkpoint is durable.

        Raises:
            RunError: StorageError, or the run's own fault.
            TrainerLost: the trainer died, and what was to be saved with it.
        """
        return await asyncio.shield(self._written)

    async def ended(self) -> None:
        """Wait until it is durable or has failed."""
        await asyncio.wait([self._written])
