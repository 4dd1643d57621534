"""`lorafleet logs` and `samples`: through the pool's endpoint and token, from what the runtime kept on storage."""

import base64
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lorafleet_cli.errors import Unavailable
from lorafleet_cli.kube import Kube
from lorafleet_cli.runtime import Runtime, open_runtime
from lorafleet_runtime.loop.journal import append
from lorafleet_runtime.loop.samples import cut_samples, write_samples
from lorafleet_runtime.types import PromptGroup, Sample, VersionId
from support.cli_world import CliWorld, free_port, pool, run, secret


@pytest.fixture
def done(world: CliWorld) -> CliWorld:
    """A finished run with two steps; no runtime of this world has ever had it."""
    world.runs.append(run("json", "Completed", step=2, targetStep=2))
    directory = world.directory(world.runs[0])
    append(directory, json.dumps({"time": 1.0, "level": "INFO", "message": "loaded afresh into slot 0"}))
    figures: dict[str, float | None] = {"step": 1, "reward": 0.5, "lr": 0.001, "gradNorm": 0.25, "tokens": 96}
    figures |= {"entropy": 1.25, "klSampler": 2e-4, "klBase": 0.03, "clipFraction": 0.0625, "tisFraction": 0.125}
    append(directory, json.dumps({"time": 2.0, "level": "INFO", "message": "step 1 of 2", **figures}))
    trace = 'Traceback (most recent call last):\n  File "rewards.py", line 3\nValueError: no label'
    append(directory, json.dumps({"time": 3.0, "level": "WARNING", "message": "failed", "detail": trace}))
    samples = (Sample((5, 6), (-0.5, -0.5), 1.0, 0.7, False), Sample((5,), (-0.5,), 0.0, -0.7, True))
    for step in (1, 2):
        group = PromptGroup("u", VersionId("u", "1.1", step), step - 1, (1,), samples, ("yes\nand", "no"), "2 + 2?")
        write_samples(directory, cut_samples(step, [group]))
    return world


def test_logs_tell_each_step_and_the_traceback(done: CliWorld) -> None:
    result = done.call("logs", "json")
    assert result.exit_code == 0, result.output
    loaded, step, failed, *trace = result.stdout.splitlines()
    assert loaded.endswith("  loaded afresh into slot 0")
    figures = ["reward 0.5", "lr 0.001", "grad norm 0.25", "tokens 96", "entropy 1.25", "KL to sampler 0.0002"]
    figures += ["KL to base 0.03", "clipped 0.0625", "TIS 0.125"]
    assert step.endswith("  ".join(["  step 1 of 2", *figures]))
    assert failed.endswith("  WARNING failed")
    assert trace == ["    Traceback (most recent call last):", '      File "rewards.py", line 3',
                     "    ValueError: no label"]  # fmt: skip


def test_logs_follow_until_the_run_is_deregistered(done: CliWorld) -> None:
    directory = done.directory(done.runs[0])

    def later() -> None:
        append(directory, json.dumps({"time": 4.0, "level": "INFO", "message": "its slot is free"}))
        done.runs[0]["status"]["conditions"].append({"type": "Deregistered", "status": "True", "reason": "Verified"})

    timer = threading.Timer(0.3, later)
    timer.start()
    result = done.call("logs", "json", "-f")
    timer.join()
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith("its slot is free")
    assert result.stdout.count("loaded afresh") == 1


