"""`lorafleet status`: what it tells of pools and runs, and its errors in one line."""

from pathlib import Path

import pytest

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


def test_a_failed_run_tells_message_and_fix(world: CliWorld) -> None:
    message = "data: 'typo.jsonl' does not exist on the pool's storage; upload it or correct the path"
    world.runs.append(run("typo", "DataError", message=message))
    fix = "fix the manifest, kubectl delete adapterrun typo, apply again"
    assert lines(world)[-1] == f"typo: {message} ({fix})"
    assert any(message in line and fix in line for line in [" ".join(lines(world, "typo"))])


def test_a_queued_run_tells_its_place(world: CliWorld) -> None:
    world.runs.append(run("late", "SlotsExhausted", message="all 4 slots are taken", queuePosition=2))
    assert lines(world)[-1] == "late: place 2 in the queue: all 4 slots are taken"


def test_a_run_that_no_operator_touches_says_so_after_half_a_minute(world: CliWorld) -> None:
    world.runs += [run("new", age=5), run("old", age=300)]
    for item in world.runs:
        del item["status"]
    shown = lines(world)
    assert [line.split()[1] for line in shown if line.startswith(("new ", "old "))] == ["Pending", "Untouched"]
    assert shown[-1].startswith("old: no operator has touched it for 5m")
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


def test_no_kubeconfig(world: CliWorld, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert world.error("status", "--kubeconfig", str(missing)).startswith(f"error: kubeconfig: {missing}: there is no")


def test_a_kubeconfig_that_is_none(world: CliWorld, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("just text")
    assert world.error("status", "--kubeconfig", str(bad)).startswith(f"error: kubeconfig: {bad}: it is not usable")


def test_an_unknown_context(world: CliWorld) -> None:
    assert "No such context nowhere" in world.error("status", "--context", "nowhere")


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


def test_a_pool_elsewhere_that_is_gone_hides_nothing(world: CliWorld) -> None:
    world.pools[:] = [pool(None)]
    item = run("orphan", "PoolNotFound", message="poolRef: no AdapterPool 'gone'")
    item["spec"]["poolRef"] = {"name": "gone"}
    world.runs.append(item)
    assert lines(world)[-1] == "orphan: poolRef: no AdapterPool 'gone'"
