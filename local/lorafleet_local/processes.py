"""Background processes of one stack: start them, know them again after a restart of this program, stop exactly those.

Called by `controlplane`, `stack` and `supervise`. A process is known by pid and kernel start time, so a reused pid is
never touched. Every process also carries the stack's id in its environment: that finds what detached itself from its
parent (Ray's daemons) or was started in the instant before this program was killed. Never matches by name.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

STACK_ENV = "LORAFLEET_STACK_ID"
_PART_ENV = "LORAFLEET_STACK_PART"
"""Name of the part, for what outlived the process that started it."""
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.05
_LINGER_SECONDS = 3.0
"""What descendants get to end by themselves once their root is gone."""


class StartError(Exception):
    """A part of the stack did not start; the message holds the end of its log and the log's path."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that this stack started."""

    name: str
    pid: int
    started: int
    """Kernel start time in clock ticks since boot; tells a reused pid apart, whatever the wall clock does."""
    log: str


def start(name: str, argv: list[str], log: Path, stack_id: str, env: Mapping[str, str] | None = None) -> Process:
    """Start `argv` in a session of its own, output appended to `log`.

    Args:
        name: for messages and the state file.
        argv: command line.
        log: made with its folder when it is missing.
        stack_id: marks the process and all that it starts.
        env: added to this program's environment.

    Raises:
        OSError: the command cannot be executed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **(env or {}), STACK_ENV: stack_id, _PART_ENV: name}
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment
        )
    return Process(name, child.pid, _start_ticks(child.pid) or 0, str(log))


def this_process(name: str) -> Process:
    """This program itself."""
    return Process(name, os.getpid(), _start_ticks(os.getpid()) or 0, "")


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends.

    Args:
        number: the signal.
        parent: pid that the parent must have; with another one it has ended already, and the signal is sent now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def find(process: Process) -> psutil.Process | None:
    """The live process, or None when it ended (a zombie counts as ended) or its pid belongs to another."""
    if _start_ticks(process.pid) != process.started:
        return None
    try:
        found = psutil.Process(process.pid)
        return None if found.status() == psutil.STATUS_ZOMBIE else found
    except psutil.NoSuchProcess:
        return None


def stop(processes: Iterable[Process], grace_seconds: float) -> list[str]:
    """SIGTERM the processes, wait for them, then SIGKILL what is left of them and of their descendants.

    Returns:
        Names or command lines of what had to be killed.
    """
    roots = [live for process in processes if (live := find(process)) is not None]
    family = _with_descendants(roots)
    for root in roots:
        _signal(root, signal.SIGTERM)
    _wait_gone(roots, grace_seconds)
    _wait_gone(family, _LINGER_SECONDS)
    killed = [f"{p.pid} {_describe(p)}" for p in family if _is_running(p)]
    for survivor in family:
        _signal(survivor, signal.SIGKILL)
    _wait_gone(family, 5.0)
    return killed


def sweep(stack_id: str, grace_seconds: float, but: Collection[str] = ()) -> list[str]:
    """Stop everything that still carries the stack's id, whoever its parent is now.

    Args:
        stack_id: of the stack.
        grace_seconds: from SIGTERM to SIGKILL.
        but: names of parts that are left alone.

    Returns:
        Command lines of what was found.
    """
    found = _with_descendants(_marked(stack_id, but))
    described = [f"{p.pid} {_describe(p)}" for p in found]
    for group in (_without_parents_in(found), found):  # supervisors first: they end their commands, and in order
        for process in group:
            _signal(process, signal.SIGTERM)
        _wait_gone(found, grace_seconds)
    for process in [*found, *_marked(stack_id, but)]:
        _signal(process, signal.SIGKILL)
    _wait_gone(found, 5.0)
    return described


def wait_until(
    what: str,
    check: Callable[[], bool],
    timeout: float,
    process: Process | None = None,
    poll_seconds: float = _POLL_SECONDS,
) -> None:
    """Poll `check` until it is true.

    Args:
        what: named in the error.
        check: cheap and free of side effects.
        timeout: seconds.
        process: when it ends before `check` holds, waiting is pointless.
        poll_seconds: pause between two checks.

    Raises:
        StartError: time is up or the process ended.
    """
    deadline = time.monotonic() + timeout
    while not check():
        if process is not None and find(process) is None:
            raise StartError(f"{what}: the process {process.name} ended\n{log_tail(process.log)}")
        if time.monotonic() > deadline:
            tail = f"\n{log_tail(process.log)}" if process is not None else ""
            raise StartError(f"{what}: not ready after {timeout:.0f} s{tail}")
        time.sleep(poll_seconds)


def log_tail(log: str, lines: int = 20) -> str:
    """The last lines of a log, indented, with its path."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"  (log {log}: {error.strerror})"
    kept = "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
    return f"{kept}\n  (log: {log})"


