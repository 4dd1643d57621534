"""Ends what a supervisor that was killed left behind: its `serve`, which saves its runs first, and its Ray.

Called by head.py before it starts anything: an orphaned `serve` would keep the port, and its trainer and engines would
keep their memory. Knows processes by pid and start time, from the state file, so a reused pid is left alone.
"""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import psutil

log = logging.getLogger(__name__)

_LINGER_SECONDS = 1.0
"""What descendants get to end by themselves once their root is gone."""


def identity(pid: int) -> dict[str, int | None]:
    """What tells a process apart from a later one of the same pid, for the state file."""
    return {"pid": pid, "started": _start_ticks(pid)}


def end_predecessor(state_file: Path | None, grace_seconds: float) -> None:
    """End the processes that the state file names, serve before Ray, and all that they started.

    Args:
        state_file: of this runtime; one that is missing or unreadable names nothing.
        grace_seconds: what each gets between SIGTERM and SIGKILL.
    """
    for title, about in _recorded(state_file).items():
        process = _find(about)
        if process is None:
            continue
        log.warning("%s (pid %d) outlived its supervisor; ending it", title, process.pid)
        end_tree(process, grace_seconds)


def end_tree(process: psutil.Process, grace_seconds: float) -> None:
    """SIGTERM, then SIGKILL for it and for every descendant that it leaves behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = process.children(recursive=True)
        process.terminate()
        _, deaf = psutil.wait_procs([process], timeout=grace_seconds)
        if deaf:
            log.warning("process %d did not stop in %.0f s; killing it", process.pid, grace_seconds)
        _, left = psutil.wait_procs([process, *tree], timeout=_LINGER_SECONDS)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=grace_seconds)


def _recorded(state_file: Path | None) -> dict[str, Any]:
    if state_file is None:
        return {}
    try:
        state = json.loads(state_file.read_text())
        return {title: state[key] for title, key in (("serve", "serve"), ("the Ray head", "ray")) if key in state}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning(
            "stateFile: %s cannot be read (%s); what an earlier supervisor left is not ended", state_file, error
        )
        return {}


def _find(about: dict[str, int | None]) -> psutil.Process | None:
    pid = about["pid"]
    if pid is None or _start_ticks(pid) != about["started"]:
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
