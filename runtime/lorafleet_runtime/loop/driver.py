"""Runs the three tasks of a pool.

    lifecycle   QUEUED ─▶ check ─▶ slot ─▶ load ─▶ first version ─▶ … ─▶ last checkpoint ─▶ slot and engines cleared
    rollout     allowance of each run ─▶ worker ─▶ engine ─▶ reward ─▶ buffer
    train       buffers ─▶ accumulate ─▶ commit ─▶ step ─▶ publish in the background

All three run on one event loop with the HTTP server and share the registry; each sleeps until the signal is set.
"""

import asyncio
import logging

from lorafleet_runtime.loop.fleet import Fleet
from lorafleet_runtime.loop.lifecycle import lifecycle
from lorafleet_runtime.loop.sampling import rollout
from lorafleet_runtime.loop.training import train

log = logging.getLogger(__name__)


async def drive(fleet: Fleet) -> None:
    """Start the trainer and the engines side by side, then run the tasks until one ends, which none should.

    Raises:
        ConfigError: trainer or engine cannot start with this configuration.
    """
    await asyncio.gather(fleet.trainer.start(), fleet.engines.start())
    log.info("trainer and engines are ready; boot epoch %d", fleet.registry.boot_epoch)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lifecycle(fleet), name="lifecycle")
            tasks.create_task(rollout(fleet), name="rollout")
            tasks.create_task(train(fleet), name="train")
    finally:
        await fleet.cancel()
