"""The API client: paths, errors told apart, pages, Events."""

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from lorafleet_operator.errors import ApiRefused, ApiUnavailable, Conflict, Invalid, NotFound
from lorafleet_operator.kube.access import ApiAccess
from lorafleet_operator.kube.client import BearerToken, KubeClient
from support.fake_api import FakeApi
from support.operator_world import run_object

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler) -> KubeClient:
    """A client with canned answers."""
    return KubeClient(httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(handler)))


@pytest.mark.parametrize(
    ("code", "error"),
    [(404, NotFound), (409, Conflict), (422, Invalid), (403, ApiRefused), (429, ApiUnavailable), (503, ApiUnavailable)],
)
def test_status_codes_become_errors_that_say_whether_to_try_again(code: int, error: type[Exception]) -> None:
    kube = client(lambda request: httpx.Response(code, json={"message": "why"}))
    with pytest.raises(error, match="why"):
        asyncio.run(kube.get("adapterruns", "team", "r"))


def test_unreachable_server_is_unavailable() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ApiUnavailable, match=r"GET /apis/lorafleet\.dev/v1alpha1/namespaces/team/adapterruns/r"):
        asyncio.run(client(refuse).get("adapterruns", "team", "r"))


@pytest.mark.parametrize("body", [b"<html>the proxy's own page</html>", b"[]", b""])
def test_good_answer_without_a_json_object_is_unavailable(body: bytes) -> None:
    kube = client(lambda request: httpx.Response(200, content=body))
    with pytest.raises(ApiUnavailable, match=r"GET .*200, but no JSON"):
        asyncio.run(kube.get("adapterruns", "team", "r"))
    assert kube.last_success is None


def test_unreadable_token_file_is_unavailable_and_the_next_call_reads_it_again(tmp_path: Path) -> None:
    access = ApiAccess("http://api", token_file=tmp_path / "token")
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["Authorization"])
        return httpx.Response(200, json={})

    transport = httpx.MockTransport(answer)
    kube = KubeClient(httpx.AsyncClient(base_url="http://api", auth=BearerToken(access), transport=transport))

    async def scenario() -> None:
        with pytest.raises(ApiUnavailable, match=r"token file .*token"):
            await kube.ping(None)
        (tmp_path / "token").write_text("fresh", encoding="utf-8")
        await kube.ping(None)

    asyncio.run(scenario())
    assert sent == ["Bearer fresh"]


def test_list_follows_pages_and_keeps_the_first_version() -> None:
    pages = {
        "": {"metadata": {"resourceVersion": "7", "continue": "next"}, "items": [{"n": 1}]},
        "next": {"metadata": {"resourceVersion": "9"}, "items": [{"n": 2}]},
    }
    kube = client(lambda request: httpx.Response(200, json=pages[request.url.params.get("continue", "")]))
    listing = asyncio.run(kube.list("adapterruns", None))
    assert [item["n"] for item in listing.items] == [1, 2]
    assert listing.version == 7


def test_list_of_all_namespaces_and_of_one() -> None:
    paths: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(200, json={"metadata": {}, "items": []})

    kube = client(answer)
    asyncio.run(kube.list("adapterpools", None))
    asyncio.run(kube.list("adapterpools", "team"))
    assert paths == [
        "/apis/lorafleet.dev/v1alpha1/adapterpools",
        "/apis/lorafleet.dev/v1alpha1/namespaces/team/adapterpools",
    ]


def test_secret_is_decoded_and_a_missing_key_named() -> None:
    api = FakeApi()
    api.secrets["team", "tok"] = {"token": base64.b64encode(b"s3cret\n").decode()}
    kube = api.client()
    assert asyncio.run(kube.secret_value("team", "tok", "token")) == "s3cret"
    with pytest.raises(NotFound, match=r"no key 'auth'; it has \['token'\]"):
        asyncio.run(kube.secret_value("team", "tok", "auth"))


@pytest.mark.parametrize("name", ["r", "a" * 253, "a." * 100 + "b" * 53], ids=["short", "longest", "dotted"])
def test_event_names_are_valid_for_every_object_name(name: str) -> None:
    api = FakeApi()
    run = run_object()
    run["metadata"]["name"] = name
    asyncio.run(api.client().create_event(run, "Normal", "Registered", "x" * 5000))
    [event] = api.events
    assert len(event["metadata"]["name"]) <= 253
    assert ".." not in event["metadata"]["name"]
    assert len(event["message"]) == 1024
    assert event["involvedObject"]["uid"] == run["metadata"]["uid"]


def test_delete_of_another_object_with_that_name_is_left_alone() -> None:
    kube = client(lambda request: httpx.Response(409, json={"message": "uid precondition"}))
    asyncio.run(kube.delete("adapterruns", "team", "r", "uid"))
