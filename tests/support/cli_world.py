"""A cluster for the command line: an API server's reading half and a runtime's real record routes, on real sockets.

The commands run as a user runs them (typer, kr8s, a kubeconfig); only the two servers behind them are in this process.
"""

import base64
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner, Result

from lorafleet_cli.main import app as cli
from lorafleet_runtime.http.app import create_app
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry
from support.runs import pool_spec

Object = dict[str, Any]

_GROUP = "/apis/lorafleet.dev/v1alpha1"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Served:
    """An ASGI application on 127.0.0.1."""

    def __init__(self, app: FastAPI, port: int | None = None) -> None:
        self.port = port or free_port()
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Served":
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return self

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


@dataclass
class CliWorld:
    """Objects and switches of the fake cluster, and the command line in front of it."""

    folder: Path
    runs: list[Object] = field(default_factory=list)
    pools: list[Object] = field(default_factory=list)
    secrets: dict[str, Object] = field(default_factory=dict)
    others: dict[str, Object] = field(default_factory=dict)
    """Other objects by path, as services and pods."""
    forbidden: tuple[str, ...] = ()
    """Plurals that this user may not read."""
    refusal: int = 403
    """How they are refused."""
    refusals: int = 0
    """Requests refused so far."""
    on_refusal: Callable[[], object] | None = None
    """Called after each refusal."""
    before_watch: list[Callable[[], None]] = field(default_factory=list)
    """Called one by one at the begin of each watch request."""
    api: Served | None = None
    runtime: Served | None = None

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def call(self, *arguments: str) -> Result:
        """Run a command in this process."""
        where = (
            [] if "--kubeconfig" in arguments or arguments[0] == "convert" else ["--kubeconfig", str(self.kubeconfig)]
        )
        return CliRunner().invoke(cli, [*arguments, *where], env={"COLUMNS": "200", "NO_COLOR": "1"})

    def error(self, *arguments: str, code: int = 1) -> str:
        """Run a command that must fail; its one line."""
        result = self.call(*arguments)
        assert result.exit_code == code, result.output
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("error: ")
        return lines[0]

    def directory(self, run: Object) -> Path:
        """Where a run's records lie."""
        meta = run["metadata"]
        return self.storage.joinpath(meta["namespace"], meta["name"], meta["uid"])

    def start_api(self, port: int | None = None) -> None:
        self.api = Served(_api(self), port).start()

    def start_runtime(self, port: int | None = None) -> None:
        view = FleetView(Registry(pool_spec(), 1), Signal(), self.storage)
        self.runtime = Served(create_app(view, lambda: "secret", CollectorRegistry()), port).start()

    def stop(self) -> None:
        for served in (self.api, self.runtime):
            if served is not None:
                served.stop()


@contextmanager
def cli_world(folder: Path) -> Iterator[CliWorld]:
    """An API server, a runtime, the pool `demo` that adopts it, and a kubeconfig."""
    world = CliWorld(folder)
    world.storage.mkdir()
    try:
        world.start_api()
        world.start_runtime()
        assert world.api is not None and world.runtime is not None
        world.kubeconfig.write_text(yaml.safe_dump(kubeconfig(world.api.url)))
        world.pools.append(pool(world.runtime.url))
        world.secrets["default/runtime-token"] = secret("secret")
        yield world
    finally:
        world.stop()


def kubeconfig(server: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "default"}},
            {"name": "team", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "user-token"}}],
    }


def secret(token: str) -> Object:
    return {"data": {"token": base64.b64encode(token.encode()).decode()}}


def pool(url: str | None) -> Object:
    endpoint = {"url": url, "tokenSecretRef": {"name": "runtime-token", "key": "token"}}
    return {
        "metadata": {"name": "demo", "namespace": "default", "uid": "p1"},
        "spec": {"endpoint": endpoint} if url else {},
        "status": {
            "slots": {"total": 4, "used": 2, "queued": 1},
            "conditions": [condition("Ready", "True", "Synced"), condition("RuntimeReady", "True", "Synced")],
        },
    }


def condition(kind: str, status: str, reason: str, message: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": timestamp()}  # fmt: skip


def timestamp(seconds_from_now: float = 0.0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds_from_now))