def test_logs_follow_waits_for_a_runtime_that_restarts(done: CliWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    assert done.runtime is not None
    port = done.runtime.port
    away, read = threading.Event(), threading.Event()

    @asynccontextmanager
    async def telling(kube: Kube, pool: dict[str, Any]) -> AsyncIterator[Runtime]:
        try:
            async with open_runtime(kube, pool) as runtime:
                yield runtime
                read.set()
        except Unavailable:
            away.set()
            raise

    monkeypatch.setattr("lorafleet_cli.logs.open_runtime", telling)
    monkeypatch.setattr("lorafleet_cli.logs._POLL_SECONDS", 0.05)

    def restart() -> None:
        assert done.runtime is not None and read.wait(60)
        done.runtime.stop()
        done.runs[0]["status"]["conditions"].append({"type": "Deregistered", "status": "True", "reason": "Verified"})
        assert away.wait(60)
        append(done.directory(done.runs[0]), json.dumps({"time": 4.0, "level": "INFO", "message": "back"}))
        done.start_runtime(port)

    restarting = threading.Thread(target=restart)
    restarting.start()
    result = done.call("logs", "json", "--follow")
    restarting.join()
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith("  back")
    assert result.stderr.startswith("waiting: runtime: ")


@pytest.mark.parametrize("plural", ["adapterruns", "adapterpools", "secrets"])
def test_logs_follow_bears_an_api_server_that_starts(
    done: CliWorld, monkeypatch: pytest.MonkeyPatch, plural: str
) -> None:
    monkeypatch.setattr("lorafleet_cli.logs._POLL_SECONDS", 0.05)

    def recover() -> None:
        if done.refusals == 8:
            done.forbidden = ()
            append(done.directory(done.runs[0]), json.dumps({"time": 4.0, "level": "INFO", "message": "back"}))
            done.runs[0]["status"]["conditions"].append(
                {"type": "Deregistered", "status": "True", "reason": "Verified"}
            )

    done.on_refusal = recover
    refuse_after_first_reading(done, monkeypatch, plural)
    result = done.call("logs", "json", "-f")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith("  back")
    assert result.stderr.startswith("waiting: ")


def test_logs_follow_does_not_take_a_refusal_for_a_deletion(done: CliWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorafleet_cli.logs._POLL_SECONDS", 0.05)
    monkeypatch.setattr("lorafleet_cli.patience.REFUSED_SECONDS", 0.2)
    refuse_after_first_reading(done, monkeypatch, "adapterruns")
    result = done.call("logs", "json", "-f")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: permission: get adapterruns/json in namespace default: ")


def test_logs_follow_ends_when_the_run_is_deleted(done: CliWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    after_first_reading(monkeypatch, done.runs.clear)
    assert done.call("logs", "json", "-f").exit_code == 0


def refuse_after_first_reading(world: CliWorld, monkeypatch: pytest.MonkeyPatch, plural: str) -> None:
    def refuse() -> None:
        world.forbidden = (plural,)

    after_first_reading(monkeypatch, refuse)


def after_first_reading(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Something happens once the log has been read for the first time."""
    changes = [change]

    @asynccontextmanager
    async def then(kube: Kube, pool: dict[str, Any]) -> AsyncIterator[Runtime]:
        async with open_runtime(kube, pool) as runtime:
            yield runtime
        if changes:
            changes.pop()()

    monkeypatch.setattr("lorafleet_cli.logs.open_runtime", then)


def test_samples_of_a_step(done: CliWorld) -> None:
    result = done.call("samples", "json", "--step", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "Step 1: 1 prompts, 2 samples",
        "",
        "Prompt 0, sampled by version 1:",
        "    2 + 2?",
        "  reward 1, advantage +0.700, 2 tokens:",
        "    yes",
        "    and",
        "  reward 0, advantage -0.700, 1 tokens, cut at maxTokens:",
        "    no",
    ]


def test_what_a_model_wrote_does_not_drive_the_terminal(done: CliWorld) -> None:
    directory = done.directory(done.runs[0])
    samples = (Sample((5,), (-0.5,), 1.0, 0.7, False),)
    group = PromptGroup("u", VersionId("u", "1.1", 3), 2, (1,), samples, ("\x1b[2Jbye",), "2?")
    write_samples(directory, cut_samples(3, [group]))
    append(directory, json.dumps({"time": 4.0, "level": "INFO", "message": "said \x1b[2Jbye"}))
    for command in ("samples", "logs"):
        assert "\\x1b[2Jbye" in done.call(command, "json").stdout


def test_samples_of_the_newest_step_for_machines(done: CliWorld) -> None:
    found = json.loads(done.call("samples", "json", "--json").stdout)
    assert (found["step"], found["prompts"][0]["samples"][1]["reward"]) == (2, 0.0)


def test_a_step_that_is_not_kept(done: CliWorld) -> None:
    text = "error: step: 7: not reached yet, or its samples are not kept any more; recorded are steps 1-2"
    assert done.error("samples", "json", "--step", "7") == text


def test_a_pool_without_endpoint(done: CliWorld) -> None:
    done.pools[:] = [pool(None)]
    assert done.error("logs", "json").startswith("error: pool: default/demo: it has no spec.endpoint")


def test_a_pool_that_is_gone(done: CliWorld) -> None:
    done.pools.clear()
    assert done.error("logs", "json").startswith("error: poolRef: default/demo: there is no such AdapterPool")


def test_the_tokens_secret_is_missing(done: CliWorld) -> None:
    done.secrets.clear()
    assert done.error("logs", "json").startswith(
        "error: tokenSecretRef: default/runtime-token: there is no such Secret"
    )


def test_the_secret_lacks_the_key(done: CliWorld) -> None:
    done.secrets["default/runtime-token"] = {"data": {"other": base64.b64encode(b"x").decode()}}
    assert done.error("logs", "json").startswith("error: tokenSecretRef.key: default/runtime-token/token: ")


def test_the_secret_may_not_be_read(done: CliWorld) -> None:
    done.forbidden = ("secrets",)
    text = done.error("samples", "json")
    assert text.startswith("error: tokenSecretRef: default/runtime-token: you may not read it")
    assert "ask for get on this Secret" in text


def test_an_old_token(done: CliWorld) -> None:
    done.secrets["default/runtime-token"] = secret("old")
    assert "the runtime refuses it" in done.error("logs", "json")


def test_an_unreachable_runtime(done: CliWorld) -> None:
    done.pools[:] = [pool(f"http://127.0.0.1:{free_port()}")]
    text = done.error("logs", "json")
    assert text.startswith("error: runtime: http://127.0.0.1:")
    assert "it cannot be reached (Connect call failed" in text or "it cannot be reached (Connection refused" in text


def test_a_restarting_runtime_is_told_by_the_pool(done: CliWorld) -> None:
    done.pools[:] = [pool(f"http://127.0.0.1:{free_port()}")]
    ready = done.pools[0]["status"]["conditions"][1]
    ready |= {"status": "False", "reason": "RuntimeUnreachable", "message": "connection refused"}
    assert "it cannot be reached (RuntimeUnreachable: connection refused)" in done.error("samples", "json")


def test_a_run_without_a_word_yet(world: CliWorld) -> None:
    world.runs.append(run("new"))
    result = world.call("logs", "new")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "nothing about this run yet" in result.stderr
    assert world.error("samples", "new").startswith("error: samples: none: no step of this run is recorded yet")
