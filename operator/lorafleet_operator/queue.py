"""A keyed work queue: each key is worked on by one worker at a time, and never lost.

    add(key) ─▶ ready ─▶ get() ─▶ worker ─▶ done(key)
                 ▲                            │ added meanwhile: ready again
    add(key, delay) ─▶ timer ─────────────────┘

Consumes: keys from watches, pool connections and the workers themselves. Produces: keys, without duplicates.
Waits: `get` for a ready key. Unblocked by: `add`, a timer, or `done` of a key that was added while in work.
All calls come from one event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Hashable


class KeyedQueue[K: Hashable]:
    """Deduplicates keys and keeps one worker per key."""

    def __init__(self) -> None:
        self._ready: deque[K] = deque()
        self._queued: dict[K, float] = {}
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._wakeup = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest ready key has waited."""
        return time.monotonic() - self._queued[self._ready[0]] if self._ready else 0.0

    def add(self, key: K, delay: float = 0.0) -> None:
        """Makes a key ready, now or after `delay` seconds; an earlier timer of the key wins."""
        if delay > 0.0:
            self._add_later(key, delay)
            return
        self._drop_timer(key)
        if key in self._working:
            self._again.add(key)
        elif key not in self._queued:
            self._queued[key] = time.monotonic()
            self._ready.append(key)
            self._wakeup.set()

    async def get(self) -> K:
        """The next ready key, which is then in work until `done`."""
        while not self._ready:
            self._wakeup.clear()
            await self._wakeup.wait()
        key = self._ready.popleft()
        del self._queued[key]
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        """Ends the work on a key; one that was added meanwhile is ready again."""
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _add_later(self, key: K, delay: float) -> None:
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + delay:
            return
        self._drop_timer(key)
        self._timers[key] = loop.call_later(delay, self.add, key)

    def _drop_timer(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
