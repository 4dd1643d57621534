"""What a stack started is found and ended even when its state folder is half gone, and nobody else's is touched."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet_local import stack, takedown
from lorafleet_local.processes import Process, find, start, sweep
from lorafleet_local.report import Reporter
from lorafleet_local.state import State
from lorafleet_local.takedown import make_ray_temp_dir

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
