"""One operator in this process, between a FakeApi and a FakeRuntime, that can be killed at any of its calls.

    async with World() as world:        # API server with a pool and its Secret, a runtime, a running operator
        world.api.add("adapterruns", run_object(finalizer=False))
        await world.until(lambda: world.run_is("Registered"))

The watch is the FakeApi's on_change. A killed operator (`Killed` raised from one of its calls, which nothing catches)
is replaced by a new one, as its supervisor would do. `until` waits for things to happen, not for time to pass.
"""

import asyncio
import base64
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx

from lorafleet_operator.controller import Controller, run_workers
from lorafleet_operator.errors import ApiUnavailable
from lorafleet_operator.pool.client import RuntimeClient
from lorafleet_operator.pool.links import Links
from lorafleet_operator.queue import KeyedQueue
from lorafleet_operator.settings import Settings
from lorafleet_operator.store import KINDS, Key, Store
from support.fake_api import FakeApi, Object
from support.fake_runtime import FakeRuntime
from support.operator_world import UID, flags, pool_object

SETTINGS = Settings(
    poll_seconds=1.0, progress_seconds=0.05, pool_linger_seconds=0.3, writes_per_second=1000.0, workers=2
)


class Killed(BaseException):
    """SIGKILL at a call of the operator; no handler of the operator catches it."""


class World:
    """Everything that a scenario needs."""

    def __init__(
        self, settings: Settings = SETTINGS, pool: Object | None = None, beside: "World | None" = None, **runtime: Any
    ) -> None:
        self.api: FakeApi = FakeApi() if beside is None else beside.api
        self.runtime: FakeRuntime = FakeRuntime(**runtime) if beside is None else beside.runtime
        self.settings = settings
        self.starts = 0
        self.calls = 0
        self.fenced: list[str] = []
        self.unreachable = False
        self.wall: Callable[[], float] = time.time
        self.kill_at: tuple[int, str] | None = None
        """(number of the call, "before" or "after" its effect)."""
        self.links: Links | None = None
        self._news = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._store = Store()
        self._queue: KeyedQueue[Key] = KeyedQueue()
        if beside is not None:

            def both(kind: str, event: str, obj: Object) -> None:
                beside._watch(kind, event, obj)
                self._watch(kind, event, obj)

            self.api.on_change = both
            return
        self.api.on_call = lambda method, path: self._tick("before")
        self.api.on_answer = lambda method, path: self._tick("after")
        self.api.on_change = self._watch
        self.api.secrets["team", "tok"] = {"token": base64.b64encode(b"secret").decode()}
        self.api.add("adapterpools", pool or pool_object())

    async def __aenter__(self) -> "World":
        self._supervisor = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._supervisor is not None
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        self.runtime.stop()

    async def until(self, happened: Callable[[], bool], seconds: float = 30.0) -> None:
        """Waits until `happened`; looks at every news, and now and then at what makes none."""
        async with asyncio.timeout(seconds):
            while not happened():
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await self._news.wait()

    def run(self, name: str = "r") -> Object | None:
        """The stored AdapterRun."""
        return self.api.objects.get(("adapterruns", "team", name))

    def status(self, name: str = "r") -> Object:
        """Its stored status."""
        return (self.run(name) or {}).get("status") or {}

    def run_is(self, kind: str, name: str = "r") -> bool:
        """Whether the stored condition is True."""
        status = self.status(name)
        return bool(status) and flags(status).get(kind, False)

    def pool_status(self) -> Object:
        """The pool's stored status."""
        return self.api.objects["adapterpools", "team", "demo"].get("status") or {}

    def held(self) -> bool:
        """Whether the runtime's trainer, engine or list has the run."""
        return UID in self.runtime.views or UID in self.runtime.engine or UID in self.runtime.trainer.values()

    def _watch(self, kind: Any, event: str, obj: Object) -> None:
        key = Key(kind, obj["metadata"]["namespace"], obj["metadata"]["name"])
        if self.settings.namespace not in (None, key.namespace):
            return
        if event == "DELETED":
            self._store.remove(key, obj["metadata"]["uid"])
        else:
            self._store.put(key, obj)
        self._queue.add(key)
        if kind == "adapterpools":
            for run in self._store.runs_of(key):
                self._queue.add(run)
        self._news.set()

    def _may_write(self) -> None:
        """As in the process: a fenced operator writes nothing more."""
        if self.fenced:
            raise ApiUnavailable("fenced")

    def _tick(self, phase: str) -> None:
        self._news.set()
        if phase == "before":
            self.calls += 1
        if self.kill_at == (self.calls, phase):
            self.kill_at = None
            raise Killed

    async def _supervise(self) -> None:
        while True:
            self.starts += 1
            self._store, self._queue = Store(), KeyedQueue()
            operator = asyncio.create_task(self._operate())
            try:
                await asyncio.shield(operator)
            except asyncio.CancelledError:
                operator.cancel()
                await asyncio.gather(operator, return_exceptions=True)
                raise
            except BaseException as died:
                if not _was_killed(died):
                    raise

    async def _operate(self) -> None:
        kube = self.api.client()
        kube.may_write = self._may_write
        self.links = Links(self._store, self._queue, kube, self.settings, self.fenced.append, self._open)
        controller = Controller(self._store, self._queue, kube, self.settings, self.links, lambda: self.wall())
        try:
            for kind in KINDS:
                listing = await kube.list(kind, self.settings.namespace)
                self._store.replace_all(kind, [dict(item) for item in listing.items], listing.version)
                for key in self._store.keys(kind):
                    self._queue.add(key)
            await run_workers_and_links(controller, self.links, self.settings.workers)
        finally:
            await self.links.close()

    def _open(self, url: str, token: str) -> RuntimeClient:
        headers = {"Authorization": f"Bearer {token}"}
        transport = httpx.MockTransport(self._runtime_call)
        return RuntimeClient(httpx.AsyncClient(base_url=url, headers=headers, transport=transport))

    async def _runtime_call(self, request: httpx.Request) -> httpx.Response:
        long_poll = "after" in request.url.params
        if not long_poll:
            self._tick("before")
        if self.unreachable:
            raise httpx.ConnectError("unreachable", request=request)
        path = request.url.raw_path.decode()
        headers = {key.lower(): value for key, value in request.headers.items()}
        code, body = await asyncio.to_thread(self.runtime.answer, request.method, path, headers, request.content)
        if self.unreachable:
            raise httpx.ReadError("unreachable", request=request)
        if not long_poll:
            self._tick("after")
        self._news.set()
        return httpx.Response(code, json=body)


async def run_workers_and_links(controller: Controller, links: Links, count: int) -> None:
    """Runs the workers; a connection that was killed kills the operator too."""
    workers = asyncio.create_task(run_workers(controller, count))
    try:
        for _ in itertools.count():
            tasks = [workers, *links.tasks()]
            done, _pending = await asyncio.wait(tasks, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is workers or (not task.cancelled() and isinstance(task.exception(), Killed)):
                    task.result()
    finally:
        workers.cancel()
        await asyncio.gather(workers, return_exceptions=True)


def _was_killed(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_was_killed(inner) for inner in error.exceptions)
    return isinstance(error, Killed)


def with_settings(**changes: Any) -> Settings:
    """The test settings with some changed."""
    return replace(SETTINGS, **changes)
