"""Growing waits between tries, with full jitter so that many clients do not come back together."""

import random


class Backoff:
    """Seconds to wait before the next try.

    Args:
        first: upper bound of the first wait, seconds.
        cap: upper bound of every wait, seconds.
    """

    def __init__(self, first: float = 0.2, cap: float = 5.0) -> None:
        self._first = first
        self._cap = cap
        self._tries = 0

    def next(self) -> float:
        """The next wait, between half and all of first x 2^tries, capped."""
        bound = min(self._first * 2.0 ** min(self._tries, 16), self._cap)
        self._tries += 1
        return bound * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Starts over after a success."""
        self._tries = 0
