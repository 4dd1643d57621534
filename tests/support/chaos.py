"""A demo-like load of eight unlike runs, a fault in its middle, and what must be true afterwards.

Called by tests/chaos. One `Scenario` per test: `start`, then `strike`, then `finish`, which adds a row to the report.
"""

import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from lorafleet_local.api import Api, condition
from lorafleet_local.processes import _short_name, find, members
from support.chaos_steps import artifact_digest, read_steps, repeated_steps
from support.cluster import Cluster, manifest

LOAD: tuple[dict[str, Any], ...] = (
    {"rank": 1, "rolloutBatchSize": 1, "nSamplesPerPrompt": 8, "numStep": 16},
    {"rank": 2, "rolloutBatchSize": 2, "nSamplesPerPrompt": 4, "numStep": 14, "algorithm": {"advantage": "rloo"}},
    {"rank": 4, "rolloutBatchSize": 3, "nSamplesPerPrompt": 3, "numStep": 12, "algorithm": {"advantage": "reinforce"}},
    {"rank": 8, "rolloutBatchSize": 4, "nSamplesPerPrompt": 2, "numStep": 14, "maxStaleness": 1},
    {"rank": 3, "rolloutBatchSize": 2, "nSamplesPerPrompt": 5, "numStep": 12, "optimizer": {"lr": 0.0001}},
    {"rank": 8, "rolloutBatchSize": 1, "nSamplesPerPrompt": 6, "numStep": 18, "algorithm": {"klCoef": 0.01}},
    {"rank": 4, "rolloutBatchSize": 2, "numStep": 15, "algorithm": {"lossReduction": "tokenMean"}},
    {"rank": 5, "rolloutBatchSize": 5, "nSamplesPerPrompt": 2, "numStep": 12, "maxStaleness": 1,
     "optimizer": {"lr": 0.003, "schedule": "cosine"}, "algorithm": {"lossReduction": "constant", "tisMode": "Mask"}},
)  # fmt: skip
"""Runs of differing rank, batch shape, length, learning rate, algorithm and staleness."""

COMPLETE = {
    "Ready": "True", "Registered": "False", "Complete": "True", "Failed": "False", "Finished": "True",
    "Deregistered": "True", "Stalled": "False", "Suspended": "False", "Reconciling": "False",
}  # fmt: skip
FAILED = COMPLETE | {"Ready": "False", "Complete": "False", "Failed": "True", "Stalled": "True"}
_POLL_SECONDS = 0.25
_END_SECONDS = 240.0
_IGNORED = ("ray-IDLE", "setup_worker.py", "default_worker.py")
"""Workers that Ray keeps or starts in advance."""


@dataclass(slots=True)
class Row:
    """One line of the report."""

    killed: str
    when: str = ""
    ends: str = ""
    restarts: int = 0
    repeated: int = 0
    recovery: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """All rows so far."""

    rows: list[Row] = field(default_factory=list)

    def markdown(self) -> str:
        """The table."""
        head = ("killed", "when", "how the runs ended", "run restarts", "steps repeated", "back after", "whole")
        lines = [" | ".join(head), " | ".join("---" for _ in head)]
        for r in self.rows:
            cells = (r.killed, r.when, r.ends, r.restarts, r.repeated, r.recovery, f"{r.seconds:.0f} s")
            lines.append(" | ".join(str(cell) for cell in cells))
        return "".join(f"| {line} |\n" for line in lines)


@dataclass(slots=True)
class Chaos:
    """A stack and what the scenarios share."""

    cluster: Cluster
    folder: Path
    """Requests to the seam, and its record of steps."""
    report: Report
    idle: Counter[str] = field(default_factory=Counter)
    """How many processes of each kind there are while no run exists."""

    def members(self) -> list[psutil.Process]:
        """Every live process of the stack."""
        state = self.cluster.stack.state
        return members(state.stack_id, state.processes)

    def kinds(self) -> Counter[str]:
        """How many processes there are of each kind."""
        found: Counter[str] = Counter()
        for process in self.members():
            try:
                found[_short_name(process.cmdline())] += process.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                continue
        return Counter({kind: n for kind, n in found.items() if n and kind not in _IGNORED})

    def processes(self, title: str) -> list[psutil.Process]:
        """The processes whose command line contains `title`, without supervisors."""
        found = []
        for process in self.members():
            try:
                line = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if title in line and "lorafleet_local.supervise" not in line:
                found.append(process)
        return found

    def ask(self, fault: str, text: str = "") -> None:
        """Ask the seam for a fault."""
        (self.folder / fault).write_text(text)


