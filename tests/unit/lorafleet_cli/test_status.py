"""`lorafleet status`: what it tells of pools and runs, and its errors in one line."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from support.cli_world import CliWorld, condition, free_port, kubeconfig, pool, run, timestamp


def lines(world: CliWorld, *arguments: str) -> list[str]:
    result = world.call("status", *arguments)
    assert result.exit_code == 0, result.output
    return [line.strip() for line in result.stdout.splitlines()]


def test_pools_and_runs_in_one_look(world: CliWorld) -> None:
    until = timestamp(95)
    world.runs.append(run("json", step=3, targetStep=8, rewardMean=0.4891, estimatedCompletionTime=until))
    pool_line, headings, row = lines(world)
    assert pool_line == "Pool demo  Ready  slots 2 of 4 used, 1 queued"
    assert headings.split() == ["NAME", "STATUS", "PROGRESS", "STEP", "REWARD", "ETA", "AGE"]
    name, status, bar, step, reward, eta, age = row.split()
    assert (name, status, step, reward) == ("json", "Training", "3/8", "0.4891")
    assert age in ("1m30s", "1m31s", "1m32s")
    assert bar == "\u2588" * 4 + "\u2591" * 8
    assert eta in ("1m35s", "1m34s", "1m33s", "1m32s")


def test_a_pool_that_is_not_ready_says_why(world: CliWorld) -> None:
    world.pools[0]["status"] = {"conditions": [condition("Ready", "False", "RuntimeUnreachable", "no answer")]}
    assert lines(world)[0] == "Pool demo  not Ready: RuntimeUnreachable: no answer"


def test_a_failed_run_tells_message_and_fix_once(world: CliWorld) -> None:
    message = "data: 'typo.jsonl' does not exist; upload it; delete this object, then apply it corrected"
    world.runs.append(run("typo", "DataError", message=message))
    assert lines(world)[-1] == f"typo: {message}"
    assert "\n".join(lines(world, "typo")).count(message) == 1


def test_a_queued_run_tells_its_position(world: CliWorld) -> None:
    world.runs.append(run("late", "SlotsExhausted", message="all 4 slots are taken", queuePosition=2))
    assert lines(world)[-1] == "late: position 2 in the queue: all 4 slots are taken"
    assert "\n".join(lines(world, "late")).count("all 4 slots are taken") == 1
    world.runs[0] = run("late", "SlotsExhausted", message="position 2 in the queue", queuePosition=2)
    assert lines(world)[-1] == "late: position 2 in the queue"


def test_a_run_that_no_operator_sees_says_so_after_half_a_minute(world: CliWorld) -> None:
    world.runs += [run("new", age=5), run("old", age=300)]
    for item in world.runs:
        del item["status"]
    shown = lines(world)
    assert [line.split()[1] for line in shown if line.startswith(("new ", "old "))] == ["Pending", "-"]
    assert shown[-1].startswith("old: not seen by an operator for 5m")
    assert "watches namespace default" in shown[-1]


def test_one_run_in_full(world: CliWorld) -> None:
    artifact = {"path": "/storage/x/step_8", "step": 8, "digest": "ab" * 32}
    world.runs.append(run("done", "Completed", step=8, targetStep=8, rewardMean=1.0, artifact=artifact, restarts=1))
    text = "\n".join(lines(world, "done"))
    for part in ("default/done", "step 8 of 8", "/storage/x/step_8", "lorafleet download done", "Restarts", "Complete"):
        assert part in text
    assert "NotFinished" not in text


def test_no_runs_yet(world: CliWorld) -> None:
    assert lines(world)[-1].startswith("No AdapterRuns in namespace default")


def test_namespace_option_and_the_contexts_own_namespace(world: CliWorld) -> None:
    item = run("theirs")
    item["metadata"]["namespace"] = "team"
    item["spec"]["poolRef"]["namespace"] = "default"
    world.runs.append(item)
    for arguments in (["-n", "team"], ["--context", "team"]):
        shown = lines(world, *arguments)
        assert shown[0].startswith("Pool default/demo  Ready")
        assert shown[-1].startswith("theirs")
    assert lines(world, "-A")[-1].split()[:2] == ["team", "theirs"]


def test_an_unknown_run_suggests_near_names(world: CliWorld) -> None:
    world.runs += [run("json"), run("addition")]
    text = "error: run: jsn: there is no such AdapterRun in namespace default; did you mean json?"
    assert world.error("status", "jsn") == text
    assert world.error("status", "xyz").endswith("; there are addition, json; choose one, or another --namespace")


def test_the_api_server_is_away(world: CliWorld, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.write_text(str(kubeconfig(f"http://127.0.0.1:{free_port()}")).replace("'", '"'))
    assert "its API server does not answer" in world.error("status", "--kubeconfig", str(away))


def test_forbidden(world: CliWorld) -> None:
    world.forbidden = ("adapterruns",)
    text = world.error("status")
    assert text.startswith("error: permission: list adapterruns in namespace default: you may not")


def test_a_cluster_without_the_crds(world: CliWorld) -> None:
    world.runs = None  # type: ignore[assignment]
    assert "does not know lorafleet.dev/v1alpha1" in world.error("status")


def test_a_traceback_only_with_debug(world: CliWorld) -> None:
    assert "Traceback" not in world.error("status", "nobody")
    shown = world.call("status", "nobody", "--debug").stderr
    assert "Traceback" in shown
    assert shown.strip().splitlines()[-1].startswith("error: run: nobody:")


def test_usage_errors_exit_with_2(world: CliWorld) -> None:
    assert world.call("status", "a", "-A").exit_code == 2
    assert world.call("logs").exit_code == 2
    assert world.call("nonsense").exit_code == 2


def test_a_reader_that_has_enough_ends_it_quietly(world: CliWorld) -> None:
    world.runs.append(run("json"))
    command = [str(Path(sys.executable).parent / "lorafleet"), "status", "--kubeconfig", str(world.kubeconfig)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_pool_elsewhere_that_is_gone_hides_nothing(world: CliWorld) -> None:
    world.pools[:] = [pool(None)]
    item = run("orphan", "PoolNotFound", message="poolRef: no AdapterPool 'gone'")
    item["spec"]["poolRef"] = {"name": "gone"}
    world.runs.append(item)
    assert lines(world)[-1] == "orphan: poolRef: no AdapterPool 'gone'"


def test_a_narrow_terminal_cuts_no_figure(world: CliWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    until = timestamp(600)
    name = "a-run-with-a-name-of-forty-characters-00"
    world.runs.append(
        run(name, "SlotsExhausted", step=10000, targetStep=20000, rewardMean=-0.12345, estimatedCompletionTime=until)
    )
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr("lorafleet_cli.main._console", lambda: console)
    assert world.call("status").exit_code == 0
    shown = screen.getvalue()
    for figure in ("SlotsExhausted", "10000/20000", "-0.1235", "9m", "1m3"):
        assert figure in shown
    assert "\u2026" not in shown
    rows = shown.splitlines()[2:]
    assert "".join(row[:20].split()[0] for row in rows[:-1] if row.strip()).startswith(name[:8])
    assert max(map(len, rows[:-1])) <= 80
