"""Reward functions of the cluster tests. Imports nothing heavy: it runs in the reward process."""

import os
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


def hangs(**_: Any) -> float:
    """Never returns."""
    time.sleep(3600)
    return 0.0


def prints(**_: Any) -> float:
    """Never returns and prints all the while."""
    while True:
        print("x" * 1000)


def eats(**_: Any) -> float:
    """Asks for more memory than a pool lets a reward have."""
    return float(len(bytearray(1 << 40)))


def leaves(**_: Any) -> float:
    """Ends its process behind Python's back."""
    os._exit(3)


def odd(*, label: str, **_: Any) -> Any:
    """What the row's label names, none of it a reward."""
    return {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0", "list": [0.5, 0.5]}[label]
