"""The bodies between operator and runtime, when one of them is newer."""

import pytest
from pydantic import ValidationError

from lorafleet_api.v1alpha1.wire import AdapterList, PutPool


def test_an_operator_reads_what_a_newer_runtime_tells() -> None:
    answer = {
        "bootEpoch": 1, "revision": 2, "synced": True, "operatorEpoch": 1, "listed": True, "weather": "fine",
        "slots": {"total": 3, "used": 0, "queued": 0, "reserved": 1},
        "trainer": {"ready": True, "slots": {}}, "engines": [], "adapters": [],
    }  # fmt: skip
    assert AdapterList.model_validate(answer).slots.total == 3


def test_a_runtime_refuses_what_it_would_have_to_ignore() -> None:
    with pytest.raises(ValidationError, match="mood"):
        PutPool.model_validate({"operatorEpoch": 1, "uids": [], "mood": "good"})
