"""Conditions and figures of an AdapterPool."""

from dataclasses import replace

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.status import AdapterPoolStatus
from lorafleet_operator.reconcile.pool import config_mismatch, pool_status
from support.operator_world import T0, condition, flags, link, listing, pool_object


def test_connected_pool_is_ready_with_slots_and_epochs() -> None:
    status = pool_status(pool_object(), replace(link(listing()), versions=(("vllm", "0.32"),)), T0)
    assert flags(status) == {"Ready": True, "ClusterReady": True, "RuntimeReady": True}
    assert status["slots"] == {"total": 2, "used": 1, "queued": 0}
    assert (status["bootEpoch"], status["operatorEpoch"], status["versions"]) == (1, 3, {"vllm": "0.32"})
    AdapterPoolStatus.model_validate(status)


def test_silent_runtime_is_not_ready_and_keeps_the_last_figures() -> None:
    status = pool_status(pool_object(), link(listing(), ready=False), T0)
    assert flags(status) == {"Ready": False, "ClusterReady": True, "RuntimeReady": False}
    assert condition(status, "RuntimeReady")["reason"] == reasons.RUNTIME_UNREACHABLE
    assert status["slots"]["total"] == 2


def test_pool_without_endpoint_says_that_it_cannot_be_made() -> None:
    pool = pool_object()
    del pool["spec"]["endpoint"]
    status = pool_status(pool, None, T0)
    assert flags(status) == {"Ready": False, "ClusterReady": False, "RuntimeReady": False}
    cluster = condition(status, "ClusterReady")
    assert cluster["reason"] == reasons.CLUSTER_UNSUPPORTED
    assert "spec.endpoint" in cluster["message"]


def test_mismatch_makes_ready_false_but_the_runtime_goes_on() -> None:
    status = pool_status(pool_object(), replace(link(listing()), mismatch=("slots", "trainer.deterministic")), T0)
    assert flags(status) == {"Ready": False, "ClusterReady": True, "RuntimeReady": True}
    assert condition(status, "Ready")["reason"] == reasons.CONFIG_MISMATCH
    assert "slots, trainer.deterministic" in condition(status, "Ready")["message"]


def test_operator_epoch_never_goes_back() -> None:
    pool = pool_object() | {"status": {"operatorEpoch": 9}}
    assert pool_status(pool, link(listing()), T0)["operatorEpoch"] == 9


RUNTIME = AdapterPoolSpec.model_validate(
    {"baseModel": {"name": "m"}, "slots": 3, "trainer": {"numThreads": 1}}
).to_wire()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"baseModel": {"name": "m"}}, ()),
        ({"baseModel": {"name": "m"}, "slots": 3}, ()),
        ({"baseModel": {"name": "m", "dtype": "bfloat16"}, "trainer": {"dataParallel": 1}}, ()),
        ({"baseModel": {"name": "n"}, "slots": 4}, ("baseModel.name", "slots")),
        ({"trainer": {"deterministic": True}}, ("trainer.deterministic",)),
        ({"endpoint": {"url": "x"}, "allowedNamespaces": ["a"], "env": {"A": "b"}}, ()),
    ],
)
def test_only_what_the_author_wrote_is_compared(written: dict[str, object], expected: tuple[str, ...]) -> None:
    assert config_mismatch(written, RUNTIME) == expected
