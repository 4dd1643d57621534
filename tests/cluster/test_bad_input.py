"""Every kind of bad input, all at once, beside a healthy run: each says why, and the healthy one never notices.

docs/bad-input.md lists them. What the API server refuses never becomes an object; the rest ends Failed.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from lorafleet_local.kubectl import KubectlError
from support.cluster import Cluster, manifest

Spec = dict[str, Any]

LONG_NAME = ".".join(["a" * 63] * 3 + ["b" * 61])
"""253 characters, the most that an object's name may have."""
DOTTED_NAME = f"{'team-' * 13}run.{'v' * 11}"
"""Case 11 (kubernetes-sigs/kueue#13413), (a): 80 characters with a dot."""

FAILS: dict[str, tuple[Spec, str, str]] = {
    "no-pool": ({"poolRef": {"name": "nowhere"}}, "PoolNotFound", "no AdapterPool 'nowhere' in namespace 'default'"),
    "rank": ({"rank": 64}, "RankTooLarge", "rank: 64 is above the pool's maxRank 8; use a rank of at most 8"),
    "stale": ({"maxStaleness": 9}, "StalenessTooLarge", "maxStaleness: 9 is above the pool's 1"),
    "no-reward": ({"customRmPath": None}, "InvalidSpec", "rmType, customRmPath, reward: exactly one must be set"),
    "no-gradient": ({"nSamplesPerPrompt": 1}, "InvalidSpec", "nSamplesPerPrompt: 1 gives every sample the advantage 0"),
    "top-p": ({"sampling": {"topP": 0.9, "maxTokens": 6}}, "InvalidSpec", "sampling.topP: 0.9 cannot be trained on"),
    "missing": ({"data": "missing.jsonl"}, "DataError", "data: 'missing.jsonl' does not exist"),
    "folder": ({"data": "folder.jsonl"}, "DataError", "data: 'folder.jsonl' cannot be read"),
    "pipe": ({"data": "pipe.jsonl"}, "DataError", "data: 'pipe.jsonl' cannot be read (it is no regular file)"),
    "outside": ({"data": "outside.jsonl"}, "DataError", "lies outside the pool's storage"),
    "newline": ({"data": "new\nline.jsonl"}, "DataError", r"data: 'new\nline.jsonl' does not exist"),
    "empty": ({"data": "empty.jsonl"}, "DataError", "has no rows"),
    "parquet": ({"data": "empty.parquet"}, "DataError", "no readable parquet file"),
    "malformed": ({"data": "malformed.jsonl"}, "DataError", "line 2 is not JSON"),
    "bytes": ({"data": "bytes.jsonl"}, "DataError", "line 1 is not JSON"),
    "surrogate": ({"data": "surrogate.jsonl"}, "DataError", "holds half a surrogate pair"),
    "no-column": ({"inputKey": "question"}, "DataError", "which has label, prompt; set inputKey to one of them"),
    "too-long": ({"data": "too-long.jsonl"}, "DataError", "0 usable rows: all 3 prompts are longer than 122 tokens"),
    "rm-type": ({"customRmPath": None, "rmType": "maths"}, "InvalidSpec", "rmType: 'maths' is unknown; use one of"),
    "forbidden": ({"customRmPath": "os.system"}, "InvalidSpec", "the pool's rewardModules allow support.rewards"),
    "no-reward-there": ({"customRmPath": "support.rewards.no"}, "RewardError", "'support.rewards.no' cannot be loaded"),
    "init-missing": ({"initFrom": "nowhere"}, "InitError", "adapter_config.json cannot be read"),
    "init-outside": ({"initFrom": "../elsewhere"}, "InitError", "lies outside the pool's storage"),
    # Case 7 (vllm-project/vllm#4879): adapters that an engine cannot load.
    "init-rank": ({"initFrom": "init-rank"}, "InitError", "r is 16, the run's rank 4; set rank to match"),
    "init-pattern": ({"initFrom": "init-pattern"}, "InitError", "rank_pattern is {'q_proj': 16}"),
    "init-cut": ({"initFrom": "init-cut"}, "InitError", "adapter_model.safetensors cannot be read"),
}  # fmt: skip
"""Name to changes of a good spec, the Failed condition's reason, and words of its message. No slot is ever taken."""

