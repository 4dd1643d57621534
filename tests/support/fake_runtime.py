"""A small runtime that speaks /v1 over real HTTP and can be made to misbehave. For operator tests; trains nothing.

    runtime = FakeRuntime(token="t"); runtime.start(); runtime.url
    runtime.step("uid", 3); runtime.complete("uid"); runtime.restart(); runtime.lies = True

`python tests/support/fake_runtime.py --port P --token T --step-seconds 0.3` plays runs to their targets by itself.
One lock guards everything; long polls wait on its condition.
"""

import argparse
import contextlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.wire import (
    OPERATOR_EPOCH_HEADER,
    AdapterList,
    AdapterView,
    ArtifactView,
    EngineView,
    PoolView,
    PresenceView,
    PutAdapter,
    PutPool,
    SlotsView,
    TrainerView,
)

Answer = tuple[int, dict[str, Any]]
ENGINE = "e0"


@dataclass
class FakeRuntime:
    """State and misbehaviour switches; change them from the test."""

    token: str = "secret"
    slots: int = 2
    lies: bool = False
    """DELETE answers 200, and the engine keeps the adapter all the same."""
    slow_delete: bool = False
    """DELETE answers 202 and leaves the run in CLEANUP until `finish_cleanup`."""
    refusals: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Run name to the problem JSON of a 422."""
    conflicts: int = 0
    """So many PUTs of runs are answered 409 though no newer operator is there."""
    boot_epoch: int = 1
    revision: int = 1
    synced: bool = False
    operator_epoch: int = 0
    spec: dict[str, Any] = field(default_factory=lambda: {"baseModel": {"name": "m"}})
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every call but GETs."""
    views: dict[str, AdapterView] = field(default_factory=dict)
    engine: dict[str, str] = field(default_factory=dict)
    """uid to the adapter name on the engine."""
    trainer: dict[int, str] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    """uids in the order in which they got a slot."""
    heard: float = 0.0
    """Monotonic time of the newest operator's last call."""
    port: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._server: ThreadingHTTPServer | None = None
        self._stopped = False

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listens; keeps its port over stop and start."""
        self._stopped = False
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Stops listening; long polls end with an error."""
        with self._changed:
            server, self._server, self._stopped = self._server, None, True
            self._changed.notify_all()
        if server is not None:
            server.shutdown()
            server.server_close()

    def restart(self, keep_engines: bool = False) -> None:
        """A new process: everything forgotten, a new boot epoch."""
        with self._changed:
            self.views.clear()
            self.trainer.clear()
            if not keep_engines:
                self.engine.clear()
            self.boot_epoch += 1
            self.revision, self.synced, self.operator_epoch = 1, False, 0
            self._changed.notify_all()

    def update(self, uid: str, **fields: Any) -> None:
        """Changes fields of a view and wakes long polls."""
        with self._changed:
            self.views[uid] = self.views[uid].model_copy(update=fields)
            self._touch()

    def step(self, uid: str, count: int = 1) -> None:
        """Commits optimizer steps."""
        view = self.views[uid]
        step = view.step + count
        self.update(
            uid, step=step, weight_version=view.weight_version + count, reward_mean=0.1 * step, lr=1e-3,
            last_step_time=time.time(), estimated_completion_time=time.time() + 60.0, steps_per_minute=12.0,
        )  # fmt: skip

    def complete(self, uid: str) -> None:
        """Target reached: the artifact is durable, then trainer and engines let go."""
        view = self.views[uid]
        artifact = ArtifactView(path=f"/storage/{view.name}/step_{view.step}", step=view.step, digest="ab" * 32)
        self.update(uid, outcome="Complete", state="RETIRING", reason=reasons.COMPLETED, artifact=artifact)
        self._end(uid, "COMPLETED")

    def fail(self, uid: str, reason: str, message: str) -> None:
        """The run fails; trainer and engines let go."""
        self.update(uid, outcome="Failed", reason=reason, message=message)
        self._end(uid, "FAILED")

    def finish_cleanup(self, uid: str) -> None:
        """Ends a slow DELETE."""
        with self._changed:
            self._drop(uid)
            self.views.pop(uid, None)
            self._admit()
            self._touch()

    def _end(self, uid: str, state: str) -> None:
        with self._changed:
            self._drop(uid)
            presence = self._presence(uid)
            self.update(uid, state=state, slot=None, registered=False, presence=presence, completion_time=time.time())
            self._admit()

    def _presence(self, uid: str) -> PresenceView:
        return PresenceView(trainer=uid in self.trainer.values(), engines=[ENGINE] if uid in self.engine else [])

    def _touch(self) -> None:
        self.revision += 1
        self._changed.notify_all()

    def _drop(self, uid: str) -> None:
        self.trainer = {slot: holder for slot, holder in self.trainer.items() if holder != uid}
        if not self.lies:
            self.engine.pop(uid, None)

    def _admit(self) -> None:
        for uid, view in sorted(self.views.items(), key=lambda item: item[1].generation):
            free = [slot for slot in range(self.slots) if slot not in self.trainer]
            if view.state != "QUEUED":
                continue
            if not free:
                self.views[uid] = view.model_copy(update={"queue_position": 1, "reason": reasons.SLOTS_EXHAUSTED})
                continue
            self.trainer[free[0]] = uid
            self.admitted.append(uid)
            self.engine[uid] = f"{uid}@{self.boot_epoch}.1.v1"
            self.views[uid] = view.model_copy(
                update={
                    "state": "ACTIVE", "registered": True, "slot": free[0], "weight_version": 1, "queue_position": None,
                    "reason": reasons.TRAINING, "message": "", "presence": self._presence(uid),
                    "start_time": view.start_time or time.time(), "start_step": view.step,
                }
            )  # fmt: skip

    # -- HTTP ---------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """One request."""
        parsed = urlparse(path)
        if headers.get("authorization") != f"Bearer {self.token}":
            return _problem(401, "Unauthorized", "wrong token")
        with self._changed:
            if method != "GET":
                self.calls.append((method, parsed.path))
            if parsed.path == "/v1/pool":
                return self._put_pool(PutPool.model_validate_json(body)) if method == "PUT" else self._pool()
            if parsed.path == "/v1/adapters":
                return self._list(parse_qs(parsed.query), int(headers.get(OPERATOR_EPOCH_HEADER.lower(), -1)))
            match = re.fullmatch(r"/v1/adapters/([^/]+)", parsed.path)
            if match and method == "PUT":
                return self._put(match[1], PutAdapter.model_validate_json(body))
            if match and method == "DELETE":
                return self._delete(match[1], int(headers.get(OPERATOR_EPOCH_HEADER.lower(), -1)))
        return _problem(404, "NotFound", path)

    def _fenced(self, epoch: int) -> Answer | None:
        if epoch >= self.operator_epoch:
            self.heard = time.monotonic()
            return None
        return _problem(409, "Fenced", f"operatorEpoch {epoch} is older than {self.operator_epoch}")

    def _pool(self) -> Answer:
        view = PoolView(
            boot_epoch=self.boot_epoch, revision=self.revision, synced=self.synced, spec=self.spec,
            operator_epoch=self.operator_epoch, slots=self._slots(), engines=self._engines(), versions={"fake": "1"},
            operator_silent_seconds=time.monotonic() - self.heard,
        )  # fmt: skip
        return 200, view.to_wire()

    def _put_pool(self, body: PutPool) -> Answer:
        refused = self._fenced(body.operator_epoch)
        if refused:
            return refused
        self.operator_epoch, self.synced = body.operator_epoch, True
        seen = [uid for uid, v in self.views.items() if body.namespaces is None or v.namespace in body.namespaces]
        others = self.views.keys() - seen
        for uid in [uid for uid in seen if uid not in body.uids]:
            self._drop(uid)
            del self.views[uid]
        for uid in [uid for uid in self.engine if uid not in {*body.uids, *others} and not self.lies]:
            del self.engine[uid]
        self._touch()
        return self._pool()

    def _put(self, uid: str, body: PutAdapter) -> Answer:
        refused = self._fenced(body.operator_epoch)
        if refused or body.name in self.refusals:
            return refused or (422, self.refusals[body.name])
        if self.conflicts:
            self.conflicts -= 1
            return _problem(409, "Conflict", "busy")
        view = self.views.get(uid)
        spec = body.spec
        if view is None:
            view = AdapterView(
                uid=uid, namespace=body.namespace, name=body.name, owner="operator", generation=body.generation,
                state="QUEUED", registered=False, reason=reasons.CHECKING_DATA, message="",
                groups_per_step=spec.get("rolloutBatchSize", 8),
            )  # fmt: skip
        self.views[uid] = view.model_copy(
            update={"generation": body.generation, "target_step": spec.get("numStep", 10)}
        )
        if spec.get("cancel"):
            self.update(uid, outcome="Cancelled", reason=reasons.CANCELLED)
            self._end(uid, "COMPLETED")
        elif spec.get("suspend"):
            self.update(uid, outcome="Suspended", reason=reasons.SUSPENDED_REASON)
            self._end(uid, "SUSPENDED")
            self.update(uid, completion_time=None)
        elif view.state == "SUSPENDED":
            self.update(uid, outcome=None, state="QUEUED", reason=reasons.PENDING)
        self._admit()
        self._touch()
        return 200, self.views[uid].to_wire()

    def _delete(self, uid: str, epoch: int) -> Answer:
        refused = self._fenced(epoch)
        if refused:
            return refused
        if self.slow_delete and uid in self.views:
            self.update(uid, outcome="Deleted", state="CLEANUP", registered=False, reason=reasons.DELETED)
            return 202, self.views[uid].to_wire()
        self.finish_cleanup(uid)
        return 200, {}

    def _list(self, query: dict[str, list[str]], epoch: int) -> Answer:
        refused = self._fenced(epoch)
        if refused:
            return refused
        if "after" in query:
            after = tuple(int(part) for part in query["after"][0].split(","))
            seconds = float(query.get("timeout", ["30"])[0])
            self._changed.wait_for(
                lambda: (self.boot_epoch, self.revision) != after or self._stopped or self._fenced(epoch),
                timeout=seconds,
            )
            if self._stopped:
                raise ConnectionAbortedError("stopped")
            refused = self._fenced(epoch)
            if refused and self.synced:
                return refused
        listing = AdapterList(
            listed=True,
            boot_epoch=self.boot_epoch, revision=self.revision, synced=self.synced,
            operator_epoch=self.operator_epoch, slots=self._slots(),
            trainer=TrainerView(ready=True, slots=dict(self.trainer)), engines=self._engines(),
            adapters=list(self.views.values()),
        )  # fmt: skip
        return 200, listing.to_wire()

    def _slots(self) -> SlotsView:
        queued = sum(view.state == "QUEUED" for view in self.views.values())
        return SlotsView(total=self.slots, used=len(self.trainer), queued=queued)

    def _engines(self) -> list[EngineView]:
        return [EngineView(engine=ENGINE, ready=True, adapters=sorted(self.engine.values()), listed_at=time.time())]