class Scenario:
    """One load and one fault.

    Args:
        chaos: the stack.
        name: prefix of the runs' names; also seeds the moment of the fault.
    """

    def __init__(self, chaos: Chaos, name: str) -> None:
        self.chaos = chaos
        self.cluster = chaos.cluster
        self.name = name
        self.row = Row(name)
        self.uids: dict[str, str] = {}
        self.specs: dict[str, dict[str, Any]] = {}
        self._random = random.Random(name)
        self._begun = time.monotonic()
        self._struck = 0.0
        stack = self.cluster.stack
        self._api = Api(stack.apiserver_url, stack.state.folder)
        self._waiting: list[subprocess.Popen[str]] = []

    def start(self, first: dict[str, Any] | None = None, **changes: Any) -> None:
        """Apply the load and wait until every run has made two steps, then for a random moment.

        Args:
            first: spec fields of the first run alone.
            changes: spec fields of all runs.
        """
        common = {"customRmPath": "support.rewards.slow", "checkpoint": {"intervalSteps": 4}}
        specs = [common | spec | changes | ((first or {}) if number == 0 else {}) for number, spec in enumerate(LOAD)]
        items = [manifest(f"{self.name}-{number}", **spec) for number, spec in enumerate(specs)]
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        self.specs = {item["metadata"]["name"]: item["spec"] for item in items}
        self.uids = {name: self.cluster.uid(name) for name in self.specs}
        self.cluster.until("all runs step", lambda: min(self.steps().values()) >= 2, 120.0)
        # A random moment is the point: a kill that always meets the same instruction proves little.
        time.sleep(self._random.uniform(0.0, 1.5))

    def steps(self) -> dict[str, int]:
        """Steps by run, by the runtime's own word."""
        listed = {view.uid: view.step for view in self.cluster.listing().adapters}
        return {name: listed.get(uid, 0) for name, uid in self.uids.items()}

    def strike(self, what: str, act: Callable[[], object]) -> None:
        """Do the damage while every run is under way."""
        before = self.steps()
        assert all(0 < before[name] < spec["numStep"] for name, spec in self.specs.items()), f"not midway: {before}"
        self._struck = time.monotonic()
        self.row.killed = what
        self.row.when = f"{self._struck - self._begun:.1f} s, at steps {min(before.values())} to {max(before.values())}"
        act()

    def kill(self, what: str, *titles: str) -> list[psutil.Process]:
        """SIGKILL the processes with these titles in their command lines, at once; returns them and their children."""
        doomed = [process for title in titles for process in self.chaos.processes(title)]
        assert len(doomed) == len(titles), f"{titles}: {doomed}"
        family = [*doomed, *(child for process in doomed for child in process.children(recursive=True))]
        self.strike(what, lambda: [process.kill() for process in doomed])
        return family

    def recover(self, but: Sequence[str] = ()) -> None:
        """Wait until every object shows two more steps than at the fault: the whole chain works again.

        One more would prove less: its samples may have been there already.
        """
        at = {name: self._step_in_record(uid) for name, uid in self.uids.items()}

        def moved() -> bool:
            status = {name: item.get("status", {}) for name, item in self.objects().items()}
            return all(
                status.get(name, {}).get("step", 0) >= step + 2 or "completionTime" in status.get(name, {})
                for name, step in at.items()
                if name not in but
            )

        self.cluster.until("every run goes on", moved, _END_SECONDS)
        self.row.recovery = f"{time.monotonic() - self._struck:.1f} s"

    def lost_groups(self, name: str) -> int:
        """Prompt groups of a completed run that were sampled for good and went into no step, by its last checkpoint."""
        artifact = self.objects()[name]["status"]["artifact"]["path"]
        cursor = json.loads((Path(artifact) / "state.json").read_text())["cursor"]
        consumed = int(cursor["low"]) + len(cursor["consumed"])
        return consumed - int(self.specs[name]["numStep"]) * int(self.specs[name]["rolloutBatchSize"])

    def _step_in_record(self, uid: str) -> int:
        return max((s.step for s in read_steps(self.chaos.folder) if s.uid == uid), default=0)

    def objects(self) -> dict[str, dict[str, Any]]:
        """This scenario's objects by name; empty while the API server is away."""
        try:
            items = self._api.list("adapterruns")
        except httpx.HTTPError:
            return {}
        return {item["metadata"]["name"]: item for item in items if item["metadata"]["name"] in self.uids}

    def finish(self, undone: int = 0, failed: dict[str, str] | None = None) -> None:
        """Wait for the end of every run and check all that must be true then; adds the row.

        Args:
            undone: steps per run that the fault may have undone: trainer processes that it killed.
            failed: reason by name of the runs that must fail; all others must complete.
        """
        failed = failed or {}
        self._await_end()
        found = self.objects()
        for name, uid in self.uids.items():
            item = found[name]
            states = {c["type"]: c["status"] for c in item["status"]["conditions"]}
            assert states == (FAILED if name in failed else COMPLETE), f"{name}: {item['status']}"
            if name in failed:
                assert condition(item, "Failed")["reason"] == failed[name], item["status"]
            assert self.cluster.traces(uid) == []
        whole = [name for name in self.uids if name not in failed]
        undone_by_run = {name: len(self._check_steps(found[name])) for name in whole}
        assert max(undone_by_run.values()) <= undone, f"steps trained twice: {undone_by_run}"
        self._check_slots()
        self._check_processes()
        ends = Counter("Complete" if n not in failed else f"Failed ({failed[n]})" for n in self.uids)
        self.row.ends = ", ".join(f"{n} {end}" for end, n in ends.items())
        self.row.restarts = sum(item["status"].get("restarts", 0) for item in found.values())
        self.row.repeated = sum(undone_by_run.values())
        self.row.seconds = time.monotonic() - self._begun
        self.chaos.report.rows.append(self.row)

    def _await_end(self) -> None:
        def ended() -> bool:
            found = self.objects()
            deregistered = [condition(item, "Deregistered")["status"] == "True" for item in found.values()]
            return len(found) == len(self.uids) and all(deregistered)

        try:
            self.cluster.until("all runs end", ended, _END_SECONDS)
        except Exception as error:
            about = {name: item.get("status") for name, item in self.objects().items()}
            raise AssertionError(json.dumps(about, indent=1)) from error

    def _check_steps(self, item: dict[str, Any]) -> list[Any]:
        status = item["status"]
        assert status["step"] == status["targetStep"] == item["spec"]["numStep"]
        assert status["artifact"]["step"] == status["targetStep"]
        mine = [s for s in read_steps(self.chaos.folder) if s.uid == item["metadata"]["uid"]]
        return repeated_steps(mine, status["targetStep"], artifact_digest(status["artifact"]))

    def _check_slots(self) -> None:
        listing = self.cluster.listing()
        assert (listing.slots.used, listing.slots.queued, listing.trainer.slots) == (0, 0, {})
        assert [engine.adapters for engine in listing.engines] == [[]]

    def _check_processes(self) -> None:
        try:
            self.cluster.until("no process is missing or left over", lambda: self._extra() == {}, 30.0)
        except Exception as error:
            raise AssertionError(f"processes more or fewer than while idle: {self._extra()}") from error

    def _extra(self) -> dict[str, int]:
        now = self.chaos.kinds()
        idle = self.chaos.idle
        return {kind: now[kind] - idle[kind] for kind in now | idle if now[kind] != idle[kind]}

    def user_waits(self, name: str) -> "subprocess.Popen[str]":
        """`kubectl wait` for the end of a run, as a user has it open, with its watch there; it tells its requests."""
        arguments = (f"adapterrun/{name}", "--for=condition=Complete", "--timeout=200s", "-v=6")
        made = self.cluster.kubectl.popen("wait", *arguments)
        self._waiting.append(made)
        assert made.stderr is not None
        assert any("watch=true" in line for line in made.stderr)
        return made

    def close(self) -> None:
        """Take the runs and their files away."""
        for process in self._waiting:
            process.kill()
            process.communicate()
        self.cluster.kubectl("delete", "adapterruns", "--all", "--timeout=90s", timeout=100.0)
        shutil.rmtree(self.cluster.stack.storage / "default", ignore_errors=True)
        for fault in ("abort", "torn", "publish-kill"):
            (self.chaos.folder / fault).unlink(missing_ok=True)
        self._api.close()


def gone(processes: Sequence[psutil.Process]) -> bool:
    """None of these runs any more, or will in a moment: who ends them is not who made the runs go on."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in alive)


def supervisors_alive(chaos: Chaos) -> bool:
    """Every part that the stack started is still watched over."""
    return all(find(process) is not None for process in chaos.cluster.stack.state.processes)
