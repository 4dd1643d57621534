"""`make bench-trainer`: what the trainer costs, to bench/trainer.json in the schema that all of bench/ shares.

    python -m lorafleet_local.bench_trainer [--out FILE] [--quick]

Every point is a process of its own (bench_case.py), one after another. CPU seconds are those of one thread, so that a
second load on the machine shows as little as it can. Called by the Makefile.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafleet_local.measure import Result, update_file
from lorafleet_local.model import ensure_model
from lorafleet_local.paths import repo_root

SAME_WORK = 1e-3
"""How far the gradient norms of the trainer and of PEFT may differ, relative."""
MIXED_RANKS = [4, 8, 8, 16, 16, 32, 32, 64]

PEFT_WAYS = (("padded_1024", "padded", 1024), ("padded_4096", "padded", 4096), ("cached", "cached", 0))
"""(name, way to batch, tokens of a micro-batch)."""


class BenchError(Exception):
    """A case failed, or two cases did not do the same work; the message names them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work a benchmark does."""

    rows: int
    """Of the active run's step."""
    reps: int
    pass_rows: tuple[int, ...]
    samples: tuple[int, ...]
    steps: int
    """Of the comparison with PEFT."""


FULL = Sizes(rows=200, reps=3, pass_rows=(512, 1024, 2048, 4096), samples=(4, 8, 16), steps=2)
QUICK = Sizes(rows=60, reps=1, pass_rows=(128, 256), samples=(2, 4), steps=1)


