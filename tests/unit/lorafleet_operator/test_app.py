"""The process as a whole: what ends it, and what a fenced one still does."""

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest

from lorafleet_operator import app
from lorafleet_operator.app import EXIT_BROKEN, EXIT_FENCED, EXIT_OK, Process
from lorafleet_operator.errors import ApiUnavailable
from lorafleet_operator.kube.access import ApiAccess
from lorafleet_operator.kube.lease import NAME
from lorafleet_operator.pool.links import Links
from lorafleet_operator.settings import Settings
from support.fake_api import FakeApi

SETTINGS = Settings(identity="a", lease_seconds=0.15, resync_seconds=0.05)


class Watches:
    """Stands where kopf is."""

    def __init__(self, *_: Any) -> None:
        self.alive = False
        self.renewing_at_stop: bool | None = None
        WATCHES.append(self)

    def start(self) -> None:
        """Nothing is watched."""
        self.alive = True

    async def stop(self) -> None:
        """Takes its time, as kopf does."""
        self.renewing_at_stop = any(task.get_name() == "lease" for task in asyncio.all_tasks())
        self.alive = False


WATCHES: list[Watches] = []


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """The API server of every Process of the test."""
    api = FakeApi()
    WATCHES.clear()
    monkeypatch.setattr(app, "load_access", lambda kubeconfig: ApiAccess("http://api"))
    monkeypatch.setattr(app, "open_client", lambda access: api.client())
    monkeypatch.setattr(app, "Watcher", Watches)
    return api


async def until(happened: Callable[[], bool]) -> None:
    """Polls what another task is to do."""
    async with asyncio.timeout(30):
        while not happened():
            await asyncio.sleep(0.005)


async def started() -> tuple[Process, "asyncio.Task[int]"]:
    """A process that works."""
    process = Process(SETTINGS)
    task = asyncio.create_task(process.run())
    await until(lambda: bool(WATCHES) and WATCHES[-1].alive)
    return process, task


def broken(part: str) -> Callable[[str, str], None]:
    """An API call that raises what nobody foresaw, for paths that end with `part`."""

    def call(method: str, path: str) -> None:
        if path.endswith(part):
            raise RuntimeError("unforeseen")

    return call


@pytest.mark.parametrize(("part", "task"), [(NAME, "lease"), ("adapterruns", "resync")])
async def test_a_task_that_dies_ends_the_process_with_its_traceback(
    api: FakeApi, caplog: pytest.LogCaptureFixture, part: str, task: str
) -> None:
    _, running = await started()
    api.on_call = broken(part)
    assert await asyncio.wait_for(running, 30) == EXIT_BROKEN
    [died] = [record for record in caplog.records if record.message == f"task {task} died"]
    assert died.exc_info is not None and "unforeseen" in str(died.exc_info[1])
    [ending] = [record.message for record in caplog.records if record.message.startswith("ending:")]
    assert ending == f"ending: task {task} ended: RuntimeError('unforeseen')"


async def test_a_signal_ends_it_and_gives_the_lease_back(api: FakeApi) -> None:
    _, running = await started()
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == EXIT_OK
    assert (api.lease or {})["spec"]["holderIdentity"] == ""


async def test_a_fenced_one_writes_nothing_and_stays_until_the_other_is_silent(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    silent = asyncio.Event()
    asked = asyncio.Event()

    async def rivals_silent(links: Links) -> bool:
        asked.set()
        return silent.is_set()

    monkeypatch.setattr(Links, "rivals_silent", rivals_silent)
    process, running = await started()
    process._fenced("a newer one")
    written = len(api.writes)
    await asyncio.wait_for(asked.wait(), 30)
    assert not running.done()
    assert WATCHES[-1].renewing_at_stop is False
    with pytest.raises(ApiUnavailable, match="given up"):
        process._kube.may_write()
    silent.set()
    assert await asyncio.wait_for(running, 30) == EXIT_FENCED
    assert len(api.writes) == written
    said = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert said[0] == "ending: fenced: another operator works here: a newer one"
    assert "waiting until the other operator is silent" in said[1]
    assert len(said) == 2


async def test_a_signal_ends_the_wait_of_a_fenced_one(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def never(links: Links) -> bool:
        asked.set()
        return False

    monkeypatch.setattr(Links, "rivals_silent", never)
    process, running = await started()
    process._fenced("a newer one")
    await asyncio.wait_for(asked.wait(), 30)
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == EXIT_FENCED
