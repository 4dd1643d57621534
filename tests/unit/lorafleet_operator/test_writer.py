"""The status writer: refusals are loud, conflicts are decided again, equal states cost nothing."""

import asyncio
import logging

import httpx
import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_operator import metrics
from lorafleet_operator.errors import ApiUnavailable, Conflict, Invalid, NotFound
from lorafleet_operator.kube.client import KubeClient
from lorafleet_operator.status.writer import StatusWriter
from support.fake_api import FakeApi, Object
from support.operator_world import run_object

REFUSAL = {
    "kind": "Status", "code": 422, "reason": "Invalid", "message": "AdapterRun \"r\" is invalid",
    "details": {"causes": [{"field": "status.conditions[0].reason", "message": "should match '^[A-Za-z]'"}]},
}  # fmt: skip


def world() -> tuple[FakeApi, StatusWriter, Object]:
    """An API server with one run, and a writer."""
    api = FakeApi()
    run = dict(api.add("adapterruns", run_object()))
    run["metadata"] = dict(run["metadata"])
    return api, StatusWriter(api.client(), 1000.0), run


def write(writer: StatusWriter, run: Object, status: Object | None) -> Object:
    """Writes a fixed status."""
    return asyncio.run(writer.write("adapterruns", run, lambda fresh: status))


def errors() -> float:
    """The counter of refused writes."""
    return (
        metrics.REGISTRY.get_sample_value("lorafleet_operator_status_write_errors_total", {"kind": "adapterruns"})
        or 0.0
    )


def test_status_is_written_through_the_subresource() -> None:
    api, writer, run = world()
    written = write(writer, run, {"step": 3})
    assert written["status"] == {"step": 3}
    assert api.writes == [("PATCH", "/apis/lorafleet.dev/v1alpha1/namespaces/team/adapterruns/r/status")]


def test_equal_status_is_not_written() -> None:
    api, writer, run = world()
    run = write(writer, run, {"step": 3})
    write(writer, run, {"step": 3})
    write(writer, run, None)
    assert len(api.writes) == 1


def test_field_that_is_gone_is_removed() -> None:
    _, writer, run = world()
    run = write(writer, run, {"step": 3, "queuePosition": 1})
    assert write(writer, run, {"step": 3})["status"] == {"step": 3}


def test_conflict_is_read_again_and_decided_again_from_the_fresh_object() -> None:
    api, writer, run = world()
    api.edit("adapterruns", "team", "r", lambda obj: obj.update(status={"targetStep": 15}))

    def compute(fresh: Object) -> Object:
        return {"step": 3} | ({"targetStep": fresh["status"]["targetStep"]} if "status" in fresh else {})

    written = asyncio.run(writer.write("adapterruns", run, compute))
    assert written["status"] == {"step": 3, "targetStep": 15}
    assert [method for method, _ in api.writes] == ["PATCH", "PATCH"]


def test_endless_conflicts_end_as_a_conflict() -> None:
    api, writer, run = world()

    def meddle(method: str, path: str) -> None:
        api.edit("adapterruns", "team", "r", lambda obj: None)

    api.on_call = meddle
    with pytest.raises(Conflict):
        write(writer, run, {"step": 3})
    assert len(api.writes) == 8


def test_refused_status_is_logged_counted_and_an_event(caplog: pytest.LogCaptureFixture) -> None:
    api, writer, run = world()
    api.status_refusal = REFUSAL
    before = errors()
    with caplog.at_level(logging.ERROR), pytest.raises(Invalid):
        write(writer, run, {"step": 3})
    assert errors() == before + 1
    assert "status.conditions[0].reason" in caplog.text
    [event] = api.events
    assert (event["type"], event["reason"]) == ("Warning", reasons.STATUS_WRITE_REJECTED)
    assert "should match" in event["message"]
    assert event["source"]["component"] == "lorafleet-operator"


def test_status_that_our_own_types_refuse_is_as_loud_and_not_sent() -> None:
    api, writer, run = world()
    condition = {"type": "Ready", "status": "True", "reason": "not camel", "message": "", "lastTransitionTime": "x"}
    before = errors()
    with pytest.raises(Invalid):
        write(writer, run, {"conditions": [condition]})
    assert errors() == before + 1
    assert [event["reason"] for event in api.events] == [reasons.STATUS_WRITE_REJECTED]
    assert all(path.endswith("/events") for _, path in api.writes)


def test_corrected_write_after_a_refusal_succeeds() -> None:
    api, writer, run = world()
    api.status_refusal = REFUSAL
    with pytest.raises(Invalid):
        write(writer, run, {"step": 3})
    assert write(writer, run, {"step": 3})["status"] == {"step": 3}


def test_object_that_is_gone_and_server_that_is_down_are_told_apart() -> None:
    api, writer, run = world()
    api.objects.clear()
    with pytest.raises(NotFound):
        write(writer, run, {"step": 3})

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    dead = KubeClient(httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(refuse)))
    with pytest.raises(ApiUnavailable):
        write(StatusWriter(dead, 1000.0), run, {"step": 3})


def test_event_in_a_terminating_namespace_is_let_go() -> None:
    def forbid(request: httpx.Request) -> httpx.Response:
        return httpx.Response(403, json={"message": "namespace is being terminated"})

    kube = KubeClient(httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(forbid)))
    asyncio.run(StatusWriter(kube, 1000.0).event(run_object(), "Normal", "Deregistered", "done"))
