"""The demos' last part: runs `prove` and `baseline` in processes of their own and shows what they found.

Called by `demo`, after the stack is down, which would take memory and cores from it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from lorafleet_local.demo_base import DemoError
from lorafleet_local.report import Reporter
from lorafleet_local.stack import Stack


def prove(running: Stack, adapters: dict[str, Path], reporter: Reporter) -> dict[str, Any]:
    """Score the finished adapters, by task, on held-out prompts; what `lorafleet_local.prove` wrote.

    Raises:
        DemoError: it did not run.
    """
    reporter.say("proof: plain transformers + peft, greedy, 64 held-out prompts per task (about 40 s)")
    arguments = [word for task, adapter in adapters.items() for word in ("--adapter", f"{task}={adapter}")]
    return _module(running, "prove", arguments)


def run_baseline(running: Stack, reporter: Reporter) -> dict[str, Any]:
    """The same tasks without the runtime; what `lorafleet_local.baseline` wrote.

    Raises:
        DemoError: it did not run.
    """
    reporter.say("baseline: the same tasks one after another with plain transformers + peft (about 4 min)")
    return _module(running, "baseline", [])


def _module(running: Stack, name: str, arguments: list[str]) -> dict[str, Any]:
    output = running.state.folder / f"{name}.json"
    command = [sys.executable, "-m", f"lorafleet_local.{name}", "--model", running.pool_spec()["baseModel"]["path"]]
    command += ["--storage", str(running.storage), "--json", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **running.environment})
    if not output.is_file():  # `prove` exits with 1 when a gain is too small, after it wrote
        raise DemoError(f"lorafleet_local.{name} did not run (exit {done.returncode}):\n{done.stderr.strip()[-3000:]}")
    written: dict[str, Any] = json.loads(output.read_text())
    return written


def print_proof(reporter: Reporter, proof: dict[str, Any]) -> None:
    """Show the scores."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    reporter.console.print("\nHeld-out prompts, greedy, plain transformers + peft, base -> adapter:", soft_wrap=True)
    for heading in ("Adapter", "Reward", "Gain", "Full reward", "First integer", ""):
        table.add_column(heading)
    for name, task in proof["tasks"].items():
        before, after = task["before"], task["after"]
        first = "-"
        if before["first_integer"] is not None:
            first = f"{before['first_integer']:.2f} -> {after['first_integer']:.2f}"
        table.add_row(
            name,
            f"{before['mean_reward']:.3f} -> {after['mean_reward']:.3f}",
            f"{task['gain']:+.3f}",
            f"{before['full_reward']:.2f} -> {after['full_reward']:.2f}",
            first,
            "ok" if task["proven"] else f"below {proof['required_gain']}",
        )
    reporter.console.print(table)
    reporter.console.print(
        "addition: most of the gain is learning to stop after the sum; first integer: the arithmetic.\n", soft_wrap=True
    )


def unproven(proof: dict[str, Any]) -> list[str]:
    """What the adapters did not learn, in words; empty when all is well."""
    failed = [name for name, task in proof["tasks"].items() if not task["proven"]]
    return [f"reward gain below {proof['required_gain']} on held-out prompts: {', '.join(failed)}"] if failed else []
