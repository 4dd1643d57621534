"""`lorafleet watch`: a line for each change, its end, and an API server that goes away meanwhile."""

import io
import json
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lorafleet_runtime.loop.journal import append
from support.cli_world import CliWorld, heeding, run


def test_it_ends_with_0_when_every_run_is_complete(world: CliWorld) -> None:
    world.runs.append(run("json", step=1, targetStep=2, rewardMean=0.25))

    def finish() -> None:
        world.runs[0] = run("json", "Completed", step=2, targetStep=2, rewardMean=0.5)

    world.before_watch.append(finish)
    result = world.call("watch", "json")
    assert result.exit_code == 0, result.output
    first, last = result.stdout.splitlines()
    assert first == "json  Training  step 1/2  reward 0.25  ETA -"
    assert last == "json  Completed  step 2/2  reward 0.5  ETA -"


def test_it_ends_with_1_when_a_run_failed_and_tells_why(world: CliWorld) -> None:
    world.runs += [run("json", "Completed", step=2, targetStep=2), run("typo", "DataError", message="data: no file")]
    result = world.call("watch")
    assert result.exit_code == 1
    assert "typo  DataError  step 0/?  reward -  ETA -  data: no file" in result.stdout


def test_a_cancelled_run_is_no_success(world: CliWorld) -> None:
    world.runs.append(run("json", "Cancelled", step=1, targetStep=2))
    assert world.call("watch", "json").exit_code == 1


def test_a_run_deleted_meanwhile_ends_it(world: CliWorld) -> None:
    world.runs.append(run("json", step=1, targetStep=2))
    world.before_watch.append(world.runs.clear)
    result = world.call("watch", "json")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("json  Deleted")


def test_it_survives_a_restart_of_the_api_server(world: CliWorld) -> None:
    world.runs.append(run("json", step=1, targetStep=2))
    assert world.api is not None
    port = world.api.port

    def again() -> None:
        assert world.api is not None
        world.api.stop()
        world.runs[0] = run("json", "Completed", step=2, targetStep=2)
        world.start_api(port)

    restarting = threading.Thread(target=again)

    def restart() -> None:
        restarting.start()
        raise RuntimeError("this request is lost")

    world.before_watch.append(restart)
    result = world.call("watch", "json")
    restarting.join()
    assert result.exit_code == 0, result.output
    shown = result.stdout.splitlines()
    assert shown[0].startswith("json  Training  step 1/2")
    assert shown[1].startswith("no news: API server: ")
    assert shown[-1].startswith("json  Completed")


@pytest.fixture
def starting(world: CliWorld, monkeypatch: pytest.MonkeyPatch) -> CliWorld:
    """After the first reading the API server refuses everything, as it may while it starts."""
    monkeypatch.setattr("lorafleet_cli.kube._RETRY_SECONDS", 0.05)
    world.runs.append(run("json", step=1, targetStep=2))

    def refuse() -> None:
        world.forbidden = ("adapterruns",)

    world.before_watch.append(refuse)
    return world


@pytest.mark.parametrize("code", [401, 403])
def test_it_survives_a_second_of_refusals(starting: CliWorld, code: int) -> None:
    starting.refusal = code

    def recover() -> None:
        if starting.refusals == 8:
            starting.forbidden = ()
            starting.runs[0] = run("json", "Completed", step=2, targetStep=2)

    starting.on_refusal = recover
    result = starting.call("watch", "json")
    assert result.exit_code == 0, result.output
    _, trouble, last = result.stdout.splitlines()
    assert trouble.startswith("no news: " + {401: "credentials: ", 403: "permission: "}[code])
    assert last.startswith("json  Completed")


def test_a_refusal_that_lasts_ends_it(starting: CliWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorafleet_cli.patience.REFUSED_SECONDS", 0.2)
    result = starting.call("watch", "json")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: permission: list adapterruns in namespace default: ")


def test_ctrl_c_is_quiet(world: CliWorld) -> None:
    world.runs.append(run("json", step=1, targetStep=2))
    command = [str(Path(sys.executable).parent / "lorafleet"), "watch", "--kubeconfig", str(world.kubeconfig)]
    started: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=heeding(signal.SIGINT), **started) as process, ExitStack() as end:
        end.callback(process.kill)
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("json  Training")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


def test_nothing_to_watch(world: CliWorld) -> None:
    assert "there are no AdapterRuns to watch" in world.error("watch")
    world.runs.append(run("json"))
    assert world.error("watch", "jason").endswith("did you mean json?")


def test_on_a_terminal_it_shows_bars_eta_and_all_rewards_so_far(
    world: CliWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.runs.append(run("json", "Completed", step=3, targetStep=3, rewardMean=1.0))
    for step, reward in ((1, 0.0), (2, 0.5)):
        entry = {"time": 1.0, "level": "INFO", "message": "step", "step": step, "reward": reward}
        append(world.directory(world.runs[0]), json.dumps(entry))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr("lorafleet_cli.main._console", lambda: console)
    assert world.call("watch", "json").exit_code == 0
    assert "\u2588" * 24 in screen.getvalue()
    assert "\u2581\u2584\u2588" in screen.getvalue()
    assert "3/3" in screen.getvalue()
