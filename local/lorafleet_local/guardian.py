"""Takes a stack down when the command that it belongs to is gone: killed, crashed, or its terminal closed too fast.

    command ──pipe──▶ guardian      a byte: released; end of file without one: the command is gone, or gave up

Called by `main` for `up` (until it is done) and by the demos. The guardian runs in a session of its own, so that what
kills the command's process group spares it, and it touches the stack only while that still belongs to the command.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lorafleet_local.processes import Process, StartError, this_process, wait_until

_RELEASED = b"."
_GONE_SECONDS = 30.0
"""From the end of the pipe to the end of its process; one that hangs does not keep its stack."""


@contextmanager
def guarded(folder: Path) -> Iterator[Process]:
    """Have a guardian watch this process; yields this process, for `stack.up(owner=...)`.

    A block that ends releases the guardian. One that raises does so only when nothing of the stack lives; else the
    guardian takes the stack down as soon as this process is gone.

    Args:
        folder: state folder of the stack; gets the guardian's log.
    """
    from lorafleet_local import stack

    me = this_process("lorafleet-local")
    log = folder / "log" / "guardian.log"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    reader, writer = os.pipe()  # not inherited: no process of the stack holds it open
    command = [sys.executable, "-m", "lorafleet_local.guardian", str(folder), str(me.pid), str(me.started)]
    with log.open("ab") as output:
        guardian = subprocess.Popen(command, stdin=reader, stdout=output, stderr=output, start_new_session=True)
    os.close(reader)
    released = False
    try:
        try:
            yield me
        except BaseException:
            released = stack.is_down(folder) and _release(folder, me, writer)
            raise
        released = _release(folder, me, writer)
    finally:
        os.close(writer)
        if released:
            guardian.wait()  # else it waits for this process


def _release(folder: Path, me: Process, writer: int) -> bool:
    from lorafleet_local import stack

    stack.disown(folder, me)
    with suppress(BrokenPipeError):  # it was killed; then nobody watches, and nothing is left to do
        os.write(writer, _RELEASED)
    return True


def main(arguments: list[str]) -> int:
    """Watch: FOLDER PID STARTED, the pipe on standard input."""
    folder, owner = Path(arguments[0]), Process("lorafleet-local", int(arguments[1]), int(arguments[2]), "")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1) == _RELEASED:
        return 0
    from lorafleet_local import stack  # late: a guardian that is released costs a few MB and no time
    from lorafleet_local.processes import find
    from lorafleet_local.report import Reporter

    reporter = Reporter()
    try:
        wait_until("the end of the command", lambda: find(owner) is None, _GONE_SECONDS)
        reporter.say(f"the command (pid {owner.pid}) is gone: stopping what it started")
    except StartError:
        reporter.say(f"the command (pid {owner.pid}) left its stack, but does not end: stopping what it started")
    stack.down_if_owned(folder, owner, reporter)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
