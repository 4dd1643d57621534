"""/healthz, /readyz and /metrics on a plain threaded HTTP server, so that a stuck event loop is seen as such."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

logger = logging.getLogger(__name__)

MAX_HEARTBEAT_AGE_SECONDS = 30.0


@dataclass(slots=True)
class Health:
    """What the probes tell; written by the main loop, read by the server's threads."""

    watching: Callable[[], bool] = lambda: False
    """Whether the watch thread runs."""
    ready: bool = False
    """Everything was listed once."""
    standing_by: Callable[[], str | None] = lambda: None
    """Which operator this one waits for, in words. One that stands by is ready to take over."""
    fenced: str | None = None
    """Why this operator writes nothing more, though it has not ended yet."""
    heartbeat: float = field(default_factory=time.monotonic)
    """Monotonic time of the main loop's last beat."""

    def problems(self) -> list[str]:
        """Why this process should be restarted; empty when it is well."""
        found = []
        age = time.monotonic() - self.heartbeat
        if age > MAX_HEARTBEAT_AGE_SECONDS:
            found.append(f"the event loop has not run for {age:.0f} s")
        if self.ready and not self.watching():
            found.append("the watches have ended")
        return found

    def readiness(self) -> tuple[bool, str]:
        """Whether this process is what it is meant to be now, working or standing by, and what to say."""
        problems = self.problems()
        waiting = self.standing_by()
        if self.fenced is not None:
            problems.append(f"fenced: {self.fenced}")
        elif not self.ready and waiting is None:
            problems.append("not everything was listed yet")
        return not problems, "\n".join(problems) or waiting or "ok"


def serve(host: str, port: int, health: Health, registry: CollectorRegistry) -> ThreadingHTTPServer:
    """Starts serving in a daemon thread; `shutdown` and `server_close` of the result end it."""

    class Handler(BaseHTTPRequestHandler):
        """Answers the three paths."""

        def do_GET(self) -> None:
            """Answers one request."""
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path == "/healthz":
                problems = health.problems()
                self._answer(503 if problems else 200, ("\n".join(problems) or "ok").encode(), "text/plain")
            elif path == "/readyz":
                ready, text = health.readiness()
                self._answer(200 if ready else 503, text.encode(), "text/plain")
            else:
                self._answer(404, b"paths: /healthz /readyz /metrics", "text/plain")

        def _answer(self, code: int, body: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are logged at debug level only."""
            logger.debug(format, *args)

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name=f"http-{port}", daemon=True).start()
    return server
