"""What both demos are made of: the example manifests, a folder of its own, waiting with a watchful eye.

Called by `demo` and `demo_full`. Judges only what no demo survives: a run that must not fail, a process that ended.
"""

import fcntl
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from lorafleet_local import measure, pool, stack
from lorafleet_local.api import Api, condition
from lorafleet_local.guardian import guarded
from lorafleet_local.paths import repo_root
from lorafleet_local.processes import Process, find, log_tail
from lorafleet_local.progress import Progress
from lorafleet_local.report import Reporter
from lorafleet_local.tasks import TASKS

TRAIN_SECONDS = 1800
DEREGISTER_SECONDS = 120
_MARKER = ".lorafleet-demo"
"""Names a folder as a demo's own, which the next demo may empty."""
_API_PATIENCE_SECONDS = 30.0
"""For an API server that is away for a moment."""
_POLL_SECONDS = 0.25

Item = dict[str, Any]


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


def examples() -> list[Example]:
    """The manifests that the demos apply, one per task.

    Raises:
        DemoError: a manifest is missing or names another pool.
    """
    return [read_example(f"{task}.yaml", task) for task in TASKS]


def read_example(name: str, task: str) -> Example:
    """One manifest of manifests/examples.

    Raises:
        DemoError: it is missing or names another pool.
    """
    path = repo_root() / "manifests" / "examples" / name
    if not path.is_file():
        raise DemoError(f"{path} is missing; the demo applies it")
    document = yaml.safe_load(path.read_text())
    if document["spec"]["poolRef"]["name"] != pool.POOL_NAME:
        raise DemoError(f"{path}: spec.poolRef.name: {document['spec']['poolRef']['name']!r}; use {pool.POOL_NAME!r}")
    return Example(path, document["metadata"]["name"], task)


def apply(running: stack.Stack, reporter: Reporter, results: measure.Results, example: Example) -> None:
    """`kubectl apply` a manifest, said and timed."""
    results.run(example.name).applied = time.time()
    running.kubectl("apply", "-f", str(example.path))
    reporter.say(f"kubectl apply -f {example.path.relative_to(repo_root())}")


class Watch:
    """Waits as a user would, with kubectl, and meanwhile shows the runs and notes when their conditions flip.

    Args:
        running: the stack.
        api: reads the runs.
        reporter: told.
        results: get the times of the conditions of the runs that must not fail.
        may_fail: names of runs that may.
    """

    def __init__(
        self,
        running: stack.Stack,
        api: Api,
        reporter: Reporter,
        results: measure.Results,
        may_fail: frozenset[str] = frozenset(),
    ) -> None:
        self._running = running
        self._api = api
        self._reporter = reporter
        self._results = results
        self._may_fail = may_fail
        self._answered = time.monotonic()

    def wait(self, kind: str, names: list[str], seconds: int, each: Callable[[list[Item]], None] | None = None) -> None:
        """`kubectl wait --for=condition=KIND NAMES`.

        Args:
            kind: condition.
            names: adapterrun/NAME.
            seconds: given to kubectl.
            each: called with the runs at every poll.

        Raises:
            DemoError: kubectl gave up, a run failed or a process ended.
        """
        self._reporter.say(f"kubectl wait --for=condition={kind} {' '.join(names)}")
        waiter = self._running.kubectl.popen("wait", f"--for=condition={kind}", f"--timeout={seconds}s", *names)
        try:
            self.follow(lambda: waiter.poll() is not None, each)
        finally:
            if waiter.poll() is None:
                waiter.kill()
            output, errors = waiter.communicate()
        if waiter.returncode != 0:
            raise DemoError(f"kubectl wait --for=condition={kind}: {errors.strip() or output.strip()}")

    def follow(self, done: Callable[[], bool], each: Callable[[list[Item]], None] | None = None) -> None:
        """Poll and show until `done`, and once more.

        Raises:
            DemoError: a run failed or a process ended.
        """
        with Progress(self._reporter) as progress:
            last, items = False, None
            while not last or items is None:
                last = last or done()
                items = self.poll()
                if items is not None:
                    progress.update(items)
                    if each is not None:
                        each(items)
                time.sleep(0.0 if last and items is not None else _POLL_SECONDS)

    def poll(self) -> list[Item] | None:
        """The runs now; None while the API server does not answer, which is not the same as no runs.

        Raises:
            DemoError: what cannot end well.
        """
        for process in self._running.state.processes:
            if find(process) is None:
                raise DemoError(f"{process.name} ended\n{log_tail(process.log)}")
        try:
            items = self._api.list("adapterruns", pool.NAMESPACE)
        except httpx.HTTPError as error:
            if time.monotonic() - self._answered > _API_PATIENCE_SECONDS:
                raise DemoError(f"the API server does not answer: {error}") from error
            return None
        self._answered = time.monotonic()
        for item in items:
            if item["metadata"]["name"] not in self._may_fail:
                self._judge(item)
        return items

    def _judge(self, item: Item) -> None:
        if "Complete" in self._results.observe(item):
            with suppress(httpx.HTTPError):  # a figure only
                measure.note_last_step(self._results, self._running, item)
        failed = condition(item, "Failed")
        if failed["status"] == "True":
            raise DemoError(
                f"AdapterRun {item['metadata']['name']} failed: {failed['reason']}: {failed['message']}"
                f" (logs: {self._running.state.folder / 'log'})"
            )


def list_runs(api: Api) -> dict[str, Item]:
    """The runs by name, from an API server that may be away for a moment.

    Raises:
        DemoError: it stays away.
    """
    deadline = time.monotonic() + _API_PATIENCE_SECONDS
    while True:
        try:
            return {item["metadata"]["name"]: item for item in api.list("adapterruns", pool.NAMESPACE)}
        except httpx.HTTPError as error:
            if time.monotonic() > deadline:
                raise DemoError(f"the API server does not answer: {error}") from error
            time.sleep(_POLL_SECONDS)


def finish(running: stack.Stack, api: Api, reporter: Reporter, results: measure.Results) -> dict[str, Path]:
    """Show the runs, take the figures; returns each task's finished adapter."""
    reporter.console.print(f"\n$ kubectl get adapterruns\n{running.kubectl('get', 'adapterruns')}", markup=False)
    items = list_runs(api)
    with suppress(httpx.HTTPError):  # figures only: a runtime that restarts now spoils no result
        measure.collect(results, running)
    return {example.task: _adapter(running, items[example.name]) for example in examples()}


def _adapter(running: stack.Stack, item: Item) -> Path:
    artifact = (item.get("status") or {}).get("artifact")
    if artifact is None:
        raise DemoError(f"AdapterRun {item['metadata']['name']} is Complete but status.artifact is empty")
    return running.storage / str(artifact["path"])


@contextmanager
def fresh_folder(folder: Path, reporter: Reporter) -> Iterator[Process]:
    """An empty state folder that nobody else uses, with a guardian; yields this process, for `stack.up(owner=...)`.

    Raises:
        DemoError: another demo runs there, or somebody else's files lie there.
    """
    with _only_one(folder):
        _clear(folder, reporter)
        with guarded(folder) as owner:
            yield owner


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
