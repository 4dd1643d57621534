"""What the demo measures, and bench/demo.json: {hardware, commit, command, date, results: [{name, value, unit, ...}]}.

Called by the demos. Reads objects, /metrics and /proc; changes nothing.
"""

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lorafleet_api.v1alpha1.wire import AdapterView
from lorafleet_local.api import condition
from lorafleet_local.paths import repo_root
from lorafleet_local.processes import peak_rss_bytes
from lorafleet_local.stack import Stack

Result = dict[str, Any]
_FULL = "demo_full."


@dataclass(slots=True)
class Observation:
    """When one run's conditions were first seen True, Unix seconds on this machine's clock."""

    seen: dict[str, float] = field(default_factory=dict)
    applied: float = 0.0
    """When its kubectl apply began."""
    last_step: float | None = None
    """The runtime's own time of the last commit."""


@dataclass(slots=True)
class Results:
    """Everything the demo gathers while it runs."""

    runs: dict[str, Observation] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    """Peak resident bytes by process."""
    counters: dict[str, float] = field(default_factory=dict)
    """Of the runtime's /metrics, at the end."""

    baseline: dict[str, Any] | None = None
    """What `lorafleet_local.baseline` wrote: the same tasks one after another, on plain HF + PEFT."""

    def run(self, name: str) -> Observation:
        """The observation of one run."""
        return self.runs.setdefault(name, Observation())

    def observe(self, item: dict[str, Any]) -> list[str]:
        """Note the conditions that are True now; returns those that were not before."""
        run = self.run(item["metadata"]["name"])
        flipped = [
            kind
            for kind in ("Registered", "Complete", "Deregistered")
            if kind not in run.seen and condition(item, kind)["status"] == "True"
        ]
        run.seen.update(dict.fromkeys(flipped, time.time()))
        return flipped


def note_last_step(results: Results, running: Stack, item: dict[str, Any]) -> None:
    """Ask the runtime for the exact time of the last commit, while it still knows the run.

    Raises:
        httpx.HTTPError: the runtime does not answer.
    """
    with running.runtime() as runtime:
        answer = runtime.get(f"/v1/adapters/{item['metadata']['uid']}")
    if answer.status_code == httpx.codes.OK:
        view = AdapterView.model_validate(answer.json())
        results.run(item["metadata"]["name"]).last_step = view.last_step_time


def collect(results: Results, running: Stack) -> None:
    """Read what only the live stack knows: memory and counters.

    Raises:
        httpx.HTTPError: the runtime does not answer.
    """
    results.peaks = peak_rss_bytes(running.state.stack_id, running.state.processes)
    with running.runtime() as runtime:
        metrics = runtime.get("/metrics").raise_for_status().text
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.endswith("_total") and not sample.labels:
                results.counters[sample.name] = sample.value


def write(path: Path, results: Results, proof: dict[str, Any], phases: dict[str, float], wall: float) -> None:
    """Write the figures in the schema that all of bench/ shares.

    Args:
        path: its rows of demo-full stay.
        results: from the run.
        proof: from `prove`.
        phases: seconds by name.
        wall: seconds of the whole demo, start-up and shutdown included.
    """
    rows = [_row("demo.wall_seconds", wall, "s")]
    rows += [_row(f"demo.phase.{name.replace(' ', '_')}_seconds", value, "s") for name, value in phases.items()]
    rows += _latencies(results)
    rows += _throughput(results)
    rows += [_row(f"demo.peak_rss.{name}", value, "bytes") for name, value in sorted(results.peaks.items())]
    for name, task in proof["tasks"].items():
        rows.append(_row(f"demo.{name}.reward_before", task["before"]["mean_reward"], "reward", task["prompts"]))
        rows.append(_row(f"demo.{name}.reward_after", task["after"]["mean_reward"], "reward", task["prompts"]))
    rows += _baseline(results.baseline)
    update_file(path, "make bench-demo", lambda name: not name.startswith(_FULL), rows)