class Bench:
    """Runs cases and gathers rows.

    Args:
        storage: a folder for what cases hand to each other.
    """

    def __init__(self, storage: Path) -> None:
        """Start without rows."""
        self._storage = storage
        self.rows: list[Result] = []

    def case(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The figures of one case.

        Raises:
            BenchError: it ended with an error.
        """
        begin = time.monotonic()
        environment = os.environ | {"OMP_NUM_THREADS": str(arguments.get("threads", 1)), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "lorafleet_local.bench_case", name,
             json.dumps({"storage": str(self._storage), **arguments})],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode != 0:
            raise BenchError(f"{name} {arguments}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        shown = " ".join(f"{key}={value}" for key, value in arguments.items())
        typer.echo(f"{name:9} {shown:48} {time.monotonic() - begin:6.1f} s", err=True)
        return figures

    def add(self, name: str, values: float | Sequence[float], unit: str) -> None:
        """A row with the mean of the values, and their range."""
        many = list(values) if isinstance(values, Sequence) else [values]
        mean = sum(many) / len(many)
        self.rows.append(
            {"name": f"trainer.{name}", "value": mean, "unit": unit, "n": len(many), "min": min(many), "max": max(many)}
        )


def resident_slots(bench: Bench, sizes: Sizes) -> None:
    """One active run among 1, 8, 32 resident ones: time must not grow, memory by each run's own state only."""
    for slots in (1, 8, 32):
        figures = bench.case("resident", slots=slots, rows=sizes.rows, reps=sizes.reps)
        name = f"resident_{slots:02}"
        bench.add(f"{name}.pass_cpu_seconds", figures["passes"], "s")
        bench.add(f"{name}.optimizer_cpu_seconds", figures["optimizer"], "s")
        bench.add(f"{name}.resident_bytes", figures["held"], "bytes")
        bench.add(f"{name}.peak_bytes", figures["peak"], "bytes")


def mixed_ranks(bench: Bench) -> None:
    """Runs of ranks 4 to 64: memory by their true ranks, beside what a bank padded to the largest would take."""
    mixed = bench.case("ranks", ranks=MIXED_RANKS)
    bench.add("ranks_mixed.grown_bytes", mixed["grown"], "bytes")
    bench.add("ranks_mixed.expected_bytes", mixed["expected"], "bytes")
    largest = max(MIXED_RANKS)
    bench.add("ranks_mixed.padded_bytes", mixed["expected"] * largest * len(MIXED_RANKS) / sum(MIXED_RANKS), "bytes")


def active_slots(bench: Bench, sizes: Sizes) -> None:
    """Eight runs that train at once, and one after another."""
    for name, together in (("together", True), ("one_by_one", False)):
        figures = bench.case("active", slots=8, rows=sizes.rows // 2, together=together, reps=max(sizes.reps - 1, 1))
        bench.add(f"active_08.{name}_cpu_seconds", figures["seconds"], "s")
        bench.add(f"active_08.{name}_peak_bytes", figures["peak"], "bytes")


def prefix_sharing(bench: Bench, sizes: Sizes) -> None:
    """A prompt of 64 tokens with n responses of 16, computed once or once per response."""
    for samples in sizes.samples:
        both = {}
        for name, shared in (("shared", True), ("plain", False)):
            figures = both[name] = bench.case("prefix", prompt=64, response=16, samples=samples, shared=shared)
            bench.add(f"prefix_{samples:02}.{name}_cpu_seconds", figures["seconds"], "s")
            bench.add(f"prefix_{samples:02}.{name}_rows", figures["rows"], "rows")
        _check_same(f"prefix, n = {samples}", [both["shared"]["grad_norm"]], [both["plain"]["grad_norm"]])
        bench.add(f"prefix_{samples:02}.ratio", both["shared"]["seconds"] / both["plain"]["seconds"], "1")


def pass_memory(bench: Bench, sizes: Sizes) -> None:
    """Peak memory against the rows of a pass, activations kept or computed again."""
    threads = os.cpu_count() or 1
    for rows in sizes.pass_rows:
        for name, recompute in (("kept", False), ("recompute", True)):
            figures = bench.case("memory", threads=threads, rows=rows, recompute=recompute)
            bench.add(f"pass_{rows:04}.{name}_peak_bytes", figures["peak"], "bytes")
            bench.add(f"pass_{rows:04}.{name}_bytes_per_row", (figures["peak"] - figures["held"]) / rows, "bytes")
            bench.add(f"pass_{rows:04}.{name}_cpu_seconds", figures["cpu"], "s")


def against_peft(bench: Bench, sizes: Sizes) -> None:
    """The demo's three runs, step by step: together here, one after another on plain HF + PEFT at its best setting."""
    ours = bench.case("trainer", steps=sizes.steps)
    per_token = _per_token(ours)
    bench.add("cpu_seconds_per_token", per_token, "s")
    bench.add("comparison_peak_bytes", ours["peak"], "bytes")
    best: list[float] = []
    for name, way, budget in (
        ("padded_1024", "padded", 1024),
        ("padded_4096", "padded", 4096),
        ("cached", "cached", 0),
    ):
        theirs = bench.case("peft", steps=sizes.steps, way=way, budget=budget)
        _check_same(f"peft {name}", ours["norms"], theirs["norms"])
        values = _per_token(theirs)
        bench.add(f"peft_{name}.cpu_seconds_per_token", values, "s")
        bench.add(f"peft_{name}.peak_bytes", theirs["peak"], "bytes")
        if not best or sum(values) < sum(best):
            best = values
    bench.add("ratio_to_peft_cpu", sum(per_token) / sum(best), "1")


def _per_token(figures: dict[str, Any]) -> list[float]:
    return [seconds / tokens for seconds, tokens in zip(figures["seconds"], figures["tokens"], strict=True)]


def _check_same(what: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if abs(a - b) > SAME_WORK * abs(b):
            raise BenchError(f"{what}: gradient norms {list(ours)} and {list(theirs)} differ; the work is not the same")


def main(
    out: Annotated[Path | None, typer.Option(help="Where to write; bench/trainer.json unless quick.")] = None,
    quick: Annotated[bool, typer.Option(help="A minute of everything, for work on the benchmark itself.")] = False,
) -> None:
    """Measure and write."""
    sizes = QUICK if quick else FULL
    ensure_model()
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as storage:
        bench = Bench(Path(storage))
        against_peft(bench, sizes)
        resident_slots(bench, sizes)
        mixed_ranks(bench)
        active_slots(bench, sizes)
        prefix_sharing(bench, sizes)
        pass_memory(bench, sizes)
    for row in bench.rows:
        typer.echo(f"{row['name']:52} {row['value']:16.6g} {row['unit']}")
    if out is None and quick:
        return
    update_file(out or repo_root() / "bench/trainer.json", "make bench-trainer", lambda name: True, bench.rows)


if __name__ == "__main__":
    typer.run(main)
