"""`lorafleet replay DIRECTORY --base-model PATH`: a run's recorded steps again with plain PEFT and torch AdamW.

Called by main.py. Compares every step's figures with its record, and the adapter with every kept checkpoint on the way;
needs no cluster, no runtime and no GPU. Reads only.
"""

import importlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lorafleet_cli.errors import CliError

if TYPE_CHECKING:
    from torch import Tensor

    from lorafleet_cli.replay_model import Outcome, Replay
    from lorafleet_cli.replay_records import Records, Saved

TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.3}
"""Default of --tolerance by the pool's type; docs/replay.md has what was measured."""

_LR_TOLERANCE = 1e-9
"""The learning rate has no rounding worth the name in any type."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Between the replayed adapter and a checkpoint's masters."""

    absolute: float
    """Largest difference of an element."""
    relative: float
    """Mean difference by the mean way from the start to the checkpoint. Means, since a few weights without a gradient
    worth the name go where rounding sends them (Replay.allowed)."""
    excess: float
    """Largest difference by what the tolerance makes room for at that weight."""
    where: str
    """That weight."""


@dataclass(slots=True)
class _Report:
    """What was found, for the table and the verdict."""

    tolerance: float
    table: Table
    first: str = ""
    """The first departure from the tolerance, or the gap; "" for none."""
    steps: int = 0
    compared: int = 0
    """Checkpoints."""

    def check(self, step: int, what: str, value: float, limit: float) -> None:
        """Keep the first figure that is above its limit; NaN is."""
        if not value <= limit and not self.first:
            self.first = f"step {step}: {what} differs by {value:.1e}, above {limit:.0e}"


def replay(
    console: Console, directory: Path, base_model: Path, *, steps: str | None, tolerance: float | None,
    dtype: str | None, device: str,
) -> int:  # fmt: skip
    """Replay and print.

    Args:
        console: for the table and the verdict.
        directory: of the run on the pool's storage.
        base_model: directory of the base model's files.
        steps: "A:B", either may be left out; all recorded steps when None.
        tolerance: largest difference of gradient norms, log-probabilities and adapters; by the run's type when None.
        dtype: arithmetic, float32 or float64; the type of the run's masters when None.
        device: torch device.

    Returns:
        0 when everything was within the tolerance; without `steps` that takes a checkpoint that was compared. Else 1.

    Raises:
        CliError: nothing can be replayed: wrong directory, base model or steps, or no torch.
    """
    records_module, model_module = _modules()
    records: Records = records_module.Records(directory)
    run = records.run
    records_module.check_base(run, base_model)
    first, last = _range(steps, records.newest())
    start = _start(records, first)
    initial = records.initial() if start is None else start.masters
    chosen = dtype or ("float64" if run["dtype"] == "float64" else "float32")
    limit = TOLERANCE[run["dtype"]] if tolerance is None else tolerance
    model: Replay = model_module.Replay(
        run, base_model, initial, dtype=model_module.DTYPES[chosen], device=device, tolerance=limit
    )
    if start is not None:
        model.restore(start)
    report = _Report(limit, _table())
    _steps(records, model, initial, range(first, last + 1), report)
    if report.steps:
        console.print(report.table)
    return _verdict(console, report, needs_checkpoint=steps is None)


def _modules() -> tuple[Any, Any]:
    """replay_records and replay_model, which need torch and PEFT."""
    try:
        return tuple(importlib.import_module(f"lorafleet_cli.replay_{name}") for name in ("records", "model"))  # type: ignore[return-value]
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "lorafleet_cli":
            raise
        raise CliError("module", missing, "replay needs it; pip install 'lorafleet-cli[replay]'") from error


def _range(steps: str | None, newest: int) -> tuple[int, int]:
    if newest == 0:
        raise CliError("records", "none", "no step has been recorded yet; wait for the run's first step")
    if steps is None:
        return 1, newest
    begin, colon, end = steps.partition(":")
    try:
        first, last = int(begin or 1), int(end or newest) if colon else int(begin)
    except ValueError as error:
        raise CliError("steps", steps, "give A:B, as 1:20, 20: or :20") from error
    if not 1 <= first <= last <= newest:
        raise CliError("steps", steps, f"recorded are steps up to {newest}; give A:B within 1:{newest}, A at most B")
    return first, last


