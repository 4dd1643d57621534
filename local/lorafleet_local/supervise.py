"""A small supervisor: runs one command and starts it again when it dies. The one-machine stand-in for a Deployment.

Started by `stack` and `controlplane` with the command line of `supervised`, once per part. SIGTERM goes to the
command's process and ends the supervisor after it. A command that never worked is given up, so that `make up` can show
why; one that worked once is started again however often it dies.
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
_ANY_STATUS = "--any-status"
GRACE_SECONDS = 40.0
"""Time the command has between SIGTERM and SIGKILL."""


def supervised(name: str, argv: list[str], *, any_status: bool = False) -> list[str]:
    """The command line of a supervisor of `argv`.

    Args:
        name: for the log.
        argv: the command.
        any_status: start it again after exit status 2 too; a Go program ends a panic with it.
    """
    options = [_ANY_STATUS] if any_status else []
    return [sys.executable, "-m", "lorafleet_local.supervise", name, *options, "--", *argv]


class Supervisor:
    """Keeps one command running until SIGTERM.

    Args:
        name: for the log.
        argv: the command.
        any_status: no exit status means that a restart would not help.
    """

    def __init__(self, name: str, argv: list[str], any_status: bool = False) -> None:
        self._name = name
        self._argv = argv
        self._any_status = any_status
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Supervise; the exit status is 0 after SIGTERM, 1 when the command was given up."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, self._on_term)
        signal.signal(signal.SIGALRM, self._on_late)
        quick_deaths, worked = 0, False
        while not self._stopping:
            started = time.monotonic()
            status = self._run_once()
            if self._stopping:
                break
            lived = time.monotonic() - started
            worked = worked or lived >= _QUICK_SECONDS
            quick_deaths = quick_deaths + 1 if lived < _QUICK_SECONDS else 0
            self._log(f"ended with {status} after {lived:.1f} s")
            if status == CANNOT_WORK and not self._any_status:
                self._log("gave up: its configuration cannot work, as its last lines say")
                return 1
            if quick_deaths >= _MAX_QUICK_DEATHS and not worked:
                self._log(f"gave up: it ended within {_QUICK_SECONDS:.0f} s {quick_deaths} times in a row")
                return 1
            self._pause(min(_MAX_DELAY_SECONDS, 0.5 * 2 ** min(quick_deaths, _MAX_QUICK_DEATHS + 1)))
        return 0

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))  # a sleep goes on after a signal, so it is cut into short ones

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
    """Parse `NAME [--any-status] -- COMMAND...` and supervise it."""
    head, separator, argv = arguments[:1], arguments[1:2], arguments[2:]
    if any_status := separator == [_ANY_STATUS]:
        separator, argv = arguments[2:3], arguments[3:]
    if separator != ["--"] or not argv:
        print(f"usage: python -m lorafleet_local.supervise NAME [{_ANY_STATUS}] -- COMMAND...", file=sys.stderr)
        return 2
    return Supervisor(head[0], argv, any_status).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
