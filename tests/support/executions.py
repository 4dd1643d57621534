"""Executes the programs of schedules.py on a trainer of one rank or of several.

`together` does everything that a program says, `alone` trains its run 0 by itself on the same samples. Used by the
alone-or-together proofs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import (
    Artifact,
    BatchResult,
    Cursor,
    Loaded,
    LoadRequest,
    PromptGroup,
    RunFault,
    StepResult,
)
from support.schedules import (
    MEMORY_FAULTS,
    SLOTS,
    Feed,
    Leave,
    Op,
    Program,
    Spoil,
    Toggle,
    make_group,
    shuffled,
    spoiled,
    uid_of,
)
from support.trainer import save


class Trainer(Protocol):
    """What a program is executed on."""

    def load(self, request: LoadRequest) -> Loaded: ...
    def drop(self, uid: str) -> object: ...
    def accumulate(self, groups: Sequence[PromptGroup]) -> BatchResult: ...
    def step(self, uid: str, cursor: Cursor) -> StepResult | RunFault: ...
    def save(self, uid: str, directory: str, partial: bool) -> Artifact: ...
    def state(self, uid: str) -> dict[str, Tensor]: ...
    def poison(self, uid: str, kind: str) -> None: ...


class OneRank:
    """A TrainerRank, with its memory open to the test."""

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank
        self.load, self.drop, self.accumulate, self.step = rank.load, rank.drop, rank.accumulate, rank.step

    def save(self, uid: str, directory: str, partial: bool) -> Artifact:
        """A checkpoint."""
        return save(self._rank, Cursor(), partial, uid=uid, directory=directory)

    def state(self, uid: str) -> dict[str, Tensor]:
        """Adapter, masters, moments, gradient sums and step count."""
        adapter, optimizer = self._rank.adapter(uid), self._rank._slot(uid).optimizer
        exp_avg, exp_avg_sq = optimizer.moments
        tensors = {"adapter": adapter.weights, "master": adapter.master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        clock = torch.tensor(optimizer.step_count)
        return {k: t.clone() for k, t in (tensors | {"grad": adapter.grad, "step": clock}).items()}

    def poison(self, uid: str, kind: str) -> None:
        """NaN in the middle of its weights or of its gradient sums."""
        adapter = self._rank.adapter(uid)
        target = adapter.master if kind == "weight" else adapter.grad
        target[len(target) // 2] = float("nan")
        adapter.refresh()


@dataclass(slots=True)
class _Progress:
    """A run that is live."""

    slot: int
    step: int = 0
    fed: int = 0
    """Groups accumulated since the last step."""
    sick: bool = False


@dataclass(slots=True)
class Execution:
    """Executes a program and checks on the way that nobody faults but whom the program spoils.

    Args:
        trainer: without live runs.
        program: what to do.
        directory: for checkpoints, relative to the trainer's storage.
        before_step: called with a full run's number before each of its steps.
    """

    trainer: Trainer
    program: Program
    directory: str
    before_step: Callable[[int], None] | None = None
    steps: dict[int, list[StepResult]] = field(default_factory=dict)
    """Results of each run's steps so far."""
    _live: dict[int, _Progress] = field(default_factory=dict)
    _saved: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """Of a suspended run: checkpoint path, step, groups accumulated since."""
    _starts: Counter[int] = field(default_factory=Counter)
    """How often each run began anew; each time in a folder of its own."""

    def together(self) -> dict[str, Tensor]:
        """Execute everything, then feed run 0 until its last step. Returns its state."""
        for run, plan in enumerate(self.program.runs):
            if plan.here or run == 0:
                self._join(run, SLOTS - 1 - run)
        for op in self.program.ops:
            self._do(op)
        if 0 not in self._live:
            self._join(0, 0)
        while self._live[0].step < self.program.runs[0].steps:
            self._feed(Feed(0, False))
        return self._finish()

    def alone(self) -> dict[str, Tensor]:
        """Execute run 0 only, a whole batch per call. Returns its state."""
        self._join(0, 0)
        for _ in range(self.program.runs[0].steps):
            plan, first = self.program.runs[0], self._live[0].step * self.program.runs[0].batch
            self._accumulate([make_group(plan, 0, first + i) for i in range(plan.batch)])
            self._step_full()
        return self._finish()

    def _finish(self) -> dict[str, Tensor]:
        state = self.trainer.state(uid_of(0))
        for run in self._live:
            self.trainer.drop(uid_of(run))
        return state

    def _do(self, op: Op) -> None:
        if isinstance(op, Feed):
            self._feed(op)
        elif isinstance(op, Toggle) and op.run not in self._live:
            self._join(op.run, op.slot)
        elif isinstance(op, Toggle):
            self._suspend(op.run, op.partial)
        elif isinstance(op, Leave) and op.run in self._live:
            if op.save:
                self._save(op.run, False)
            self._forget(op.run)
        elif isinstance(op, Spoil) and op.run in self._live:
            self._spoil(op.run, op.kind)

    def _join(self, run: int, wish: int) -> None:
        taken = {p.slot for p in self._live.values()}
        slot = next(s % SLOTS for s in range(wish, wish + SLOTS) if s % SLOTS not in taken)
        plan, (path, step, fed) = self.program.runs[run], self._saved.pop(run, (None, 0, 0))
        uid = uid_of(run)
        loaded = self.trainer.load(LoadRequest(uid, "team", uid, slot, plan.spec, plan.steps, "digest", path))
        assert (loaded.step, loaded.groups) == (step, fed)
        self._live[run] = _Progress(slot, step, fed)
        if path is None:
            self.steps[run] = []
            self._starts[run] += 1

    def _save(self, run: int, partial: bool) -> str:
        return self.trainer.save(uid_of(run), f"{self.directory}/{uid_of(run)}.{self._starts[run]}", partial).path

    def _suspend(self, run: int, partial: bool) -> None:
        progress = self._live[run]
        if progress.sick:
            return
        self._saved[run] = (self._save(run, partial), progress.step, progress.fed if partial else 0)
        self.trainer.drop(uid_of(run))
        del self._live[run]

    def _forget(self, run: int) -> None:
        """Its next load starts anew."""
        self.trainer.drop(uid_of(run))
        del self._live[run]

    def _feed(self, op: Feed) -> None:
        self._step_full()
        waiting: dict[int, list[PromptGroup]] = {}
        wanted = op.counts()
        for run, progress in self._live.items():
            plan = self.program.runs[run]
            count = min(wanted[run], plan.batch - progress.fed) if progress.step < plan.steps else 0
            first = progress.step * plan.batch + progress.fed
            waiting[run] = [make_group(plan, run, first + i) for i in range(count)]
        self._accumulate(shuffled(waiting, op.seed))
        if not op.late:
            self._step_full()

    def _accumulate(self, groups: Sequence[PromptGroup], bad: int | None = None) -> None:
        result = self.trainer.accumulate(groups)
        for fault in result.faults:
            run = int(fault.uid[1:])
            assert run == bad or self._live[run].sick, fault
            self._forget(run)
        assert bad is None or bad not in self._live, "a spoiled group was trained"
        counted = {stats.uid: stats.groups for stats in result.stats}
        for run, progress in self._live.items():
            mine = sum(group.uid == uid_of(run) for group in groups)
            assert counted.get(uid_of(run), 0) == mine
            progress.fed += mine

    def _step_full(self) -> None:
        for run, progress in list(self._live.items()):
            if progress.fed < self.program.runs[run].batch:
                continue
            if self.before_step is not None:
                self.before_step(run)
            result = self.trainer.step(uid_of(run), Cursor(progress.step + 1))
            if isinstance(result, RunFault):
                assert progress.sick and result.reason == reasons.NON_FINITE, result
                self._forget(run)
                continue
            assert not progress.sick, "a run with a value that is not finite made a step"
            progress.step, progress.fed = progress.step + 1, 0
            self.steps[run].append(result)

    def _spoil(self, run: int, kind: str) -> None:
        self._step_full()
        progress = self._live.get(run)
        if progress is None:
            return
        if kind in MEMORY_FAULTS:
            self.trainer.poison(uid_of(run), kind)
            progress.sick = True
            return
        waiting = {}
        for other, where in self._live.items():
            plan = self.program.runs[other]
            if other == run or (where.step < plan.steps and where.fed < plan.batch):
                waiting[other] = [make_group(plan, other, where.step * plan.batch + where.fed)]
        waiting[run] = [waiting[run][0], spoiled(waiting[run][0], kind)]
        self._accumulate(shuffled(waiting, run), bad=run)


def next_folder(storage: Path) -> str:
    """A name that is not taken there."""
    return f"program-{len(list(storage.iterdir()))}"
