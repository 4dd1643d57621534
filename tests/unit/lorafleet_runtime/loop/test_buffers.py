"""Batch collection and the data cursor."""

from hypothesis import given
from hypothesis import strategies as st

from lorafleet_runtime.loop.buffers import Buffers, CursorTracker, Need
from lorafleet_runtime.types import Cursor
from support.runs import group


def need(remaining: int, *, oldest: int = 1, weight: int = 1, whole: bool = False) -> Need:
    return Need(remaining=remaining, incarnation="1.1", oldest_version=oldest, weight=weight, whole=whole)


def fill(buffers: Buffers, uid: str, count: int, *, n: int = 1, incarnation: str = "1.1") -> None:
    for index in range(count):
        buffers.add(group(uid, index, n=n, incarnation=incarnation))


def uids(buffers: Buffers, needs: dict[str, Need], max_samples: int) -> list[str]:
    return [g.uid for g in buffers.collect(needs, max_samples).groups]


def test_runs_take_turns() -> None:
    buffers = Buffers()
    fill(buffers, "a", 3)
    fill(buffers, "b", 3)
    assert uids(buffers, {"a": need(3), "b": need(3)}, 100) == ["a", "b", "a", "b", "a", "b"]


def test_the_turn_persists_across_batches() -> None:
    buffers = Buffers()
    fill(buffers, "a", 4)
    fill(buffers, "b", 4)
    needs = {"a": need(4), "b": need(4)}
    assert uids(buffers, needs, 2) == ["a"]
    assert uids(buffers, needs, 2) == ["b"]
    assert uids(buffers, needs, 2) == ["a"]


def test_a_slice_never_overshoots_what_the_step_needs() -> None:
    buffers = Buffers()
    fill(buffers, "a", 5)
    assert uids(buffers, {"a": need(2)}, 100) == ["a", "a"]
    assert buffers.count("a") == 3


def test_a_heavier_run_takes_more_turns() -> None:
    buffers = Buffers()
    fill(buffers, "a", 4)
    fill(buffers, "b", 4)
    assert uids(buffers, {"a": need(4, weight=2), "b": need(4)}, 12) == ["a", "a", "b", "a", "a", "b"]


def test_stale_groups_and_those_of_an_older_registration_are_thrown_out() -> None:
    buffers = Buffers()
    fill(buffers, "a", 1, n=1)
    fill(buffers, "a", 1, n=3, incarnation="0.9")
    fill(buffers, "a", 1, n=3)
    batch = buffers.collect({"a": need(3, oldest=2)}, 100)
    assert [g.version.n for g in batch.groups] == [3]
    assert len(batch.stale) == 2


def test_a_full_batch_leaves_the_next_group_in_place() -> None:
    buffers = Buffers()
    fill(buffers, "a", 3)
    batch = buffers.collect({"a": need(3, weight=5)}, 4)
    assert [g.index for g in batch.groups] == [0, 1]
    assert [g.index for g in buffers.collect({"a": need(3)}, 4).groups] == [2]


def test_a_run_that_waits_for_its_whole_batch_gives_nothing_and_holds_nobody_up() -> None:
    buffers = Buffers()
    fill(buffers, "a", 2)
    fill(buffers, "b", 1)
    needs = {"a": need(3, whole=True), "b": need(3)}
    assert buffers.samples_ready(needs) == 2  # b's
    assert uids(buffers, needs, 100) == ["b"]
    assert buffers.count("a") == 2


def test_a_whole_batch_goes_out_in_slices_of_the_usual_size() -> None:
    buffers = Buffers()
    fill(buffers, "a", 4)
    needs = {"a": need(3, whole=True)}
    assert buffers.samples_ready(needs) == 6
    assert [g.index for g in buffers.first("a", 3)] == [0, 1, 2]
    assert [g.index for g in buffers.collect(needs, 4).groups] == [0, 1]
    assert [g.index for g in buffers.collect({"a": need(1)}, 4).groups] == [2]


def test_stale_groups_do_not_fill_a_whole_batch() -> None:
    buffers = Buffers()
    fill(buffers, "a", 2, n=3)
    fill(buffers, "a", 1, n=1)
    fill(buffers, "a", 1, n=3, incarnation="0.9")
    assert len(buffers.drop_stale("a", need(3, oldest=2, whole=True))) == 2
    assert buffers.count("a") == 2
    assert buffers.drop_stale("nobody", need(3)) == []


def test_a_group_that_is_consumed_twice_counts_once() -> None:
    tracker = CursorTracker(Cursor())
    for index in (0, 2, 0, 2):
        tracker.consume(index)
    assert tracker.cursor == Cursor(1, (2,))


@given(st.lists(st.sampled_from(["take", "use", "return"]), max_size=80))
def test_the_cursor_hands_out_every_index_once_and_resumes_with_the_unused(operations: list[str]) -> None:
    tracker = CursorTracker(Cursor())
    out: list[int] = []
    used: set[int] = set()
    for operation in operations:
        if operation == "take":
            out.append(tracker.take())
        elif out and operation == "use":
            index = out.pop(0)
            assert index not in used
            used.add(index)
            tracker.consume(index)
        elif out:
            tracker.give_back(out.pop())
    assert len(set(out)) == len(out)
    resumed = CursorTracker(tracker.cursor)
    again = [resumed.take() for _ in range(len(used) + 5)]
    assert not used & set(again)
    assert sorted(used | set(again))[: len(used) + 5] == list(range(len(used) + 5))


def test_a_released_index_is_not_consumed_and_not_handed_out() -> None:
    tracker = CursorTracker(Cursor(2))
    assert [tracker.take() for _ in range(5)] == [2, 3, 4, 5, 6]
    for index in (2, 3, 4, 6):
        tracker.consume(index)
    tracker.release([3, 6])
    assert tracker.cursor == Cursor(3, (4,))
    assert tracker.take() == 7
    tracker.consume(3)
    assert tracker.cursor == Cursor(5)
