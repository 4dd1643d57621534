"""Binaries are built once, kept while their pins hold, and never half written."""

import threading
from pathlib import Path

import pytest

from lorafleet_local import binaries
from lorafleet_local.binaries import BinaryError, Tool, build_missing, find_binaries

TOOL = Tool("etcd", "1.0", "etcd", "example.org/etcd", "-s", "about 1 s")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one pinned tool, an empty cache, and a `go` that notes each call."""
    folder = tmp_path / "tools" / "etcd"
    folder.mkdir(parents=True)
    (folder / "go.mod").write_text("module x\n")
    (folder / "go.sum").write_text("")
    monkeypatch.setattr(binaries, "repo_root", lambda: tmp_path)
    monkeypatch.setattr(binaries, "TOOLS", (TOOL,))
    monkeypatch.setenv("LORAFLEET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return tmp_path


def fake_go(checkout: Path, body: str) -> str:
    script = checkout / "go"
    script.write_text(f'#!/bin/bash\necho "$@" >>{checkout}/calls\n{body}\n')
    script.chmod(0o755)
    return str(script)


def calls(checkout: Path) -> int:
    return len((checkout / "calls").read_text().splitlines())


WRITES = 'while [[ $1 != -o ]]; do shift; done; sleep 0.2; echo binary >"$2"; chmod +x "$2"'


def test_builds_once_with_read_only_modules(checkout: Path) -> None:
    go = fake_go(checkout, WRITES)
    build_missing(go)
    build_missing(go)
    assert calls(checkout) == 1
    assert "-mod=readonly -trimpath" in (checkout / "calls").read_text()
    assert (checkout / "cache" / "bin" / "etcd-1.0").read_text() == "binary\n"


def test_changed_pins_build_again(checkout: Path) -> None:
    go = fake_go(checkout, WRITES)
    build_missing(go)
    (checkout / "tools" / "etcd" / "go.mod").write_text("module x\n\nrequire y v1.0.0\n")
    build_missing(go)
    assert calls(checkout) == 2


def test_two_checkouts_build_once(checkout: Path) -> None:
    go = fake_go(checkout, WRITES)
    threads = [threading.Thread(target=build_missing, args=(go,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls(checkout) == 1


def test_a_failed_build_shows_the_compiler_and_leaves_nothing(checkout: Path) -> None:
    go = fake_go(checkout, WRITES + "; echo 'undefined: Foo' >&2; exit 1")
    with pytest.raises(BinaryError, match=r"go build of etcd failed with 1 (.|\n)*undefined: Foo"):
        build_missing(go)
    left = sorted(path.name for path in (checkout / "cache" / "bin").iterdir() if not path.name.endswith(".lock"))
    assert left == ["etcd-1.0.log"]


def test_kubebuilder_assets_come_first(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assets = checkout / "assets"
    assets.mkdir()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    assert binaries._from_assets(TOOL) is None
    (assets / "etcd").write_text("#!/bin/sh\n")
    (assets / "etcd").chmod(0o755)
    assert binaries._from_assets(TOOL) == assets / "etcd"
    build_missing(fake_go(checkout, "exit 1"))
    assert not (checkout / "calls").exists()


def test_a_missing_binary_names_the_fix(checkout: Path) -> None:
    with pytest.raises(BinaryError, match=r"etcd 1\.0 is not built .*make setup"):
        find_binaries()
