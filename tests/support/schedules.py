"""Random schedules of a shared trainer for hypothesis; executions.py executes them.

A program says which runs there are and what happens to them in which order: slices of mixed groups, steps, joins,
suspensions, departures, faults. Run 0 is the tracked one: it never fails. Used by the alone-or-together
proofs, on one rank and on groups of ranks.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from lorafleet_api.v1alpha1.adapterpool import ALL_LINEAR
from lorafleet_api.v1alpha1.adapterrun import Algorithm
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import (
    LoadRequest,
    PromptGroup,
    Sample,
    VersionId,
)
from support.trainer import MICRO_VOCAB, randomize

SLOTS, MAX_RANK, MAX_RUNS = 8, 16, 8
DATA_FAULTS = ("advantage", "logprob", "lengths", "token", "prompt")
MEMORY_FAULTS = ("weight", "gradient")

_ALGORITHM_NUMBERS: dict[str, tuple[float | None, ...]] = {
    "clip_low": (0.2, 0.0, 1.0),
    "clip_high": (0.28, 0.0, 2.0),
    "dual_clip": (None, 1.5),
    "tis_floor": (0.0, 0.5),
    "tis_cap": (2.0, 0.7),
    "kl_coef": (0.0, 0.0, 0.3),
}
"""What to choose from for the numeric fields of Algorithm; a new field needs a line here."""

_OPTIMIZER: dict[str, tuple[Any, ...]] = {
    "lr": (0.01, 0.3),
    "schedule": ("constant", "linear", "cosine"),
    "warmupSteps": (0, 1, 2),
    "minLr": (0.0, 0.001),
    "weightDecay": (0.1, 0.0),
    "betas": ((0.9, 0.98), (0.0, 0.5)),
    "eps": (1e-8, 1e-4),
    "clipGrad": (1.0, 0.0, 0.01),
}

Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several values."""


