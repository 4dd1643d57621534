"""The Lease by which one operator works at a time."""

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lorafleet_operator.errors import ApiUnavailable, ConfigError
from lorafleet_operator.kube.client import KubeClient
from lorafleet_operator.kube.lease import Lease
from lorafleet_operator.settings import Settings
from support.fake_api import FakeApi
from support.operator_world import run_object

SECONDS = 0.3


def lease(api: FakeApi, identity: str, seconds: float = SECONDS) -> Lease:
    """An operator's end of the lease."""
    return Lease(api.client(), "lorafleet-system", identity, seconds)


def holder(api: FakeApi) -> Any:
    """Who holds it by the API server's word."""
    assert api.lease is not None
    return api.lease["spec"]["holderIdentity"]


async def until(happened: Callable[[], bool]) -> None:
    """Polls what another task is to do."""
    async with asyncio.timeout(30):
        while not happened():
            await asyncio.sleep(0.005)


async def test_the_first_takes_it_and_may_write() -> None:
    api = FakeApi()
    first = lease(api, "a", seconds=15.4)
    with pytest.raises(ApiUnavailable, match="not held"):
        first.check()
    await first.acquire()
    first.check()
    spec = (api.lease or {})["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", 15, 1)
    assert spec["renewTime"].endswith("Z")


