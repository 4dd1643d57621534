"""What `make demo` does: the whole path a user takes, with kubectl, on a stack of its own, and the proof at the end.

    up -> task data -> kubectl apply -> kubectl wait Complete, Deregistered (live progress) -> proof -> down

Called by `main`. Whatever happens, the stack is down at the end. Raises instead of returning a verdict: no error means
that every run completed, deregistered and learnt.
"""

import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.table import Table

from lorafleet_local import measure, pool, stack
from lorafleet_local.api import Api, condition
from lorafleet_local.paths import repo_root
from lorafleet_local.processes import find, log_tail
from lorafleet_local.progress import Progress
from lorafleet_local.report import Reporter
from lorafleet_local.tasks import TASKS, write_tasks

_MARKER = ".lorafleet-demo"
"""Names a folder as a demo's own, which the next demo may empty."""
_TRAIN_SECONDS = 1800
_DEREGISTER_SECONDS = 120
_API_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.25


class DemoError(Exception):
    """The demo did not do what it must; the message says what and where to look."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example manifest."""

    path: Path
    name: str
    """metadata.name."""
    task: str
    """Key of `TASKS`."""


def run_demo(folder: Path, bench: Path | None) -> None:
    """Run the demo in a fresh state folder.

    Args:
        folder: wiped first; keeps logs, checkpoints and objects afterwards.
        bench: where the measured figures go.

    Raises:
        DemoError: a run failed, did not end in time, or did not learn.
        StartError: the stack did not come up.
    """
    with _only_one(folder):
        reporter = Reporter()
        results = measure.Results()
        _clear(folder, reporter)
        try:
            running = stack.up(folder, reporter)
            adapters = _run(running, reporter, results)
        finally:
            with reporter.phase("stop"):
                stack.down(folder, reporter)
        with reporter.phase("proof"):  # after the stack, which would take memory and cores from it
            proof = _prove(running, adapters, reporter)
        _print_proof(reporter, proof)
        wall = reporter.elapsed()
        if bench is not None:
            results.baseline = _run_baseline(running, reporter)
            measure.write(bench, results, proof, reporter.phases, wall)
            reporter.say(f"figures: {bench}")
    failed = [name for name, task in proof["tasks"].items() if not task["proven"]]
    if failed:
        raise DemoError(f"reward gain below {proof['required_gain']} on held-out prompts: {', '.join(failed)}")
    reporter.say(f"three adapters trained, deregistered and proven in {wall:.0f} s; logs and adapters: {folder}")


def _run(running: stack.Stack, reporter: Reporter, results: measure.Results) -> dict[str, Path]:
    """Apply, wait, look; returns each task's finished adapter."""
    write_tasks(running.storage)
    found = examples()
    names = [f"adapterrun/{example.name}" for example in found]
    api = running.api()
    try:
        watch = _Watch(running, api, reporter, results)
        with reporter.phase("training", spinner=False):
            for example in found:
                results.run(example.name).applied = time.time()
                running.kubectl("apply", "-f", str(example.path))
                reporter.say(f"kubectl apply -f {example.path.relative_to(repo_root())}")
            watch.wait("Complete", names, _TRAIN_SECONDS)
        with reporter.phase("deregister", spinner=False):
            watch.wait("Deregistered", names, _DEREGISTER_SECONDS)
        reporter.console.print(f"\n$ kubectl get adapterruns\n{running.kubectl('get', 'adapterruns')}", markup=False)
        items = {item["metadata"]["name"]: item for item in api.list("adapterruns", pool.NAMESPACE)}
        with suppress(httpx.HTTPError):  # figures only: a runtime that restarts now spoils no result
            measure.collect(results, running)
        return {example.task: _adapter(running, items[example.name]) for example in found}
    finally:
        api.close()


def examples() -> list[Example]:
    """The manifests that the demo applies, one per task.

    Raises:
        DemoError: a manifest is missing or names another pool.
    """
    found = []
    for task in TASKS:
        path = repo_root() / "manifests" / "examples" / f"{task}.yaml"
        if not path.is_file():
            raise DemoError(f"{path} is missing; the demo applies one manifest per task")
        document = yaml.safe_load(path.read_text())
        if document["spec"]["poolRef"]["name"] != pool.POOL_NAME:
            raise DemoError(
                f"{path}: spec.poolRef.name: {document['spec']['poolRef']['name']!r}; use {pool.POOL_NAME!r}"
            )
        found.append(Example(path, document["metadata"]["name"], task))
    return found


