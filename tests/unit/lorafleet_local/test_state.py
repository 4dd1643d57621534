"""The state file survives, is private, keeps ports, and says whose the processes are even when it is lost."""

import shutil
import stat
from pathlib import Path

from lorafleet_local.processes import Process, this_process
from lorafleet_local.state import State


def test_round_trip(tmp_path: Path) -> None:
    state = State(tmp_path / "s")
    state.ports = {"apiserver": 1234}
    state.owner = Process("lorafleet-local", 43, 778, "")
    state.ready = True
    state.add(Process("etcd", 42, 777, "/log"))
    assert State.load(tmp_path / "s") == state


def test_the_id_follows_from_the_folder(tmp_path: Path) -> None:
    assert State.load(tmp_path / "a").stack_id == State.load(tmp_path / "a").stack_id
    assert State.load(tmp_path / "a").stack_id != State.load(tmp_path / "b").stack_id


def test_a_lost_or_broken_file_leaves_the_id(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.add(Process("etcd", 42, 777, "/log"))
    (tmp_path / "state.json").write_text('{"processes": [')
    assert State.load(tmp_path).stack_id == state.stack_id
    (tmp_path / "state.json").unlink()
    assert State.load(tmp_path).stack_id == state.stack_id


def test_a_copy_of_the_folder_owns_nothing(tmp_path: Path) -> None:
    state = State(tmp_path / "a")
    state.add(Process("etcd", 42, 777, "/log"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = State.load(tmp_path / "b")
    assert copied.processes == []
    assert copied.stack_id != state.stack_id


def test_a_moved_folder_keeps_its_processes(tmp_path: Path) -> None:
    state = State(tmp_path / "a")
    state.add(this_process("etcd"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = State.load(tmp_path / "b")
    assert (moved.processes, moved.stack_id) == (state.processes, state.stack_id)


def test_a_moved_folder_leaves_its_id_to_the_next_one_there(tmp_path: Path) -> None:
    State(tmp_path / "a").add(Process("etcd", 42, 777, "/log"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = State.load(tmp_path / "b")
    moved.save()
    assert State.load(tmp_path / "b").stack_id == moved.stack_id == State(tmp_path / "b").stack_id
    assert moved.stack_id != State.load(tmp_path / "a").stack_id


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    State(tmp_path / "s").save()
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "s" / "state.json").stat().st_mode) == 0o600


def test_a_port_is_remembered(tmp_path: Path) -> None:
    state = State(tmp_path)
    assert state.port("apiserver") == state.ports["apiserver"] == state.port("apiserver")
    assert state.port("etcd") != state.port("apiserver")