async def test_a_second_stands_by_while_the_first_renews(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeApi()
    first, second = lease(api, "a", seconds=2.0), lease(api, "b")
    now, renewals, looks = 100.0, 0, 0

    def answered(method: str, path: str) -> None:
        nonlocal now, renewals, looks
        looks += method == "GET"
        if method == "PATCH":
            renewals += 1
            now += 1.5  # only renewals pass the time, so that a slow machine does not

    api.on_answer = answered
    monkeypatch.setattr("lorafleet_operator.kube.lease.time", SimpleNamespace(monotonic=lambda: now))
    await first.acquire()
    lost: list[str] = []
    holding = asyncio.create_task(first.hold(lost.append))
    with caplog.at_level(logging.WARNING):
        waiting = asyncio.create_task(second.acquire())
        await until(lambda: renewals == 2)
        holding.cancel()
        looks = 0
        await until(lambda: looks == 3)
    assert not waiting.done()
    first.check()
    assert (holder(api), lost) == ("a", [])
    assert [r.message for r in caplog.records if "standing by while a holds it" in r.message] != []
    assert len([r for r in caplog.records if "standing by" in r.message]) == 1
    waiting.cancel()


async def test_a_silent_holder_is_replaced_and_ends_when_it_wakes() -> None:
    api = FakeApi()
    first, second = lease(api, "a", seconds=1.0), lease(api, "b", seconds=1.0)
    await first.acquire()
    (api.lease or {})["spec"]["leaseDurationSeconds"] = 0.2
    await asyncio.wait_for(second.acquire(), 30)
    assert (holder(api), (api.lease or {})["spec"]["leaseTransitions"]) == ("b", 2)
    lost: list[str] = []
    await asyncio.wait_for(first.hold(lost.append), 30)
    assert lost == ["lease lorafleet-system/lorafleet-operator is held by b"]
    with pytest.raises(ApiUnavailable):
        first.check()


async def test_clocks_that_differ_do_not_matter() -> None:
    api = FakeApi()
    first, second = lease(api, "a", seconds=60), lease(api, "b")
    await first.acquire()
    (api.lease or {})["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second.acquire(), 2 * SECONDS)


async def test_a_released_lease_and_one_of_the_same_identity_are_taken_at_once() -> None:
    api = FakeApi()
    first = lease(api, "a", seconds=600)
    await first.acquire()
    await asyncio.wait_for(lease(api, "a", seconds=600).acquire(), 10)
    again = lease(api, "a", seconds=600)
    await again.acquire()
    await again.release()
    with pytest.raises(ApiUnavailable):
        again.check()
    await asyncio.wait_for(lease(api, "b", seconds=600).acquire(), 10)
    assert holder(api) == "b"


async def test_writes_stop_while_the_lease_cannot_be_renewed_and_go_on_after() -> None:
    api = FakeApi()
    mine = lease(api, "a")
    await mine.acquire()
    down = True

    def answer(method: str, path: str) -> None:
        if down:
            raise httpx.ConnectError("refused")

    api.on_call = answer
    holding = asyncio.create_task(mine.hold(lambda why: None))

    def refused() -> bool:
        try:
            mine.check()
        except ApiUnavailable as error:
            return "not renewed" in str(error)
        return False

    await until(refused)
    down = False
    await until(lambda: not refused())
    assert holder(api) == "a"
    holding.cancel()


async def test_a_lease_given_up_during_a_renewal_stays_given_up() -> None:
    api = FakeApi()
    mine = lease(api, "a")
    await mine.acquire()
    renewed = asyncio.Event()

    def answered(method: str, path: str) -> None:
        if method == "PATCH" and path.endswith("/lorafleet-operator"):
            mine.give_up()
            renewed.set()

    api.on_answer = answered
    lost: list[str] = []
    holding = asyncio.create_task(mine.hold(lost.append))
    await asyncio.wait_for(renewed.wait(), 30)
    await asyncio.wait_for(holding, 30)
    assert (lost, mine.held) == ([], False)
    with pytest.raises(ApiUnavailable, match="given up"):
        mine.check()
    before = len(api.writes)
    await mine.release()
    await asyncio.wait_for(mine.hold(lost.append), 30)
    assert len(api.writes) == before


async def test_of_two_processes_with_one_identity_the_older_one_ends() -> None:
    api = FakeApi()
    older, newer = lease(api, "a"), lease(api, "a", seconds=2.0)
    await older.acquire()
    await asyncio.wait_for(newer.acquire(), 10)
    lost: list[str] = []
    newer_lost: list[str] = []
    holding = asyncio.create_task(newer.hold(newer_lost.append))
    await asyncio.wait_for(older.hold(lost.append), 30)
    assert ["another process under the same identity, a" in why for why in lost] == [True]
    version = (api.lease or {})["metadata"]["resourceVersion"]
    await until(lambda: (api.lease or {})["metadata"]["resourceVersion"] != version)  # the newer one goes on
    newer.check()
    assert newer_lost == []
    holding.cancel()


async def test_who_is_waited_for_is_told() -> None:
    api = FakeApi()
    first, second = lease(api, "a", seconds=60), lease(api, "b", seconds=60)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await until(lambda: second.standing_by is not None)
    assert second.standing_by == "standing by: a holds lease lorafleet-system/lorafleet-operator"
    assert (first.standing_by, first.held, second.held) == (None, True, False)
    waiting.cancel()


async def test_a_lease_that_somebody_deleted_is_made_again() -> None:
    api = FakeApi()
    mine = lease(api, "a")
    await mine.acquire()
    holding = asyncio.create_task(mine.hold(lambda why: None))
    api.lease = None
    await until(lambda: api.lease is not None)
    assert holder(api) == "a"
    holding.cancel()


async def test_two_that_start_at_once_never_both_hold_it() -> None:
    api = FakeApi()
    racers = [lease(api, name, seconds=30) for name in "abcd"]
    tasks = [asyncio.create_task(r.acquire()) for r in racers]
    await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    done, _ = await asyncio.wait(tasks, timeout=0.2)
    assert len(done) == 1
    for task in tasks:
        task.cancel()


async def test_a_missing_namespace_is_named() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"message": 'namespaces "lorafleet-system" not found'})

    kube = KubeClient(httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(answer)))
    with pytest.raises(ConfigError, match="--lease-namespace"):
        await Lease(kube, "lorafleet-system", "a", 15).acquire()


async def test_a_client_asks_before_every_write() -> None:
    api = FakeApi()
    api.add("adapterruns", run_object())
    kube = api.client()

    def refuse() -> None:
        raise ApiUnavailable("not held")

    kube.may_write = refuse
    run = await kube.get("adapterruns", "team", "r")
    for write in (
        lambda: kube.patch("adapterruns", "team", "r", {"status": {}}, subresource="status"),
        lambda: kube.delete("adapterruns", "team", "r", run["metadata"]["uid"]),
        lambda: kube.create_event(run, "Normal", "X", "x"),
    ):
        with pytest.raises(ApiUnavailable, match="not held"):
            await write()
    assert api.writes == []


def test_the_lease_lies_where_the_operator_watches() -> None:
    assert Settings().lease_home == "lorafleet-system"
    assert Settings(namespace="team").lease_home == "team"
    assert Settings(namespace="team", lease_namespace="here").lease_home == "here"
    assert Settings().identity != Settings().identity
