"""When a fenced operator may end: never while a restart of it would take another's work away."""

import asyncio

import pytest

from lorafleet_operator.kube.lease import Lease
from lorafleet_operator.pool.links import Links
from lorafleet_operator.queue import KeyedQueue
from lorafleet_operator.rivals import wait_until_alone
from lorafleet_operator.settings import Settings
from lorafleet_operator.store import Key, Store
from support.fake_api import FakeApi

SECONDS = 0.03


class Runtimes(Links):
    """No runtimes, but an answer."""

    def __init__(self, api: FakeApi) -> None:
        queue: KeyedQueue[Key] = KeyedQueue()
        super().__init__(Store(), queue, api.client(), Settings(), lambda why: None)
        self.silent = False
        self.asked = asyncio.Event()

    async def rivals_silent(self) -> bool:
        """What the test says."""
        self.asked.set()
        return self.silent


async def fenced(api: FakeApi) -> Lease:
    """A lease that was held and given up."""
    mine = Lease(api.client(), "lorafleet-system", "a", 60.0)
    await mine.acquire()
    mine.give_up()
    return mine


async def test_it_waits_while_another_speaks_to_its_runtimes() -> None:
    api = FakeApi()
    mine, runtimes = await fenced(api), Runtimes(api)
    waiting = asyncio.create_task(wait_until_alone(mine, runtimes, SECONDS))
    for _ in range(2):
        await asyncio.wait_for(runtimes.asked.wait(), 30)
        runtimes.asked.clear()
    assert not waiting.done()
    runtimes.silent = True
    await asyncio.wait_for(waiting, 30)
    assert api.writes == [("POST", "/apis/coordination.k8s.io/v1/namespaces/lorafleet-system/leases")]


async def test_it_waits_while_another_process_renews_under_its_identity() -> None:
    api = FakeApi()
    mine, runtimes = await fenced(api), Runtimes(api)
    runtimes.silent = True
    looks = 0

    def renew(method: str, path: str) -> None:
        nonlocal looks
        looks += 1
        if looks < 4:
            assert api.lease is not None
            api.lease["metadata"]["resourceVersion"] += "1"

    api.on_answer = renew
    await asyncio.wait_for(wait_until_alone(mine, runtimes, SECONDS), 30)
    assert looks == 5


async def test_it_ends_after_the_duration_when_another_holds_its_lease() -> None:
    api = FakeApi()
    mine, runtimes = await fenced(api), Runtimes(api)
    assert api.lease is not None
    api.lease["spec"]["holderIdentity"] = "b"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_until_alone(mine, runtimes, 60.0), 0.05)
    await asyncio.wait_for(wait_until_alone(mine, runtimes, SECONDS), 30)
    assert not runtimes.asked.is_set()
