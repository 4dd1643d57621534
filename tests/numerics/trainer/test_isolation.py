"""Nothing that happens to one run reaches another: bit for bit."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError, RuntimeFault
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, RunFault
from support.trainer import load, make_groups, make_rank, make_request, train_step


def everything(rank: TrainerRank, uid: str) -> list[Tensor]:
    """Whatever a run has in the trainer: weights, gradient sums, moments, clock, schedule and counts."""
    slot = rank._slot(uid)
    adapter, optimizer = slot.adapter, slot.optimizer
    numbers = (optimizer.step_count, optimizer.target_step, slot.denominator, slot.groups, slot.samples)
    tensors = (adapter.weights, adapter.master, adapter.grad, *optimizer.moments, torch.tensor(numbers))
    return [t.clone() for t in tensors]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def two_runs(model: Path, storage: Path) -> TrainerRank:
    """Both have made a step; a has accumulated groups since."""
    rank = make_rank(model, storage)
    load(rank, "a")
    load(rank, "b", slot=1, seed=2)
    train_step(rank, "a", make_groups("a"))
    train_step(rank, "b", make_groups("b"))
    rank.accumulate(make_groups("a", seed=1))
    return rank


def suspend(rank: TrainerRank) -> str:
    artifact = rank.checkpoint("b", "runs/b", Cursor(), partial=True)
    rank.drop("b")
    assert artifact is not None
    return artifact.path


def retire(rank: TrainerRank) -> None:
    rank.checkpoint("b", "runs/b", Cursor())
    rank.drop("b")


def replace_run(rank: TrainerRank) -> None:
    rank.drop("b")
    rank.load(make_request("c", 1))


def diverge(rank: TrainerRank) -> None:
    rank.adapter("b").grad[5] = math.inf
    assert isinstance(rank.step("b", Cursor()), RunFault)


def refuse(rank: TrainerRank) -> None:
    with pytest.raises(RunError):
        rank.load(make_request("c", 2, initFrom="nowhere"))


ACTIONS: dict[str, Callable[[TrainerRank], object]] = {
    "register": lambda rank: rank.load(make_request("c", 2, rank=16)),
    "reload": lambda rank: rank.load(make_request("b", 1)),
    "refused load": refuse,
    "accumulate": lambda rank: rank.accumulate(make_groups("b", seed=1)),
    "step": lambda rank: train_step(rank, "b", make_groups("b", seed=1)),
    "fail in a step": diverge,
    "fail in a batch": lambda rank: rank.accumulate([replace(g, prompt_ids=()) for g in make_groups("b")]),
    "suspend": suspend,
    "resume": lambda rank: rank.load(make_request("b", 3, suspend(rank))),
    "retire": retire,
    "drop": lambda rank: rank.drop("b"),
    "reuse of the slot": replace_run,
    "retain": lambda rank: rank.retain(["a"]),
    "export": lambda rank: rank.export("b"),
    "checkpoint": lambda rank: rank.checkpoint("b", "runs/b", Cursor()),
}


@pytest.fixture(scope="module")
def ranks(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainerRank, TrainerRank]:
    """Trainers that the tests empty and use again."""
    storage = tmp_path_factory.mktemp("storage")
    return make_rank(qwen3, storage), make_rank(qwen3, storage)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_neighbours_life_changes_nothing_at_any_point_of_the_loop(
    ranks: tuple[TrainerRank, TrainerRank], action: str
) -> None:
    """The action comes before a's first batch, between the parts of it, before its step, and after it."""
    groups = make_groups("a", count=2)

    def lifetime(rank: TrainerRank, moment: int) -> list[Tensor]:
        for uid in rank.slots().values():
            rank.drop(uid)
        load(rank, "b", slot=1, seed=2)
        rank.accumulate(make_groups("b", seed=7))
        load(rank, "a")
        steps: list[Callable[[], object]] = [
            lambda: rank.accumulate(groups[:1]),
            lambda: rank.accumulate(groups[1:]),
            lambda: rank.step("a", Cursor()),
            lambda: train_step(rank, "a", make_groups("a", seed=3)),
        ]
        for i, step in enumerate(steps):
            if i == moment:
                before = everything(rank, "a")
                ACTIONS[action](rank)
                assert same(before, everything(rank, "a"))
            step()
        return everything(rank, "a")

    undisturbed = lifetime(ranks[0], -1)
    for moment in range(4):
        assert same(undisturbed, lifetime(ranks[1], moment))


def test_non_finite_gradient_is_a_fault_of_its_run_and_is_zeroed(qwen3: Path, tmp_path: Path) -> None:
    rank = two_runs(qwen3, tmp_path)
    rank.accumulate(make_groups("b", seed=1))
    before = everything(rank, "a")
    weights = rank.adapter("b").master.clone()
    rank.adapter("b").grad[3] = math.inf
    fault = rank.step("b", Cursor())
    assert isinstance(fault, RunFault) and fault.reason == reasons.NON_FINITE and fault.uid == "b"
    assert float(rank.adapter("b").grad.abs().sum()) == 0
    assert torch.equal(rank.adapter("b").master, weights)
    assert same(before, everything(rank, "a"))


