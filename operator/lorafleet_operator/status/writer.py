"""Writes status to the /status subresource: guarded by resourceVersion, never silently dropped. Caller: controller.

compute(object) ─▶ merge patch with resourceVersion ─▶ written
                      409: read again, compute again
                      422: counted, logged, an Event; the caller retries later
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

from pydantic import ValidationError

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.meta import ApiModel
from lorafleet_api.v1alpha1.status import AdapterPoolStatus, AdapterRunStatus
from lorafleet_operator import metrics
from lorafleet_operator.errors import Conflict, Invalid, OperatorError
from lorafleet_operator.kube.client import KubeClient
from lorafleet_operator.reconcile.throttle import merge_patch
from lorafleet_operator.store import Kind

logger = logging.getLogger(__name__)

Object = dict[str, Any]
TRIES = 8
_TYPES: dict[Kind, type[ApiModel]] = {"adapterruns": AdapterRunStatus, "adapterpools": AdapterPoolStatus}


class RateLimit:
    """At most `per_second` writes a second, with a burst of two seconds' worth."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._tokens = 2.0 * per_second
        self._last = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether a write would have to wait now."""
        self._refill()
        return self._tokens < 1.0

    async def wait(self) -> None:
        """Returns when one more write may be sent."""
        self._refill()
        self._tokens -= 1.0
        if self._tokens < 0.0:
            await asyncio.sleep(-self._tokens / self._per_second)

    def _refill(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._tokens + (now - self._last) * self._per_second, 2.0 * self._per_second)
        self._last = now


class Turns[K: Hashable]:
    """Spreads writes that can wait: each key gets a turn of its own, `per_second` of them, without a burst."""

    def __init__(self, per_second: float) -> None:
        self._gap = 1.0 / per_second
        self._next = 0.0
        self._turns: dict[K, float] = {}

    def wait(self, key: K, now: float) -> float:
        """Seconds until the key's turn, which is given out at the first call; 0.0 ends it. `now` is monotonic time."""
        turn = self._turns.setdefault(key, max(now, self._next))
        self._next = max(self._next, turn + self._gap)
        if turn > now:
            return turn - now
        del self._turns[key]
        return 0.0

    def drop(self, key: K) -> None:
        """The key has nothing to write any more."""
        self._turns.pop(key, None)


class StatusWriter:
    """Writes status and Events through one client, within one budget."""

    def __init__(self, kube: KubeClient, writes_per_second: float) -> None:
        self._kube = kube
        self._limit = RateLimit(writes_per_second)

    @property
    def busy(self) -> bool:
        """Whether others wait for the budget: what is less urgent should come later."""
        return self._limit.busy

    async def write(self, kind: Kind, obj: Object, compute: Callable[[Object], Object | None]) -> Object:
        """Makes the stored status equal to what `compute` wants.

        Args:
            kind: which resource.
            obj: the object as last seen.
            compute: the desired status of an object; called again with the fresh object after a conflict. None
                means that nothing is wanted.

        Returns:
            The newest object, written or not.

        Raises:
            Invalid: the API server refuses the status; that has been logged, counted and recorded as an Event.
            NotFound, ApiUnavailable, Conflict: the last one after several tries.
        """
        for attempt in range(TRIES):
            desired = compute(obj)
            patch = {} if desired is None else merge_patch(obj.get("status") or {}, desired)
            if not patch:
                return obj
            await self._limit.wait()
            try:
                return await self._send(kind, obj, patch, desired or {})
            except Conflict:
                metrics.STATUS_CONFLICTS.labels(kind).inc()
                if attempt == TRIES - 1:
                    raise
                meta = obj["metadata"]
                obj = await self._kube.get(kind, meta["namespace"], meta["name"])
        raise AssertionError("unreachable: the last try returns or raises")

    async def _send(self, kind: Kind, obj: Object, patch: Object, desired: Object) -> Object:
        meta = obj["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"], "uid": meta["uid"]}, "status": patch}
        try:
            _TYPES[kind].model_validate(desired)
            written = await self._kube.patch(kind, meta["namespace"], meta["name"], body, subresource="status")
        except (Invalid, ValidationError) as error:
            refusal = error if isinstance(error, Invalid) else Invalid(422, f"own check: {error}")
            await self._tell(kind, obj, refusal)
            raise refusal from error
        metrics.STATUS_WRITES.labels(kind).inc()
        return written

    async def _tell(self, kind: Kind, obj: Object, refusal: Invalid) -> None:
        """An invalid status is a fault of this operator; it must be seen by people."""
        meta = obj["metadata"]
        metrics.STATUS_WRITE_ERRORS.labels(kind).inc()
        causes = "; ".join(refusal.causes) or refusal.message
        logger.error("%s %s/%s: the API server refused a status: %s", kind, meta["namespace"], meta["name"], causes)
        await self.event(obj, "Warning", reasons.STATUS_WRITE_REJECTED, f"a status was refused as invalid: {causes}")

    async def event(self, about: Object, kind: str, reason: str, message: str) -> None:
        """Records an Event; one that cannot be recorded (a terminating namespace, say) is logged and let go."""
        try:
            await self._kube.create_event(about, kind, reason, message)
        except OperatorError as error:
            logger.info("Event %s about %s not recorded: %s", reason, about["metadata"]["name"], error)
