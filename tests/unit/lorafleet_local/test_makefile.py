"""`make down` and `make clean` in a checkout whose environment was removed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lorafleet_local.paths import repo_root
from lorafleet_local.processes import this_process
from lorafleet_local.state import State


def make(folder: Path, target: str) -> "subprocess.CompletedProcess[str]":
    shutil.copy(repo_root() / "Makefile", folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "LORAFLEET_STATE"))}
    return subprocess.run(["make", target], cwd=folder, env=env, capture_output=True, text=True, timeout=60.0)


@pytest.mark.parametrize("folder", [".lorafleet", ".lorafleet/demo"])
def test_clean_spares_the_state_of_live_processes(tmp_path: Path, folder: str) -> None:
    state = State(tmp_path / folder)
    state.add(this_process("etcd"))
    done = make(tmp_path, "clean")
    assert done.returncode != 0
    assert "make setup && make down" in done.stderr
    assert State.load(tmp_path / folder).processes == state.processes


@pytest.mark.parametrize("was_up", [True, False])
def test_clean_of_a_stack_that_is_down_needs_no_environment(tmp_path: Path, was_up: bool) -> None:
    if was_up:
        State(tmp_path / ".lorafleet").save()
    done = make(tmp_path, "clean")
    assert (done.returncode, (tmp_path / ".lorafleet").exists()) == (0, False), done.stderr
