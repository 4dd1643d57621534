"""The supervisor restarts what dies, stops what it is told to, and gives up on what cannot start."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet_local.processes import Process, find, start, sweep, wait_until

END = "raise SystemExit(2)"
COUNT = "import os, sys, time; print('run', os.getpid(), flush=True); time.sleep(60)"


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Process]:
    marker = uuid.uuid4().hex
    argv = [sys.executable, "-m", "lorafleet_local.supervise", "part", "--", sys.executable, "-S", "-c", COUNT]
    yield start("part", argv, tmp_path / "log", marker)
    sweep(marker, 0.0)


def runs(process: Process) -> list[int]:
    lines = Path(process.log).read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("run ")]


def test_a_killed_command_is_started_again(supervised: Process) -> None:
    wait_until("first run", lambda: len(runs(supervised)) == 1, 30.0, supervised)
    os.kill(runs(supervised)[0], signal.SIGKILL)
    wait_until("second run", lambda: len(runs(supervised)) == 2, 30.0, supervised)
    assert runs(supervised)[0] != runs(supervised)[1]


def test_sigterm_ends_the_command_and_the_supervisor(supervised: Process) -> None:
    wait_until("first run", lambda: len(runs(supervised)) == 1, 30.0, supervised)
    os.kill(supervised.pid, signal.SIGTERM)
    wait_until("its end", lambda: find(supervised) is None, 30.0)
    assert len(runs(supervised)) == 1
    assert not Path(f"/proc/{runs(supervised)[0]}").exists()


def test_a_command_that_cannot_work_is_given_up_at_once() -> None:
    argv = [sys.executable, "-m", "lorafleet_local.supervise", "part", "--", sys.executable, "-S", "-c", END]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("started pid") == 1
    assert "configuration cannot work" in done.stderr


def test_usage_without_a_command() -> None:
    argv = [sys.executable, "-m", "lorafleet_local.supervise", "part", "--"]
    assert subprocess.run(argv, capture_output=True, timeout=60).returncode == 2


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace_and_not_before() -> None:
    script = (
        "import lorafleet_local.supervise as s, sys\n"
        "s.GRACE_SECONDS = 0.5\n"
        "deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)'\n"
        "sys.exit(s.main(['part', '--', sys.executable, '-S', '-c', deaf]))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    begun = time.monotonic()
    child.terminate()
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "did not end within" in errors
    assert time.monotonic() - begun > 0.45


def _supervise(script: str, *options: str, works: float = 0.5) -> "subprocess.CompletedProcess[str]":
    """A supervisor for which `works` seconds of life mean that the command works; told to stop after 6 starts."""
    argv = ["part", *options, "--", sys.executable, "-S", "-c", script]
    program = (
        "import lorafleet_local.supervise as s, os, sys\n"
        f"s._QUICK_SECONDS, s._MAX_DELAY_SECONDS = {works}, 0.01\n"
        "run_once, starts = s.Supervisor._run_once, []\n"
        "def counted(self):\n"
        "    starts.append(1)\n"
        "    os.environ['START'] = str(len(starts))\n"
        "    self._stopping = len(starts) == 6\n"
        "    return run_once(self)\n"
        "s.Supervisor._run_once = counted\n"
        f"sys.exit(s.main({argv!r}))\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_a_command_that_never_worked_is_given_up() -> None:
    done = _supervise("raise SystemExit(1)", works=30.0)
    assert (done.returncode, done.stderr.count("started pid")) == (1, 3)
    assert "gave up" in done.stderr


def test_a_command_that_worked_once_is_never_given_up() -> None:
    done = _supervise("import os, time; time.sleep(0.7 * (os.environ['START'] == '1')); os.kill(os.getpid(), 9)")
    assert (done.returncode, done.stderr.count("started pid")) == (0, 6)


def test_exit_status_2_of_a_go_program_is_no_verdict() -> None:
    worked = "import os, time; time.sleep(0.7 * (os.environ['START'] == '1')); raise SystemExit(2)"
    assert _supervise(worked, "--any-status").stderr.count("started pid") == 6
