"""A port belongs to one state folder at a time, whoever asks at the same moment."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lorafleet_local import ports
from lorafleet_local.ports import reserve

ASK = (
    "import sys; from pathlib import Path; from lorafleet_local.ports import reserve; print(reserve(Path(sys.argv[1])))"
)


def folder(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    return made


def test_a_reserved_port_can_be_bound(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", reserve(tmp_path)))


def test_a_port_is_kept_while_it_is_free(tmp_path: Path) -> None:
    first = reserve(tmp_path)
    assert reserve(tmp_path, first) == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        assert reserve(tmp_path, first) != first


def test_a_port_that_another_folder_has_is_not_given_though_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_RANGE", range(20000, 20040))
    one, two = folder(tmp_path, "one"), folder(tmp_path, "two")
    mine: set[int] = set()
    for number in range(5):
        mine.add(reserve(one, keep=mine))
        assert len(mine) == number + 1
    assert reserve(two, preferred=min(mine)) not in mine


def test_ports_of_a_removed_folder_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = folder(tmp_path, "one"), folder(tmp_path, "two")
    port = reserve(one)
    monkeypatch.setattr(ports, "_RANGE", range(port, port + 1))
    with pytest.raises(OSError, match="no free port"):
        reserve(two)
    shutil.rmtree(one)
    assert reserve(two) == port


def test_a_folder_that_begins_anew_gives_its_old_ports_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_RANGE", range(20000, 20003))
    for _ in range(20):
        assert reserve(tmp_path) in ports._RANGE
    assert reserve(folder(tmp_path, "two")) in ports._RANGE


def test_processes_that_ask_at_once_get_different_ports(tmp_path: Path) -> None:
    folders = [folder(tmp_path, str(number)) for number in range(4)]
    asking = [subprocess.Popen([sys.executable, "-c", ASK, str(f)], stdout=subprocess.PIPE) for f in folders]
    got = [process.communicate()[0] for process in asking]
    assert len(set(got)) == len(folders)
    assert all(20000 <= int(port) < 30000 for port in got)


def test_asking_for_another_folders_port_does_not_cost_it_that_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_RANGE", range(20000, 20040))
    one, two = folder(tmp_path, "one"), folder(tmp_path, "two")
    port = reserve(one)
    monkeypatch.setattr(ports, "_RANGE", range(20000, 20003))
    for _ in range(10):
        assert reserve(two, preferred=port) != port