FAILS_TRAINING: dict[str, tuple[Spec, str, str]] = {
    "raises": ({"customRmPath": "support.rewards.broken"}, "RewardError", "this reward is broken"),
    "hangs": (
        {"customRmPath": "support.rewards.hangs", "rewardTimeoutSeconds": 0.5}, "RewardError", "no answer within 0.5 s"
    ),
    "prints": ({"customRmPath": "support.rewards.prints"}, "RewardError", "printed more than 4 MiB in one call"),
    "eats": ({"customRmPath": "support.rewards.eats"}, "RewardError", "rollout.rewardMemoryBytes"),
    "leaves": ({"customRmPath": "support.rewards.leaves"}, "RewardError", "exited with code 3"),
    **{
        f"odd-{label}": (
            {"customRmPath": "support.rewards.odd", "data": f"odd-{label}.jsonl"}, "RewardError", "return a finite"
        )
        for label in ("none", "nan")
    },
}  # fmt: skip
"""As FAILS, for what only the first prompt group can show."""

TRAINS: dict[str, Spec] = {
    LONG_NAME: {"numStep": 1},
    DOTTED_NAME: {"numStep": 1},
    "some-too-long": {"data": "some-too-long.jsonl", "numStep": 1},
    "odd-shape": {"rolloutBatchSize": 3, "nSamplesPerPrompt": 5, "numStep": 1},
}
"""What looks odd and is right."""

REFUSED: dict[str, tuple[str, str]] = {
    "unknown-field": ("numSteps: 3", 'unknown field "spec.numSteps"'),
    "word-for-number": ("rank: four", "spec.rank"),
    "number-as-string": ('rank: "4"', "spec.rank"),
    "fraction": ("rank: 4.5", "spec.rank"),
    "negative": ("optimizer: {lr: -1}", "spec.optimizer.lr"),
    "beta": ("optimizer: {betas: [0.9, 1.0]}", "betas: each must be in [0, 1); for example [0.9, 0.98]"),
    "no-step": ("numStep: 0", "spec.numStep"),
    "no-batch": ("rolloutBatchSize: 0", "spec.rolloutBatchSize"),
    "huge-group": ("nSamplesPerPrompt: 100000", "spec.nSamplesPerPrompt"),
    "empty-stop": ("sampling: {stop: ['']}", "spec.sampling.stop"),
    "empty-data": ("data: ''", "spec.data"),
    "no-timeout": ("rewardTimeoutSeconds: 0", "spec.rewardTimeoutSeconds"),
    "two-rewards": ("rmType: math", "rmType, customRmPath and reward exclude each other; keep one of them"),
    "enum": ("optimizer: {schedule: square}", "spec.optimizer.schedule"),
    "bare-off": ("algorithm: {tisMode: Off}", "spec.algorithm.tisMode in body must be of type string"),
    "min-lr": ("optimizer: {lr: 0.001, minLr: 0.1}", "minLr is above lr; lower minLr or raise lr"),
    "tis-floor": ("algorithm: {tisFloor: 3, tisCap: 2}", "tisFloor is above tisCap; lower tisFloor or raise tisCap"),
    "decay": ("optimizer: {lr: 0.1, weightDecay: 10}", "lr times weightDecay must be below 1"),
    "twice": ("targetModules: [q_proj, q_proj]", "a projection is there more than once; list each once"),
}
"""Name to a line of spec, and words of the API server's refusal."""

UNREADABLE = ("optimizer: {lr: .nan}", "optimizer: {weightDecay: .inf}", "optimizer: {eps: 1e400}")
"""Lines that JSON has no number for."""


