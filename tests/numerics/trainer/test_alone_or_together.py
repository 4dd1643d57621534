"""A run's update does not depend on who trains beside it, on packing, or on how its batch is split."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch import Tensor

from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, PromptGroup, RunFault
from support.executions import Execution, OneRank, next_folder
from support.schedules import MAX_RANK, SLOTS, MixedSlices, Program, examples, mixed_slices, programs
from support.trainer import (
    gradient,
    load,
    make_groups,
    make_micro_model,
    make_pool_rank,
    make_rank,
    relative,
    train_step,
)

NEIGHBOURS = {
    "b": {"rank": 8, "targetModules": ["q_proj", "v_proj", "down_proj"], "algorithm": {"lossReduction": "tokenMean"}},
    "c": {"rank": 1, "sampling": {"temperature": 0.6}, "algorithm": {"tisMode": "Off"}},
}


def interleave(*runs: list[PromptGroup]) -> list[PromptGroup]:
    return [group for groups in zip(*runs, strict=True) for group in groups]


def trained(model: Path, storage: Path, together: bool, dtype: torch.dtype | None, **trainer: object) -> list[Tensor]:
    """Masters and moments of run a after three steps, in slot 0 alone or in slot 2 behind two neighbours."""
    rank = make_rank(model, storage, dtype, **trainer)
    load(rank, "a", slot=2 if together else 0)
    if together:
        for slot, (uid, spec) in enumerate(NEIGHBOURS.items()):
            load(rank, uid, slot=slot, seed=5 + slot, **spec)
    for round in range(3):
        mine = make_groups("a", count=3, lengths=(5, 1, 8), seed=round)
        others = [make_groups(uid, count=3, lengths=(2, 11), seed=round) for uid in NEIGHBOURS] if together else []
        for batch in (interleave(*(r[:2] for r in (*others, mine))), interleave(*(r[2:] for r in (mine, *others)))):
            assert not rank.accumulate(batch).faults
        for uid in ("a", *(NEIGHBOURS if together and round != 1 else ())):
            assert not isinstance(rank.step(uid, Cursor()), RunFault)
    adapter = rank.adapter("a")
    return [adapter.master, *rank._slot("a").optimizer.moments]


@pytest.mark.parametrize("budget", [38, 4096])  # 38: packed freely, a's groups would share other passes when alone
def test_deterministic_update_is_bit_identical_alone_or_together(tiny: Path, tmp_path: Path, budget: int) -> None:
    settings = {"deterministic": True, "microBatchTokens": budget}
    alone = trained(tiny, tmp_path, False, None, **settings)
    together = trained(tiny, tmp_path, True, None, **settings)
    assert all(torch.equal(x, y) for x, y in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("budget", [64, 4096])
def test_fast_gradient_is_the_same_alone_or_together(
    tiny: Path, tmp_path: Path, dtype: torch.dtype, limit: float, budget: int
) -> None:
    def accumulated(together: bool) -> Tensor:
        rank = make_rank(tiny, tmp_path, dtype, microBatchTokens=budget)
        load(rank, "a", slot=2 if together else 0)
        groups = make_groups("a", count=3)
        if together:
            for slot, (uid, spec) in enumerate(NEIGHBOURS.items()):
                load(rank, uid, slot=slot, seed=5 + slot, **spec)
            groups = interleave(groups, *(make_groups(uid, count=3, lengths=(2, 11)) for uid in NEIGHBOURS))
        assert not rank.accumulate(groups).faults
        return gradient(rank, "a")

    assert relative(accumulated(True), accumulated(False)) < limit


def test_fast_update_in_float64_is_the_same_alone_or_together(tiny: Path, tmp_path: Path) -> None:
    alone, together = (trained(tiny, tmp_path, mixed, torch.float64) for mixed in (False, True))
    assert all(relative(x, y) < 1e-10 for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_shared_prompts_equal_plain_packing(tiny: Path, tmp_path: Path, dtype: torch.dtype, limit: float) -> None:
    groups = make_groups("a", count=3)
    plain = [
        PromptGroup(g.uid, g.version, 10 * g.index + i, g.prompt_ids, (sample,))
        for g in groups
        for i, sample in enumerate(g.samples)
    ]
    grads, rows = [], []
    for batch in (groups, plain):
        rank = make_rank(tiny, tmp_path, dtype)
        load(rank, "a")
        rows.append(rank.accumulate(batch).rows)
        grads.append(gradient(rank, "a"))
    assert rows[0] < rows[1]
    assert relative(grads[0], grads[1]) < limit


def test_response_by_response_attention_equals_the_tree_mask(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = []
    for small in (512, 0):
        monkeypatch.setattr("lorafleet_runtime.trainer.attention._SMALL_GROUP_ROWS", small)
        monkeypatch.setattr("lorafleet_runtime.trainer.attention._TREE_WASTE", 4 if small else 0)
        rank = make_rank(tiny, tmp_path, torch.float64)
        load(rank, "a")
        rank.accumulate(make_groups("a"))
        grads.append(gradient(rank, "a"))
    assert relative(grads[0], grads[1]) < 1e-12


def test_update_depends_neither_on_packing_nor_on_neighbours(llama: Path, tmp_path: Path) -> None:
    """Eight rollouts of 3 to 89 tokens: micro-batch 8, 2, 1, then beside a second run."""
    lengths = (3, 5, 8, 13, 21, 34, 55, 89)
    (group,) = make_groups("a", count=1, samples=8, lengths=lengths)
    results = []
    for budget, split, neighbour in ((4096, 8, False), (4096, 2, False), (16, 1, False), (4096, 8, True)):
        rank = make_rank(llama, tmp_path, microBatchTokens=budget)
        load(rank, "a", optimizer={"lr": 1e-3})
        parts = [
            PromptGroup(group.uid, group.version, i, group.prompt_ids, group.samples[i : i + split])
            for i in range(0, 8, split)
        ]
        if neighbour:
            load(rank, "b", slot=1, seed=9)
            parts = [*make_groups("b", count=2), *parts, *make_groups("b", count=1, seed=3)]
        for part in parts if split < 8 else [parts]:
            assert not rank.accumulate(part if isinstance(part, list) else [part]).faults
        result = rank.step("a", Cursor())
        assert not isinstance(result, RunFault)
        results.append((result.grad_norm, rank.adapter("a").master.clone()))
    for norm, master in results[1:]:
        assert norm == pytest.approx(results[0][0], rel=1e-5)
        assert (master - results[0][1]).abs().max() < 1e-5


def test_group_over_the_token_budget_is_split_without_a_trace(qwen3: Path, tmp_path: Path) -> None:
    grads = []
    for budget in (4096, 16):
        rank = make_rank(qwen3, tmp_path, torch.float64, microBatchTokens=budget, deterministic=True)
        load(rank, "a")
        rank.accumulate(make_groups("a"))
        grads.append(gradient(rank, "a"))
    assert relative(grads[1], grads[0]) < 1e-12


def test_partial_gradients_survive_a_neighbours_step(qwen3: Path, tmp_path: Path) -> None:
    groups = make_groups("a", count=2)
    masters = []
    for interrupted in (False, True):
        rank = make_rank(qwen3, tmp_path, deterministic=True)
        load(rank, "a")
        load(rank, "b", slot=1)
        rank.accumulate(groups[:1])
        if interrupted:
            train_step(rank, "b", make_groups("b"))
        train_step(rank, "a", groups[1:])
        masters.append(rank.adapter("a").master.clone())
    assert torch.equal(*masters)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro_model(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module")
def pair(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[OneRank, OneRank, Path]:
    """A trainer for everybody and one for the tracked run alone, which no neighbour has ever touched."""
    storage = tmp_path_factory.mktemp("storage")
    together, alone = (
        OneRank(make_pool_rank(micro, storage, None, SLOTS, MAX_RANK, deterministic=True, microBatchTokens=24))
        for _ in range(2)
    )
    return together, alone, storage


@examples(200)
@given(program=programs())
def test_run_in_any_schedule_ends_bit_identical_to_itself_alone(
    pair: tuple[OneRank, OneRank, Path], program: Program
) -> None:
    together, alone, storage = pair
    shared, single = Execution(together, program, next_folder(storage)), Execution(alone, program, "alone")
    mixed, own = shared.together(), single.alone()
    assert shared.steps[0] == single.steps[0]
    assert mixed.keys() == own.keys()
    assert [name for name, tensor in mixed.items() if not torch.equal(tensor, own[name])] == []


BUDGETS = (16, 40, 4096)
"""Rows of a pass: a group or less, some groups, everything."""


@pytest.fixture(scope="module")
def packers(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, list[TrainerRank]]:
    """Trainers that pack freely, by type and BUDGETS."""
    storage = tmp_path_factory.mktemp("packers")
    return {
        dtype: [make_pool_rank(micro, storage, dtype, SLOTS, MAX_RANK, microBatchTokens=n) for n in BUDGETS]
        for dtype in (torch.float64, torch.float32)
    }


@examples(30)
@given(slices=mixed_slices())
def test_fast_gradient_depends_neither_on_neighbours_nor_on_the_size_of_a_pass(
    packers: dict[torch.dtype, list[TrainerRank]], slices: MixedSlices
) -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        alone = slices.gradient(packers[dtype][0], alone=True)
        for rank in packers[dtype]:
            together = slices.gradient(rank, alone=False)
            assert (together - alone).norm() <= limit * alone.norm()


@examples(20)
@given(program=programs())
def test_fast_trajectory_in_float64_is_the_same_in_any_schedule(
    packers: dict[torch.dtype, list[TrainerRank]], program: Program
) -> None:
    trainer, folder = OneRank(packers[torch.float64][2]), next_folder(packers[torch.float64][2]._storage)
    mixed, own = Execution(trainer, program, folder).together(), Execution(trainer, program, "alone").alone()
    for name, tensor in mixed.items():
        assert (tensor - own[name]).double().norm() <= 1e-12 * own[name].double().norm(), name
