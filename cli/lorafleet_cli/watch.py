"""`lorafleet watch [RUN]`: live progress until the runs are finished.

On a terminal one live table; elsewhere one line for each change. An API server that goes away is waited for.
"""

import time
from contextlib import nullcontext

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from lorafleet_api.v1alpha1 import reasons
from lorafleet_cli import facts
from lorafleet_cli.errors import CliError
from lorafleet_cli.kube import Kube, Object, unknown_run
from lorafleet_cli.runtime import open_runtime
from lorafleet_cli.table import WIDE, runs_table


async def watch(kube: Kube, console: Console, name: str | None) -> int:
    """Show progress until every run is finished. 0 when all are Complete, 1 when one failed, was cancelled or deleted.

    Raises:
        CliError: there is nothing to watch, or the API server is away at the start.
    """
    board = Board(console)
    live = Live(get_renderable=board.render, console=console, refresh_per_second=2) if console.is_terminal else None
    seen: dict[str, Object] = {}
    if live is not None:
        await _recall(kube, board, name)
    with live or nullcontext():
        async for runs, trouble in kube.watch(name):
            if not runs and not seen:
                raise await _nothing(kube, name)
            seen |= {run["metadata"]["uid"]: run for run in runs}
            gone = seen.keys() - {run["metadata"]["uid"] for run in runs}
            board.update(list(seen.values()), gone, trouble)
            if live is None:
                board.print_changes()
            ended = [uid in gone or facts.holds(run, reasons.FINISHED) for uid, run in seen.items()]
            if all(ended) and trouble is None:
                break
    complete = all(facts.holds(run, reasons.COMPLETE) for run in seen.values())
    return 0 if complete else 1


async def _recall(kube: Kube, board: "Board", name: str | None) -> None:
    """The rewards of steps before now, from the runtime's logs, for the sparklines."""
    for run in await kube.runs():
        done, _ = facts.progress(run)
        if not done or name not in (None, run["metadata"]["name"]):
            continue
        try:
            async with open_runtime(kube, await kube.pool_of(run)) as runtime:
                entries = (await runtime.get(run, "log"))["entries"]
        except CliError:  # progress comes from the API server alone; without a runtime the sparklines begin now
            return
        board.learn(run, {e["step"]: e["reward"] for e in entries if e.get("reward") is not None and "step" in e})


async def _nothing(kube: Kube, name: str | None) -> CliError:
    if name is None:
        return CliError("namespace", kube.namespace, "there are no AdapterRuns to watch; apply one first")
    return unknown_run(name, kube.namespace, [run["metadata"]["name"] for run in await kube.runs()])


class Board:
    """The newest objects, and what has been seen of their rewards.

    Args:
        console: where it is shown; lines go there when it is no terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._runs: list[Object] = []
        self._gone: set[str] = set()
        self._trouble: str | None = None
        self._rewards: dict[str, dict[int, float]] = {}
        self._printed: dict[str, str] = {}

    def update(self, runs: list[Object], gone: set[str], trouble: str | None) -> None:
        """Take over what is known now.

        Args:
            runs: the newest object of every run seen.
            gone: uids of those that are deleted.
            trouble: why there is no news; None while there is.
        """
        self._runs, self._gone, self._trouble = runs, gone, trouble
        for run in runs:
            status = facts.status_of(run)
            if status.get("rewardMean") is not None:
                rewards = self._rewards.setdefault(run["metadata"]["uid"], {})
                rewards[int(status.get("step") or 0)] = float(status["rewardMean"])

    def learn(self, run: Object, rewards: dict[int, float]) -> None:
        """Mean rewards of earlier steps."""
        self._rewards.setdefault(run["metadata"]["uid"], {}).update(rewards)

    def render(self) -> Group:
        """The live table."""
        now = time.time()
        table = runs_table(("NAME", "STATUS", "PROGRESS", "STEP", "REWARD", "", "ETA"))
        bar, spark = (24, 20) if self._console.width >= WIDE else (8, 8)
        notes = []
        for run in self._runs:
            done, target = facts.progress(run)
            table.add_row(
                run["metadata"]["name"], self._state(run, now), facts.bar(done, target, bar),
                f"{done}/{'?' if target is None else target}", facts.number(facts.status_of(run).get("rewardMean")),
                self._spark(run, spark), facts.duration(facts.eta_seconds(run, now)),
            )  # fmt: skip
            note = facts.note(run, now)
            if note is not None:
                notes.append(f"{run['metadata']['name']}: {note}")
        if self._trouble is not None:
            notes.append(f"no news: {self._trouble}")
        return Group(table, *(escape(note) for note in notes))

    def print_changes(self) -> None:
        """One line for each run that changed, and for trouble that begins or ends."""
        now = time.time()
        for run in self._runs:
            self._print(run["metadata"]["uid"], self._line(run, now))
        self._print("", f"no news: {self._trouble}" if self._trouble else "")

    def _print(self, key: str, line: str) -> None:
        known = self._printed.get(key, "")
        self._printed[key] = line
        if line and line.split("  ETA")[0] != known.split("  ETA")[0]:
            self._console.print(line, markup=False, soft_wrap=True)

    def _line(self, run: Object, now: float) -> str:
        done, target = facts.progress(run)
        parts = [
            f"{run['metadata']['name']}  {self._state(run, now)}",
            f"step {done}/{'?' if target is None else target}",
            f"reward {facts.number(facts.status_of(run).get('rewardMean'))}",
            f"ETA {facts.duration(facts.eta_seconds(run, now))}",
        ]
        note = facts.note(run, now)
        return "  ".join(parts) + (f"  {note}" if note else "")

    def _state(self, run: Object, now: float) -> str:
        return "Deleted" if run["metadata"]["uid"] in self._gone else facts.state(run, now)

    def _spark(self, run: Object, width: int) -> str:
        rewards = self._rewards.get(run["metadata"]["uid"], {})
        return facts.sparkline([rewards[step] for step in sorted(rewards)], width)