@pytest.fixture
def files(cluster: Cluster) -> None:
    """The data files and adapters that the tables name, on the pool's storage."""
    root = cluster.stack.storage
    good, long = {"prompt": "1 plus", "label": "1"}, {"prompt": "count: " + "tick " * 9000, "label": "1"}
    texts: dict[str, list[object]] = {
        "too-long": [long, long, long],
        "some-too-long": [good, long, {"prompt": "2 plus", "label": "2"}],
        **{f"odd-{label}": [{"prompt": "1 plus", "label": label}] for label in ("none", "nan")},
    }
    for name, rows in texts.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = json.dumps(good).encode() + b"\n"
    (root / "malformed.jsonl").write_bytes(line + b'{"prompt": "2 plus", \n')
    (root / "bytes.jsonl").write_bytes(line.replace(b"plus", b"\xff\xfe"))
    (root / "surrogate.jsonl").write_bytes(line.replace(b"plus", b"\\ud800"))
    for name in ("empty.jsonl", "empty.parquet"):
        (root / name).write_bytes(b"")
    (root / "folder.jsonl").mkdir()
    os.mkfifo(root / "pipe.jsonl")
    (root.parent / "outside.jsonl").write_bytes(line)
    (root / "outside.jsonl").symlink_to(root.parent / "outside.jsonl")
    _adapter(root / "init-rank", r=16)
    _adapter(root / "init-pattern", r=4, rank_pattern={"q_proj": 16})
    _adapter(root / "init-cut", r=4)
    weights = root / "init-cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def _adapter(directory: Path, **config: Any) -> None:
    directory.mkdir()
    plain = {"peft_type": "LORA", "lora_alpha": 4, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(plain | config))
    save_file({"a": np.ones((4, 4), np.float32)}, directory / "adapter_model.safetensors")


def test_bad_runs_say_why_and_a_healthy_neighbour_never_notices(cluster: Cluster, files: None) -> None:
    """Cases 7, 9 (huggingface/trl#3180) and 11 (kubernetes-sigs/kueue#13413) on a whole stack, among all the others."""
    busy = {"numStep": 1000, "customRmPath": "support.rewards.slow"}
    for name in ("good", "filler", "late"):
        cluster.apply(name, **busy, **({"activeDeadlineSeconds": 15} if name == "late" else {}))
    good = cluster.wait_step("good", 1)
    boot = cluster.listing().boot_epoch
    last = {"scheduling": {"priority": -100}, "numStep": 1}
    extra: dict[str, Spec] = {"impatient": last | {"registrationDeadlineSeconds": 1}, "patient": last}
    bad = FAILS | FAILS_TRAINING
    specs = {name: spec for name, (spec, _, _) in bad.items()} | TRAINS | extra
    _apply(cluster, specs)

    def waits() -> dict[str, Any]:
        return cluster.condition("patient", "Registered")

    cluster.until("patient waits for a slot", lambda: waits()["reason"] == "SlotsExhausted")
    assert re.fullmatch("all 3 slots are taken; position [1-9][0-9]? in the queue", waits()["message"])
    cluster.wait("impatient", "Finished")
    cluster.kubectl("delete", "adapterrun", "filler", "--wait=false")
    _wait(cluster, "Finished", "Deregistered", names=["late", *specs])

    runs = {run["metadata"]["name"]: run for run in _list(cluster)}
    told = {name: _told(runs[name], "Failed") for name in [*bad, "late", "impatient"]}
    assert {name: words for name, (_, reason, words) in bad.items() if told[name][0] != reason} == {}
    wrong = {name: told[name] for name, (_, _, words) in bad.items() if words not in told[name][1]}
    assert wrong == {}
    assert [told[name][0] for name in ("late", "impatient")] == ["DeadlineExceeded"] * 2
    assert all("delete it, then apply it corrected" in _told(runs[name], "Stalled")[1] for name in bad)
    assert [name for name in FAILS if "slot" in runs[name]["status"] or "startTime" in runs[name]["status"]] == []
    assert {name: _told(runs[name], "Complete")[0] for name in [*TRAINS, "patient"]} == dict.fromkeys(
        [*TRAINS, "patient"], "Completed"
    )
    skipped = runs["some-too-long"]["status"]
    assert (skipped["usableRows"], skipped["skippedRows"]) == (2, 1)

    step = runs["good"]["status"]["step"]
    cluster.apply("next", numStep=1)  # no bad object was deleted, and none holds a slot
    for condition in ("Complete", "Deregistered"):
        cluster.wait("next", condition, 20)
    cluster.wait_step("good", step + 1)
    view = cluster.view(good)
    assert view is not None and (view.state, view.restarts) == ("ACTIVE", 0)
    listing = cluster.listing()
    assert (listing.boot_epoch, list(listing.trainer.slots.values())) == (boot, [good])
    assert {name.partition("@")[0] for engine in listing.engines for name in engine.adapters} == {good}


