"""What `make demo` does: the whole path a user takes, with kubectl, on a stack of its own, and the proof at the end.

    up -> task data -> kubectl apply -> kubectl wait Complete, Deregistered (live progress) -> down -> proof

Called by `main`; `demo_full` does more on the same kind of stack. Whatever happens, the stack is down at the end,
and a guardian sees to that when this process is killed. Raises instead of returning a verdict: no error means that
every run completed, deregistered and learnt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet_local import measure, stack
from lorafleet_local.demo_base import (
    DEREGISTER_SECONDS,
    TRAIN_SECONDS,
    DemoError,
    Watch,
    apply,
    examples,
    finish,
    fresh_folder,
)
from lorafleet_local.demo_proof import print_proof, prove, run_baseline, unproven
from lorafleet_local.processes import Process
from lorafleet_local.report import Reporter
from lorafleet_local.tasks import write_tasks

__all__ = ["DemoError", "Done", "perform", "run_demo"]

Train = Callable[[stack.Stack, Reporter, measure.Results], dict[str, Path]]
"""What a demo does on a stack that is up; returns each task's finished adapter."""


@dataclass(frozen=True, slots=True)
class Done:
    """A demo that came to its end; whether it ended well is for the caller to say."""

    running: stack.Stack
    """Down by now."""
    results: measure.Results
    proof: dict[str, Any]
    wall: float
    """Seconds, start-up, shutdown and proof included."""


def run_demo(folder: Path, bench: Path | None) -> None:
    """Run the demo in a fresh state folder.

    Args:
        folder: wiped first; keeps logs, checkpoints and objects afterwards.
        bench: where the measured figures go.

    Raises:
        DemoError: a run failed, did not end in time, or did not learn.
        StartError: the stack did not come up.
    """
    reporter = Reporter()
    with fresh_folder(folder, reporter) as owner:
        done = perform(folder, owner, reporter, _train_three)
        if wrong := unproven(done.proof):
            raise DemoError("; ".join(wrong))
        if bench is not None:
            done.results.baseline = run_baseline(done.running, reporter)
            measure.write(bench, done.results, done.proof, reporter.phases, done.wall)
            reporter.say(f"figures: {bench}")
    reporter.say(f"three adapters trained, deregistered and proven in {done.wall:.0f} s; logs and adapters: {folder}")


def perform(folder: Path, owner: Process, reporter: Reporter, train: Train) -> Done:
    """Bring a stack up, train on it, take it down, prove."""
    results = measure.Results()
    try:
        running = stack.up(folder, reporter, owner=owner)
        write_tasks(running.storage)
        adapters = train(running, reporter, results)
    finally:
        with reporter.phase("stop"):
            stack.down(folder, reporter)
    with reporter.phase("proof"):
        proof = prove(running, adapters, reporter)
    print_proof(reporter, proof)
    return Done(running, results, proof, reporter.elapsed())


def _train_three(running: stack.Stack, reporter: Reporter, results: measure.Results) -> dict[str, Path]:
    found = examples()
    names = [f"adapterrun/{example.name}" for example in found]
    api = running.api()
    try:
        watch = Watch(running, api, reporter, results)
        with reporter.phase("training", spinner=False):
            for example in found:
                apply(running, reporter, results, example)
            watch.wait("Complete", names, TRAIN_SECONDS)
        with reporter.phase("deregister", spinner=False):
            watch.wait("Deregistered", names, DEREGISTER_SECONDS)
        return finish(running, api, reporter, results)
    finally:
        api.close()
