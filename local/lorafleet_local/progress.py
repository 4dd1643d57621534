"""Live progress of AdapterRuns from their status alone: what a user would see with `kubectl get -w`, with bars.

Called by `demo`. On a terminal one live table; elsewhere one line per step and per change of state.
"""

import datetime
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from lorafleet_local.api import condition
from lorafleet_local.report import Reporter

Item = dict[str, Any]


class Progress:
    """Shows the runs; use as a context manager.

    Args:
        reporter: gives the console and the clock.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._shown: dict[str, tuple[object, ...]] = {}
        console: Console = reporter.console
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, items: list[Item]) -> None:
        """Show the newest objects."""
        if self._live is not None:
            self._live.update(_table(items, self._reporter.elapsed()))
            return
        for item in items:
            status = item.get("status") or {}
            key = (status.get("step"), _state(item))
            if self._shown.get(item["metadata"]["name"]) != key:
                self._shown[item["metadata"]["name"]] = key
                self._reporter.say(line(item))


def line(item: Item) -> str:
    """One run in one line."""
    status = item.get("status") or {}
    reward = status.get("rewardMean")
    return (
        f"{item['metadata']['name']:10} {_state(item):16} step {status.get('step', 0):>3}/"
        f"{status.get('targetStep', '?'):<3} reward {'-' if reward is None else f'{reward:.3f}':5} "
        f"version {status.get('weightVersion', '-'):<3} ETA {eta(item)}"
    )


def eta(item: Item) -> str:
    """Time left as m:ss, or "-"."""
    status = item.get("status") or {}
    until = status.get("estimatedCompletionTime")
    if until is None or condition(item, "Finished")["status"] == "True":
        return "-"
    then = datetime.datetime.fromisoformat(until)
    left = max(0, int((then - datetime.datetime.now(datetime.UTC)).total_seconds()))
    return f"{left // 60}:{left % 60:02}"


def _state(item: Item) -> str:
    if condition(item, "Deregistered")["status"] == "True":
        return "Deregistered"
    return str(condition(item, "Ready")["reason"])


def _table(items: list[Item], elapsed: float) -> Table:
    table = Table(title=f"{elapsed:.0f} s", title_justify="left", box=None, padding=(0, 2))
    for heading in ("Run", "State", "Progress", "Step", "Reward", "ETA", "Version"):
        table.add_column(heading, justify="right" if heading in ("Step", "Reward", "ETA", "Version") else "left")
    for item in items:
        status = item.get("status") or {}
        step, target = status.get("step") or 0, status.get("targetStep")
        reward = status.get("rewardMean")
        table.add_row(
            item["metadata"]["name"],
            _state(item),
            ProgressBar(total=target or 1, completed=step, width=30),
            f"{step}/{target or '?'}",
            "-" if reward is None else f"{reward:.3f}",
            eta(item),
            str(status.get("weightVersion") or "-"),
        )
    return table
