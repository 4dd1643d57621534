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


IN_A_TERMINAL = """
import fcntl, signal, sys, termios, time
from pathlib import Path
from lorafleet_local import main, stack
from lorafleet_local.guardian import guarded
from lorafleet_local.processes import start
from lorafleet_local.report import Reporter
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have it ignored
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
folder = Path(sys.argv[1])
def bring_up(state, reporter, spec, progress_seconds):
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    state.add(start("part", sleep, state.log("part"), state.stack_id))
    with reporter.phase("pool ready"):
        reporter.say("up")
        time.sleep(60)
stack._bring_up = bring_up
main._prepare()
with guarded(folder) as me:
    stack.up(folder, Reporter(), {"slots": 1}, owner=me)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, lambda number, frame: None)" + COMMAND


@pytest.fixture
def code() -> str:
    return COMMAND


@pytest.fixture
def command(tmp_path: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    folder = tmp_path / "state"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
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
    wait_until("the guardian's end", lambda: guardians(folder) == [], 60.0)
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
    assert command.wait(60.0) == -signal.SIGTERM
    wait_until("the guardian's end", lambda: guardians(folder) == [], 60.0)
    assert find(part) is None


def test_the_usage_needs_a_released_byte(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "lorafleet_local.guardian", str(tmp_path / "no"), "1", "1"]
    done = subprocess.run(arguments, input=guardian._RELEASED, timeout=60.0)
    assert done.returncode == 0
    assert not (tmp_path / "no").exists()


def test_the_lock_is_free_while_a_command_is_watched(tmp_path: Path) -> None:
    with guarded(tmp_path), exclusive(tmp_path):
        pass


def test_a_closed_terminal_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, str(folder)],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    try:
        said = b""
        while b"up" not in said:
            said += os.read(master, 1000)
        (part,) = State.load(folder).processes
        os.close(master)
        assert process.wait(60.0) == 128 + signal.SIGHUP
        assert find(part) is None, "the command itself takes its stack down"
        wait_until("the guardian's end", lambda: guardians(folder) == [], 60.0)
        assert State.load(folder).owner is None
    finally:
        process.kill()
        process.wait()
        sweep(State.load(folder).stack_id, 0.0)


def test_a_command_that_fails_with_its_stack_up_leaves_it_to_the_guardian(tmp_path: Path) -> None:
    code = COMMAND.replace('print("up", flush=True)\n    time.sleep(60)', 'raise OSError("clean-up failed")')
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60.0)
    assert "clean-up failed" in done.stderr
    wait_until("the guardian's end", lambda: guardians(tmp_path) == [], 60.0)
    state = State.load(tmp_path)
    assert (state.processes, state.owner, stack.is_down(tmp_path)) == ([], None, True)


def test_a_command_that_fails_with_its_stack_down_ends_its_guardian(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="early"), guarded(tmp_path):
        raise OSError("early")
    assert guardians(tmp_path) == []


def test_down_ends_a_suspended_command(command: subprocess.Popen[str], tmp_path: Path) -> None:
    folder = tmp_path / "state"
    (part,) = State.load(folder).processes
    os.kill(command.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, command.pid, os.WSTOPPED)
    stack.down(folder, Reporter())
    assert command.wait(60.0) == -signal.SIGTERM
    assert find(part) is None


@pytest.mark.parametrize("code", [DEAF], ids=["deaf"])
def test_down_kills_a_command_that_does_not_end(
    command: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stack, "_OWNER_SECONDS", 0.3)
    folder = tmp_path / "state"
    (part,) = State.load(folder).processes
    assert stack.down(folder, Reporter())
    assert command.wait(60.0) == -signal.SIGKILL
    assert find(part) is None
    assert f"pid {command.pid} did not end" in capsys.readouterr().out


def test_a_killed_pytest_leaves_no_stack(tmp_path: Path) -> None:
    code = """
import os, sys, types
from pathlib import Path
sys.modules["support.tiny_model"] = types.SimpleNamespace(make_tiny_model=lambda folder: folder)
from lorafleet_local.processes import start
from lorafleet_local.state import State
from support import tiny_stack
def up(folder, reporter, progress_seconds, spec, owner=None):
    state = State(folder, owner=owner)
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    state.add(start("part", sleep, state.log("part"), state.stack_id))
    os.kill(os.getpid(), 9)
tiny_stack.up = up
with tiny_stack.tiny_stack(Path(sys.argv[1])):
    pass
"""
    folder = tmp_path / "state"
    search = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=search, timeout=60.0)
    try:
        assert killed.returncode == -signal.SIGKILL
        wait_until("the end of the stack", lambda: stack.is_down(folder), 60.0)
    finally:
        sweep(State.load(folder).stack_id, 0.0)
