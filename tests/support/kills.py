"""Kills a trainer over and over while three recorded runs train, and compares with a trainer that nobody killed.

The driver plays the runtime: it feeds each run its recorded groups, keeps what the trainer acknowledged, and after a
kill goes on from nothing but what a new trainer's `load` says. Used by tests/durability (long) and by the numerics.
"""

import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorafleet_runtime.loop.buffers import CursorTracker
from lorafleet_runtime.types import BatchResult, Cursor, Loaded, LoadRequest, PromptGroup, Sample, StepResult, VersionId
from support.kill_child import SEAMS, Catch, Place, serve

State = dict[str, np.ndarray[Any, Any]]
"""Adapter, masters and moments by name."""

VOCAB = 48
SAVE_EVERY = 2
_ANSWER_SECONDS = 60.0
_STEPS_TO_A_KILL = 100
"""Every moment comes long before."""

RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "a": (2, 3, {
        "rank": 4, "alpha": 8, "optimizer": {"lr": 1e-2, "schedule": "cosine", "warmupSteps": 3},
        "checkpoint": {"keep": 2},
    }),
    "b": (3, 2, {
        "rank": 8, "optimizer": {"lr": 3e-3, "schedule": "linear", "minLr": 1e-3, "clipGrad": 0.05},
        "algorithm": {"lossReduction": "tokenMean", "klCoef": 0.1, "tisMode": "Mask"},
        "checkpoint": {"keep": 1, "keepBest": True},
    }),
    "c": (4, 4, {
        "rank": 2, "targetModules": ["q_proj", "down_proj"],
        "optimizer": {"lr": 2e-2, "betas": [0.8, 0.9], "weightDecay": 0.0},
        "algorithm": {"lossReduction": "constant", "advantage": "rloo", "tisMode": "Off"},
        "checkpoint": {"keep": 3},
    }),
}  # fmt: skip
"""uid -> (groups per step, samples per group, spec): different ranks, batches, rates and losses."""


def recorded(uid: str, index: int) -> PromptGroup:
    """The samples of one prompt group; the same whenever they are asked for."""
    chance = random.Random(f"{uid} {index}")
    samples = tuple(
        Sample(
            tuple(chance.randrange(VOCAB) for _ in range(length)),
            tuple(chance.gauss(-3.5, 0.5) for _ in range(length)),
            chance.random(),
            chance.gauss(0.0, 1.0),
            chance.random() < 0.2,
        )
        for length in (chance.randint(1, 6) for _ in range(RUNS[uid][1]))
    )
    prompt = tuple(chance.randrange(VOCAB) for _ in range(chance.randint(2, 6)))
    return PromptGroup(uid, VersionId(uid, "1.1", 1), index, prompt, samples)