def _start(records: "Records", first: int) -> "Saved | None":
    """The checkpoint to go on from; None for the initial adapter."""
    if first == 1:
        return None
    kept = sorted(records.checkpoints())
    if first - 1 not in kept:
        places = ", ".join(str(step + 1) for step in [0, *kept])
        raise CliError("steps", f"{first}:", f"no checkpoint of step {first - 1} is kept; A can be {places}")
    start = records.saved(first - 1)
    if start.wrong:
        raise CliError("checkpoint", f"step {first - 1}", f"{start.wrong}; start elsewhere")
    return start


def _steps(
    records: "Records", model: "Replay", initial: "dict[str, Tensor]", steps: range, report: _Report
) -> None:  # fmt: skip
    from lorafleet_cli.replay_records import Gap

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    errors = Console(file=sys.stderr)
    checkpoints = records.checkpoints()
    with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as progress:
        task = progress.add_task("replaying", total=len(steps))
        for number in steps:
            try:
                step = records.step(number)
            except Gap as gap:
                report.first = report.first or str(gap)
                return
            outcome = model.step(step)
            report.steps += 1
            _judge(report, number, outcome)
            distance = None
            if number in checkpoints:
                distance = _compare(records, model, initial, number, report)
            samples = sum(len(group.samples) for group in step.groups)
            _row(report.table, number, samples, outcome, distance)
            progress.advance(task)


def _compare(
    records: "Records", model: "Replay", initial: "dict[str, Tensor]", number: int, report: _Report
) -> Distance | None:
    """The adapter with the checkpoint of its step; None for one that cannot be read."""
    try:
        saved = records.saved(number)
    except CliError as error:
        report.first = report.first or f"step {number}: its checkpoint: {error}"
        return None
    distance = _distance(model, saved.masters, initial)
    report.compared += 1
    report.check(number, "the adapter of its checkpoint", distance.relative, report.tolerance)
    # in bfloat16 errors of single gradients reach many times what is usual: no bound there tells anything
    if not distance.excess <= 1.0 and records.run["dtype"] != "bfloat16":
        text = f"{distance.excess:.1f} times as far as the tolerance explains"
        report.first = report.first or f"step {number}: {distance.where} of its checkpoint is off, {text}"
    if saved.wrong:
        report.first = report.first or f"step {number}: its checkpoint: {saved.wrong}"
    return distance


def _judge(report: _Report, number: int, outcome: "Outcome") -> None:
    report.check(number, "the learning rate", outcome.lr, _LR_TOLERANCE)
    report.check(number, f"the log-probability of {outcome.where}", outcome.logprob, report.tolerance)
    report.check(number, "the gradient norm", outcome.grad_norm, report.tolerance)


def _distance(model: "Replay", saved: "dict[str, Tensor]", initial: "dict[str, Tensor]") -> Distance:
    largest = apart = way = excess = 0.0
    where = ""
    for key, master in model.masters.items():
        wanted = saved[key].double()
        gap = (master.detach().cpu().double() - wanted).abs()
        largest = max(largest, float(gap.max()))
        apart += float(gap.sum())
        way += float((wanted - initial[key].double()).abs().sum())
        worst = (gap / model.allowed[key].cpu().double().clamp(min=1e-30)).max()
        if float(worst) > excess:
            excess, where = float(worst), f"a weight of {key}"
    if not math.isfinite(apart):
        return Distance(math.nan, math.nan, math.nan, "a weight")
    return Distance(largest, apart / way if way else math.inf if apart else 0.0, excess, where)


def _table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("STEP", "SAMPLES", "LR", "GRAD NORM", "LOGPROB", "CHECKPOINT", "OF THE WAY", "WEIGHT"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _row(table: Table, number: int, samples: int, outcome: "Outcome", distance: Distance | None) -> None:
    figures = [outcome.lr, outcome.grad_norm, outcome.logprob]
    figures += [] if distance is None else [distance.absolute, distance.relative, distance.excess]
    table.add_row(str(number), str(samples), *(f"{value:.1e}" for value in figures))


def _verdict(console: Console, report: _Report, needs_checkpoint: bool) -> int:
    done = f"{report.steps} steps replayed, {report.compared} checkpoints compared"
    if report.first:
        console.print(f"{done}\n{report.first}", markup=False, soft_wrap=True)
        return 1
    within = f"{done}; all within {report.tolerance:.0e}"
    if report.compared:
        console.print(within, markup=False, soft_wrap=True)
        return 0
    note = "no checkpoint of these steps is kept, so no adapter was compared"
    if needs_checkpoint:
        note += "; wait for one, or give --steps : to check the records alone"
    console.print(f"{within}; {note}", markup=False, soft_wrap=True)
    return 1 if needs_checkpoint else 0
