"""What `make demo-full` does: the demo's three runs, and four more that come, go, pause and fail beside them.

The pool has four slots. The late joiner gets the free one; the others queue, and it passes from hand to hand:

    the late joiner completes, one run is suspended, one deleted, one fails; then the suspended one is resumed

Called by `main`. Passes only when every story ended as it should and the three adapters are proven, as in `demo`.
"""

import time
from collections.abc import Callable
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lorafleet_api.v1alpha1.wire import AdapterList
from lorafleet_local import measure, stack
from lorafleet_local.demo import Done, perform
from lorafleet_local.demo_base import (
    DEREGISTER_SECONDS,
    TRAIN_SECONDS,
    DemoError,
    Item,
    Watch,
    apply,
    examples,
    finish,
    fresh_folder,
    list_runs,
    read_example,
)
from lorafleet_local.demo_proof import unproven
from lorafleet_local.demo_stories import Actions, demo_stories
from lorafleet_local.report import Reporter
from lorafleet_local.stories import Snapshot, Stories, Story

_RUNS = ("late", "paused", "deleted", "broken")
_LISTING_PATIENCE_SECONDS = 30.0
_TABLE_WIDTH = 120
"""Of a log, which rich takes for 80 columns wide; a terminal says itself how wide it is."""


def run_demo_full(folder: Path, bench: Path | None) -> None:
    """Run it in a fresh state folder.

    Args:
        folder: wiped first; keeps logs, checkpoints and objects afterwards.
        bench: where the measured figures go, beside those that are there; only when all went well.

    Raises:
        DemoError: a story ended otherwise, a run failed that must not, or did not learn.
        StartError: the stack did not come up.
    """
    reporter = Reporter()
    demo = _FullDemo()
    with fresh_folder(folder, reporter) as owner:
        done = perform(folder, owner, reporter, demo.train)
    if wrong := [*demo.wrong(), *unproven(done.proof)]:
        raise DemoError("; ".join(wrong))
    if bench is not None:
        _write(bench, done, demo.stories, reporter)
    reporter.say(
        f"three adapters trained and proven, four stories ended as they should, in {done.wall:.0f} s; logs: {folder}"
    )


class _FullDemo:
    """The three runs and the stories."""

    def __init__(self) -> None:
        self.stories = Stories([], lambda line: None)

    def train(self, running: stack.Stack, reporter: Reporter, results: measure.Results) -> dict[str, Path]:
        """For `perform`."""
        three = examples()
        extras = {name: read_example(f"demo-full/{name}.yaml", "addition") for name in _RUNS}
        names = [f"adapterrun/{example.name}" for example in three]
        actions = Actions(
            kubectl=running.kubectl,
            apply=lambda name: apply(running, reporter, results, extras[name]),
            runs={name: example.name for name, example in extras.items()},
            three=[example.name for example in three],
        )
        stories = self.stories = Stories(demo_stories(actions), reporter.say)
        api = running.api()
        try:
            with running.runtime() as runtime:
                each = _advance(stories, runtime, reporter)
                watch = Watch(running, api, reporter, results, may_fail=frozenset({extras["broken"].name}))
                with reporter.phase("training", spinner=False):
                    for example in three:
                        apply(running, reporter, results, example)
                    watch.wait("Complete", names, TRAIN_SECONDS, each)
                with reporter.phase("deregister", spinner=False):
                    watch.wait("Deregistered", names, DEREGISTER_SECONDS, each)
                with reporter.phase("rest of the stories", spinner=False):
                    watch.follow(lambda: stories.over, each)
            adapters = finish(running, api, reporter, results)
            steps = {name: int(item["status"]["step"]) for name, item in list_runs(api).items()}
            stories.judge_neighbours({name: step for name, step in steps.items() if name != extras["broken"].name})
            return adapters
        finally:
            api.close()
            _print_stories(reporter, stories)

    def wrong(self) -> list[str]:
        """What did not go as it should, in words."""
        failed = [f"{story.name}: {story.happened}" for story in self.stories.all if not story.ok]
        return [*failed, *self.stories.faults]


def _advance(stories: Stories, runtime: httpx.Client, reporter: Reporter) -> Callable[[list[Item]], None]:
    answered = time.monotonic()

    def each(items: list[Item]) -> None:
        nonlocal answered
        try:
            answer = runtime.get("/v1/adapters", params={"timeout": 0}).raise_for_status()
        except httpx.HTTPError as error:
            if time.monotonic() - answered > _LISTING_PATIENCE_SECONDS:
                raise DemoError(f"the runtime does not answer: {error}") from error
            return
        answered = time.monotonic()
        listing = AdapterList.model_validate(answer.json())
        stories.advance(Snapshot(reporter.elapsed(), {item["metadata"]["name"]: item for item in items}, listing))

    return each


def _print_stories(reporter: Reporter, stories: Stories) -> None:
    table = Table(padding=(0, 1), show_lines=True, expand=True)
    for heading in ("Story", "What was done", "Expected", "Happened", "Steps beside it", "Seconds", ""):
        ratio = {"What was done": 4, "Expected": 4, "Happened": 5, "Steps beside it": 4}.get(heading)
        table.add_column(heading, justify="right" if heading == "Seconds" else "left", overflow="fold", ratio=ratio)
    for story in stories.all:
        table.add_row(
            story.name,
            story.did,
            story.expected,
            escape(story.happened),
            _neighbours(story),
            "-" if (seconds := _seconds(story)) is None else f"{seconds:.0f}",
            "ok" if story.ok else "FAILED",
        )
    console = reporter.console
    if not console.file.isatty():
        console = Console(file=console.file, width=_TABLE_WIDTH, highlight=False)
    console.print("\nStories:")
    console.print(table)
    console.print(
        f"Over all runs and all polls: {'; '.join(stories.faults) or 'no step went back, nothing was restarted'}\n",
        soft_wrap=True,
        markup=False,
    )


def _seconds(story: Story) -> float | None:
    return None if story.begun is None or story.ended is None else story.ended - story.begun


def _neighbours(story: Story) -> str:
    return ", ".join(f"{run} {before}->{after}" for run, (before, after) in story.neighbours.items()) or "nobody"


def _write(bench: Path, done: Done, stories: Stories, reporter: Reporter) -> None:
    spent = {story.name: seconds for story in stories.all if (seconds := _seconds(story)) is not None}
    measure.write_full(bench, done.wall, reporter.phases, spent)
    reporter.say(f"figures: {bench}")
