"""Remembers on storage which operator owns the pool, so that a restarted runtime still refuses an older one.

It also tells a restarted runtime that there is an operator at all, whose runs hold slots it has not heard of yet.
"""

import asyncio
import json
import logging
from pathlib import Path

from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.storage import write_durably

log = logging.getLogger(__name__)

_FILE = "operator.json"
_RETRY_SECONDS = 5.0


def last_operator_epoch(folder: Path) -> int:
    """The newest operatorEpoch that an earlier runtime heard; 0 when there was none. A damaged file is reported."""
    path = folder / _FILE
    try:
        return int(json.loads(path.read_text())["operatorEpoch"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.error("%s cannot be used (%s); an older operator is not refused until a newer one has spoken", path, error)
        return 0


async def keep_operator_epoch(registry: Registry, signal: Signal, folder: Path) -> None:
    """Write every raise of the epoch, for ever. The raise comes once per start of an operator."""
    written = registry.operator_epoch
    while True:
        pause = None
        epoch = registry.operator_epoch
        if epoch > written:
            try:
                await asyncio.to_thread(write_durably, folder / _FILE, {"operatorEpoch": epoch})
            except OSError as error:
                log.error("operatorEpoch %d not recorded (%s); trying again in %.0f s", epoch, error, _RETRY_SECONDS)
                pause = _RETRY_SECONDS
            else:
                written = epoch
                continue
        await signal.wait(pause)
