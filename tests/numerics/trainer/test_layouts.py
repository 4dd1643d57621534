"""A trainer of several ranks computes what one rank computes, and alone-or-together holds in every layout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import ConfigError, RunError
from lorafleet_runtime.storage import OPTIMIZER_FILE, WEIGHTS_FILE
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
from support.executions import Execution, OneRank, next_folder
from support.schedules import MAX_RANK, SLOTS, Program, examples, programs
from support.trainer import MICRO_VOCAB, make_groups, make_micro_model, make_pool_rank, make_request
from support.trainer_group import GroupUnderTest, running_group

SETTINGS: dict[str, Any] = {"deterministic": True, "microBatchTokens": 24}
LIMIT = 1e-5
"""Relative difference from one rank, in float32."""
VECTORS = ("master", "exp_avg", "exp_avg_sq")

SPECS: dict[str, dict[str, Any]] = {
    "a": {"rank": 4, "optimizer": {"lr": 1e-2, "schedule": "cosine", "clipGrad": 0.1}},
    "b": {
        "rank": 8,
        "targetModules": ["q_proj", "o_proj", "up_proj", "down_proj"],
        "algorithm": {"lossReduction": "tokenMean", "tisMode": "Off", "klCoef": 0.1},
        "sampling": {"temperature": 0.7},
    },
}


@dataclass
class Layout:
    """A trainer of dp x tp ranks; a support.schedules.Trainer."""

    group: GroupUnderTest
    storage: Path
    dp: int
    tp: int

    def load(self, request: LoadRequest) -> Loaded:
        loaded: Loaded = self.group.call("load", request)
        return loaded

    def drop(self, uid: str) -> None:
        self.group.call("drop", uid)

    def accumulate(self, groups: Sequence[PromptGroup]) -> BatchResult:
        result: BatchResult = self.group.call("accumulate", list(groups))
        return result

    def step(self, uid: str, cursor: Cursor) -> StepResult | RunFault:
        result: StepResult | RunFault = self.group.call("step", uid, cursor, "1.1")
        return replace(result, snapshot="") if isinstance(result, StepResult) else result  # a ticket of its own each

    def save(self, uid: str, directory: str, partial: bool) -> Artifact:
        return self.group.checkpoint(uid, self.storage / directory, partial=partial)

    def state(self, uid: str) -> dict[str, Tensor]:
        return stored(self.save(uid, next_folder(self.storage), False))

    def poison(self, uid: str, kind: str) -> None:
        """NaN in every rank's masters, or in the last rank's gradient sums."""

        def change(rank: TrainerRank) -> None:
            adapter = rank.adapter(uid)
            if kind == "weight":
                adapter.master[len(adapter.master) // 2] = float("nan")
                adapter.refresh()
            elif rank._ranks.rank == rank._ranks.world - 1:
                adapter.grad[len(adapter.grad) // 2] = float("nan")

        self.group.each(change)


def stored(artifact: Artifact) -> dict[str, Tensor]:
    """A checkpoint's tensors, in the canonical layout."""
    path = Path(artifact.path)
    files: dict[str, Tensor] = load_file(path / OPTIMIZER_FILE) | load_file(path / WEIGHTS_FILE)
    return files | {"step": torch.tensor(float(artifact.step))}


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro_model(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module", params=[(2, 1), (1, 2), (2, 2)], ids=["DP2", "TP2", "DP2xTP2"])
def running(
    request: pytest.FixtureRequest, micro: Path, ray_here: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Layout]:
    """One layout after the other: each rank is a process."""
    storage = tmp_path_factory.mktemp("storage")
    with running_group(micro, storage, *request.param, **SETTINGS) as group:
        yield Layout(group, storage, *request.param)


@pytest.fixture
def layout(running: Layout) -> Layout:
    """Without runs."""
    return emptied(running)


def emptied(running: Layout) -> Layout:
    for uid in running.group.call("slots").values():
        running.drop(uid)
    return running


@pytest.fixture
def one(micro: Path, running: Layout) -> OneRank:
    """A trainer of one rank, on the same storage."""
    return OneRank(make_pool_rank(micro, running.storage, None, SLOTS, MAX_RANK, **SETTINGS))


def groups_of(uid: str, count: int, seed: int = 0) -> list[PromptGroup]:
    return make_groups(uid, count=count, seed=seed, vocab=MICRO_VOCAB)


def assert_near(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Masters and moments, each as one vector."""
    for name in VECTORS:
        assert (ours[name] - reference[name]).norm() <= LIMIT * reference[name].norm(), name


def assert_same(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    assert ours.keys() == reference.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, reference[name])] == []


def test_every_step_is_that_of_one_rank(layout: Layout, one: OneRank) -> None:
    """Run a has 3 groups a step, in two slices with b's between; b has 1, so at DP2 a rank has none of it."""
    trainers = (layout, one)
    for trainer in trainers:
        for slot, (uid, spec) in enumerate(SPECS.items()):
            trainer.load(make_request(uid, slot, **spec))
    for round in range(4):
        mine, others = groups_of("a", 3, round), groups_of("b", 1, round)
        for batch in ([mine[0], others[0], mine[1]], mine[2:]):
            ours, reference = (trainer.accumulate(batch) for trainer in trainers)
            assert not ours.faults and ours.rows == reference.rows
            for got, wanted in zip(ours.stats, reference.stats, strict=True):
                assert (got.uid, got.groups, got.tokens) == (wanted.uid, wanted.groups, wanted.tokens)
                assert got.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-4, abs=1e-5)
                assert asdict(got.policy) == pytest.approx(asdict(wanted.policy), rel=1e-4, abs=1e-5)
        for uid in SPECS:
            ours_step, one_step = (trainer.step(uid, Cursor(round)) for trainer in trainers)
            assert isinstance(ours_step, StepResult) and isinstance(one_step, StepResult)
            assert (ours_step.step, ours_step.lr) == (one_step.step, one_step.lr)
            assert ours_step.grad_norm == pytest.approx(one_step.grad_norm, rel=1e-5)
            assert_near(layout.state(uid), stored(one.save(uid, next_folder(layout.storage), False)))


COLLECTIVES = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "gather", "all_gather_object")