def arrival(number: int) -> int:
    """Index of the group that arrives as the `number`th: 1, 2, 0, 4, 5, 3 …, so that cursors have gaps."""
    return 3 * (number // 3) + (number % 3 + 1) % 3


def requests() -> list[LoadRequest]:
    """Loads of all runs, without their checkpoints."""
    base = {"poolRef": {"name": "pool"}, "data": "data.jsonl", "rmType": "math"}
    return [
        LoadRequest(uid, "team", uid, slot, base | spec | {"rolloutBatchSize": groups}, 400, "data", None)
        for slot, (uid, (groups, _, spec)) in enumerate(RUNS.items())
    ]


class Killed(Exception):
    """The trainer is gone."""


@dataclass
class Progress:
    """What the driver knows of one run."""

    uid: str
    step: int = 0
    consumed: int = 0
    """Groups trained on, in arrival order."""
    durable: tuple[int, int] = (0, 0)
    """(step, groups consumed) of the newest checkpoint that was acknowledged."""
    steps: dict[int, list[int]] = field(default_factory=dict)
    """Indices that each committed step is made of."""
    open: list[int] = field(default_factory=list)
    """Indices accumulated since."""

    @property
    def batch(self) -> int:
        return RUNS[self.uid][0]

    @property
    def cursor(self) -> Cursor:
        tracker = CursorTracker(Cursor())
        for number in range(self.consumed):
            tracker.consume(arrival(number))
        return tracker.cursor

    def resume(self, loaded: Loaded, snapshots: bool) -> None:
        """Go on from what the trainer has."""
        consumed = loaded.cursor.low + len(loaded.cursor.consumed)
        assert consumed == loaded.step * self.batch + loaded.groups, loaded  # no group lost, none twice
        assert not loaded.passed_over, loaded
        at_least = self.step if snapshots else self.durable[0]
        assert at_least <= loaded.step <= self.step + 1, (loaded, self)  # a step may be made and its answer lost
        if loaded.step == self.durable[0]:
            assert consumed >= self.durable[1], (loaded, self)
        whole = self.steps | {self.step + 1: list(self.open)}
        self.steps = {n: whole[n] for n in range(1, loaded.step + 1)}
        self.step, self.consumed = loaded.step, consumed
        assert loaded.cursor == self.cursor, (loaded, self)
        self.open = [arrival(number) for number in range(self.step * self.batch, consumed)]


def _context() -> ForkServerContext:
    """Forks children from a server that has imported what they need. It ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.kill_child"])
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    changes = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with pytest.MonkeyPatch.context() as patch:  # for the server's start: it does not take over sys.path
        for name, value in changes.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


class Trainer:
    """One life of a trainer process."""

    def __init__(self, place: Place, catch: Catch | None, kill_after: float | None) -> None:
        context = _context()
        self._calls, calls = context.Pipe()
        self._marks, marks = context.Pipe()
        self._process: ForkServerProcess = context.Process(
            target=serve, args=(place, requests(), catch, calls, marks), daemon=True
        )
        self._process.start()
        calls.close()
        marks.close()
        self._kill_at = float("inf")
        self.cause = ""
        self.loaded: list[Loaded] = self._answer()
        """In the order of `requests`."""
        if kill_after is not None:
            self._kill_at = time.monotonic() + kill_after

    def call(self, name: str, *arguments: Any) -> Any:
        """Raises Killed when the moment came before the answer."""
        self._calls.send((name, arguments))
        return self._answer()

    def call_at_the_seam(self, name: str, *arguments: Any) -> Any:
        """The answer of a trainer whose thread that writes may stand at the seam; None if there is none."""
        self._calls.send((name, arguments))
        stands = self._marks.poll(_ANSWER_SECONDS) if name == "snapshotted" else False
        return self._calls.recv() if self._calls.poll(0.3 if stands else _ANSWER_SECONDS) else None

    def _answer(self) -> Any:
        timeout = max(0.0, min(self._kill_at - time.monotonic(), _ANSWER_SECONDS))
        ready = wait([self._calls, self._marks], timeout)
        if self._marks in ready:
            self.kill(self._marks.recv())
            raise Killed
        if not ready:
            assert time.monotonic() >= self._kill_at, "the trainer does not answer"
            self.kill("at a random moment")
            raise Killed
        try:
            return self._calls.recv()
        except EOFError as error:
            raise AssertionError("the trainer died by itself; its output says why") from error

    def kill(self, cause: str = "") -> None:
        """SIGKILL."""
        self.cause = cause
        self._process.kill()
        self._process.join()
        for connection in (self._calls, self._marks):
            connection.close()


@dataclass(frozen=True)
class Life:
    """One line of the report."""

    found: dict[str, tuple[int, int]]
    """(step, groups of the next) that the trainer loaded, by run."""
    cause: str
    reached: dict[str, int]
    """Steps acknowledged."""
    node_lost: bool
    """With its snapshots, after the kill."""


class Driver:
    """Feeds the runs; `chance` decides how they interleave, never what they train on."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.runs = {uid: Progress(uid) for uid in RUNS}
        self._chance = random.Random(seed)
        self._tickets: dict[str, tuple[str, tuple[int, int]]] = {}
        self._made: dict[str, str] = {}
        """Tickets of steps whose snapshot is on its way: the run waits, the others do not."""

    def train(self, trainer: Trainer, until: dict[str, int]) -> None:
        """Go on until every run has these steps, and everything asked for is saved."""
        while any(run.step < until[uid] for uid, run in self.runs.items()):
            self._settle(trainer, until)
            if not self._ready(until):
                break
            groups = list(self._batch(until))
            result: BatchResult = trainer.call("accumulate", groups)
            assert not result.faults, result.faults
            for group in groups:
                run = self.runs[group.uid]
                run.open.append(group.index)
                run.consumed += 1
            for run in self.runs.values():
                self._after(trainer, run)
        for uid in list(self._tickets):
            self._collect(trainer, uid)

    def _batch(self, until: dict[str, int]) -> Iterator[PromptGroup]:
        waiting = self._ready(until)
        for run in self._chance.sample(waiting, self._chance.randint(1, len(waiting))):
            for number in range(self._chance.randint(1, run.batch - len(run.open))):
                yield recorded(run.uid, arrival(run.consumed + number))

    def _ready(self, until: dict[str, int]) -> list[Progress]:
        return [run for run in self.runs.values() if run.step < until[run.uid] and run.uid not in self._made]

    def _settle(self, trainer: Trainer, until: dict[str, int]) -> None:
        """Some of the steps that were made count, so that a run can go on."""
        while self._made and (not self._ready(until) or self._chance.random() < 0.5):
            uid, ticket = self._made.popitem()
            assert trainer.call("snapshotted", ticket)
            run = self.runs[uid]
            run.step += 1
            run.steps[run.step], run.open = run.open, []
            if run.step % SAVE_EVERY == 0:
                self._capture(trainer, run, partial=False)

    def _after(self, trainer: Trainer, run: Progress) -> None:
        if run.uid in self._made:
            return
        if len(run.open) == run.batch:
            result: StepResult = trainer.call("step", run.uid, run.cursor)
            assert isinstance(result, StepResult) and result.step == run.step + 1, result
            self._made[run.uid] = result.snapshot
        elif run.open and self._chance.random() < 0.3:  # as a suspension or a stop does
            self._capture(trainer, run, partial=True)

    def _capture(self, trainer: Trainer, run: Progress, partial: bool) -> None:
        if run.uid in self._tickets:
            self._collect(trainer, run.uid)
        ticket = trainer.call("capture", run.uid, run.cursor, partial, self._chance.random())
        self._tickets[run.uid] = (ticket, (run.step, run.consumed))

    def _collect(self, trainer: Trainer, uid: str) -> None:
        ticket, saved = self._tickets.pop(uid)
        assert trainer.call("saved", ticket) is not None
        self.runs[uid].durable = saved

    def resume(self, trainer: Trainer, snapshots: bool) -> None:
        """A new trainer has loaded every run."""
        self._tickets.clear()
        self._made.clear()
        for loaded in trainer.loaded:
            self.runs[loaded.uid].resume(loaded, snapshots)


@dataclass(frozen=True)
class Story:
    """What came of it."""

    lives: list[Life]
    driver: Driver
    states: dict[str, State]
    """Of the last trainer."""


def kill_over_and_over(place: Place, kills: int, seed: int) -> Story:
    """Train with that many kills, then two more steps of each run.

    Every other kill is inside a write. After about half of them the node is lost too: the checkpoints alone carry the
    runs.
    """
    chance = random.Random(seed)
    driver, lives, snapshots = Driver(place, seed), list[Life](), True
    seams = [seam for _ in range(kills) for seam in chance.sample(SEAMS, len(SEAMS))]
    for number in range(kills):
        catch = Catch(seams[number // 2], chance.randrange(6)) if number % 2 else None
        trainer = Trainer(place, catch, None if catch else chance.uniform(0.0, 0.8))
        driver.resume(trainer, snapshots)
        found = {loaded.uid: (loaded.step, loaded.groups) for loaded in trainer.loaded}
        with suppress(Killed):
            driver.train(trainer, {uid: run.step + _STEPS_TO_A_KILL for uid, run in driver.runs.items()})
            raise AssertionError(f"the moment never came: {catch}")
        snapshots = chance.random() < 0.5
        lives.append(Life(found, trainer.cause, {uid: run.step for uid, run in driver.runs.items()}, not snapshots))
        if not snapshots:
            shutil.rmtree(place.node, ignore_errors=True)
    trainer = Trainer(place, None, None)
    driver.resume(trainer, snapshots)
    driver.train(trainer, {uid: run.step + 2 for uid, run in driver.runs.items()})
    return Story(lives, driver, _states(trainer))


def _states(trainer: Trainer) -> dict[str, State]:
    found = {uid: trainer.call("state", uid) for uid in RUNS}
    trainer.kill()
    return found


def uninterrupted(place: Place, until: dict[str, int]) -> dict[str, State]:
    """What a trainer that nobody kills has after these steps; its batches interleave in another way."""
    driver, trainer = Driver(place, seed=0), Trainer(place, None, None)
    driver.train(trainer, until)
    return _states(trainer)


def check(story: Story, place: Place) -> None:
    """Every group was used once, in its step, and every number is the same bit for bit.

    Args:
        story: of the kills.
        place: for the trainer that is not killed.
    """
    runs = story.driver.runs
    whole = uninterrupted(place, {uid: run.step for uid, run in runs.items()})
    for uid, run in runs.items():
        assert run.steps == {
            step: [arrival(number) for number in range((step - 1) * run.batch, step * run.batch)]
            for step in range(1, run.step + 1)
        }
        assert story.states[uid].keys() == whole[uid].keys()
        for name, value in whole[uid].items():
            assert torch.equal(torch.from_numpy(story.states[uid][name]), torch.from_numpy(value)), f"{name} of {uid}"


def table(lives: list[Life]) -> str:
    """One line per kill."""
    lines = [f"{'killed':42} {'node':5} " + " ".join(f"{'run ' + uid:>14}" for uid in RUNS)]
    for number, life in enumerate(lives, start=1):
        spans = [f"{step}+{more} to {life.reached[uid]}" for uid, (step, more) in life.found.items()]
        node = "lost" if life.node_lost else "kept"
        lines.append(f"{number:3} {life.cause:38} {node:5} " + " ".join(f"{span:>14}" for span in spans))
    return "\n".join([*lines, "steps at which each trainer found and left the runs; +N: groups of the next step"])


def make_place(root: Path, model: Path) -> Place:
    """Storage and node folders of one trainer."""
    return Place(model, root / "storage", root / "node")
