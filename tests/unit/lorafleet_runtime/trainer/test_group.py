"""Several ranks behind one handle: what a call gives when they agree, and what it raises when they do not."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import ConfigError, Retryable, RunError
from lorafleet_runtime.loop.trainer import Doing, TrainerHandle, TrainerLost
from lorafleet_runtime.trainer import group as groups
from lorafleet_runtime.trainer.group import RanksDisagree, Seat, TrainerGroup, agree
from lorafleet_runtime.types import Artifact
from support.fake_actors import Handle

FULL = RunError(reasons.STORAGE_ERROR, "disk full")
ARTIFACT = Artifact("/path", 1, "digest")


class FakeRank:
    """Answers with its number, or does what a test says."""

    def __init__(self, number: int, node: str = "node") -> None:
        self.number = number
        self.where = node
        self.work: Callable[[], Any] = lambda: self.number
        self.save: Callable[[], Any] = lambda: ARTIFACT
        self.calls: list[str] = []
        self.asked = asyncio.Event()
        """A step was asked for."""
        self.saving = asyncio.Event()
        """A checkpoint was asked for."""
        self.seat: Seat | None = None

    def node(self) -> str:
        return self.where

    def open_store(self, neighbours: int) -> tuple[str, int]:
        return f"address of rank {self.number}", neighbours

    def start(self, seat: Seat) -> dict[int, str]:
        self.seat = seat
        return {}

    def step(self, *args: object) -> Any:
        self.calls.append(f"step {args}")
        self.asked.set()
        return self.work()

    def capture(self, uid: str) -> str:
        return f"ticket of {uid}"

    def saved(self, ticket: str) -> Any:
        self.calls.append("saved")
        self.saving.set()
        return self.save()

    def export(self, uid: str) -> Any:
        self.calls.append(f"export {uid}")
        return self.work()


STEP = Doing("step", "a")


class Ranks:
    """A group of fakes, and the handle that the loop has of it."""

    def __init__(self, size: int = 2) -> None:
        self.handles = [Handle(FakeRank(number)) for number in range(size)]
        self.group = TrainerGroup(self.handles, share=lambda argument: argument)
        self.lost: list[frozenset[Doing]] = []
        """What was under way at each death."""
        self.spawned: list[TrainerGroup] = []
        self.killed: list[TrainerGroup] = []
        self.handle = TrainerHandle(self._spawn, self._on_lost, lambda slots: None, self._kill)

    def __getitem__(self, rank: int) -> FakeRank:
        fake: FakeRank = self.handles[rank].target
        return fake

    def _on_lost(self, under_way: frozenset[Doing], why: str) -> None:
        self.lost.append(under_way)

    def _spawn(self) -> TrainerGroup:
        if self.spawned:
            self.handles = [Handle(FakeRank(number)) for number in range(len(self.handles))]
            self.group = TrainerGroup(self.handles, share=lambda argument: argument)
        self.spawned.append(self.group)
        return self.group

    def _kill(self, group: TrainerGroup) -> None:
        self.killed.append(group)
        for handle in group.actors:
            handle.dead = True


def raising(error: Exception) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


async def never() -> None:
    """What a rank does whose peer is gone."""
    await asyncio.Event().wait()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GRACE_SECONDS", 0.05)


async def test_a_call_reaches_every_rank_and_rank_0_answers(ranks: Ranks) -> None:
    assert await ranks.group.step.remote("a", 1) == 0
    assert ranks[0].calls == ranks[1].calls == ["step ('a', 1)"]


async def test_an_answer_waits_for_all_ranks(ranks: Ranks) -> None:
    gate = asyncio.Event()
    ranks[1].work = gate.wait
    answer = asyncio.ensure_future(ranks.group.step.remote())
    done, _ = await asyncio.wait([answer], timeout=0.05)
    assert not done
    gate.set()
    assert await answer == 0


async def test_calls_are_sent_before_anybody_waits(ranks: Ranks) -> None:
    first, second = ranks.group.step.remote(1), ranks.group.step.remote(2)
    assert await second == await first == 0
    assert ranks[1].calls == ["step (1,)", "step (2,)"]


async def test_a_single_rank_is_called_directly() -> None:
    ranks = Ranks(1)
    assert type(ranks.group.step) is type(ranks.handles[0].step)
    assert await ranks.group.step.remote() == 0


async def test_a_dead_rank_ends_the_wait_for_the_others(ranks: Ranks) -> None:
    ranks[0].work = never
    ranks.handles[1].dead = True
    with pytest.raises(Retryable, match="trainer rank 1 of 2: actor lost"):
        await ranks.group.step.remote()


async def test_the_death_counts_and_not_what_the_others_raise_because_of_it(ranks: Ranks) -> None:
    told = asyncio.Event()

    async def dying() -> None:
        await told.wait()  # Ray tells of a death later than the sockets do
        ranks.handles[1].dead = True

    ranks[0].work, ranks[1].work = raising(RuntimeError("connection closed by peer")), dying
    first, second = (asyncio.ensure_future(handle.step.remote()) for handle in ranks.handles)
    first.add_done_callback(lambda _: asyncio.get_running_loop().call_soon(told.set))
    with pytest.raises(Retryable, match="trainer rank 1 of 2: actor lost") as caught:
        await agree([first, second])
    assert not isinstance(caught.value, RanksDisagree)


async def test_an_error_of_a_run_that_all_ranks_raise_is_that_error(ranks: Ranks) -> None:
    ranks[0].work = ranks[1].work = raising(FULL)
    with pytest.raises(RunError, match="disk full"):
        await ranks.group.step.remote()


async def test_an_unforeseen_error_that_all_ranks_raise_is_that_error(ranks: Ranks) -> None:
    ranks[0].work = ranks[1].work = raising(ZeroDivisionError("of all"))
    with pytest.raises(ZeroDivisionError, match="of all"):
        await ranks.group.step.remote()


@pytest.mark.parametrize("other", [lambda: 1, never, raising(ValueError("x")), raising(RunError("NonFinite", "x"))])
async def test_ranks_that_disagree_are_named(ranks: Ranks, short_grace: None, other: Callable[[], Any]) -> None:
    ranks[0].work, ranks[1].work = other, raising(FULL)
    with pytest.raises(RanksDisagree, match="rank 1 raised RunError: StorageError: disk full"):
        await ranks.group.step.remote()


async def test_the_buffer_of_an_export_is_rank_0s_and_all_ranks_take_part(ranks: Ranks) -> None:
    manifest, buffer = ranks.group.export.options(num_returns=2).remote("a")
    assert (await manifest, buffer.endswith("of a")) == (0, True)
    assert ranks[1].calls == ["export a"]


async def test_only_rank_0_waits_for_files(ranks: Ranks) -> None:
    assert await ranks.group.saved.remote("ticket") == ARTIFACT
    assert ranks[1].calls == []


async def test_ranks_of_one_node_get_neighbouring_numbers() -> None:
    handles = [Handle(FakeRank(number, node)) for number, node in enumerate(["x", "y", "x", "y", "y"])]
    group = TrainerGroup(handles)
    await group.start.remote()
    assert [handle.target.number for handle in group.actors] == [0, 2, 1, 3, 4]
    assert [handle.target.seat for handle in group.actors] == [
        Seat(rank, neighbours, ("address of rank 0", 2)) for rank, neighbours in enumerate([2, 2, 3, 3, 3])
    ]


async def test_a_group_that_does_not_start_is_killed_and_says_what_is_wrong(ranks: Ranks, short_grace: None) -> None:
    ranks[0].start = lambda seat: never()  # type: ignore[method-assign, assignment, return-value]
    ranks[1].start = lambda seat: raising(ConfigError("no such model"))()  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no such model"):
        await ranks.handle.start()
    assert ranks.killed == ranks.spawned


async def test_a_dead_rank_costs_the_whole_group(ranks: Ranks) -> None:
    await ranks.handle.start()
    ranks[0].work = never
    ranks.handles[1].dead = True
    with pytest.raises(TrainerLost):
        await ranks.handle.call("step", doing=[STEP])
    assert await ranks.handle.call("step") == 0
    assert (ranks.lost, len(ranks.spawned), ranks.killed) == ([frozenset({STEP})], 2, ranks.spawned[:1])


async def test_ranks_that_disagree_cost_the_whole_group(ranks: Ranks, short_grace: None) -> None:
    await ranks.handle.start()
    ranks[0].work = raising(FULL)
    with pytest.raises(TrainerLost, match="ranks disagree"):
        await ranks.handle.call("step", doing=[STEP])
    assert await ranks.handle.call("step") == 0
    assert ranks.lost == [{STEP}]
    assert ranks.killed == ranks.spawned[:1]


async def test_an_error_of_a_run_costs_nothing_else(ranks: Ranks) -> None:
    await ranks.handle.start()
    ranks[0].work = ranks[1].work = raising(FULL)
    with pytest.raises(RunError):
        await ranks.handle.call("step")
    assert (ranks.lost, ranks.killed) == ([], [])


async def saved(ranks: Ranks) -> Artifact:
    """Of a checkpoint of the run `a` that is captured and on its way."""
    writing = ranks.handle.save(await ranks.handle.permit(), "a")
    await writing.captured()
    return await writing.written()


async def test_a_death_with_a_save_on_the_way_names_its_run_beside_the_call_that_was_executed(ranks: Ranks) -> None:
    await ranks.handle.start()
    dead = asyncio.Event()
    ranks[0].work = ranks[0].save = dead.wait  # the save hears of the death first, as it was asked for first
    save = asyncio.ensure_future(saved(ranks))
    await ranks[0].saving.wait()
    behind = Doing("step", "behind")
    calls = [asyncio.ensure_future(ranks.handle.call("step", doing=[doing])) for doing in (STEP, behind)]
    await ranks[0].asked.wait()
    ranks.handles[0].dead = True
    dead.set()
    lost = await asyncio.gather(save, *calls, return_exceptions=True)
    assert [type(error) for error in lost] == [TrainerLost] * 3
    assert ranks.lost == [{STEP, Doing("save", "a")}]


async def test_a_capture_is_of_the_trainer_that_was_asked_and_never_of_the_next(ranks: Ranks) -> None:
    """The next one may have the run at another group than the cursor that was sent along."""
    await ranks.handle.start()
    writing = ranks.handle.save(await ranks.handle.permit(), "a")
    ranks.handle.condemn(ranks.handle.current)
    with pytest.raises(TrainerLost):
        await writing.captured()
    with pytest.raises(TrainerLost):
        await writing.written()
    with pytest.raises(TrainerLost):  # none is there yet
        ranks.handle.save(await ranks.handle.permit(), "a")


async def test_a_save_that_nobody_waits_for_any_more_keeps_its_place_until_it_ends(ranks: Ranks) -> None:
    await ranks.handle.start()
    mended = asyncio.Event()
    ranks[0].save = mended.wait
    saves = [asyncio.ensure_future(saved(ranks)) for _ in range(4)]
    await asyncio.wait(saves, timeout=0.05)
    for save in saves:
        save.cancel()
    await asyncio.gather(*saves, return_exceptions=True)
    fifth = asyncio.ensure_future(ranks.handle.permit())
    await asyncio.wait([fifth], timeout=0.05)
    assert not fifth.done()
    mended.set()
    (await fifth).release()


async def test_calls_that_end_with_a_condemned_trainer_are_not_to_blame(ranks: Ranks) -> None:
    await ranks.handle.start()
    condemned = asyncio.Event()
    ranks[0].work = condemned.wait
    call = asyncio.ensure_future(ranks.handle.call("step", doing=[STEP]))
    await ranks[0].asked.wait()
    ranks.handle.condemn(ranks.handle.current)
    condemned.set()
    with pytest.raises(TrainerLost):
        await call
    assert ranks.lost == [frozenset()]


async def test_a_save_does_not_wait_for_the_calls(ranks: Ranks) -> None:
    await ranks.handle.start()
    ranks[0].work = never
    call = asyncio.ensure_future(ranks.handle.call("step"))
    await ranks[0].asked.wait()
    assert await saved(ranks) == ARTIFACT
    call.cancel()


async def test_a_save_that_storage_refuses_is_the_runs_own_error(ranks: Ranks) -> None:
    await ranks.handle.start()
    ranks[0].save = raising(FULL)
    with pytest.raises(RunError, match="disk full"):
        await saved(ranks)
    assert ranks.lost == []


async def test_a_save_of_a_trainer_that_was_replaced_is_lost_and_costs_nobody(ranks: Ranks) -> None:
    await ranks.handle.start()
    ranks[0].save = lambda: None
    with pytest.raises(TrainerLost, match="never took it"):
        await saved(ranks)
    assert ranks.lost == []


async def test_a_save_ends_when_the_trainer_is_condemned(ranks: Ranks) -> None:
    await ranks.handle.start()
    mended = asyncio.Event()
    ranks[0].save = mended.wait
    save = asyncio.ensure_future(saved(ranks))
    await ranks[0].saving.wait()
    ranks.handle.condemn(ranks.handle.current)
    mended.set()
    with pytest.raises(TrainerLost):
        await save
    assert ranks.lost == [frozenset()]  # what condemned the trainer is known
