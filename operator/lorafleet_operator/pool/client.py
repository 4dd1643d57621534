"""The operator's side of the runtime's /v1 HTTP API. Caller: `pool.connection`. No retries, no policy."""

import math
from typing import Any

import httpx
from pydantic import ValidationError

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.meta import ApiModel
from lorafleet_api.v1alpha1.wire import (
    OPERATOR_EPOCH_HEADER,
    AdapterList,
    AdapterView,
    PoolView,
    PutAdapter,
    PutPool,
)
from lorafleet_operator.errors import RuntimeFenced, RuntimeUnauthorized, RuntimeUnavailable, SpecRefused

CALL_TIMEOUT = httpx.Timeout(30.0, connect=3.0)


class RuntimeClient:
    """Calls one runtime.

    Args:
        http: client with base_url and the bearer token; `open_runtime` makes it.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def get_pool(self) -> PoolView:
        """What the runtime is; needs no epoch.

        Raises:
            RuntimeUnavailable, RuntimeUnauthorized: see errors; so do all calls.
        """
        return _parse(PoolView, await self._call("GET", "/v1/pool"))

    async def put_pool(self, body: PutPool) -> PoolView:
        """Tells the runtime who operates it and which runs exist.

        Raises:
            RuntimeFenced: a newer operator owns it.
        """
        return _parse(PoolView, await self._call("PUT", "/v1/pool", json=body.to_wire()))

    async def list(self, epoch: int, after: tuple[int, int] | None, poll_seconds: float) -> AdapterList:
        """Every run, or (with `after`) waits up to `poll_seconds` for a revision after (boot epoch, revision)."""
        params: dict[str, Any] = {}
        if after is not None:
            params = {"after": f"{after[0]},{after[1]}", "timeout": str(math.ceil(poll_seconds))}
        timeout = httpx.Timeout(poll_seconds + 15.0, connect=3.0)
        answer = await self._call("GET", "/v1/adapters", params=params, headers=_epoch(epoch), timeout=timeout)
        return _parse(AdapterList, answer)

    async def put_adapter(self, uid: str, body: PutAdapter) -> AdapterView:
        """Makes the runtime know this generation of a run; idempotent.

        Raises:
            SpecRefused: the spec is not usable in this pool.
        """
        return _parse(AdapterView, await self._call("PUT", f"/v1/adapters/{uid}", json=body.to_wire()))

    async def delete_adapter(self, uid: str, epoch: int) -> bool:
        """Asks the runtime to let go of a run and forget it.

        Returns:
            True when the runtime says that it is gone. That is a claim; the next listing is the evidence.
        """
        answer = await self._call("DELETE", f"/v1/adapters/{uid}", headers=_epoch(epoch), gone_is_fine=True)
        return answer.status_code != 202

    async def _call(self, method: str, path: str, *, gone_is_fine: bool = False, **options: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise RuntimeUnavailable(f"{self._http.base_url}: {type(error).__name__} {error}".rstrip()) from error
        code = answer.status_code
        if answer.is_success or (gone_is_fine and code == 404):
            return answer
        if code in (401, 403):
            raise RuntimeUnauthorized(f"{self._http.base_url} refused the token; check endpoint.tokenSecretRef")
        if code == 409:
            raise RuntimeFenced(_problem_text(answer))
        if code in (400, 422) and method == "PUT" and path.startswith("/v1/adapters/"):
            raise _refusal(answer)
        raise RuntimeUnavailable(f"{method} {path} answered {code}: {_problem_text(answer)}")


def open_runtime(url: str, token: str) -> RuntimeClient:
    """A client for a real runtime."""
    headers = {"Authorization": f"Bearer {token}"}
    return RuntimeClient(httpx.AsyncClient(base_url=url, headers=headers, timeout=CALL_TIMEOUT, trust_env=False))


def _epoch(epoch: int) -> dict[str, str]:
    return {OPERATOR_EPOCH_HEADER: str(epoch)}


def _parse[T: ApiModel](kind: type[T], answer: httpx.Response) -> T:
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RuntimeUnavailable(
            f"{answer.request.url.path}: the answer is no {kind.__name__} ({where}: {first['msg']}); "
            "use operator and runtime of the same version"
        ) from error


def _problem(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _problem_text(answer: httpx.Response) -> str:
    problem = _problem(answer)
    return str(problem.get("detail") or problem.get("title") or answer.text[:300])


def _refusal(answer: httpx.Response) -> SpecRefused:
    """A spec problem as the Failed condition tells it: what is wrong, with field, value and fix."""
    problem = _problem(answer)
    title = str(problem.get("title", ""))
    reason = title if title in reasons.FAILURE_REASONS else reasons.INVALID_SPEC
    text = _problem_text(answer)
    field, value, fix = problem.get("field"), problem.get("value"), problem.get("fix")
    if field and str(field) not in text:
        text = f"{field}: {text}"
    if value is not None and str(value) not in text:
        text += f" (value {value!r})"
    if fix and str(fix) not in text:
        text += f"; {fix}"
    return SpecRefused(reason, text)