class _Watch:
    """Waits as a user would, with kubectl, and meanwhile shows the runs and notes when their conditions flip."""

    def __init__(self, running: stack.Stack, api: Api, reporter: Reporter, results: measure.Results) -> None:
        self._running = running
        self._api = api
        self._reporter = reporter
        self._results = results
        self._answered = time.monotonic()

    def wait(self, kind: str, names: list[str], seconds: int) -> None:
        """`kubectl wait --for=condition=KIND NAMES`.

        Raises:
            DemoError: kubectl gave up, a run failed or a process ended.
        """
        self._reporter.say(f"kubectl wait --for=condition={kind} {' '.join(names)}")
        waiter = self._running.kubectl.popen("wait", f"--for=condition={kind}", f"--timeout={seconds}s", *names)
        try:
            with Progress(self._reporter) as progress:
                while waiter.poll() is None:
                    progress.update(self._look())
                    time.sleep(_POLL_SECONDS)
                progress.update(self._look())
        finally:
            if waiter.poll() is None:
                waiter.kill()
            output, errors = waiter.communicate()
        if waiter.returncode != 0:
            raise DemoError(f"kubectl wait --for=condition={kind}: {errors.strip() or output.strip()}")

    def _look(self) -> list[dict[str, Any]]:
        """The runs now; raises on what cannot end well."""
        for process in self._running.state.processes:
            if find(process) is None:
                raise DemoError(f"{process.name} ended\n{log_tail(process.log)}")
        try:
            items = self._api.list("adapterruns", pool.NAMESPACE)
        except httpx.HTTPError as error:
            if time.monotonic() - self._answered > _API_PATIENCE_SECONDS:
                raise DemoError(f"the API server does not answer: {error}") from error
            return []
        self._answered = time.monotonic()
        for item in items:
            if "Complete" in self._results.observe(item):
                with suppress(httpx.HTTPError):  # a figure only
                    measure.note_last_step(self._results, self._running, item)
            failed = condition(item, "Failed")
            if failed["status"] == "True":
                raise DemoError(
                    f"AdapterRun {item['metadata']['name']} failed: {failed['reason']}: {failed['message']}"
                    f" (logs: {self._running.state.folder / 'log'})"
                )
        return items


def _adapter(running: stack.Stack, item: dict[str, Any]) -> Path:
    artifact = (item.get("status") or {}).get("artifact")
    if artifact is None:
        raise DemoError(f"AdapterRun {item['metadata']['name']} is Complete but status.artifact is empty")
    return running.storage / str(artifact["path"])


def _prove(running: stack.Stack, adapters: dict[str, Path], reporter: Reporter) -> dict[str, Any]:
    reporter.say("proof: plain transformers + peft, greedy, 64 held-out prompts per task (about 40 s)")
    arguments = [word for task, adapter in adapters.items() for word in ("--adapter", f"{task}={adapter}")]
    return _module(running, "prove", arguments)


def _run_baseline(running: stack.Stack, reporter: Reporter) -> dict[str, Any]:
    reporter.say("baseline: the same tasks one after another with plain transformers + peft (about 4 min)")
    return _module(running, "baseline", [])


def _module(running: stack.Stack, name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a module of this package that loads the model, in a process of its own; returns what it wrote."""
    spec = json.loads((running.state.folder / "runtime.yaml").read_text())["pool"]["spec"]
    output = running.state.folder / f"{name}.json"
    command = [sys.executable, "-m", f"lorafleet_local.{name}", "--model", spec["baseModel"]["path"]]
    command += ["--storage", str(running.storage), "--json", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if not output.is_file():  # `prove` exits with 1 when a gain is too small, after it wrote
        raise DemoError(f"lorafleet_local.{name} did not run (exit {done.returncode}):\n{done.stderr.strip()[-3000:]}")
    written: dict[str, Any] = json.loads(output.read_text())
    return written


def _print_proof(reporter: Reporter, proof: dict[str, Any]) -> None:
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


def _clear(folder: Path, reporter: Reporter) -> None:
    marker = folder / _MARKER
    if not marker.exists() and any(entry.name != "lock" for entry in folder.iterdir()):
        raise DemoError(f"--state-dir: {folder} holds files that no demo wrote; name a new folder, it is emptied first")
    stack.down(folder, reporter)  # a demo that was killed may have left processes
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name not in ("lock", _MARKER):
            entry.unlink()
    marker.touch()


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder.parent / f"{folder.name}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DemoError(f"another demo is running in {folder}; wait for it or stop it") from error
        yield
