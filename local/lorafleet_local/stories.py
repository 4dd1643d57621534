"""Stories: what is done to a run while others train, and what must come of it. Generators, moved on by one loop.

    story ── yield Expect(what, holds, seconds) ──▶ Stories.advance(snapshot), at every poll ──▶ its next action

Called by `demo_full`. A story that does not come true says what it saw and ends; the others go on. `Stories` also
keeps every run's steps, so that a story can say how its neighbours fared meanwhile. Applies and deletes nothing itself.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from lorafleet_api.v1alpha1.wire import AdapterList, AdapterView
from lorafleet_local.api import condition
from lorafleet_local.kubectl import KubectlError

Item = dict[str, Any]


class StoryError(Exception):
    """A story took another turn; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Objects and runtime at one moment."""

    at: float
    """Seconds since the demo's start."""
    items: dict[str, Item]
    """AdapterRuns by name."""
    listing: AdapterList
    """The runtime's."""

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """A condition of a run; status Unknown where there is none."""
        return condition(self.items.get(name), kind)

    def is_true(self, name: str, kind: str) -> bool:
        """Whether a condition is True."""
        return bool(self.condition(name, kind)["status"] == "True")

    def queue_position(self, name: str) -> int | None:
        """Its place in the queue, from 1, by its status; None where it is not queued."""
        return ((self.items.get(name) or {}).get("status") or {}).get("queuePosition")

    def view(self, name: str) -> AdapterView | None:
        """What the runtime says of the run."""
        return next((view for view in self.listing.adapters if view.name == name), None)

    def step(self, name: str) -> int:
        """Steps done, by the runtime while it knows the run, else by its status."""
        view = self.view(name)
        status = (self.items.get(name) or {}).get("status") or {}
        return view.step if view is not None else int(status.get("step") or 0)

    def traces(self, uid: str) -> list[str]:
        """Where trainer and engines hold the run, by their own listings."""
        slots = [f"trainer slot {slot}" for slot, held in self.listing.trainer.slots.items() if held == uid]
        engines = [
            f"{adapter} on engine {engine.engine}"
            for engine in self.listing.engines
            for adapter in engine.adapters
            if adapter.startswith(f"{uid}@")
        ]
        return slots + engines


@dataclass(frozen=True, slots=True)
class Expect:
    """What a story waits for."""

    what: str
    holds: Callable[[Snapshot], bool]
    seconds: float
    never: Callable[[Snapshot], str | None] | None = None
    """What must not be seen meanwhile: a reason to give up at once, or None."""


Waits = Generator[Expect, Snapshot, str]
"""Yields what it waits for, is sent the snapshot that showed it, returns what happened."""


@dataclass(slots=True)
class Story:
    """One story and what came of it."""

    name: str
    run: str
    """Its run's name."""
    did: str
    expected: str
    begin: Callable[["Stories"], Waits]
    begun: float | None = None
    """When it did something first; waiting for its turn does not count."""
    ended: float | None = None
    happened: str = ""
    ok: bool = False
    neighbours: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Step of each run that trained beside it, at its begin and at its end."""

    @property
    def over(self) -> bool:
        """It ended, well or not."""
        return self.ended is not None


class Stories:
    """Moves stories on side by side.

    Args:
        stories: in the order of the table.
        say: shows one line.
    """

    def __init__(self, stories: list[Story], say: Callable[[str], None]) -> None:
        self.all = stories
        self._say = say
        self._running = {story.name: story.begin(self) for story in stories}
        self._waits: dict[str, tuple[Expect, float]] = {}
        self._steps: dict[str, int] = {}
        self.newest: Snapshot | None = None
        self.faults: list[str] = []
        """Steps that went back, restarts: what no story allows."""

    @property
    def over(self) -> bool:
        """Every story ended."""
        return all(story.over for story in self.all)

    def story(self, name: str) -> Story:
        """The story of that name."""
        return next(story for story in self.all if story.name == name)

    def say(self, name: str, line: str) -> None:
        """One line of a story, live; the first one begins it."""
        story = self.story(name)
        if story.begun is None and self.newest is not None:
            story.begun = self.newest.at
            story.neighbours = {run: (self.newest.step(run), 0) for run in _training(self.newest) if run != story.run}
        self._say(f"[{name}] {line}")

    def advance(self, snapshot: Snapshot) -> None:
        """Go on with every story whose wait is over."""
        self._check(snapshot)
        self.newest = snapshot
        for story in self.all:
            if not story.over:
                self._advance(story, snapshot)

    def _advance(self, story: Story, snapshot: Snapshot) -> None:
        wait = self._waits.get(story.name)
        try:
            if wait is not None:
                expect, since = wait
                trouble = expect.never(snapshot) if expect.never is not None else None
                if trouble is not None:
                    raise StoryError(f"while waiting for {expect.what}: {trouble}")
                if not expect.holds(snapshot):
                    if snapshot.at - since > expect.seconds:
                        raise StoryError(
                            f"{expect.what}: not within {expect.seconds:.0f} s; {_describe(snapshot, story.run)}"
                        )
                    return
            waits = self._running[story.name]
            following = next(waits) if wait is None else waits.send(snapshot)
            self._waits[story.name] = (following, snapshot.at)
        except StopIteration as end:
            self._end(story, snapshot, str(end.value), ok=True)
        except (StoryError, KubectlError) as error:
            self._end(story, snapshot, str(error), ok=False)

    def _end(self, story: Story, snapshot: Snapshot, happened: str, *, ok: bool) -> None:
        self.say(story.name, f"{'ok' if ok else 'FAILED'}: {happened}")
        story.ended, story.happened, story.ok = snapshot.at, happened, ok
        story.neighbours = {run: (before, snapshot.step(run)) for run, (before, _) in story.neighbours.items()}

    def _check(self, snapshot: Snapshot) -> None:
        for view in snapshot.listing.adapters:
            before = self._steps.get(view.uid, 0)
            if view.step < before:
                self.faults.append(f"{view.name} went back from step {before} to {view.step} at {snapshot.at:.1f} s")
            self._steps[view.uid] = view.step
            if view.restarts and (fault := f"{view.name} restarted {view.restarts} times") not in self.faults:
                self.faults.append(fault)

    def judge_neighbours(self, targets: dict[str, int]) -> None:
        """At the end: who trained beside a story must have gone on after its begin.

        Args:
            targets: last step of each run that must have completed.
        """
        for story in self.all:
            stuck = [run for run, (before, _) in story.neighbours.items() if run in targets and targets[run] <= before]
            if stuck:
                story.ok = False
                story.happened += f"; no step afterwards: {', '.join(stuck)}"


def _training(snapshot: Snapshot) -> list[str]:
    return [view.name for view in snapshot.listing.adapters if view.state == "ACTIVE"]


def _describe(snapshot: Snapshot, run: str) -> str:
    if run not in snapshot.items:
        return f"{run} does not exist"
    ready = snapshot.condition(run, "Ready")
    return (
        f"{run} is at step {snapshot.step(run)}, Ready={ready['status']} ({ready['reason']}) {ready.get('message', '')}"
    )