def write_full(path: Path, wall: float, phases: dict[str, float], stories: dict[str, float]) -> None:
    """Write the figures of demo-full beside those of the demo.

    Args:
        path: its other results stay.
        wall: seconds of the whole, start-up, shutdown and proof included.
        phases: seconds by name.
        stories: seconds by name.
    """
    rows = [_row(f"{_FULL}wall_seconds", wall, "s")]
    rows += [_row(f"{_FULL}phase.{name.replace(' ', '_')}_seconds", value, "s") for name, value in phases.items()]
    rows += [_row(f"{_FULL}story.{name}_seconds", value, "s") for name, value in stories.items()]
    update_file(path, "make bench-demo-full", lambda name: name.startswith(_FULL), rows)


def update_file(path: Path, command: str, mine: Callable[[str], bool], rows: list[Result]) -> None:
    """Replace the rows that `mine` names; the header becomes that of now, and the command is added.

    A row that stays, but was measured elsewhere or at another commit or day, says so itself.
    """
    now = {
        "hardware": hardware(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    before: dict[str, Any] = {**now, "command": command, "results": []}
    if path.is_file():
        before = json.loads(path.read_text())
    kept = []
    for row in before["results"]:
        if not mine(row["name"]):
            origin = {key: row.get(key, before[key]) for key in now}
            figures = {key: value for key, value in row.items() if key not in now}
            kept.append({**figures, **{key: value for key, value in origin.items() if value != now[key]}})
    document = {
        "hardware": now["hardware"],
        "commit": now["commit"],
        "command": "; ".join(dict.fromkeys([*before["command"].split("; "), command])),
        "date": now["date"],
        "results": sorted([*kept, *rows], key=lambda row: row["name"].startswith(_FULL)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _row(name: str, value: float, unit: str, n: int = 1, spread: tuple[float, float] | None = None) -> Result:
    low, high = spread or (value, value)
    return {"name": name, "value": value, "unit": unit, "n": n, "min": low, "max": high}


def _mean_row(name: str, values: list[float], unit: str) -> list[Result]:
    if not values:
        return []
    return [_row(name, sum(values) / len(values), unit, len(values), (min(values), max(values)))]


def _latencies(results: Results) -> list[Result]:
    runs = results.runs.values()
    registered = [run.seen["Registered"] - run.applied for run in runs if "Registered" in run.seen]
    complete = [run.seen["Complete"] - run.last_step for run in runs if run.last_step and "Complete" in run.seen]
    deregistered = [run.seen["Deregistered"] - run.seen["Complete"] for run in runs if "Deregistered" in run.seen]
    return [
        *_mean_row("operator.registered_seconds", registered, "s"),
        *_mean_row("operator.complete_seconds", complete, "s"),
        *_mean_row("operator.deregistered_seconds", deregistered, "s"),
    ]


def _throughput(results: Results) -> list[Result]:
    ends = [run.seen["Complete"] for run in results.runs.values() if "Complete" in run.seen]
    starts = [run.seen["Registered"] for run in results.runs.values() if "Registered" in run.seen]
    if not ends or not starts:
        return []
    seconds = max(ends) - min(starts)
    rows = []
    for name, counter in (("rollout", "lorafleet_rollout_tokens_total"), ("train", "lorafleet_train_tokens_total")):
        if counter in results.counters:
            tokens = results.counters[counter]
            rows.append(_row(f"demo.{name}_tokens", tokens, "tokens"))
            rows.append(_row(f"demo.{name}_tokens_per_second", tokens / seconds, "tokens/s"))
    busy = results.counters.get("lorafleet_train_busy_seconds_total")
    return rows if busy is None else [*rows, _row("demo.trainer_busy_fraction", busy / seconds, "1")]


def _baseline(summary: dict[str, Any] | None) -> list[Result]:
    if summary is None:
        return []
    rows = [
        _row("baseline.total_seconds", summary["total_seconds"], "s"),
        _row("baseline.load_seconds", summary["load_seconds"], "s"),
        _row("baseline.tokens_per_second", summary["tokens_per_second"], "tokens/s"),
    ]
    return rows + [_row(f"baseline.{name}_seconds", task["seconds"], "s") for name, task in summary["tasks"].items()]


def hardware() -> str:
    """CPU model, count and memory of this machine."""
    model = platform.machine()
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            model = text.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model}, {memory:.0f} GiB, no GPU"


def commit() -> str:
    """The checkout's commit, with "-dirty" when tracked files differ."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=repo_root(),
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"