def communicated(layout: Layout, seed: int) -> list[list[tuple[str, int]]]:
    """Each rank's collectives, as (name, elements), in one batch and step of run a."""

    def count(rank: TrainerRank) -> None:
        record: list[tuple[str, int]] = []

        def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                record.append((name, sum(x.numel() for x in arguments if isinstance(x, Tensor))))
                return original(*arguments, **options)

            return call

        originals = {name: getattr(torch.distributed, name) for name in COLLECTIVES}
        for name, original in originals.items():
            setattr(torch.distributed, name, counted(name, original))
        rank.__dict__["counted"] = record, originals

    def read(rank: TrainerRank) -> list[tuple[str, int]]:
        record, originals = rank.__dict__.pop("counted")
        for name, original in originals.items():
            setattr(torch.distributed, name, original)
        return list(record)

    layout.group.each(count)
    layout.accumulate(groups_of("a", 2, seed))
    layout.step("a", Cursor())
    return layout.group.each(read)


def test_idle_slots_add_no_communication(layout: Layout) -> None:
    layout.load(make_request("a", 0, **SPECS["a"]))
    alone = communicated(layout, 1)
    for slot in range(1, SLOTS):
        layout.load(make_request(f"idle{slot}", slot, rank=8))
    assert communicated(layout, 1) == alone
    assert all(alone)


def test_replicated_gradients_are_bit_equal(layout: Layout) -> None:
    layout.load(make_request("a", 0, **SPECS["a"]))
    layout.accumulate(groups_of("a", 3))
    layout.step("a", Cursor())
    layout.accumulate(groups_of("a", 3, 1))

    def shared(rank: TrainerRank) -> tuple[int, Tensor]:
        """What all tensor-parallel ranks have of their own gradient, masters and moments."""
        slot = rank._slot("a")
        adapter, shares = slot.adapter, slot.adapter.shares
        vectors = (shares.reduce(adapter.grad.clone()), adapter.master, *slot.optimizer.moments)
        return rank._ranks.dp_rank, torch.stack([shares._pick_own(v, shared=True) for v in vectors])

    found = layout.group.each(shared)
    for dp_rank, tensors in found:
        first = next(other for rank, other in found if rank == dp_rank)
        assert torch.equal(tensors, first)
    # by hand: A of q, k, v, gate, up and B of o, down, each 16 x 4, in 2 layers
    assert sum(tensors.shape[1] for _, tensors in found) == 2 * 7 * 16 * 4 * layout.tp
    assert all(bool(sum(tensors[i].abs().sum() for _, tensors in found)) for i in range(4))


@examples(20)
@given(program=programs())
def test_run_in_any_schedule_ends_bit_identical_to_itself_alone(running: Layout, program: Program) -> None:
    folder = next_folder(emptied(running).storage)
    shared, single = Execution(running, program, folder), Execution(running, program, f"{folder}-alone")
    mixed, own = shared.together(), single.alone()
    assert shared.steps[0] == single.steps[0]
    assert_same(mixed, own)


def test_partial_gradients_survive_a_neighbours_step(layout: Layout) -> None:
    mine, states = groups_of("a", 3), []
    for interrupted in (False, True):
        for slot, (uid, spec) in enumerate(SPECS.items()):
            layout.load(make_request(uid, slot, **spec))
        layout.accumulate(mine[:1])
        if interrupted:
            layout.accumulate([*groups_of("b", 2), mine[1]])
            layout.step("b", Cursor())
            layout.accumulate(mine[2:])
        else:
            layout.accumulate(mine[1:])
        layout.step("a", Cursor())
        states.append(layout.state("a"))
        for uid in SPECS:
            layout.drop(uid)
    assert_same(*states)


