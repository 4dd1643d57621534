"""The state file survives, is private, and keeps ports that are still free."""

import socket
import stat
from pathlib import Path

from lorafleet_local.processes import Process
from lorafleet_local.state import State, free_port


def test_round_trip(tmp_path: Path) -> None:
    state = State(tmp_path / "s")
    state.ports = {"apiserver": 1234}
    state.ray_temp_dir = "/tmp/lf-x"
    state.add(Process("etcd", 42, 777, "/log"))
    assert State.load(tmp_path / "s") == state


def test_a_new_folder_gives_a_new_stack(tmp_path: Path) -> None:
    assert State.load(tmp_path).stack_id != State.load(tmp_path).stack_id


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    State(tmp_path / "s").save()
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "s" / "state.json").stat().st_mode) == 0o600


def test_a_port_is_kept_while_it_is_free(tmp_path: Path) -> None:
    state = State(tmp_path)
    first = state.port("apiserver")
    assert state.port("apiserver") == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        assert state.port("apiserver") != first


def test_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
