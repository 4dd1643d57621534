"""Places that are taken and given back: for saves, snapshots and reads of one trainer.

Called by trainer.py; whoever holds a Permit gives it back. Knows nothing of what the places are for.
"""

import asyncio


class Permit:
    """One or more of the places, given back once."""

    def __init__(self, places: asyncio.Semaphore, count: int = 0) -> None:
        self._places = places
        self._count = count

    @classmethod
    async def of(cls, places: asyncio.Semaphore, count: int) -> "Permit":
        """Wait for so many places. Who takes all of them must be the only one to do so."""
        permit = cls(places)
        try:
            for _ in range(count):
                await places.acquire()
                permit._count += 1
        except BaseException:
            permit.release()
            raise
        return permit

    def release(self) -> None:
        """Give back what there is; nothing happens when it is given back or handed over already."""
        count, self._count = self._count, 0
        for _ in range(count):
            self._places.release()

    def hand_over(self) -> "Permit":
        """The same places, for somebody else to give back."""
        count, self._count = self._count, 0
        return Permit(self._places, count)
