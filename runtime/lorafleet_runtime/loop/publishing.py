"""Publishing one version of one run: engines first, then new requests, then the old version goes."""

import time
from typing import Any

from lorafleet_runtime.loop.fleet import Fleet
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.types import Manifest, VersionId


async def publish(fleet: Fleet, run: Run, n: int, manifest: Manifest, buffer: Any) -> None:
    """Put version n on every engine, verified; then switch new requests to it.

    Raises:
        RunError: an engine refused it; the old version keeps serving.
    """
    state = fleet.state(run)
    if state is None:
        return
    version = VersionId(run.uid, state.incarnation, n)
    async with state.publishing:
        if run.incarnation != version.incarnation or run.state not in ("PENDING", "ACTIVE"):
            return
        with fleet.metrics.publish_seconds.time():
            await fleet.engines.publish(version, manifest, buffer)
        if run.incarnation != version.incarnation or run.state not in ("PENDING", "ACTIVE"):
            return
        fleet.registry.published(run.uid, n, time.time())
    fleet.spawn(fleet.engines.retire_others(run.uid, version), f"retiring versions before {version.name}")
