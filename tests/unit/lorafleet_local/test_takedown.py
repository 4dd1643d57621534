"""What a stack started is found and ended even when its state folder is half gone, and nobody else's is touched."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet_local import stack, takedown
from lorafleet_local.processes import Process, find, start, sweep, wait_until
from lorafleet_local.report import Reporter
from lorafleet_local.state import State
from lorafleet_local.supervise import supervised
from lorafleet_local.takedown import make_ray_temp_dir, take_down

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    """A part of the stack in `mine`, and one of the stack in `other`."""
    started = []
    for name in ("mine", "other"):
        state = State(tmp_path / name)
        started.append(state.add(start("part", SLEEP, state.log("part"), state.stack_id)))
    yield started[0], started[1]
    for name in ("mine", "other"):
        sweep(State(tmp_path / name).stack_id, 0.0)


@pytest.mark.parametrize("lost", ["state.json", "."], ids=["state file", "whole folder"])
def test_down_works_without_the_state(tmp_path: Path, parts: tuple[Process, Process], lost: str) -> None:
    mine, other = parts
    target = tmp_path / "mine" / lost
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    stack.down(tmp_path / "mine", Reporter())
    assert find(mine) is None
    assert find(other) is not None


def test_down_of_a_copied_folder_spares_the_original(tmp_path: Path, parts: tuple[Process, Process]) -> None:
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    stack.down(tmp_path / "copy", Reporter())
    assert find(parts[0]) is not None


def test_rays_folder_goes_and_its_logs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takedown, "_PREFIX", "lf-test-")  # should this break, no live stack loses its folder
    mine, other = State(tmp_path / "mine"), State(tmp_path / "other")
    mine.save()
    folders = [Path(make_ray_temp_dir(state)) for state in (mine, other)]
    try:
        logs = folders[0] / "session_latest" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.out").write_text("hello")
        (mine.folder / "state.json").unlink()
        stack.down(mine.folder, Reporter())
        assert [folder.exists() for folder in folders] == [False, True]
        assert (mine.folder / "log" / "ray" / "raylet.out").read_text() == "hello"
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def test_a_clone_at_the_old_place_spares_a_moved_stack(tmp_path: Path, parts: tuple[Process, Process]) -> None:
    shutil.move(tmp_path / "mine", tmp_path / "moved")
    state = State.load(tmp_path / "moved")
    take_down(state, Reporter())  # as `up` does first
    assert find(parts[0]) is None
    again = state.add(start("part", SLEEP, state.log("part"), state.stack_id))
    try:
        stack.down(tmp_path / "mine", Reporter())  # a new clone
        assert find(again) is not None
    finally:
        sweep(state.stack_id, 0.0)


HEAD = """
import pathlib, signal, sys, time
def save(number, frame):
    time.sleep(0.6)
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "head").touch()
time.sleep(60)
"""
ETCD = """
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path(sys.argv[1], "etcd saw " + str(pathlib.Path(sys.argv[1], "saved").exists())).touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1], "etcd").touch()
time.sleep(60)
"""


def test_a_runtime_without_its_supervisor_saves_before_the_control_plane_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takedown, "_STRAY_SECONDS", 0.1)
    folder = tmp_path / "state"
    state = State(folder)
    for name, code in (("etcd", ETCD), ("runtime", HEAD)):
        argv = supervised(name, [sys.executable, "-S", "-c", code, str(tmp_path)])
        state.add(start(name, argv, state.log(name), state.stack_id))
    try:
        wait_until("both to start", lambda: (tmp_path / "etcd").exists() and (tmp_path / "head").exists(), 60.0)
        supervisor = state.process("runtime")
        assert supervisor is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        os.waitpid(supervisor.pid, 0)
        stack.down(folder, Reporter())
        assert (tmp_path / "saved").exists()
        assert (tmp_path / "etcd saw True").exists()
    finally:
        sweep(state.stack_id, 0.0)