def examples(count: int) -> settings:
    """The same examples every time; LORAFLEET_EXAMPLES=N asks for N times as many, drawn anew."""
    factor = int(os.environ.get("LORAFLEET_EXAMPLES", "0"))
    return settings(
        max_examples=count * max(factor, 1),
        derandomize=factor == 0,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run: its spec in wire form, and the shape of its samples."""

    spec: dict[str, Any]
    batch: int
    """Groups per step."""
    samples: int
    steps: int
    prompt: int
    response: int
    """Longest response."""
    seed: int
    here: bool
    """Live from the start."""


@dataclass(frozen=True, slots=True)
class Feed:
    """One accumulate call; `seed` says how many groups of whom in which order: 0 is one of each, run by run."""

    seed: int
    late: bool
    """Full batches step only when the next slice comes."""

    def counts(self) -> list[int]:
        """Groups of each run, where it needs so many."""
        dice = random.Random(self.seed)
        return [dice.choice((0, 0, 1, 1, 2)) if self.seed else 1 for _ in range(MAX_RUNS)]


@dataclass(frozen=True, slots=True)
class Toggle:
    """Suspend a live run; load one that is away, into a free slot."""

    run: int
    slot: int
    partial: bool
    """Its checkpoint holds what was accumulated since its last step; without, those groups come again."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Deregister."""

    run: int
    save: bool


@dataclass(frozen=True, slots=True)
class Spoil:
    """A fault, in the middle of a slice of everybody's groups."""

    run: int
    kind: str


Op = Feed | Toggle | Leave | Spoil


@dataclass(frozen=True, slots=True)
class Program:
    """Run 0 is the tracked one."""

    runs: tuple[RunPlan, ...]
    ops: tuple[Op, ...]


def _algorithm(pick: Pick) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name, about in Algorithm.model_fields.items():
        if name in _ALGORITHM_NUMBERS:
            values: Sequence[Any] = _ALGORITHM_NUMBERS[name]
        elif get_origin(about.annotation) is Literal:
            values = get_args(about.annotation)
        else:
            assert about.annotation is bool, f"algorithm.{name} has no values in _ALGORITHM_NUMBERS"
            values = (False, True)
        chosen[about.alias or name] = pick(values)
    return chosen


def _plan(pick: Pick, here: bool = True) -> RunPlan:
    batch, samples, response = pick((1, 2, 3)), pick((2, 1, 3, 4)), pick(range(1, 10))
    targets = [name for name in ALL_LINEAR if pick((True, True, False))]
    spec = {
        "poolRef": {"name": "pool"},
        "data": "data.jsonl",
        "rmType": "math",
        "rank": pick((4, 1, 3, 8, 16)),
        "alpha": pick((8, 1, 32)),
        "initScheme": pick(("kaiming", "gaussian")),
        "initSeed": pick(range(4)),
        "targetModules": targets or None,
        "rolloutBatchSize": batch,
        "nSamplesPerPrompt": samples,
        "sampling": {"temperature": pick((1.0, 0.6)), "maxTokens": response},
        "optimizer": {name: pick(values) for name, values in _OPTIMIZER.items()},
        "algorithm": _algorithm(pick),
    }
    return RunPlan(spec, batch, samples, pick((2, 1, 3)), pick(range(1, 10)), response, pick(range(10)), here)


@st.composite
def _tracked(draw: st.DrawFn) -> RunPlan:
    return _plan(lambda values: draw(st.sampled_from(values)))


def _neighbour(seed: int) -> RunPlan:
    """Drawn from one number: 7 runs of 30 values each would take hypothesis longer than training them."""
    return _plan(random.Random(seed).choice, here=seed % 2 == 0)


def programs(faults: Sequence[str] = (*DATA_FAULTS, *MEMORY_FAULTS)) -> st.SearchStrategy[Program]:
    """Programs of 8 runs; `faults` are the kinds that befall the neighbours."""
    neighbour = st.integers(1, MAX_RUNS - 1)
    op = st.one_of(
        st.builds(Feed, st.integers(0, 999), st.booleans()),
        st.builds(Toggle, st.sampled_from((0, *range(MAX_RUNS))), st.integers(0, SLOTS - 1), st.booleans()),
        st.builds(Leave, neighbour, st.booleans()),
        st.builds(Spoil, neighbour, st.sampled_from(faults)),
    )
    others = st.lists(st.integers(0, 9999).map(_neighbour), min_size=MAX_RUNS - 1, max_size=MAX_RUNS - 1)
    runs = st.tuples(_tracked(), others).map(lambda parts: (parts[0], *parts[1]))
    return st.builds(Program, runs, st.lists(op, min_size=3, max_size=12).map(tuple))


@dataclass(frozen=True, slots=True)
class MixedSlices:
    """Groups of several runs in one or two accumulate calls; run 0 is the one to look at."""

    runs: tuple[RunPlan, ...]
    order: int
    calls: int

    def gradient(self, rank: TrainerRank, alone: bool) -> Tensor:
        """What run 0 accumulates, with B not zero; group by group when it is alone. Empties the trainer again."""
        live = self.runs[:1] if alone else self.runs
        for run, plan in enumerate(live):
            rank.load(LoadRequest(uid_of(run), "team", uid_of(run), run, plan.spec, 9, "digest", None))
            randomize(rank.adapter(uid_of(run)), run)
        waiting = {run: [make_group(plan, run, i) for i in range(3)] for run, plan in enumerate(live)}
        groups = shuffled(waiting, self.order)
        size = 1 if alone else -(-len(groups) // self.calls)
        for first in range(0, len(groups), size):
            assert not rank.accumulate(groups[first : first + size]).faults
        found = rank.adapter(uid_of(0)).grad.clone()
        for run in range(len(live)):
            rank.drop(uid_of(run))
        return found


def mixed_slices() -> st.SearchStrategy[MixedSlices]:
    """Run 0 and one to four others."""
    others = st.lists(st.integers(0, 9999).map(_neighbour), min_size=1, max_size=4)
    runs = st.tuples(_tracked(), others).map(lambda parts: (parts[0], *parts[1]))
    return st.builds(MixedSlices, runs, st.integers(0, 99), st.integers(1, 2))


def uid_of(run: int) -> str:
    """Run 0 is r0."""
    return f"r{run}"


def make_group(plan: RunPlan, run: int, index: int) -> PromptGroup:
    """The run's group at a position of its stream: short and empty responses, truncated ones, advantages of 0."""
    dice = random.Random(f"{plan.seed}/{run}/{index}")
    level = dice.choice((0.0, 1.0, 1.0))
    samples = []
    for _ in range(plan.samples):
        length = dice.randint(0 if dice.random() < 0.1 else 1, plan.response)
        ids = tuple(dice.randrange(MICRO_VOCAB) for _ in range(length))
        logprobs = tuple(-3.9 + dice.gauss(0.0, 1.0) for _ in range(length))
        samples.append(Sample(ids, logprobs, 0.0, level * dice.gauss(0.0, 1.0), length == plan.response))
    prompt = tuple(dice.randrange(MICRO_VOCAB) for _ in range(plan.prompt))
    uid = uid_of(run)
    return PromptGroup(uid, VersionId(uid, "1.1", 1), index, prompt, tuple(samples))


def spoiled(group: PromptGroup, kind: str) -> PromptGroup:
    """The group with one of DATA_FAULTS."""
    if kind == "prompt":
        return replace(group, prompt_ids=())
    nan = float("nan")
    change: dict[str, dict[str, Any]] = {
        "advantage": {"advantage": nan},
        "logprob": {"token_ids": (1, 2), "sampler_logprobs": (-1.0, nan)},
        "lengths": {"token_ids": (1, 2), "sampler_logprobs": (-1.0,)},
        "token": {"token_ids": (MICRO_VOCAB,), "sampler_logprobs": (-1.0,)},
    }
    first, *rest = group.samples
    return replace(group, samples=(replace(first, **change[kind]), *rest))


def shuffled(waiting: dict[int, list[PromptGroup]], order: int) -> list[PromptGroup]:
    """All groups in some order that keeps each run's own: 0 run by run, else at random."""
    owners = [run for run, groups in waiting.items() for _ in groups]
    if order:
        random.Random(order).shuffle(owners)
    rest = {run: iter(groups) for run, groups in waiting.items()}
    return [next(rest[run]) for run in owners]
