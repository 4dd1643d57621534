"""Work and memory follow the runs that train, not the slots: an idle run costs its own bytes and no operator."""

import gc
from collections.abc import Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, StepResult
from support.trainer import MICRO_VOCAB, load, make_groups, make_micro_model, make_pool_rank, make_request

RANKS = (4, 8, 16, 32, 64)
ELEMENTS_PER_RANK = 2 * (48 + 32 + 32 + 48 + 40 + 40 + 40)
"""Inputs + outputs of q, k, v, o, gate, up and down in the 2 layers of the micro model."""
ADAMW_CLOCK = 4
"""Its step count, one float32."""


class Operators(TorchDispatchMode):
    """Every operator that runs, with the shapes it got, and every storage that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.calls.append((str(func), tuple(tuple(t.shape) for t in tensors)))
        self.storages |= {t.untyped_storage().data_ptr() for t in tensors}
        return result


def crowded(model: Path, storage: Path, residents: int, deterministic: bool) -> TrainerRank:
    """Run a with rank 8 in the last slot, beside residents of rank 4 to 64 that train nothing."""
    rank = make_pool_rank(model, storage, None, 32, 64, deterministic=deterministic)
    load(rank, "a", slot=31, rank=8, algorithm={"klCoef": 0.1})
    for i in range(residents - 1):
        load(rank, f"idle{i}", slot=i, seed=i, rank=RANKS[i % len(RANKS)])
    return rank


def buffers(rank: TrainerRank, uid: str) -> list[Tensor]:
    slot = rank._slot(uid)
    return [slot.adapter.weights, slot.adapter.master, slot.adapter.grad, *slot.optimizer.moments]


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro_model(tmp_path_factory.mktemp("micro"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_operators_do_not_depend_on_how_many_runs_are_resident(
    micro: Path, tmp_path: Path, deterministic: bool
) -> None:
    """A batch, a step, an export and a checkpoint of one run among 1, 8, 32: the same operators on the same shapes."""
    seen = []
    for residents in (1, 8, 32):
        rank = crowded(micro, tmp_path, residents, deterministic)
        with Operators() as operators:
            assert not rank.accumulate(make_groups("a", vocab=MICRO_VOCAB)).faults
            assert isinstance(rank.step("a", Cursor()), StepResult)
            rank.export("a")
            rank.checkpoint("a", f"of{residents}", Cursor())
        seen.append(operators.calls)
        idle = [t for uid in rank.slots().values() if uid != "a" for t in buffers(rank, uid)]
        assert len(idle) == 5 * (residents - 1)
        assert not operators.storages & {t.untyped_storage().data_ptr() for t in idle}
        assert operators.storages >= {t.untyped_storage().data_ptr() for t in buffers(rank, "a")}
    assert len(seen[0]) > 500
    assert seen[0] == seen[1] == seen[2]


def test_a_run_that_has_no_groups_in_a_batch_is_not_touched_by_it(micro: Path, tmp_path: Path) -> None:
    rank = crowded(micro, tmp_path, 4, False)
    groups = [*make_groups("idle0", vocab=MICRO_VOCAB), *make_groups("a", vocab=MICRO_VOCAB)]
    with Operators() as operators:
        assert not rank.accumulate(groups).faults
        rank.step("a", Cursor())
    for uid, touched in (("a", True), ("idle0", True), ("idle1", False), ("idle2", False)):
        found = {t.untyped_storage().data_ptr() for t in buffers(rank, uid)} & operators.storages
        assert bool(found) is touched, uid


def bytes_of(thing: object) -> int:
    """Of all tensors' storages that can be reached from an object."""
    seen: dict[int, object] = {}
    storages: dict[int, int] = {}
    waiting = [thing]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType, BuiltinFunctionType)):
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        waiting += gc.get_referents(item)
    return sum(storages.values())


@pytest.mark.parametrize("dtype, bytes_per_element", [(torch.float32, 16), (torch.bfloat16, 18)])
def test_a_slot_has_the_bytes_of_its_own_rank(
    micro: Path, tmp_path: Path, dtype: torch.dtype, bytes_per_element: int
) -> None:
    """Masters, gradient sums and two moments in float32, and below it a compute copy; maxRank is 64 for all of them."""
    trainer = make_pool_rank(micro, tmp_path, dtype, 32, 64)
    base = bytes_of(trainer)
    expected = [rank * ELEMENTS_PER_RANK * bytes_per_element + ADAMW_CLOCK for rank in RANKS]
    for slot, rank in enumerate(RANKS):
        trainer.load(make_request(f"r{rank}", slot, rank=rank))
        assert bytes_of(trainer) - base == sum(expected[: slot + 1])
    for slot, rank in enumerate(RANKS):
        trainer.drop(f"r{rank}")
        assert bytes_of(trainer) - base == sum(expected[slot + 1 :])
