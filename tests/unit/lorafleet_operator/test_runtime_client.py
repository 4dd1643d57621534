"""The client of the runtime: problems into reasons, codes into errors."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.wire import PutAdapter
from lorafleet_operator.errors import RuntimeFenced, RuntimeUnauthorized, RuntimeUnavailable, SpecRefused
from lorafleet_operator.pool.client import RuntimeClient
from support.operator_world import listing

BODY = PutAdapter(namespace="team", name="r", spec={}, generation=1, operator_epoch=3, creation_timestamp=0.0)


def client(handler: Callable[[httpx.Request], httpx.Response]) -> RuntimeClient:
    """A client with canned answers."""
    return RuntimeClient(httpx.AsyncClient(base_url="http://runtime", transport=httpx.MockTransport(handler)))


def answering(code: int, body: object) -> RuntimeClient:
    """Always the same answer."""
    return client(lambda request: httpx.Response(code, json=body))


@pytest.mark.parametrize(
    ("problem", "reason", "message"),
    [
        (
            {
                "title": "RankTooLarge",
                "detail": "rank 64 is above maxRank 32",
                "field": "rank",
                "value": 64,
                "fix": "use 32",
            },
            reasons.RANK_TOO_LARGE,
            "rank 64 is above maxRank 32; use 32",
        ),
        (
            {
                "title": "Unprocessable",
                "detail": "must be at most 1",
                "field": "sampling.topP",
                "value": 2,
                "fix": "use 1",
            },
            reasons.INVALID_SPEC,
            "sampling.topP: must be at most 1 (value 2); use 1",
        ),
        ("no object", reasons.INVALID_SPEC, '"no object"'),
    ],
)
def test_problem_becomes_reason_and_message(problem: object, reason: str, message: str) -> None:
    with pytest.raises(SpecRefused) as caught:
        asyncio.run(answering(422, problem).put_adapter("u", BODY))
    assert (caught.value.reason, caught.value.message) == (reason, message)


@pytest.mark.parametrize(
    ("code", "error"),
    [(401, RuntimeUnauthorized), (403, RuntimeUnauthorized), (409, RuntimeFenced), (500, RuntimeUnavailable)],
)
def test_codes_become_errors(code: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        asyncio.run(answering(code, {"detail": "x"}).put_adapter("u", BODY))


def test_422_of_anything_but_a_run_is_no_refused_spec() -> None:
    with pytest.raises(RuntimeUnavailable):
        asyncio.run(answering(422, {"detail": "x"}).get_pool())


@pytest.mark.parametrize(("code", "gone"), [(200, True), (202, False), (404, True)])
def test_delete_tells_whether_the_run_is_gone(code: int, gone: bool) -> None:
    assert asyncio.run(answering(code, {}).delete_adapter("u", 3)) is gone


def test_answer_of_another_version_is_unavailable_and_says_where() -> None:
    with pytest.raises(RuntimeUnavailable, match=r"no AdapterList \(bootEpoch.*same version"):
        asyncio.run(answering(200, {"hello": 1}).list(3, None, 0.0))


def test_long_poll_sends_epoch_header_and_position() -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json=listing().to_wire())

    asyncio.run(client(answer).list(3, (2, 17), 30.0))
    assert sent[0].headers["X-LoraFleet-Operator-Epoch"] == "3"
    assert dict(sent[0].url.params) == {"after": "2,17", "timeout": "30"}
