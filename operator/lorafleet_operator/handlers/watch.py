"""Watches AdapterRuns and AdapterPools with kopf, in a thread and event loop of its own.

kopf cancels foreign tasks of its loop when it ends, and its watches must not wait for our work: so it runs apart and
hands each event to the main loop. It decides nothing and writes nothing.

Consumes: the API server's watches. Produces: (kind, event type, object) on the main loop. Ends: when stopped, or by
itself with an error that ends the process, since an operator that does not watch is of no use.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from lorafleet_api.v1alpha1 import names
from lorafleet_operator.kube.access import ApiAccess
from lorafleet_operator.store import KINDS, Kind, Object

logger = logging.getLogger(__name__)

OnEvent = Callable[[Kind, str | None, Object], None]

RECONNECT_SECONDS = 300
CONNECT_TIMEOUT_SECONDS = 5
REQUEST_TIMEOUT_SECONDS = 30
LOGIN_RETRY_SECONDS = 2.0
"""A token file that cannot be read is read again this often."""
API_RETRY_SECONDS = (0.5, 1.0, 2.0, 3.0, *(5.0 for _ in range(720)))
"""kopf's waits between tries: an API server may be away for an hour before the process ends and is started anew."""


class Watcher:
    """kopf in a thread.

    Args:
        access: API server and credentials.
        namespace: the one to watch, or None for all.
        on_event: called on the main loop.
        on_exit: called on the main loop when the watching ended, with the error if there was one.
    """

    def __init__(
        self,
        access: ApiAccess,
        namespace: str | None,
        on_event: OnEvent,
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        self._access = access
        self._namespace = namespace
        self._on_event = on_event
        self._on_exit = on_exit
        self._main = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        """Starts watching."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    async def stop(self, timeout_seconds: float = 5.0) -> None:
        """Ends the watches and waits for the thread."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, timeout_seconds)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._operate())
        except Exception as caught:
            logger.exception("the watches ended")
            error = caught
        if not self._stop.is_set():
            self._main.call_soon_threadsafe(self._on_exit, error)

    async def _operate(self) -> None:
        await kopf.operator(
            registry=self._registry(),
            settings=_settings(),
            standalone=True,
            clusterwide=self._namespace is None,
            namespaces=[self._namespace] if self._namespace is not None else [],
            stop_flag=self._stop,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        def login(**_: Any) -> kopf.ConnectionInfo:
            return connection_info(self._access)

        kopf.on.login(registry=registry, backoff=LOGIN_RETRY_SECONDS)(login)
        for kind in KINDS:
            kopf.on.event(names.GROUP, names.VERSION, kind, registry=registry)(self._forward(kind))
        return registry

    def _forward(self, kind: Kind) -> Callable[..., Awaitable[None]]:
        async def seen(event: Any, **_: Any) -> None:
            obj = dict(event["object"])
            obj["metadata"] = dict(obj["metadata"])  # the store drops managedFields from its own copy
            self._main.call_soon_threadsafe(self._on_event, kind, event["type"], obj)

        return seen


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # a namespaced Role cannot list namespaces or CRDs
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.watching.connect_timeout = CONNECT_TIMEOUT_SECONDS
    settings.watching.server_timeout = RECONNECT_SECONDS
    settings.networking.connect_timeout = CONNECT_TIMEOUT_SECONDS
    settings.networking.request_timeout = REQUEST_TIMEOUT_SECONDS
    settings.networking.error_backoffs = API_RETRY_SECONDS
    settings.background.cancellation_polling = 1
    return settings


def connection_info(access: ApiAccess) -> kopf.ConnectionInfo:
    """The same credentials in kopf's form."""
    return kopf.ConnectionInfo(
        server=access.server,
        ca_data=access.ca_pem,
        certificate_data=access.cert_pem,
        private_key_data=access.key_pem,
        token=access.token,
        insecure=access.insecure or None,
    )
