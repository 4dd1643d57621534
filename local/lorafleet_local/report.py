"""What a user sees while the stack works: one line per finished part, and what is being waited for.

Called by `stack` and `demo`. On a terminal the wait is a live line; elsewhere it is printed when it changes and from
time to time. Decides nothing, and goes on when nobody reads any more.
"""

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.markup import escape

_REPEAT_SECONDS = 15.0


class _Output(io.TextIOBase):
    """Standard output, as far as it can still be written to.

    A terminal that was closed fails every write. What fails then is mostly a clean-up that says what it does.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Rich draws with what it can encode."""
        return self._file.encoding


class Reporter:
    """Progress on one console.

    Args:
        console: where to write; standard output, dead or alive, when None.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=_Output(sys.stdout), highlight=False)  # type: ignore[arg-type]
        self.started = time.monotonic()
        self.phases: dict[str, float] = {}
        """Seconds of each phase, by name."""
        self._status = self.console.status("") if self.console.is_terminal else None
        self._waiting = ""
        self._waiting_at = 0.0

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        self.console.print(f"[dim]{escape(self._clock())}[/dim] {escape(text)}", soft_wrap=True)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def _clock(self) -> str:
        return f"[{self.elapsed():6.1f}s]"

    def waiting(self, text: str) -> None:
        """What is being waited for, as often as the caller likes."""
        if self._status is not None:
            self._status.update(escape(f"{self._clock()} {text}"))
            return
        now = time.monotonic()
        if text != self._waiting or now - self._waiting_at > _REPEAT_SECONDS:
            self._waiting, self._waiting_at = text, now
            self.say(f"  waiting for {text}")

    @contextmanager
    def phase(self, name: str, *, spinner: bool = True) -> Iterator[None]:
        """Time a phase; the live line shows while it lasts, unless the caller has a display of its own."""
        begun = time.monotonic()
        status = self._status if spinner else None
        if status is not None:
            status.update(name)
            status.start()
        try:
            yield
        finally:
            if status is not None:
                status.stop()
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - begun
