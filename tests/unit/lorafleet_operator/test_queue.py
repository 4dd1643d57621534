"""The keyed queue: no duplicates, one worker per key, nothing lost."""

import asyncio

from lorafleet_operator.queue import KeyedQueue


def test_key_added_twice_is_handed_out_once() -> None:
    async def scenario() -> int:
        queue: KeyedQueue[str] = KeyedQueue()
        queue.add("a")
        queue.add("a")
        await queue.get()
        return len(queue)

    assert asyncio.run(scenario()) == 0


def test_key_added_while_in_work_comes_again_after_done() -> None:
    async def scenario() -> list[int]:
        queue: KeyedQueue[str] = KeyedQueue()
        queue.add("a")
        key = await queue.get()
        queue.add("a")
        during = len(queue)
        queue.done(key)
        return [during, len(queue)]

    assert asyncio.run(scenario()) == [0, 1]


def test_get_waits_for_a_key() -> None:
    async def scenario() -> str:
        queue: KeyedQueue[str] = KeyedQueue()
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add("b")
        return await asyncio.wait_for(waiting, 10.0)

    assert asyncio.run(scenario()) == "b"


def test_earlier_timer_wins_and_adding_now_drops_it() -> None:
    async def scenario() -> list[object]:
        queue: KeyedQueue[str] = KeyedQueue()
        queue.add("a", 60.0)
        queue.add("a", 0.01)
        queue.add("a", 60.0)
        first = await asyncio.wait_for(queue.get(), 10.0)
        queue.done(first)
        queue.add("a", 0.01)
        queue.add("a")
        second = await queue.get()
        queue.done(second)
        await asyncio.sleep(0.03)
        return [first, second, len(queue)]

    assert asyncio.run(scenario()) == ["a", "a", 0]
