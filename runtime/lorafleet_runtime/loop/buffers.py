"""Finished prompt groups waiting for the trainer, and how a batch is collected from them. Pure.

Collection is round robin over runs, one group a turn (times the run's weight), with a cursor that persists across
batches, so that a small run never waits behind a big one (DESIGN invariant 12). A slice never takes more groups than
the run still needs for its step.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lorafleet_runtime.types import Cursor, PromptGroup


@dataclass(frozen=True, slots=True)
class Need:
    """What one run can take from its buffer now."""

    remaining: int
    """Groups missing to its next step."""
    incarnation: str
    oldest_version: int
    """Groups of older versions are stale."""
    weight: int = 1
    whole: bool = False
    """Nothing may be taken before all `remaining` groups are there: the run's advantages depend on its whole batch."""


@dataclass(frozen=True, slots=True)
class Collected:
    """One training batch and what was thrown away while collecting it."""

    groups: list[PromptGroup]
    stale: list[PromptGroup]


class Buffers:
    """One FIFO of finished groups per run."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[PromptGroup]] = {}
        self._next = ""
        """Uid whose turn comes next."""

    def add(self, group: PromptGroup) -> None:
        """Append a finished group."""
        self._queues.setdefault(group.uid, deque()).append(group)

    def give_back(self, uid: str, groups: Sequence[PromptGroup]) -> None:
        """Groups that were taken and not trained on: they come first again, in their order."""
        self._queues.setdefault(uid, deque()).extendleft(reversed(groups))

    def count(self, uid: str) -> int:
        """Groups waiting for this run."""
        return len(self._queues.get(uid, ()))

    def first(self, uid: str, count: int) -> list[PromptGroup]:
        """The groups that come next, at most `count`; they stay."""
        return list(self._queues.get(uid, ()))[:count]

    def drop_stale(self, uid: str, need: Need) -> list[PromptGroup]:
        """Throw out every stale group of a run, so that `count` counts fresh ones."""
        queue = self._queues.get(uid, deque())
        stale = [group for group in queue if not _fresh(group, need)]
        if stale:
            self._queues[uid] = deque(group for group in queue if _fresh(group, need))
        return stale

    def clear(self, uid: str) -> int:
        """Drop a run's groups; returns how many."""
        return len(self._queues.pop(uid, ()))

    def samples_ready(self, needs: Mapping[str, Need]) -> int:
        """Samples that a batch could take now."""
        total = 0
        for uid, need in needs.items():
            if not self._waits(uid, need):
                total += sum(len(g.samples) for g in self.first(uid, need.remaining))
        return total

    def _waits(self, uid: str, need: Need) -> bool:
        return need.whole and self.count(uid) < need.remaining

    def collect(self, needs: Mapping[str, Need], max_samples: int) -> Collected:
        """Take groups round robin until `max_samples` or nothing is left to take."""
        taken: list[PromptGroup] = []
        stale: list[PromptGroup] = []
        remaining = {uid: 0 if self._waits(uid, need) else need.remaining for uid, need in needs.items()}
        samples = 0
        order = self._turn_order(needs)
        progress = True
        while progress and samples < max_samples:
            progress = False
            for uid in order:
                for _ in range(needs[uid].weight):
                    group = self._pop(uid, needs[uid], stale) if remaining[uid] > 0 else None
                    if group is None or samples >= max_samples:
                        if group is not None:
                            self._queues[uid].appendleft(group)
                        break
                    taken.append(group)
                    remaining[uid] -= 1
                    samples += len(group.samples)
                    self._next = _after(order, uid)
                    progress = True
        return Collected(taken, stale)

    def _turn_order(self, needs: Mapping[str, Need]) -> list[str]:
        uids = sorted(needs)
        later = [u for u in uids if u >= self._next]
        return later + [u for u in uids if u < self._next]

    def _pop(self, uid: str, need: Need, stale: list[PromptGroup]) -> PromptGroup | None:
        queue = self._queues.get(uid)
        while queue:
            group = queue.popleft()
            if _fresh(group, need):
                return group
            stale.append(group)
        return None


def _fresh(group: PromptGroup, need: Need) -> bool:
    return group.version.incarnation == need.incarnation and group.version.n >= need.oldest_version


def _after(order: list[str], uid: str) -> str:
    return order[(order.index(uid) + 1) % len(order)]


class CursorTracker:
    """Which prompt groups of one run are used up, as a low-water mark and the set above it."""

    def __init__(self, cursor: Cursor) -> None:
        self._low = cursor.low
        self._consumed = set(cursor.consumed)
        self._next = cursor.low
        self._returned: list[int] = []

    def take(self) -> int:
        """The next index to sample, lowest first."""
        if self._returned:
            self._returned.sort(reverse=True)
            return self._returned.pop()
        while self._next in self._consumed:
            self._next += 1
        index = self._next
        self._next += 1
        return index

    def give_back(self, index: int) -> None:
        """The index was not used; it will be taken again."""
        self._returned.append(index)

    def consume(self, index: int) -> None:
        """The index is used up: trained on, or dropped for good. Twice is fine: a lost batch is trained on again."""
        if index >= self._low:
            self._consumed.add(index)
        while self._low in self._consumed:
            self._consumed.remove(self._low)
            self._low += 1

    def release(self, indices: Iterable[int]) -> None:
        """Their groups are to be trained on again. They wait in the buffer, so `take` does not hand them out."""
        released = set(indices)
        lowest = min(released, default=self._low)
        if lowest < self._low:
            self._consumed.update(range(lowest, self._low))
            self._low = lowest
        self._consumed -= released

    @property
    def cursor(self) -> Cursor:
        """The state to checkpoint."""
        return Cursor(self._low, tuple(sorted(self._consumed)))