def run(name: str, reason: str = "Training", *, age: float = 90.0, message: str = "", **status: Any) -> Object:
    """An AdapterRun whose Ready has this reason; Completed, Failed and Cancelled set what goes with them."""
    ready = "True" if reason in ("Training", "Completed", "Cancelled") else "False"
    ended = {"Completed": "Complete", "DataError": "Failed"}.get(reason)
    conditions = [condition("Ready", ready, reason, message)]
    if ended is not None or reason == "Cancelled":
        conditions.append(condition("Finished", "True", reason, message))
    if ended is not None:
        conditions.append(condition(ended, "True", reason, message))
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "creationTimestamp": timestamp(-age)},
        "spec": {"poolRef": {"name": "demo"}, "data": "x.jsonl"},
        "status": {"conditions": conditions, **status},
    }


def _api(world: CliWorld) -> FastAPI:
    app = FastAPI()

    @app.get("/version/")
    async def version() -> Object:
        return {"gitVersion": "v1.37.2", "major": "1", "minor": "37"}

    @app.websocket("/api/v1/namespaces/{namespace}/pods/{name}/portforward")
    async def portforward(websocket: WebSocket, namespace: str, name: str, ports: int) -> None:
        await _portforward(websocket, ports)

    @app.get("/{path:path}")
    async def get(path: str, request: Request) -> Response:
        return _answer(world, f"/{path}", request)

    return app


def _answer(world: CliWorld, path: str, request: Request) -> Response:
    parts = path.removeprefix(_GROUP).removeprefix("/api/v1").strip("/").split("/")
    namespace = parts[1] if parts[0] == "namespaces" else None
    plural, name = ([*parts[2:], None] if namespace else [*parts, None])[:2]
    if plural in world.forbidden:
        world.refusals += 1
        if world.on_refusal is not None:
            world.on_refusal()
        return _status(world.refusal, f"{plural} is forbidden: User cannot get resource")
    if plural == "secrets":
        found = world.secrets.get(f"{namespace}/{name}")
        return JSONResponse(found) if found else _status(404, f'secrets "{name}" not found')
    if path in world.others:
        return JSONResponse(world.others[path])
    items = {"adapterruns": world.runs, "adapterpools": world.pools}.get(str(plural))
    if items is None:
        return _status(404, "the server could not find the requested resource")
    field = request.query_params.get("fieldSelector", "").removeprefix("metadata.name=") or name
    if request.query_params.get("watch"):
        if world.before_watch:
            world.before_watch.pop(0)()
        return StreamingResponse(_events(items, field))
    chosen = [i for i in items if namespace in (None, i["metadata"]["namespace"])
              and field in (None, i["metadata"]["name"])]  # fmt: skip
    if name is not None:
        return JSONResponse(chosen[0]) if chosen else _status(404, f'{plural} "{name}" not found')
    return JSONResponse({"metadata": {"resourceVersion": "1"}, "items": chosen})


async def _events(items: list[Object], name: str | None) -> AsyncIterator[str]:
    for item in items:
        if name in (None, item["metadata"]["name"]):
            yield json.dumps({"type": "MODIFIED", "object": item}) + "\n"


def _status(code: int, message: str) -> JSONResponse:
    return JSONResponse({"kind": "Status", "message": message, "code": code}, status_code=code)


async def _portforward(websocket: WebSocket, port: int) -> None:
    """The kubelet's end: channel 0 is data, 1 errors; each channel begins with a frame that tells the port."""
    import asyncio

    await websocket.accept()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for channel in (b"\x00", b"\x01"):
        await websocket.send_bytes(channel + port.to_bytes(2, "little"))

    async def answer() -> None:
        while data := await reader.read(65536):
            await websocket.send_bytes(b"\x00" + data)

    task = asyncio.create_task(answer())
    with contextlib.suppress(Exception):  # the client hangs up
        while True:
            writer.write((await websocket.receive_bytes())[1:])
    task.cancel()
    writer.close()


def heeding(signum: signal.Signals) -> Callable[[], None]:
    """A child's first act: whoever runs the tests in the background may have ignored the signal, which is inherited."""

    def heed() -> None:
        signal.signal(signum, signal.SIG_DFL)

    return heed
