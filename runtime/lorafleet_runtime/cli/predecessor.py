"""Ends what a supervisor that was killed left behind: its `serve`, which saves its runs first, and its Ray.

Called by head.py before it starts anything; a runtime whose supervisor lives is left alone. An orphaned `serve` would
keep the port, and its trainer and engines would keep their memory. Knows processes by pid and start time, from the
state file, so a reused pid is left alone.
"""

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import psutil

from lorafleet_runtime.errors import ConfigError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_LINGER_SECONDS = 1.0
"""What descendants get to end by themselves once their root is gone."""


def identity(pid: int) -> dict[str, int | None]:
    """What tells a process apart from a later one of the same pid, for the state file."""
    return {"pid": pid, "started": _start_ticks(pid)}


def refuse_living_head(state_file: Path | None) -> None:
    """Check that no other supervisor runs with this state file.

    Raises:
        ConfigError: one does; names its pid.
    """
    about = _recorded(state_file).get("head")
    process = None if about is None else _find(about)
    if process is not None and process.pid != os.getpid():
        raise ConfigError(
            f"stateFile: {state_file}: the supervisor with pid {process.pid} runs this runtime; "
            "stop it first, or give this one a configuration of its own"
        )


def end_predecessor(state_file: Path | None, serve_seconds: float, ray_seconds: float) -> None:
    """End the processes that the state file names, serve before Ray, and all that they started.

    Args:
        state_file: of this runtime; one that is missing or unreadable names nothing.
        serve_seconds: what serve gets between SIGTERM and SIGKILL.
        ray_seconds: the same, for the Ray head.
    """
    recorded = _recorded(state_file)
    for key, title, grace in (("serve", "serve", serve_seconds), ("ray", "the Ray head", ray_seconds)):
        process = _find(recorded[key]) if key in recorded else None
        if process is None:
            continue
        log.warning("%s (pid %d) outlived its supervisor; ending it", title, process.pid)
        end_tree(process, grace)


def end_tree(process: psutil.Process, grace_seconds: float) -> None:
    """SIGTERM, then SIGKILL for it and for every descendant that it leaves behind; a zombie counts as ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = process.children(recursive=True)
        process.terminate()
        if _running_after([process], grace_seconds):
            log.warning("process %d did not stop in %.0f s; killing it", process.pid, grace_seconds)
        left = _running_after([process, *tree], _LINGER_SECONDS)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        _running_after(left, grace_seconds)
        psutil.wait_procs([process, *tree], timeout=0)  # reaps those that are this process's children


def _running_after(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after so many seconds; returns earlier when none does.

    Not psutil.wait_procs, for which a zombie is there until its parent reaps it; a container's PID 1 may never do so.
    """
    deadline = time.monotonic() + seconds
    while (running := [one for one in processes if _is_running(one)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return running


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _recorded(state_file: Path | None) -> dict[str, Any]:
    if state_file is None:
        return {}
    try:
        state: dict[str, Any] = json.loads(state_file.read_text())
        return {key: about for key, about in state.items() if isinstance(about, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        log.warning(
            "stateFile: %s cannot be read (%s); what an earlier supervisor left is not ended", state_file, error
        )
        return {}


def _find(about: dict[str, int | None]) -> psutil.Process | None:
    pid = about.get("pid")
    if pid is None or _start_ticks(pid) != about.get("started"):
        return None
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


def _start_ticks(pid: int) -> int | None:
    """Kernel start time in clock ticks since boot, whatever the wall clock does; None when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the name before it may hold spaces
