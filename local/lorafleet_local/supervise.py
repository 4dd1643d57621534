"""A small supervisor: runs one command and starts it again when it dies. The one-machine stand-in for a Deployment.

Started by `stack` as `python -m lorafleet_local.supervise NAME -- COMMAND...`, once per supervised part. SIGTERM goes
to the command's process and ends the supervisor after it. A command that dies at once again and again is given up, so
that `make up` can show why.
"""

import signal
import subprocess
import sys
import time
from types import FrameType

_QUICK_SECONDS = 10.0
"""A command that lived shorter than this failed to start."""
_MAX_QUICK_DEATHS = 3
_MAX_DELAY_SECONDS = 5.0
CANNOT_WORK = 2
"""Exit status of a command that a restart would not help: bad usage or configuration."""
GRACE_SECONDS = 40.0
"""Time the command has between SIGTERM and SIGKILL."""


class Supervisor:
    """Keeps one command running until SIGTERM.

    Args:
        name: for the log.
        argv: the command.
    """

    def __init__(self, name: str, argv: list[str]) -> None:
        self._name = name
        self._argv = argv
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Supervise; the exit status is 0 after SIGTERM, 1 when the command was given up."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, self._on_term)
        signal.signal(signal.SIGALRM, self._on_late)
        quick_deaths = 0
        while not self._stopping:
            started = time.monotonic()
            status = self._run_once()
            if self._stopping:
                break
            lived = time.monotonic() - started
            quick_deaths = quick_deaths + 1 if lived < _QUICK_SECONDS else 0
            self._log(f"ended with {status} after {lived:.1f} s")
            if status == CANNOT_WORK:
                self._log("gave up: its configuration cannot work, as its last lines say")
                return 1
            if quick_deaths >= _MAX_QUICK_DEATHS:
                self._log(f"gave up: it ended within {_QUICK_SECONDS:.0f} s {quick_deaths} times in a row")
                return 1
            time.sleep(min(_MAX_DELAY_SECONDS, 0.5 * 2**quick_deaths))
        return 0

    def _run_once(self) -> int:
        self._child = subprocess.Popen(self._argv)
        if self._stopping:  # SIGTERM came between the check and the start
            self._terminate(self._child)
        self._log(f"started pid {self._child.pid}")
        return self._child.wait()

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._child is not None and self._child.returncode is None:
            self._terminate(self._child)

    def _terminate(self, child: "subprocess.Popen[bytes]") -> None:
        child.terminate()
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    def _on_late(self, number: int, frame: FrameType | None) -> None:
        if self._child is not None and self._child.returncode is None:
            self._log(f"did not end within {GRACE_SECONDS:.0f} s of SIGTERM: killing it")
            self._child.kill()

    def _log(self, message: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} supervisor of {self._name}: {message}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Parse `NAME -- COMMAND...` and supervise it."""
    if len(arguments) < 3 or arguments[1] != "--":
        print("usage: python -m lorafleet_local.supervise NAME -- COMMAND...", file=sys.stderr)
        return 2
    return Supervisor(arguments[0], arguments[2:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
