"""A run with NaN or Inf anywhere fails by itself; those that share its very passes do not notice, bit for bit."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import ALL_LINEAR
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, PromptGroup, RunFault, StepResult
from support.trainer import MICRO_VOCAB, load, make_groups, make_micro_model, make_rank, named

Change = Callable[[TrainerRank, list[PromptGroup]], list[PromptGroup]]
"""Makes run b sick: in its memory, or in its groups."""


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> TrainerRank:
    """Packs freely, so the three runs of a batch share one pass."""
    model = make_micro_model(tmp_path_factory.mktemp("micro"))
    return make_rank(model, tmp_path_factory.mktemp("storage"))


def groups_of(uid: str, seed: int = 0) -> list[PromptGroup]:
    return make_groups(uid, seed=seed, vocab=MICRO_VOCAB)


def beside(rank: TrainerRank, sick: Change, specs: Sequence[dict[str, Any]] = ({}, {}, {})) -> list[list[Tensor]]:
    """Runs c, b, a in one batch, a step of each, and all again; states of a and c. Checks who fails."""
    for uid in rank.slots().values():
        rank.drop(uid)
    for slot, (uid, spec) in enumerate(zip("cba", specs, strict=True)):
        load(rank, uid, slot=slot, seed=slot, **spec)
    failed: list[RunFault] = []
    for round in range(2):
        batches = {uid: groups_of(uid, round) for uid in "cba"}
        if round == 0:
            batches["b"] = sick(rank, batches["b"])
        live = [uid for uid in "cba" if uid in rank.slots().values()]
        faults = list(rank.accumulate([group for uid in live for group in batches[uid]]).faults)
        for uid in live:
            if uid in [fault.uid for fault in faults]:
                continue
            result = rank.step(uid, Cursor())
            if isinstance(result, RunFault):
                faults.append(result)
        for fault in faults:
            rank.drop(fault.uid)
        failed += faults
    expected = [] if sick is healthy else [("b", reasons.NON_FINITE)]
    assert [(fault.uid, fault.reason) for fault in failed] == expected
    return [state(rank, uid) for uid in "ac"]


def state(rank: TrainerRank, uid: str) -> list[Tensor]:
    slot = rank._slot(uid)
    return [t.clone() for t in (slot.adapter.master, slot.adapter.grad, *slot.optimizer.moments)]


def healthy(rank: TrainerRank, groups: list[PromptGroup]) -> list[PromptGroup]:
    return groups


def weights(where: str, value: float) -> Change:
    """One element of every matrix with this in its key."""

    def change(rank: TrainerRank, groups: list[PromptGroup]) -> list[PromptGroup]:
        adapter = rank.adapter("b")
        for key, matrix in named(adapter, adapter.master).items():
            if where in key:
                matrix[-1, 0] = value
        adapter.refresh()
        return groups

    return change


def gradients(value: float) -> Change:
    def change(rank: TrainerRank, groups: list[PromptGroup]) -> list[PromptGroup]:
        rank.adapter("b").grad[7] = value
        return groups

    return change


def samples(**fields: Any) -> Change:
    """The last sample of the last group."""

    def change(rank: TrainerRank, groups: list[PromptGroup]) -> list[PromptGroup]:
        *first, group = groups
        *others, sample = group.samples
        return [*first, replace(group, samples=(*others, replace(sample, **fields)))]

    return change


def assert_unharmed(rank: TrainerRank, sick: Change, specs: Sequence[dict[str, Any]] = ({}, {}, {})) -> None:
    well, beside_sick = beside(rank, healthy, specs), beside(rank, sick, specs)
    for one, other in zip(well, beside_sick, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
        assert all(bool(torch.isfinite(x).all()) for x in one)


def test_the_three_runs_share_one_pass(rank: TrainerRank, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    hidden = rank._model.hidden

    def counted(ids: Tensor, groups: Any, segments: Sequence[Any]) -> Tensor:
        runs.append(len(segments))
        return hidden(ids, groups, segments)

    monkeypatch.setattr(rank._model, "hidden", counted)
    beside(rank, healthy)
    assert runs == [3, 3]


# The whole [rows, rank] product of a poisoned A, B is what 0 x NaN would spread, so each matrix has its turn.
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("kind", ["lora_A", "lora_B"])
@pytest.mark.parametrize("projection", ALL_LINEAR)
@pytest.mark.parametrize("layer", [0, 1])
def test_weights(rank: TrainerRank, layer: int, projection: str, kind: str, value: float) -> None:
    parent = "mlp" if projection in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    assert_unharmed(rank, weights(f"layers.{layer}.{parent}.{projection}.{kind}", value))


@pytest.mark.parametrize(
    "sick",
    [
        gradients(math.nan), gradients(math.inf), gradients(-math.inf),
        samples(advantage=math.nan), samples(advantage=math.inf), samples(advantage=-math.inf),
        samples(advantage=1e300), samples(advantage=3e38),
        samples(token_ids=(1, 2), sampler_logprobs=(-1.0, math.nan)),
        samples(token_ids=(1, 2), sampler_logprobs=(-math.inf, -1.0)),
    ],
    ids=[
        "gradient NaN", "gradient Inf", "gradient -Inf", "advantage NaN", "advantage Inf", "advantage -Inf",
        "advantage above float32", "advantage at the end of float32", "logprob NaN", "logprob -Inf",
    ],
)  # fmt: skip
def test_gradients_and_samples(rank: TrainerRank, sick: Change) -> None:
    assert_unharmed(rank, sick)


OPTIONS = [
    {"lossReduction": reduction, "tisMode": mode, "klCoef": coefficient, "klType": kind, "dualClip": dual}
    for (reduction, dual), mode, (coefficient, kind) in itertools.product(
        (("sampleMean", None), ("tokenMean", 3.0), ("constant", 1.5)),
        ("Clip", "Mask", "Off"),
        ((0.0, "k3"), (0.1, "k1"), (0.1, "k2"), (0.1, "k3")),
    )
]


@pytest.mark.parametrize("own", [True, False], ids=["sick", "healthy"])
def test_every_loss_option(rank: TrainerRank, own: bool) -> None:
    """Of the sick run, and of those beside it: in each the other side has the defaults."""
    for options in OPTIONS:
        spec: dict[str, Any] = {"algorithm": options}
        specs = ({}, spec, {}) if own else (spec, {}, spec)
        assert_unharmed(rank, weights("layers.0.self_attn.v_proj.lora_B", math.nan), specs)


def test_weights_of_a_run_that_needs_no_pass(rank: TrainerRank) -> None:
    """Its advantages are all 0, so the step is the first to look at its weights."""

    def sick(rank: TrainerRank, groups: list[PromptGroup]) -> list[PromptGroup]:
        weights("q_proj.lora_A", math.nan)(rank, groups)
        return [replace(g, samples=tuple(replace(s, advantage=0.0) for s in g.samples)) for g in groups]

    assert_unharmed(rank, sick)


def test_a_slot_is_clean_after_a_run_that_was_not_finite(rank: TrainerRank) -> None:
    """The next run in the slot ends as in a slot that nobody had: weights, moments, clock and schedule."""
    settings: dict[str, Any] = {"optimizer": {"lr": 0.02, "schedule": "linear", "warmupSteps": 3}}

    def lifetime(slot: int) -> tuple[list[StepResult], list[Tensor]]:
        load(rank, "d", slot=slot, **settings)
        steps = []
        for round in range(3):
            rank.accumulate(groups_of("d", round))
            result = rank.step("d", Cursor())
            assert isinstance(result, StepResult)
            steps.append(result)
        found = state(rank, "d")
        rank.drop("d")
        return steps, found

    for sick in (weights("lora_A", math.nan), gradients(math.nan), samples(advantage=math.nan)):
        beside(rank, sick)  # b was in slot 1
        used, fresh = lifetime(1), lifetime(3)
        assert used[0] == fresh[0] and [s.step for s in used[0]] == [1, 2, 3]
        assert [s.lr for s in used[0]] == pytest.approx([0.02 / 3, 0.04 / 3, 0.02])
        assert all(torch.equal(x, y) for x, y in zip(used[1], fresh[1], strict=True))


def test_a_run_that_broke_in_its_step_cannot_replace_its_good_checkpoint(rank: TrainerRank, tmp_path: Path) -> None:
    for uid in rank.slots().values():
        rank.drop(uid)
    load(rank, "a", checkpoint={"keep": 1})
    folder = Path(rank._storage) / "broken"
    assert not rank.accumulate(groups_of("a")).faults
    assert isinstance(rank.step("a", Cursor()), StepResult)
    rank.checkpoint("a", str(folder), Cursor())
    rank._slot("a").optimizer.moments[0][0] = math.inf
    assert not rank.accumulate(groups_of("a", 1)).faults
    assert isinstance(rank.step("a", Cursor()), RunFault)
    for keep in (lambda: rank.checkpoint("a", str(folder), Cursor()), lambda: rank.export("a")):
        with pytest.raises(RunError, match="not finite"):
            keep()
    assert [path.name for path in folder.iterdir()] == ["step_1"]
