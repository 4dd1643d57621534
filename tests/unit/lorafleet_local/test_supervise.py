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
    wait_until("first run", lambda: len(runs(supervised)) == 1, 5.0, supervised)
    os.kill(runs(supervised)[0], signal.SIGKILL)
    wait_until("second run", lambda: len(runs(supervised)) == 2, 5.0, supervised)
    assert runs(supervised)[0] != runs(supervised)[1]


def test_sigterm_ends_the_command_and_the_supervisor(supervised: Process) -> None:
    wait_until("first run", lambda: len(runs(supervised)) == 1, 5.0, supervised)
    os.kill(supervised.pid, signal.SIGTERM)
    wait_until("its end", lambda: find(supervised) is None, 5.0)
    assert len(runs(supervised)) == 1
    assert not Path(f"/proc/{runs(supervised)[0]}").exists()


def test_a_command_that_cannot_work_is_given_up_at_once() -> None:
    argv = [sys.executable, "-m", "lorafleet_local.supervise", "part", "--", sys.executable, "-S", "-c", END]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10)
    assert done.returncode == 1
    assert done.stderr.count("started pid") == 1
    assert "configuration cannot work" in done.stderr


def test_usage_without_a_command() -> None:
    argv = [sys.executable, "-m", "lorafleet_local.supervise", "part", "--"]
    assert subprocess.run(argv, capture_output=True, timeout=10).returncode == 2


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
    _, errors = child.communicate(timeout=10)
    assert child.returncode == 0
    assert "did not end within" in errors
    assert time.monotonic() - begun > 0.45
