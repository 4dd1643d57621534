"""What a pool refuses before a slot is taken, by field, value and fix."""

from typing import Any

import pytest

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.reasons import INVALID_SPEC
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.registry.admission import check_limits
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
