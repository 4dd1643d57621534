"""Which operator works: a coordination.k8s.io Lease, taken before anything is read and renewed while it lasts.

    acquire: no lease, a released one, ours, or one that nobody renewed for its duration ─▶ ours
             another's ─▶ stand by
    hold:    renew ─▶ fine
             another's, or taken by another process under our identity ─▶ lost, the process must end
             no answer ─▶ `check` refuses writes once the duration has passed, until a renewal succeeds
    give_up: for good; nothing takes or renews it any more

Caller: `app`. The lease keeps two operators from starting; operatorEpoch fences one that was paused or cut off and has
not noticed yet. Another's clock is never compared with ours: a lease expires when we saw no change of it for that long.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from lorafleet_operator.errors import ApiUnavailable, ConfigError, Conflict, NotFound, OperatorError
from lorafleet_operator.kube.client import KubeClient
from lorafleet_operator.pool.backoff import Backoff

logger = logging.getLogger(__name__)

Object = dict[str, Any]

NAME = "lorafleet-operator"
API_VERSION = "coordination.k8s.io/v1"
_RENEWALS = 3
"""Renewals per duration."""


class Lease:
    """One Lease object and whether this process holds it.

    Args:
        kube: client; its writes of everything else should ask `check`.
        namespace: of the Lease; operators of one namespace exclude each other.
        identity: of this process. One that is started again under the same identity goes on at once.
        seconds: duration: a holder that is silent for so long is replaced.
    """

    def __init__(self, kube: KubeClient, namespace: str, identity: str, seconds: float) -> None:
        self._kube = kube
        self._identity = identity
        self._seconds = seconds
        self._namespace = namespace
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/leases"
        self._renewed: float | None = None
        """Monotonic time at which the last renewal that succeeded was sent; None while not held."""
        self._given_up = False
        self._claimed = ""
        """acquireTime of this process's claim: tells it from another process of the same identity."""
        self._version = ""
        self._seen_at = 0.0
        self._rival = ""

    def __str__(self) -> str:
        return f"lease {self._namespace}/{NAME}"

    def check(self) -> None:
        """Returns while this process surely holds the lease.

        Raises:
            ApiUnavailable: it was given up, or not renewed for its whole duration, so that another operator may work.
        """
        if self._given_up:
            raise ApiUnavailable(f"{self}: given up by this operator; it writes nothing more")
        if self._renewed is None:
            raise ApiUnavailable(f"{self}: not held by this operator; nothing is written")
        age = time.monotonic() - self._renewed
        if age >= self._seconds:
            raise ApiUnavailable(f"{self}: not renewed for {age:.0f} s; nothing is written until it is")

    @property
    def held(self) -> bool:
        """Whether this process surely holds it."""
        return self._renewed is not None and time.monotonic() - self._renewed < self._seconds

    @property
    def standing_by(self) -> str | None:
        """Whom this process waits for, in words; None when it holds the lease or has not looked yet."""
        return None if self._renewed is not None or not self._rival else f"standing by: {self._rival} holds {self}"

    def give_up(self) -> None:
        """Hold it no more, whatever the object says: `check` refuses for good, and nothing renews it."""
        self._given_up = True
        self._renewed = None

    async def look(self) -> tuple[str, str] | None:
        """Whose it is if not this identity's (else ""), and its resourceVersion; None when there is no answer."""
        try:
            found = await self._kube.call("GET", f"{self._path}/{NAME}")
        except NotFound:
            return "", ""
        except OperatorError as error:
            logger.info("%s: %s", self, error)
            return None
        holder = (found.get("spec") or {}).get("holderIdentity") or ""
        return "" if holder == self._identity else holder, found["metadata"]["resourceVersion"]

    async def acquire(self) -> None:
        """Waits until this process holds the lease.

        Raises:
            ConfigError: its namespace does not exist.
        """
        backoff = Backoff(0.2, self._seconds / _RENEWALS / 2.0)
        while True:
            try:
                if await self._try():
                    return
                await asyncio.sleep(self._seconds / _RENEWALS / 2.0)
            except Conflict:
                continue  # somebody was quicker; look again
            except ConfigError:
                raise
            except OperatorError as error:
                logger.error("%s: %s; trying again", self, error)
                await asyncio.sleep(backoff.next())

    async def hold(self, lost: Callable[[str], None]) -> None:
        """Renews until cancelled, or until another holds the lease: then `lost` is told why."""
        pause = self._seconds / _RENEWALS
        while True:
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(self._seconds / 2.0):
                    held = await self._try()
            except Conflict:
                pause = 0.0
                continue
            except (OperatorError, TimeoutError) as error:
                logger.warning("%s: not renewed: %s", self, error or "no answer in time")
                pause = self._seconds / _RENEWALS / 2.0
                continue
            if self._given_up:
                return
            if not held:
                self.give_up()
                lost(f"{self} is held by {self._rival}")
                return
            pause = self._seconds / _RENEWALS

    async def release(self) -> None:
        """Lets the next operator begin at once; one that cannot be released expires."""
        if self._renewed is None:
            return
        self.give_up()
        body = {"metadata": {"resourceVersion": self._version}, "spec": {"holderIdentity": ""}}
        try:
            async with asyncio.timeout(2.0):
                await self._send(body)
        except (OperatorError, TimeoutError) as error:
            logger.info("%s: not released, it expires: %s", self, error)

    async def _try(self) -> bool:
        """Takes or renews the lease. False while another's is in force, and after `give_up`."""
        if self._given_up:
            return False
        sent = time.monotonic()
        try:
            found = await self._kube.call("GET", f"{self._path}/{NAME}")
        except NotFound:
            written = await self._create()
        else:
            if self._given_up or not self._may_take(found, sent):
                return False
            written = await self._send(self._claim(found))
        if self._given_up:
            return False
        self._version = written["metadata"]["resourceVersion"]
        self._claimed = (written.get("spec") or {}).get("acquireTime", "")  # as the API server spells it
        if self._renewed is None:
            logger.info("%s: held by this operator, %s", self, self._identity)
        self._renewed = sent
        return True

    def _may_take(self, found: Object, now: float) -> bool:
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        version = found["metadata"]["resourceVersion"]
        if holder == self._identity and self._renewed is not None and spec.get("acquireTime") != self._claimed:
            self._rival = f"another process under the same identity, {holder}; give each its own --identity"
            return False
        if holder in ("", self._identity):
            return True
        if version != self._version:
            self._version, self._seen_at = version, now
        if now - self._seen_at >= float(spec.get("leaseDurationSeconds") or self._seconds):
            logger.warning("%s: %s has not renewed it; taking over", self, holder)
            return True
        if holder != self._rival:
            self._rival = holder
            logger.warning("%s: standing by while %s holds it; is a second operator meant to run?", self, holder)
        return False

    def _claim(self, found: Object) -> Object:
        old = found.get("spec") or {}
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec: Object = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._seconds)),
            "renewTime": now,
        }
        if old.get("holderIdentity") != self._identity or self._renewed is None:
            self._claimed = now
            spec |= {"acquireTime": now, "leaseTransitions": int(old.get("leaseTransitions") or 0) + 1}
        return {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "spec": spec}

    async def _create(self) -> Object:
        lease = {
            "apiVersion": API_VERSION,
            "kind": "Lease",
            "metadata": {"name": NAME, "namespace": self._namespace},
            "spec": self._claim({"metadata": {"resourceVersion": ""}})["spec"],
        }
        try:
            return await self._kube.call("POST", self._path, body=lease)
        except NotFound as error:
            fix = "create the namespace, or name another with --lease-namespace"
            raise ConfigError(f"lease-namespace: {self._namespace}: {error.message}; {fix}") from error

    async def _send(self, body: Object) -> Object:
        headers = {"Content-Type": "application/merge-patch+json"}
        return await self._kube.call("PATCH", f"{self._path}/{NAME}", body=body, headers=headers)
