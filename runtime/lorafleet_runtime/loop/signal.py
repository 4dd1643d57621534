"""A wake-up that any number of tasks wait on; setting it wakes them all once."""

import asyncio


class Signal:
    """Unlike asyncio.Event there is nothing to clear: each `set` wakes exactly the waiters of that moment."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        """Wake everyone who waits now."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for the next `set`. False when `timeout` seconds pass first."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter, timeout)
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True
