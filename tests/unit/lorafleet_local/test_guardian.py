"""A command that is killed leaves nothing behind; one that ends leaves neither a guardian nor its mark."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lorafleet_local import guardian, stack
from lorafleet_local.guardian import guarded
from lorafleet_local.processes import Process, find, start, sweep, this_process, wait_until
from lorafleet_local.report import Reporter
from lorafleet_local.state import State, exclusive

COMMAND = """
import sys, time
from pathlib import Path
from lorafleet_local.guardian import guarded
from lorafleet_local.processes import start
from lorafleet_local.state import State
folder = Path(sys.argv[1])
with guarded(folder) as me:
    state = State.load(folder)
    state.owner = me
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    state.add(start("part", sleep, state.log("part"), state.stack_id))
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    folder = tmp_path / "state"
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    sweep(State.load(folder).stack_id, 0.0)


def guardians(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "lorafleet_local.guardian" in (line := process.info["cmdline"] or []) and str(folder) in line:
            found.append(process)
    return found


@pytest.mark.parametrize("group", [False, True], ids=["process", "process group"])
def test_sigkill_of_the_command_takes_the_stack_down(
    command: subprocess.Popen[str], tmp_path: Path, group: bool
) -> None:
    folder = tmp_path / "state"
    (part,) = State.load(folder).processes
    assert find(part) is not None
    assert len(guardians(folder)) == 1
    (os.killpg if group else os.kill)(command.pid, signal.SIGKILL)
    wait_until("the guardian's end", lambda: guardians(folder) == [], 20.0)
    assert find(part) is None
    assert State.load(folder).owner is None


def test_a_command_that_ends_leaves_the_stack_and_no_guardian(tmp_path: Path) -> None:
    state = State(tmp_path)
    with guarded(tmp_path) as me:
        state.owner = me
        sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        part = state.add(start("part", sleep, state.log("part"), state.stack_id))
        assert len(guardians(tmp_path)) == 1
    try:
        assert guardians(tmp_path) == []
        assert find(part) is not None
        assert State.load(tmp_path).owner is None
    finally:
        stack.down(tmp_path, Reporter())
    assert find(part) is None


def test_a_guardian_spares_the_stack_of_the_next_command(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.owner = this_process("the next command")
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    part = state.add(start("part", sleep, state.log("part"), state.stack_id))
    try:
        stack.down_if_owned(tmp_path, Process("lorafleet-local", 2**22 - 1, 5, ""), Reporter())
        assert find(part) is not None
    finally:
        stack.down(tmp_path, Reporter())


def test_a_killed_guardian_does_not_trouble_the_command(tmp_path: Path) -> None:
    with guarded(tmp_path):
        (process,) = guardians(tmp_path)
        process.kill()


def test_down_ends_the_command_first(command: subprocess.Popen[str], tmp_path: Path) -> None:
    folder = tmp_path / "state"
    (part,) = State.load(folder).processes
    stack.down(folder, Reporter())
    assert command.wait(5.0) == -signal.SIGTERM
    wait_until("the guardian's end", lambda: guardians(folder) == [], 20.0)
    assert find(part) is None


def test_the_usage_needs_a_released_byte(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "lorafleet_local.guardian", str(tmp_path / "no"), "1", "1"]
    done = subprocess.run(arguments, input=guardian._RELEASED, timeout=10.0)
    assert done.returncode == 0
    assert not (tmp_path / "no").exists()


def test_the_lock_is_free_while_a_command_is_watched(tmp_path: Path) -> None:
    with guarded(tmp_path), exclusive(tmp_path):
        pass
