"""`lorafleet status [RUN]`: the pool and its runs in one look, or one run in full."""

import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lorafleet_api.v1alpha1 import reasons
from lorafleet_cli import facts
from lorafleet_cli.errors import CliError
from lorafleet_cli.kube import Kube, Object
from lorafleet_cli.table import WIDE, runs_table

_BAR = 12


async def show_all(kube: Kube, console: Console, *, everywhere: bool) -> None:
    """Pools, then runs, then what a user should know of single runs."""
    now = time.time()
    runs = await kube.runs(everywhere=everywhere)
    for pool in await _pools(kube, runs, everywhere):
        console.print(_pool_line(pool, kube.namespace), soft_wrap=True)
    if not runs:
        where = "any namespace" if everywhere else f"namespace {kube.namespace}"
        console.print(f"No AdapterRuns in {where}; write one and `kubectl apply -f` it.", soft_wrap=True)
        return
    console.print(_table(runs, now, everywhere, _BAR if console.width >= WIDE else _BAR // 2))
    for run in runs:
        note = facts.note(run, now)
        if note is not None:
            console.print(f"{run['metadata']['name']}: {note}", markup=False, soft_wrap=True)


async def show_one(kube: Kube, console: Console, name: str) -> None:
    """Everything that matters of one run."""
    run = await kube.run(name)
    now = time.time()
    status = facts.status_of(run)
    done, target = facts.progress(run)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")

    def row(field: str, value: object) -> None:
        if value not in (None, "", "-"):
            table.add_row(field, escape(str(value)))

    row("Run", f"{run['metadata']['namespace']}/{name}")
    row("Pool", "/".join(facts.pool_ref(run)))
    row("Status", facts.state(run, now))
    note = facts.note(run, now)
    row("Note", note)
    row("Progress", f"{facts.bar(done, target, 30)} step {done} of {'?' if target is None else target}")
    row("Speed", f"{facts.number(status.get('stepsPerMinute'), 3)} steps/min" if status.get("stepsPerMinute") else None)
    row("ETA", facts.duration(facts.eta_seconds(run, now)))
    row("Reward", facts.number(status.get("rewardMean")))
    row("Learning rate", facts.number(status.get("lr")))
    row("Gradient norm", facts.number(status.get("gradNorm")))
    row("Mismatch", facts.number(status.get("mismatch"), 2))
    if facts.holds(run, reasons.REGISTERED):
        row("Slot", f"{status.get('slot')} (version {status.get('weightVersion')})")
        row("Batch", f"{status.get('accumulatedGroups', 0)} of {status.get('groupsPerStep')} groups")
    row("Dropped", ", ".join(f"{n} {why}" for why, n in (status.get("dropped") or {}).items() if n))
    row("Restarts", status.get("restarts") or None)
    row("Age", facts.duration(facts.age_seconds(run, now)))
    if "startTime" in status and "completionTime" in status:
        row("Trained for", facts.duration(facts.unix(status["completionTime"]) - facts.unix(status["startTime"])))
    artifact = status.get("artifact")
    if artifact is not None:
        row("Artifact", f"step {artifact['step']}: {artifact['path']}")
        row("sha256", artifact["digest"])
        row("Fetch it", f"lorafleet download {name}")
    console.print(table)
    conditions = status.get("conditions") or []
    if conditions:
        console.print(_conditions(conditions, now, note or ""))


def _conditions(conditions: list[Object], now: float, note: str) -> Table:
    """What holds, and what is not so for a reason worth telling; no message twice, nor the one of `note`."""
    said: set[str] = set()
    quiet = {reasons.NOT_FINISHED, reasons.NOT_FAILED, reasons.NOT_SUSPENDED, reasons.SETTLED, reasons.IN_USE}
    rows = []
    for found in conditions:
        if found["status"] == "True" or found["reason"] not in quiet:
            since = facts.duration(max(0.0, now - facts.unix(found["lastTransitionTime"])))
            message = "" if found["message"] in said or note.endswith(found["message"]) else found["message"]
            said.add(message)
            rows.append((found["type"], found["status"], found["reason"], since, escape(message)))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("Condition", "Is", "Reason", "Since"):
        table.add_column(heading, no_wrap=True)
    table.add_column("Message" if any(message for *_, message in rows) else "", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


async def _pools(kube: Kube, runs: list[Object], everywhere: bool) -> list[Object]:
    """The pools here, and those elsewhere that these runs use."""
    pools = await kube.pools(everywhere=everywhere)
    known = {(p["metadata"]["namespace"], p["metadata"]["name"]) for p in pools}
    for namespace, name in sorted({facts.pool_ref(run) for run in runs} - known):
        try:
            pools.append(await kube.pool(name, namespace))
        except CliError:  # its runs' own conditions say what is wrong with it; it may also be none of our business
            continue
    return pools


def _pool_line(pool: Object, namespace: str) -> str:
    meta = pool["metadata"]
    name = meta["name"] if meta["namespace"] == namespace else f"{meta['namespace']}/{meta['name']}"
    ready = facts.condition(pool, reasons.READY)
    slots = (pool.get("status") or {}).get("slots")
    if ready["status"] == "True":
        word = "Ready"
    elif not ready["reason"]:
        word = "not seen by an operator"
    else:
        word = f"not Ready: {ready['reason']}: {ready['message']}"
    held = f"  slots {slots['used']} of {slots['total']} used, {slots['queued']} queued" if slots else ""
    return escape(f"Pool {name}  {word}{held}")


def _table(runs: list[Object], now: float, everywhere: bool, bar: int) -> Table:
    headings = ["NAME", "STATUS", "PROGRESS", "STEP", "REWARD", "ETA", "AGE"]
    table = runs_table(["NAMESPACE", *headings] if everywhere else headings)
    for run in runs:
        done, target = facts.progress(run)
        cells = [
            run["metadata"]["name"],
            facts.state(run, now),
            facts.bar(done, target, bar),
            f"{done}/{'?' if target is None else target}",
            facts.number(facts.status_of(run).get("rewardMean")),
            facts.duration(facts.eta_seconds(run, now)),
            facts.duration(facts.age_seconds(run, now)),
        ]
        table.add_row(*([run["metadata"]["namespace"], *cells] if everywhere else cells))
    return table
