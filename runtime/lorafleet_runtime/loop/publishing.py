"""Publishing one version of one run: engines first, then new requests, then the old version goes."""

import logging
import time
from typing import Any

from lorafleet_runtime.loop.fleet import Fleet
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.types import Manifest, VersionId

log = logging.getLogger(__name__)


async def publish(fleet: Fleet, run: Run, n: int, manifest: Manifest, buffer: Any) -> None:
    """Put version n on every engine, verified; then switch new requests to it.

    Raises:
        RunError: an engine refused it; the old version keeps serving.
    """
    state = fleet.state(run)
    if state is None:
        return
    version = VersionId(run.uid, state.incarnation, n)

    restarts = run.restarts

    def wanted() -> bool:  # after a trainer's death `load` publishes again: this buffer may be lost with its node
        same = run.incarnation == version.incarnation and run.restarts == restarts
        return same and run.state in ("PENDING", "ACTIVE")

    async with state.publishing:
        if not wanted() or run.weight_version >= n:
            return
        with fleet.metrics.publish_seconds.time():
            live = await fleet.engines.publish(version, manifest, buffer, wanted)
        if not live:
            return  # the run ended: its cleanup waits for this publish and retires what was loaded
        fleet.registry.published(run.uid, n, time.time())
        log.info("run %s: version %d is on every engine", run.uid, n, extra=about(run.uid, version=n))
    retire = fleet.engines.retire_others(run.uid, version, oldest_useful=n - run.spec.max_staleness)
    fleet.spawn(retire, f"retiring versions before {version.name}")
