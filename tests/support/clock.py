"""An event loop whose clock jumps to the next timer: limits of seconds are tested in no time, on any machine."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(timeout)
        self.now += max(timeout, 0.0)
        return super().select(0)


def run_jumping(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run to the end; `asyncio.get_running_loop().time()` begins at 0. Nothing in it may wait for a thread."""

    def loop() -> asyncio.AbstractEventLoop:
        clock = _Jumping()
        made = asyncio.SelectorEventLoop(clock)
        made.time = lambda: clock.now  # type: ignore[method-assign]
        return made

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(coroutine)
