"""The command's words and exit statuses, and what a signal does to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorafleet_local import main, stack
from lorafleet_local.main import app
from lorafleet_local.processes import StartError, find, start, this_process
from lorafleet_local.report import Reporter
from lorafleet_local.state import State

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], pass_fds=[int(sys.argv[2])])
os.kill(os.getpid(), 9) if sys.argv[3] == "die" else child.wait()
"""
CHILD = """
import os, signal, sys, time
from lorafleet_local import main
try:
    main._prepare(os.getppid())
    os.write({fd}, b"up ")
    time.sleep(60)
except SystemExit as end:
    os.kill(os.getpid(), signal.SIGHUP)  # a second signal must not cut the cleanup short
    os.write({fd}, b"cleaned %d" % end.code)
"""


def test_status_of_a_stack_that_is_down_is_no_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)])
    assert (result.exit_code, result.output) == (3, "not running: start it with `make up`\n")


def test_status_of_a_running_stack(tmp_path: Path) -> None:
    state = State(tmp_path, ports={"apiserver": 1, "runtime": 2}, ready=True)
    me = this_process("etcd")
    state.add(me)
    result = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert "etcd                       running" in result.output
    assert f"export KUBECONFIG={tmp_path}/kubeconfig" in result.output


def test_up_names_what_is_wrong_with_the_pool_file_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_prepare", lambda owner: None)
    monkeypatch.setattr("lorafleet_local.model.ensure_model", lambda: tmp_path / "model")
    (tmp_path / "pool.yaml").write_text("spec: {slots: 0}")
    result = CliRunner().invoke(app, ["up", "--state-dir", str(tmp_path / "s"), "--pool", str(tmp_path / "pool.yaml")])
    assert result.exit_code == 1
    assert "spec.slots: 0:" in result.output
    assert not (tmp_path / "s").exists()


def test_another_pool_than_the_running_one_is_refused(tmp_path: Path) -> None:
    state = State(tmp_path, ports={"apiserver": 1, "runtime": 2}, ready=True)
    state.add(this_process("etcd"))
    (tmp_path / "runtime.yaml").write_text('{"pool": {"spec": {"slots": 4}}}')
    with pytest.raises(StartError, match="another pool"):
        stack.up(tmp_path, Reporter(), {"slots": 2})
    assert stack.up(tmp_path, Reporter(), {"slots": 4}).state.process("etcd") == state.process("etcd")


@pytest.mark.parametrize("folder", ["", "demo"])
def test_down_without_a_folder_ends_the_demo_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("LORAFLEET_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(main, "_prepare", lambda: None)  # the signals are pytest's
    state = State(tmp_path / folder)
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    part = state.add(start("part", sleep, state.log("part"), state.stack_id))
    assert CliRunner().invoke(app, ["down"]).exit_code == 0
    assert find(part) is None
    assert CliRunner().invoke(app, ["down"]).output == "nothing was running\n"


def test_a_command_ends_with_the_make_that_started_it() -> None:
    reader, writer = os.pipe()
    arguments = [sys.executable, "-c", PARENT, CHILD.format(fd=writer), str(writer)]
    process = subprocess.Popen([*arguments, "live"], pass_fds=[writer])
    os.close(writer)
    try:
        assert os.read(reader, 100) == b"up "
        process.kill()
        assert os.read(reader, 100) == b"cleaned 143"
    finally:
        os.close(reader)
        process.wait()
