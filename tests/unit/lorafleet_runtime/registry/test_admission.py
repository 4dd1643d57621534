"""What a pool refuses before a slot is taken, by field, value and fix."""

import math
from typing import Any

import pytest

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.reasons import INVALID_SPEC
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.registry.admission import SpecProblem, check_limits, parse_spec
from support.runs import pool_spec, run_spec


def check(**changes: Any) -> None:
    check_limits(AdapterRunSpec.model_validate(run_spec(**changes)), pool_spec())


@pytest.mark.parametrize(
    "changes, texts",
    [
        ({"sampling": {"topP": 0.9, "maxTokens": 8}}, ("sampling.topP: 0.9", "set it to 1")),
        ({"sampling": {"temperature": 0, "maxTokens": 8}}, ("sampling.temperature: 0 ", "use 0.01 or more")),
        ({"sampling": {"temperature": 0.009, "maxTokens": 8}}, ("sampling.temperature: 0.009 ", "use 0.01 or more")),
        ({"nSamplesPerPrompt": 1}, ("nSamplesPerPrompt: 1 ", "algorithm.advantage grpo", "use 2 or more")),
        (
            {"nSamplesPerPrompt": 1, "algorithm": {"advantage": "rloo"}},
            ("nSamplesPerPrompt: 1 ", "algorithm.advantage rloo", "use 2 or more"),
        ),
        (
            {"nSamplesPerPrompt": 1, "rolloutBatchSize": 1, "algorithm": {"advantage": "reinforce"}},
            ("rolloutBatchSize: 1 with nSamplesPerPrompt 1", "use more of either"),
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_field(changes: dict[str, Any], texts: tuple[str, ...]) -> None:
    with pytest.raises(RunError) as caught:
        check(**changes)
    assert caught.value.reason == INVALID_SPEC
    assert all(text in caught.value.message for text in texts), caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"temperature": 0.01, "topP": 1.0, "maxTokens": 8}},
        {"nSamplesPerPrompt": 1, "algorithm": {"advantage": "reinforce"}},
        {"nSamplesPerPrompt": 2, "algorithm": {"advantage": "rloo"}},
    ],
)
def test_what_lies_at_the_limit_is_taken(changes: dict[str, Any]) -> None:
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimizer": {"lr": -1}}, "optimizer.lr: -1: Input should be greater than 0"),
        ({"optimizer": {"lr": math.nan}}, "optimizer.lr: nan: "),
        ({"optimizer": {"weightDecay": math.inf}}, "optimizer.weightDecay: inf: Input should be a finite number"),
        ({"optimizer": {"eps": float("1e400")}}, "optimizer.eps: inf: Input should be a finite number"),
        ({"algorithm": {"tisCap": math.inf}}, "algorithm.tisCap: inf: Input should be a finite number"),
        (
            {"algorithm": {"tisFloor": 3, "tisCap": 2}},
            "algorithm.tisFloor: 3.0 is above tisCap 2.0; lower tisFloor or raise tisCap",
        ),
        ({"rewardTimeoutSeconds": math.inf}, "rewardTimeoutSeconds: inf: "),
        ({"optimizer": {"betas": [0.9, 1]}}, "optimizer.betas: 1.0 is not in [0, 1); use for example [0.9, 0.98]"),
        ({"optimizer": {"minLr": 1}}, "optimizer.minLr: 1.0 is above lr 1e-05; lower minLr or raise lr"),
        ({"rmType": None}, "rmType, customRmPath, reward: exactly one must be set; for example rmType: math"),
        ({"numSteps": 3}, "numSteps: 3: unknown field; remove it or correct its name"),
        ({"optimizer": "fast"}, "optimizer: 'fast': Input should be"),
        ({"rank": {"of": 4}}, "rank: 'an object': Input should be a valid integer"),
        ({"data": None}, "data: Field required"),
        ({"numStep": 0}, "numStep: 0: Input should be greater than or equal to 1"),
        ({"nSamplesPerPrompt": 10**9}, "nSamplesPerPrompt: 1000000000: Input should be less than or equal to 1024"),
        ({"sampling": {"stop": [""]}}, "sampling.stop.0: '': String should have at least 1 character"),
    ],
)
def test_a_spec_that_does_not_parse_names_field_value_and_what_is_right(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecProblem) as caught:
        parse_spec(run_spec(**changes), pool_spec())
    assert str(caught.value).startswith(text)


def test_a_value_that_never_ends_is_cut() -> None:
    with pytest.raises(SpecProblem) as caught:
        parse_spec(run_spec(rank="x" * 1_000_000), pool_spec())
    assert len(str(caught.value)) < 500


def test_a_bad_default_is_the_pools_owners_to_correct() -> None:
    with pytest.raises(SpecProblem, match=r"rank: 0: .*\(from the pool's defaults: its owner must correct them\)"):
        parse_spec(run_spec(rank=None), pool_spec(defaults={"rank": 0}))
    with pytest.raises(SpecProblem) as caught:
        parse_spec(run_spec(rank=-1), pool_spec(defaults={"rank": 0}))
    assert "defaults" not in str(caught.value)
