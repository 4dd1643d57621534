"""Kills the processes that a dead engine actor left behind.

Called by whoever restarts an engine, on the engine's node: vLLM's engine process watches no parent and outlives an
actor that was killed, with its memory. Kills only processes that the engine itself listed.
"""

from collections.abc import Iterable

import psutil


def process_tree() -> tuple[int, ...]:
    """This process and its children, all the way down."""
    me = psutil.Process()
    return (me.pid, *(child.pid for child in me.children(recursive=True)))


def reap(pids: Iterable[int], listed_at: float, timeout_seconds: float = 10.0) -> tuple[int, ...]:
    """Kill the listed processes that still run, and wait until they are gone.

    Args:
        pids: EngineStatus.pids.
        listed_at: EngineStatus.listed_at, Unix seconds. A process that was made later took over a freed number and is
            left alone; so is the caller itself.
        timeout_seconds: how long to wait for the kernel to remove them.

    Returns:
        The numbers that were killed.

    Raises:
        TimeoutError: a process is still there.
    """
    killed = []
    for pid in set(pids) - {psutil.Process().pid}:
        try:
            process = psutil.Process(pid)
            if process.create_time() <= listed_at:
                process.kill()
                killed.append(process)
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(killed, timeout=timeout_seconds)
    stuck = [p.pid for p in alive if _running(p)]
    if stuck:
        raise TimeoutError(f"processes {stuck}: alive {timeout_seconds} s after SIGKILL; check for a hung device")
    return tuple(sorted(p.pid for p in killed))


def _running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
