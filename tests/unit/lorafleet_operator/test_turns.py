"""Writes that can wait come one by one, however many are due at once."""

from lorafleet_operator.status.writer import RateLimit, Turns


def test_hundred_places_that_change_at_once_are_written_two_a_second() -> None:
    turns: Turns[int] = Turns(per_second=2.0)
    waits = [turns.wait(number, 1000.0) for number in range(100)]
    assert waits == [number / 2.0 for number in range(100)]
    assert [number for number in range(1, 100) if turns.wait(number, 1010.0) == 0.0] == list(range(1, 21))


def test_a_turn_is_kept_until_it_comes_and_used_once() -> None:
    turns: Turns[str] = Turns(per_second=1.0)
    assert turns.wait("a", 50.0) == 0.0
    assert [turns.wait("b", now) for now in (50.0, 50.25, 51.0)] == [1.0, 0.75, 0.0]
    assert turns.wait("b", 51.0) == 1.0
    turns.drop("b")
    assert turns.wait("c", 60.0) == 0.0


async def test_budget_is_busy_once_a_write_would_wait() -> None:
    limit = RateLimit(per_second=1.0)
    assert not limit.busy
    await limit.wait()
    await limit.wait()
    assert limit.busy
