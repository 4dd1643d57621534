"""The figures of bench/demo.json are derived from observations by hand-checkable arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorafleet_local import measure
from lorafleet_local.measure import Observation, Results

PROOF = {
    "required_gain": 0.3,
    "tasks": {"json": {"prompts": 64, "before": {"mean_reward": 0.1}, "after": {"mean_reward": 0.9}}},
}


def observed() -> Results:
    return Results(
        runs={
            "a": Observation(
                {"Registered": 101.0, "Complete": 160.0, "Deregistered": 161.0}, applied=100.0, last_step=159.5
            ),
            "b": Observation(
                {"Registered": 102.0, "Complete": 202.0, "Deregistered": 204.0}, applied=100.0, last_step=200.5
            ),
        },
        peaks={"etcd": 5},
        counters={"lorafleet_rollout_tokens_total": 1010.0, "lorafleet_train_busy_seconds_total": 50.5},
    )


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    measure.write(tmp_path / "demo.json", observed(), PROOF, {"pool ready": 30.0}, 240.0)
    written: dict[str, Any] = json.loads((tmp_path / "demo.json").read_text())
    return written


def row(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [result for result in document["results"] if result["name"] == name]
    return found


def test_the_schema_is_that_of_all_benchmarks(document: dict[str, Any]) -> None:
    assert set(document) == {"hardware", "commit", "command", "date", "results"}
    assert all(set(result) == {"name", "value", "unit", "n", "min", "max"} for result in document["results"])


def test_registered_counts_from_the_apply(document: dict[str, Any]) -> None:
    assert row(document, "operator.registered_seconds") == {
        "name": "operator.registered_seconds", "value": 1.5, "unit": "s", "n": 2, "min": 1.0, "max": 2.0,
    }  # fmt: skip


def test_complete_counts_from_the_last_commit(document: dict[str, Any]) -> None:
    assert row(document, "operator.complete_seconds")["value"] == pytest.approx(1.0)  # (0.5 + 1.5) / 2


def test_rates_use_the_span_from_first_registered_to_last_complete(document: dict[str, Any]) -> None:
    assert row(document, "demo.rollout_tokens_per_second")["value"] == pytest.approx(10.0)  # 1010 / (202 - 101)
    assert row(document, "demo.trainer_busy_fraction")["value"] == pytest.approx(0.5)


def test_the_baseline_stands_beside_it(tmp_path: Path) -> None:
    tasks = {"json": {"seconds": 60.0}}
    summary = {"total_seconds": 200.0, "load_seconds": 2.0, "tokens_per_second": 70.0, "tasks": tasks}
    results = observed()
    results.baseline = summary
    measure.write(tmp_path / "demo.json", results, PROOF, {}, 240.0)
    values = {row["name"]: row["value"] for row in json.loads((tmp_path / "demo.json").read_text())["results"]}
    assert (values["baseline.total_seconds"], values["baseline.json_seconds"]) == (200.0, 60.0)


def test_wall_phases_memory_and_rewards_are_there(document: dict[str, Any]) -> None:
    values = {result["name"]: result["value"] for result in document["results"]}
    assert values["demo.wall_seconds"] == 240.0
    assert values["demo.phase.pool_ready_seconds"] == 30.0
    assert values["demo.peak_rss.etcd"] == 5
    assert values["demo.json.reward_after"] == 0.9


def test_a_condition_is_noted_when_first_seen_true() -> None:
    results = Results()
    condition = {"type": "Registered", "status": "False", "reason": "x"}
    item = {"metadata": {"name": "a"}, "status": {"conditions": [condition]}}
    assert results.observe(item) == []
    assert results.runs["a"].seen == {}
    condition["status"] = "True"
    assert results.observe(item) == ["Registered"]
    first = results.runs["a"].seen["Registered"]
    assert results.observe(item) == []
    assert results.runs["a"].seen == {"Registered": first}


def test_demo_full_is_written_beside_the_demo_and_the_other_way_round(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    measure.write(path, observed(), PROOF, {}, 240.0)
    measure.write_full(path, 500.0, {"training": 300.0}, {"late": 40.0})
    measure.write(path, observed(), PROOF, {}, 250.0)
    document = json.loads(path.read_text())
    values = {result["name"]: result["value"] for result in document["results"]}
    assert len(values) == len(document["results"])
    assert (values["demo.wall_seconds"], values["demo_full.wall_seconds"]) == (250.0, 500.0)
    assert (values["demo_full.phase.training_seconds"], values["demo_full.story.late_seconds"]) == (300.0, 40.0)
    assert document["command"] == "make bench-demo; make bench-demo-full"


def test_a_story_that_is_gone_leaves_no_row(tmp_path: Path) -> None:
    measure.write_full(tmp_path / "demo.json", 500.0, {}, {"old": 1.0})
    measure.write_full(tmp_path / "demo.json", 510.0, {}, {"new": 1.0})
    names = [result["name"] for result in json.loads((tmp_path / "demo.json").read_text())["results"]]
    assert names == ["demo_full.wall_seconds", "demo_full.story.new_seconds"]


def test_a_row_that_stays_keeps_its_own_commit_and_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "demo.json"
    monkeypatch.setattr(measure, "hardware", lambda: "two cores")
    monkeypatch.setattr(measure, "commit", lambda: "old")
    measure.write(path, observed(), PROOF, {}, 240.0)
    monkeypatch.setattr(measure, "commit", lambda: "new")
    for wall in (500.0, 510.0):
        measure.write_full(path, wall, {}, {})
    document = json.loads(path.read_text())
    assert document["commit"] == "new"
    assert row(document, "demo.wall_seconds")["commit"] == "old"
    assert "date" not in row(document, "demo.wall_seconds"), "the header's"
    assert "commit" not in row(document, "demo_full.wall_seconds")
    measure.write(path, observed(), PROOF, {}, 250.0)
    assert "commit" not in row(json.loads(path.read_text()), "demo.wall_seconds")