def test_the_api_server_refuses_what_it_can_see(cluster: Cluster) -> None:
    documents = [_raw(name, line) for name, (line, _) in REFUSED.items()]
    documents += [_raw("Upper", ""), _raw("new\nline", ""), _raw("a" * 254, "")]
    with pytest.raises(KubectlError) as caught:
        cluster.kubectl("apply", "-f", "-", stdin="\n---\n".join(documents))
    told = str(caught.value)
    assert {name: words for name, (_, words) in REFUSED.items() if words not in told} == {}
    assert told.count("metadata.name: Invalid value") >= 3
    for line in UNREADABLE:
        with pytest.raises(KubectlError):
            cluster.kubectl("apply", "-f", "-", stdin=_raw("unreadable", line))
    assert _list(cluster) == []


def test_edits_that_a_run_cannot_follow_are_refused(cluster: Cluster) -> None:
    cluster.apply("done", numStep=1)
    cluster.apply("fixed", numStep=500, customRmPath="support.rewards.slow")
    cluster.wait_step("fixed", 1)
    edits: list[tuple[str, Spec, str]] = [
        ("fixed", {"rank": 8}, "rank cannot change after creation; create a new AdapterRun instead"),
        ("fixed", {"data": "other.jsonl"}, "data cannot change after creation"),
        ("fixed", {"alpha": 8}, "alpha cannot change after creation"),
        ("fixed", {"numStep": 400}, "numStep may only grow; cancel the run to end it earlier"),
    ]
    cluster.wait("done", "Complete")
    finished = "cannot change after the run finished; create a new AdapterRun with initFrom instead"
    edits += [("done", {"numStep": 5}, f"numStep {finished}"), ("done", {"numEpoch": 5}, f"numEpoch {finished}")]
    for name, change, words in edits:
        with pytest.raises(KubectlError) as caught:
            cluster.kubectl("patch", "adapterrun", name, "--type=merge", "-p", json.dumps({"spec": change}))
        assert words in str(caught.value)


def _raw(name: str, line: str) -> str:
    """A good manifest with one line of spec written as a user would."""
    base = manifest(name)
    changed = yaml.safe_load(line) or {}
    base["spec"] = {key: value for key, value in base["spec"].items() if key not in changed}
    return yaml.safe_dump(base) + (f"  {line}\n" if line else "")


def _apply(cluster: Cluster, specs: dict[str, Spec]) -> None:
    items = [manifest(name, **spec) for name, spec in specs.items()]
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def _wait(cluster: Cluster, *conditions: str, names: list[str]) -> None:
    for condition in conditions:
        targets = [f"adapterrun/{name}" for name in names]
        cluster.kubectl("wait", *targets, f"--for=condition={condition}", "--timeout=90s", timeout=100.0)


def _list(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.kubectl("get", "adapterruns", "-o", "json"))["items"]
    return found


def _told(run: dict[str, Any], kind: str) -> tuple[str, str]:
    condition = next(c for c in run["status"]["conditions"] if c["type"] == kind)
    return condition["reason"], condition["message"]
