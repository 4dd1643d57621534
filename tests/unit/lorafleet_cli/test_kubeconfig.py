"""From kubectl's options and environment to a cluster, and what of the user's key stays: nothing."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lorafleet_cli.main import app
from support.cli_world import CliWorld, free_port, heeding, kubeconfig, run


def test_no_kubeconfig(world: CliWorld, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert world.error("status", "--kubeconfig", str(missing)).startswith(f"error: kubeconfig: {missing}: there is no")


def test_a_kubeconfig_that_is_none(world: CliWorld, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("just text")
    assert world.error("status", "--kubeconfig", str(bad)).startswith(f"error: kubeconfig: {bad}: it is not usable")


def test_an_unknown_context(world: CliWorld) -> None:
    assert "No such context nowhere" in world.error("status", "--context", "nowhere")


def test_an_empty_kubeconfig_variable_counts_as_unset(
    world: CliWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.runs.append(run("json"))
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/config").write_text(world.kubeconfig.read_text())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert by_environment(monkeypatch, "") == "json"
    (tmp_path / ".kube/config").unlink()
    result = CliRunner().invoke(app, ["status"])
    assert result.stderr.startswith(f"error: kubeconfig: {tmp_path}/.kube/config: there is no such file")


def test_several_kubeconfigs_are_one_and_the_first_wins(
    world: CliWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = run("theirs")
    item["metadata"]["namespace"] = "team"
    world.runs.append(item)
    whole = yaml.safe_load(world.kubeconfig.read_text())
    away = kubeconfig(f"http://127.0.0.1:{free_port()}")
    parts = {
        "1": {"clusters": whole["clusters"], "users": whole["users"]},
        "2": {"contexts": whole["contexts"], "current-context": "team"},
        "3": away | {"current-context": "here"},
    }
    for name, part in parts.items():
        (tmp_path / name).write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **part}))
    paths = [str(tmp_path / name) for name in ("1", "missing", "2", "3")]
    assert by_environment(monkeypatch, ":".join(paths)) == "theirs"


def test_a_kubeconfig_without_a_current_context(world: CliWorld) -> None:
    content = yaml.safe_load(world.kubeconfig.read_text())
    del content["current-context"]
    world.kubeconfig.write_text(yaml.safe_dump(content))
    assert "it names no current-context; pass --context" in world.error("status")
    assert world.call("status", "--context", "here").exit_code == 0


def by_environment(monkeypatch: pytest.MonkeyPatch, kubeconfigs: str) -> str:
    """The last run that status shows with this KUBECONFIG."""
    monkeypatch.setenv("KUBECONFIG", kubeconfigs)
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()[-1].split()[0]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_key_in_the_temporary_folder(
    world: CliWorld, tmp_path: Path, signum: signal.Signals
) -> None:
    world.runs.append(run("json", step=1, targetStep=2))
    content = yaml.safe_load(world.kubeconfig.read_text())
    content["users"][0]["user"] = {"client-key-data": "LS0t"}
    world.kubeconfig.write_text(yaml.safe_dump(content))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [str(Path(sys.executable).parent / "lorafleet"), "watch", "--kubeconfig", str(world.kubeconfig)]
    environment = os.environ | {"TMPDIR": str(scratch)}
    started: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=heeding(signum), **started) as process, contextlib.ExitStack() as end:
        end.callback(process.kill)
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("json  Training")
        (folder,) = scratch.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert next(folder.iterdir()).read_text() == "---"
        process.send_signal(signum)
        assert process.wait(60) == 128 + signum
        assert process.stderr.read() == ""
    assert list(scratch.iterdir()) == []


def test_no_key_of_the_kubeconfig_is_left_in_the_temporary_folder(
    world: CliWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kubeconfig(world.api.url if world.api else "")
    config["users"][0]["user"] = {"token": "t", "client-key-data": "LS0t", "client-certificate-data": "LS0t"}
    path = tmp_path / "keys"
    path.write_text(str(config).replace("'", '"'))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    world.call("status", "--kubeconfig", str(path))
    assert list(scratch.iterdir()) == []