def test_optimizer_state_is_split_over_data_parallel_ranks(layout: Layout, one: OneRank) -> None:
    for trainer in (layout, one):
        trainer.load(make_request("a", 0, rank=16))

    def held(rank: TrainerRank) -> tuple[int, int, int]:
        slot = rank._slot("a")
        tensors = (slot.adapter.master, *slot.optimizer.moments)
        largest = max(entry.end - entry.offset for entry in slot.adapter.layout)
        return rank._ranks.tp_rank, sum(t.untyped_storage().nbytes() for t in tensors), 12 * largest

    # by hand: 2 layers of q 16+32, k 16+16, v 16+16, o 32+16, gate and up 16+24, down 24+16, at rank 16
    elements = 16 * 2 * (48 + 32 + 32 + 48 + 40 + 40 + 40)
    assert held(one._rank)[1] == 12 * elements
    found = layout.group.each(held)
    for tp_rank in range(layout.tp):
        sizes = [size for rank, size, _ in found if rank == tp_rank]
        total, largest = sum(sizes), max(matrix for _, _, matrix in found)
        assert len(sizes) == layout.dp
        assert all(abs(size - total / layout.dp) <= largest / 2 for size in sizes)
        assert layout.tp > 1 or total == 12 * elements


def test_checkpoints_go_from_this_layout_to_one_rank_and_back(layout: Layout, one: OneRank) -> None:
    """With and without gradients accumulated since the step; saved again, they are the same files."""
    pairs: list[tuple[Any, Any]] = [(layout, one), (one, layout)]
    for source, target in pairs:
        for partial in (False, True):
            uid = f"a{int(partial)}"
            groups = groups_of(uid, 3)
            source.load(make_request(uid, 0, **SPECS["a"]))
            source.accumulate(groups)
            source.step(uid, Cursor())
            source.accumulate(groups[:2])
            first = source.save(uid, next_folder(layout.storage), partial)
            loaded = target.load(make_request(uid, 0, first.path, **SPECS["a"]))
            assert (loaded.step, loaded.groups) == (1, 2 if partial else 0)
            second = target.save(uid, next_folder(layout.storage), partial)
            assert_same(master_and_moments(second), master_and_moments(first))
            source.accumulate(groups[2:])
            target.accumulate(groups[2:] if partial else groups)
            for trainer in (source, target):
                assert isinstance(trainer.step(uid, Cursor()), StepResult)
            assert_near(*(stored(t.save(uid, next_folder(layout.storage), False)) for t in (target, source)))
            for trainer in (source, target):
                trainer.drop(uid)


def master_and_moments(artifact: Artifact) -> dict[str, Tensor]:
    return {name: t for name, t in stored(artifact).items() if name in VECTORS}


@pytest.mark.parametrize(
    "spec, reason",
    [
        ({"initFrom": "nowhere"}, reasons.INIT_ERROR),
        ({"rank": MAX_RANK + 1}, reasons.RANK_TOO_LARGE),
        ({"rank": "four"}, reasons.INVALID_SPEC),
    ],
    ids=["initFrom", "rank", "spec"],
)
def test_a_refused_load_leaves_every_rank_as_it_was(layout: Layout, spec: dict[str, Any], reason: str) -> None:
    groups = groups_of("a", 2)
    layout.load(make_request("a", 0))
    layout.accumulate(groups)
    with pytest.raises(RunError) as raised:
        layout.load(make_request("c", 2, **spec))
    assert raised.value.reason == reason
    assert layout.group.each(lambda rank: rank.slots()) == [{0: "a"}] * (layout.dp * layout.tp)
    assert isinstance(layout.step("a", Cursor()), StepResult)
    disturbed = layout.state("a")
    layout.drop("a")
    layout.load(make_request("a", 0))
    layout.accumulate(groups)
    layout.step("a", Cursor())
    assert_same(disturbed, layout.state("a"))


def test_a_checkpoint_of_another_run_is_refused_on_every_rank(layout: Layout) -> None:
    layout.load(make_request("a", 0))
    layout.accumulate(groups_of("a", 1))
    layout.step("a", Cursor())
    artifact = layout.save("a", next_folder(layout.storage), False)
    with pytest.raises(RunError, match="uid") as raised:
        layout.load(make_request("b", 1, artifact.path))
    assert raised.value.reason == reasons.CHECKPOINT_MISMATCH
    assert layout.group.each(lambda rank: rank.slots()) == [{0: "a"}] * (layout.dp * layout.tp)


def test_a_run_suspended_within_a_batch_goes_on_bit_for_bit(layout: Layout) -> None:
    mine, states = groups_of("a", 5), []
    for suspended in (False, True):
        layout.load(make_request("a", 0, **SPECS["a"]))
        layout.accumulate(mine[:3])
        if suspended:
            path = layout.save("a", next_folder(layout.storage), partial=True).path
            layout.drop("a")
            assert layout.load(make_request("a", 3, path, **SPECS["a"])).groups == 3
        layout.accumulate(mine[3:])
        layout.step("a", Cursor())
        states.append(layout.state("a"))
        layout.drop("a")
    assert_same(*states)


def test_pipeline_parallelism_is_refused(micro: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValidationError), match=r"pipelineParallel: 2 is not supported.*set it to 1"):
        make_pool_rank(micro, tmp_path, None, 1, 8, pipelineParallel=2)
