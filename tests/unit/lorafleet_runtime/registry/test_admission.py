"""What a pool refuses before a slot is taken, by field, value and fix."""

import math
from typing import Any

import pytest

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.reasons import INVALID_SPEC
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.registry.admission import SpecProblem, check_limits, parse_spec, without_effect
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
        {"optimizer": {"lr": 0.5, "weightDecay": 1.99, "minLr": 0.5}},
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
        (
            {"optimizer": {"lr": 0.5, "weightDecay": 2}},
            "optimizer.weightDecay: 2.0 times lr 0.5 is 1: each step multiplies weights by 1 minus that, so it must be",
        ),
        (
            {"targetModules": ["q_proj", "v_proj", "q_proj"]},
            "targetModules: q_proj is there more than once; list each projection once",
        ),
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


def test_the_rank_that_nobody_wrote_is_named_as_the_default() -> None:
    with pytest.raises(RunError, match=r"rank: 16 is above the pool's maxRank 8; .* \(16 is the default\)$"):
        check_limits(AdapterRunSpec.model_validate(run_spec(rank=None)), pool_spec())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimizer": {"lr": 1, "minLr": 0.5}}, "optimizer.minLr 0.5 has no effect: schedule is constant"),
        (
            {"optimizer": {"schedule": "cosine", "warmupSteps": 3}},
            "optimizer.warmupSteps 3 is as long as the run of 3 steps: cosine never begins",
        ),
        (
            {"optimizer": {"warmupSteps": 4}},
            "optimizer.warmupSteps 4 is as long as the run of 3 steps: lr is never reached",
        ),
        ({"algorithm": {"dualClip": 3}}, "algorithm.dualClip 3.0 has no effect: tisMode is Clip"),
        ({"algorithm": {"tisMode": "Mask", "clipLow": 0.1}}, "algorithm.clipLow 0.1 has no effect: tisMode is Mask"),
        ({"algorithm": {"tisMode": "Off", "tisCap": 3}}, "algorithm.tisCap 3.0 has no effect: tisMode is Off"),
        ({"algorithm": {"klType": "k1"}}, "algorithm.klType k1 has no effect: klCoef is 0"),
        ({"initFrom": "a", "initSeed": 4}, "initSeed 4 has no effect: initFrom has the matrices"),
        ({"numEpoch": 2}, "numEpoch 2 has no effect: numStep wins"),
    ],
)
def test_a_setting_that_does_nothing_is_told(changes: dict[str, Any], text: str) -> None:
    assert without_effect(AdapterRunSpec.model_validate(run_spec(**changes)), 3) == [text]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"lr": 1, "schedule": "linear", "minLr": 0.5, "warmupSteps": 2}},
        {"optimizer": {"warmupSteps": 3}},
        {"algorithm": {"tisMode": "Off", "dualClip": 3, "clipLow": 0.1, "clipHigh": 0.1}},
        {"algorithm": {"tisMode": "Mask", "tisFloor": 0.5, "tisCap": 5, "klCoef": 0.1, "klType": "k1"}},
        {"initSeed": 4, "initScheme": "gaussian"},
    ],
)
def test_a_setting_that_does_something_is_not(changes: dict[str, Any]) -> None:
    assert without_effect(AdapterRunSpec.model_validate(run_spec(**changes)), 3) == []


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