def spoil(field: str, value: object) -> Callable[..., object]:
    def change(group: object) -> object:
        assert hasattr(group, "samples")
        first, *rest = group.samples
        return replace(group, samples=(replace(first, **{field: value}), *rest))  # type: ignore[type-var]

    return change


@pytest.mark.parametrize(
    "field, value, reason",
    [
        ("sampler_logprobs", (-1.0,), reasons.INTERNAL_ERROR),
        ("token_ids", (1, 2, 3, 4, 512), reasons.INTERNAL_ERROR),
        ("advantage", math.nan, reasons.NON_FINITE),
        ("sampler_logprobs", (-1.0, -math.inf, -1.0, -1.0, -1.0), reasons.NON_FINITE),
    ],
)
def test_malformed_group_fails_its_run_only(
    qwen3: Path, tmp_path: Path, field: str, value: object, reason: str
) -> None:
    rank = two_runs(qwen3, tmp_path)
    good, bad = make_groups("a", seed=4), make_groups("b", seed=4)
    before = everything(rank, "b")
    result = rank.accumulate([bad[0], good[0], spoil(field, value)(bad[1]), good[1]])  # type: ignore[list-item]
    assert [(f.uid, f.reason) for f in result.faults] == [("b", reason)]
    assert [s.uid for s in result.stats] == ["a"] and result.stats[0].groups == 2
    assert same(before, everything(rank, "b"))


def test_group_of_a_run_that_is_not_loaded_fails_that_run_only(qwen3: Path, tmp_path: Path) -> None:
    rank = two_runs(qwen3, tmp_path)
    result = rank.accumulate([*make_groups("gone"), *make_groups("a")])
    assert [f.uid for f in result.faults] == ["gone"]
    assert [s.uid for s in result.stats] == ["a"]


@pytest.mark.parametrize(
    "spec, reason, named_field",
    [
        ({"rank": 17}, reasons.RANK_TOO_LARGE, "maxRank"),
        ({"sampling": {"temperature": 0}}, reasons.INVALID_SPEC, "temperature"),
        ({"sampling": {"temperature": 0.009}}, reasons.INVALID_SPEC, "temperature"),
        ({"sampling": {"topP": 0.9}}, reasons.INVALID_SPEC, "topP"),
        ({"rank": "four"}, reasons.INVALID_SPEC, "rank"),
        ({"initFrom": "nowhere"}, reasons.INIT_ERROR, "initFrom"),
    ],
)
def test_failed_load_leaves_nothing_behind(
    qwen3: Path, tmp_path: Path, spec: dict[str, Any], reason: str, named_field: str
) -> None:
    rank = two_runs(qwen3, tmp_path)
    before = everything(rank, "a")
    with pytest.raises(RunError, match=named_field) as raised:
        rank.load(make_request("c", 2, **spec))
    assert raised.value.reason == reason
    assert rank.slots() == {0: "a", 1: "b"}
    assert same(before, everything(rank, "a"))


def test_slot_of_another_run_is_not_taken(qwen3: Path, tmp_path: Path) -> None:
    rank = two_runs(qwen3, tmp_path)
    with pytest.raises(RunError, match="held by a"):
        rank.load(make_request("c", 0))
    assert rank.slots() == {0: "a", 1: "b"}


def test_loading_a_run_again_starts_it_anew(qwen3: Path, tmp_path: Path) -> None:
    rank = two_runs(qwen3, tmp_path)
    assert rank.load(make_request("a", 3)).step == 0
    assert rank.slots() == {1: "b", 3: "a"}


def fail_in_a_batch(rank: TrainerRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a's pass ends in the middle with an error that is no run's."""

    def out_of_memory(*_: object) -> Tensor:
        raise MemoryError("no memory")

    monkeypatch.setattr(rank._model, "hidden", out_of_memory)
    with pytest.raises(MemoryError):
        rank.accumulate(make_groups("a"))


def test_trainer_that_failed_in_a_batch_refuses_to_go_on(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = two_runs(qwen3, tmp_path)
    fail_in_a_batch(rank, monkeypatch)
    with pytest.raises(RuntimeFault, match="middle of a batch"):
        rank.step("a", Cursor())


def test_what_a_step_left_is_saved_although_a_batch_failed_in_the_middle(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture may lie in the queue behind that batch; weights and moments move in steps only."""
    rank = two_runs(qwen3, tmp_path)
    fail_in_a_batch(rank, monkeypatch)
    assert rank.capture("a", "team/a/a", Cursor()) is not None
    with pytest.raises(RuntimeFault, match="middle of a batch"):
        rank.capture("a", "team/a/a", Cursor(), True)
