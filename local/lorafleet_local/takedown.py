"""Takes a stack down: operator and runtime, controller manager, API server, etcd, then whatever carries the stack's id.

Called by `stack`, under its lock. Needs no state file: the id follows from the folder. A part whose supervisor is dead
gets the time that it would have had from it. Also owns Ray's temporary folders, which it finds by their marker.
"""

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lorafleet_local.processes import StartError, find, stop, sweep
from lorafleet_local.report import Reporter
from lorafleet_local.state import State
from lorafleet_local.supervise import GRACE_SECONDS

_CONTROL_PLANE = ("kube-controller-manager", "kube-apiserver", "etcd")
_STRAY_SECONDS = 3.0
"""For what is left of a part that was stopped."""
_PREFIX, _MARKER = "lf-", "stack"


def make_ray_temp_dir(state: State) -> str:
    """A new folder for Ray, short on purpose: its sockets live below it and their paths end at 107 bytes."""
    made = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    (Path(made) / _MARKER).write_text(state.stack_id)
    return made


def take_down(state: State, reporter: Reporter) -> bool:
    """Stop every process of the stack, keep Ray's logs, write the state; False when nothing lived.

    Raises:
        StartError: a process survived SIGKILL.
    """
    with _uninterrupted():
        parts = [process for process in state.processes if process.name not in _CONTROL_PLANE]
        watched = bool(parts) and all(find(process) is not None for process in parts)
        alive = any(find(process) is not None for process in state.processes)
        if alive:
            reporter.say("stopping")
        killed = stop(parts, GRACE_SECONDS + 5.0)
        # A runtime without its supervisor still has runs to save, and so it has where the state file is lost.
        killed += sweep(state.stack_id, _STRAY_SECONDS if watched else GRACE_SECONDS, but=_CONTROL_PLANE)
        for name in _CONTROL_PLANE:
            killed += stop([process for process in state.processes if process.name == name], 10.0)
        killed += sweep(state.stack_id, 10.0)
        for line in killed:
            reporter.say(f"had to end {line}")
        left = [process for process in state.processes if find(process) is not None]
        if left:
            state.processes, state.ready = left, False
            state.save()
            raise StartError(f"still alive after SIGKILL: {', '.join(p.name for p in left)}; run `make down` again")
        if alive or killed:
            reporter.say("all processes are gone")
        for temporary in _ray_temp_dirs(state):
            _keep_ray_logs(temporary, state.folder / "log" / "ray")
        state.processes, state.ready = [], False
        state.renew_id()
        if state.folder.is_dir() and (state.folder / "state.json").exists():
            state.save()
        return alive or bool(killed)


def _ray_temp_dirs(state: State) -> list[Path]:
    found = []
    for marker in Path("/tmp").glob(f"{_PREFIX}*/{_MARKER}"):
        with suppress(OSError):  # another user's
            if marker.read_text() == state.stack_id:
                found.append(marker.parent)
    return found


def _keep_ray_logs(ray_temp_dir: Path, target: Path) -> None:
    logs = ray_temp_dir / "session_latest" / "logs"
    if logs.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(logs, target, symlinks=True, ignore_dangling_symlinks=True)
    shutil.rmtree(ray_temp_dir, ignore_errors=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a second Ctrl-C not leave half of the processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
