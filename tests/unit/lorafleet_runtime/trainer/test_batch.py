"""Packing: what gets a row, what is only a label, and which groups share a pass."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.trainer.attention import GroupRows
from lorafleet_runtime.trainer.batch import Work, make_micro_batch, pack, split_group
from lorafleet_runtime.trainer.losses.policy import LossParams
from lorafleet_runtime.types import PromptGroup, Sample, VersionId

SPEC = AdapterRunSpec.model_validate({"poolRef": {"name": "p"}, "data": "d", "rmType": "math"})
PARAMS = LossParams.from_spec(SPEC)
MASKING = LossParams.from_spec(
    SPEC.model_copy(update={"algorithm": SPEC.algorithm.model_copy(update={"mask_truncated": True})})
)


def sample(*ids: int, advantage: float = 1.0, truncated: bool = False) -> Sample:
    return Sample(ids, tuple(-0.1 * i for i in ids), 0.0, advantage, truncated)


def group(*samples: Sample) -> PromptGroup:
    return PromptGroup("a", VersionId("a", "1.1", 1), 0, (1, 2, 3), samples)


def test_rows_labels_and_tokens_of_one_group() -> None:
    work = Work(0, PARAMS, (1, 2, 3), (sample(4, 5, 6), sample(7), sample(8, 9, advantage=-2.0)))
    batch = make_micro_batch([work], torch.device("cpu"), torch.float32)
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 8] + [0] * 10
    assert batch.groups == (GroupRows(3, (2, 1)), GroupRows(10))
    assert batch.num_rows == work.rows == 6
    assert batch.rows.tolist() == [2, 3, 4, 5]
    assert batch.head.row.tolist() == [0, 0, 0, 1, 2, 3]
    assert batch.head.label.tolist() == [4, 7, 8, 5, 6, 9]
    torch.testing.assert_close(batch.policy.sampler, torch.tensor([-0.4, -0.7, -0.8, -0.5, -0.6, -0.9]))
    assert batch.policy.advantage.tolist() == [1.0, 1.0, -2.0, 1.0, 1.0, -2.0]
    torch.testing.assert_close(batch.policy.weight, torch.tensor([1 / 3, 1.0, 0.5, 1 / 3, 1 / 3, 0.5]))


def test_rows_and_tokens_of_a_slot_are_adjacent() -> None:
    works = [Work(slot, PARAMS, (1, 2), (sample(3, 4),)) for slot in (2, 0, 2)]
    (members,) = pack(works, 100, deterministic=False)
    batch = make_micro_batch(members, torch.device("cpu"), torch.float32)
    assert batch.segments == ((0, 0, 3), (2, 3, 9))
    assert batch.spans == ((0, 0, 2), (2, 2, 6))


def works_of(*sizes: tuple[int, int]) -> list[Work]:
    """(slot, rows) each; the token id tells them apart."""
    return [Work(slot, PARAMS, (1,) * rows, (sample(i),)) for i, (slot, rows) in enumerate(sizes)]


def number(work: Work) -> int:
    """Its place in works_of."""
    return work.samples[0].token_ids[0]


def rows_of(passes: list[list[Work]]) -> list[list[int]]:
    return [[w.rows for w in members] for members in passes]


def test_passes_fill_up_to_the_budget() -> None:
    works = works_of((0, 6), (0, 3), (0, 5), (0, 20))
    assert rows_of(pack(works, 10, deterministic=False)) == [[6, 3], [5], [20]]
    assert rows_of(pack(works, 10, deterministic=True)) == [[6], [3], [5], [20]]


def test_work_is_moved_to_where_it_fits_when_that_saves_a_pass() -> None:
    works = works_of((1, 4), (1, 7), (0, 6), (0, 3))
    assert rows_of(pack(works, 10, deterministic=False)) == [[6, 4], [3, 7]]


def test_filling_in_order_is_kept_where_it_needs_fewer_passes() -> None:
    """First-fit decreasing makes [6, 4], [4, 4, 3], [3] of these."""
    works = works_of((0, 6), (0, 3), (0, 3), (1, 4), (1, 4), (1, 4))
    assert rows_of(pack(works, 12, deterministic=False)) == [[6, 3, 3], [4, 4, 4]]


def next_fit_count(sizes: list[int], budget: int) -> int:
    count = room = 0
    for size in sizes:
        if not count or size > room:
            count, room = count + 1, budget
        room -= size
    return count


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=30), st.integers(1, 50))
@example([(0, 30), (1, 30)], 20)
def test_any_work_is_packed_once_within_the_budget_and_in_order(sizes: list[tuple[int, int]], budget: int) -> None:
    works = works_of(*sizes)
    passes = pack(works, budget, deterministic=False)
    assert sorted(number(w) for members in passes for w in members) == list(range(len(works)))
    for members in passes:
        assert members and (len(members) == 1 or sum(w.rows for w in members) <= budget)
        assert members == sorted(members, key=lambda w: (w.slot, number(w)))
    ordered = sorted(works, key=lambda w: w.slot)
    assert len(passes) <= next_fit_count([w.rows for w in ordered], budget)
    assert pack(works, budget, deterministic=True) == [[w] for w in ordered]


def test_group_over_the_budget_is_split_between_samples() -> None:
    parts = list(split_group(0, PARAMS, group(sample(1, 2, 3), sample(4, 5, 6), sample(7)), budget=6))
    assert [[s.token_ids for s in p.samples] for p in parts] == [[(1, 2, 3)], [(4, 5, 6), (7,)]]


def test_masked_and_empty_responses_need_no_pass() -> None:
    full = group(sample(1, 2, truncated=True), sample(), sample(3))
    assert [s.token_ids for p in split_group(0, MASKING, full, 100) for s in p.samples] == [(3,)]
    assert [s.token_ids for p in split_group(0, PARAMS, full, 100) for s in p.samples] == [(1, 2), (3,)]
    assert list(split_group(0, MASKING, group(sample(1, truncated=True)), 100)) == []
