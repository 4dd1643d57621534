"""Only the listed processes are killed, and only those that existed when they were listed."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from lorafleet_runtime.engines.reap import process_tree, reap


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_listed_processes_are_killed(sleeper: subprocess.Popen[bytes]) -> None:
    assert reap([sleeper.pid], time.time()) == (sleeper.pid,)
    assert not psutil.pid_exists(sleeper.pid)


def test_a_process_that_took_over_a_number_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    before = psutil.Process(sleeper.pid).create_time() - 1
    assert reap([sleeper.pid], before) == ()
    assert sleeper.poll() is None


def test_the_caller_and_the_dead_are_left_out(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    assert reap([psutil.Process().pid, sleeper.pid], time.time()) == ()


def test_the_tree_has_this_process_and_its_children(sleeper: subprocess.Popen[bytes]) -> None:
    assert {psutil.Process().pid, sleeper.pid} <= set(process_tree())
