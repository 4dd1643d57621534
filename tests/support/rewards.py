"""Reward functions of the cluster tests. Imports nothing heavy: it runs in the reward process."""

import time
from typing import Any


def spread(*, response: str, **_: Any) -> float:
    """A reward that differs between samples, so that there is a gradient."""
    return (sum(response.encode()) % 97) / 97.0


def broken(**_: Any) -> float:
    """Always raises."""
    raise RuntimeError("this reward is broken")


def slow(*, response: str, **_: Any) -> float:
    """Like spread, but a run with it lasts long enough to be acted on."""
    time.sleep(0.15)
    return spread(response=response)
