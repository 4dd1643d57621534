"""resolve_spec: the run over the pool's defaults over the built-in values."""

import pytest
from pydantic import ValidationError

from lorafleet_api.v1alpha1.adapterrun import resolve_spec

RUN = {"poolRef": {"name": "demo"}, "data": "d.jsonl", "rmType": "math"}


def test_built_in_then_pool_then_run() -> None:
    assert resolve_spec(RUN, {}).rank == 16
    assert resolve_spec(RUN, {"rank": 8}).rank == 8
    assert resolve_spec(RUN | {"rank": 4}, {"rank": 8}).rank == 4


def test_objects_merge_key_by_key() -> None:
    spec = resolve_spec(RUN | {"optimizer": {"lr": 1e-3}}, {"optimizer": {"weightDecay": 0.0, "lr": 1e-4}})
    assert (spec.optimizer.lr, spec.optimizer.weight_decay) == (1e-3, 0.0)


def test_pools_reward_yields_to_any_reward_of_the_run() -> None:
    assert resolve_spec(RUN, {"customRmPath": "a.b"}).custom_rm_path is None
    without = {key: value for key, value in RUN.items() if key != "rmType"}
    assert resolve_spec(without, {"customRmPath": "a.b"}).custom_rm_path == "a.b"


def test_lifecycle_fields_are_never_the_pools() -> None:
    spec = resolve_spec(RUN, {"suspend": True, "backoffLimit": 9, "data": "other"})
    assert (spec.suspend, spec.backoff_limit, spec.data) == (False, 3, "d.jsonl")


def test_no_reward_and_two_rewards_are_refused() -> None:
    with pytest.raises(ValidationError, match="exactly one must be set"):
        resolve_spec({"poolRef": {"name": "demo"}, "data": "d"}, {})
    with pytest.raises(ValidationError, match="exactly one must be set"):
        resolve_spec(RUN | {"customRmPath": "a.b"}, {})


def test_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="numSteps"):
        resolve_spec(RUN | {"numSteps": 3}, {})