def _problem(status: int, title: str, detail: str) -> Answer:
    return status, {"type": "about:blank", "title": title, "status": status, "detail": detail}


def _handler(runtime: FakeRuntime) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Hands requests to the FakeRuntime."""

        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            headers = {key.lower(): value for key, value in self.headers.items()}
            try:
                code, body = runtime.answer(self.command, self.path, headers, self.rfile.read(length))
            except ConnectionAbortedError:
                self.close_connection = True
                return
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(content)

        do_GET = do_PUT = do_DELETE = _serve

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    return Handler


def play(runtime: FakeRuntime, step_seconds: float) -> None:
    """Steps every active run to its target and completes it, for ever."""
    while True:
        time.sleep(step_seconds)
        for uid, view in list(runtime.views.items()):
            if view.state != "ACTIVE":
                continue
            runtime.step(uid)
            if runtime.views[uid].step >= (view.target_step or 0):
                runtime.complete(uid)


def main() -> None:
    """Serves until killed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", default="secret")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--boot-epoch", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--lies", action="store_true")
    options = parser.parse_args()
    runtime = FakeRuntime(
        token=options.token, slots=options.slots, lies=options.lies, port=options.port, boot_epoch=options.boot_epoch
    )
    runtime.start()
    print(runtime.url, flush=True)
    play(runtime, options.step_seconds)


if __name__ == "__main__":
    main()