def last_error(log: str) -> str:
    """The newest ERROR line of a log, or an empty string."""
    try:
        lines = Path(log).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if " ERROR " in line), "")


def members(stack_id: str, roots: Iterable[Process]) -> list[psutil.Process]:
    """Every live process of the stack: what was started, its descendants, and what carries the stack's id.

    Both ways are needed: daemons leave their parent, and a process that sets its title overwrites its environment.
    """
    live = [found for process in roots if (found := find(process)) is not None]
    return list({process.pid: process for process in [*_with_descendants(live), *_marked(stack_id)]}.values())


def peak_rss_bytes(stack_id: str, roots: Iterable[Process]) -> dict[str, int]:
    """Peak resident memory (VmHWM) of every live process of the stack, by a short name; children are listed apart."""
    peaks: dict[str, int] = {}
    for process in members(stack_id, roots):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            name = _short_name(process.cmdline())
        except (OSError, psutil.Error):
            continue
        peak = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
        peaks[name] = max(peaks.get(name, 0), peak)
    return peaks


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the name before it may hold spaces


def _short_name(argv: list[str]) -> str:
    """A name for figures: the actor's class, the module or the program, without paths and versions.

    Example: ["/venv/bin/python", "-m", "lorafleet_runtime.cli", "serve"] is "lorafleet_runtime.cli".
    """
    words = [word for word in argv if not word.startswith("-")] or ["unknown"]
    if words[0].startswith("ray::"):  # "ray::Actor.method" while it works, "ray::Actor" while it waits
        return "ray-" + words[0].removeprefix("ray::").split(".")[0]
    if words[0].startswith("VLLM::"):
        return "vllm-" + words[0].removeprefix("VLLM::").split()[0]
    script = words[1] if len(words) > 1 and Path(words[0]).name.startswith("python") else words[0]
    if script.startswith("from multiprocessing"):
        return "multiprocessing"
    return re.sub(r"-[0-9][0-9.]*$", "", Path(script).name)


def _marked(stack_id: str, but: Collection[str] = ()) -> list[psutil.Process]:
    wanted = f"{STACK_ENV}={stack_id}".encode()
    unwanted = {f"{_PART_ENV}={name}".encode() for name in but}
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        words = set(environment.split(b"\0"))
        if wanted in words and not unwanted & words:
            found.append(process)
    return found


def _with_descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    family = {}
    for root in roots:
        try:
            members = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        family.update({member.pid: member for member in members if member.pid != os.getpid()})
    return list(family.values())


def _without_parents_in(processes: list[psutil.Process]) -> list[psutil.Process]:
    pids = {process.pid for process in processes}
    roots = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() not in pids:
                roots.append(process)
    return roots


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)  # psutil compares the start time first
    except psutil.NoSuchProcess:
        return


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _wait_gone(processes: list[psutil.Process], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(_is_running(process) for process in processes) and time.monotonic() < deadline:
        _reap(processes)
        time.sleep(_POLL_SECONDS)
    _reap(processes)


def _reap(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue  # not a child of this program


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120] or process.name()
    except psutil.Error:
        return "(gone)"
