"""Which rewards a run may name."""

from typing import Any

import pytest

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.reasons import INVALID_SPEC
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.rewards.resolve import resolve_reward


def spec(**reward: Any) -> AdapterRunSpec:
    return AdapterRunSpec.model_validate({"poolRef": {"name": "p"}, "data": "d.jsonl"} | reward)


def refusal(modules: list[str], **reward: Any) -> str:
    with pytest.raises(RunError) as caught:
        resolve_reward(spec(**reward), modules)
    assert caught.value.reason == INVALID_SPEC
    return caught.value.message


def test_math_is_built_in() -> None:
    assert resolve_reward(spec(rmType="math", labelKey="answer"), []) == "lorafleet_runtime.rewards.math.math_reward"


def test_math_needs_a_label() -> None:
    assert "labelKey" in refusal([], rmType="math")


def test_an_unknown_type_names_the_known_ones() -> None:
    assert refusal([], rmType="maths", labelKey="a") == "rmType: 'maths' is unknown; use one of math"


@pytest.mark.parametrize("path", ["team.rewards.f", "team.rewards.sub.f"])
def test_a_module_on_the_list_or_below_is_allowed(path: str) -> None:
    assert resolve_reward(spec(customRmPath=path), ["other", "team.rewards"]) == path


@pytest.mark.parametrize("path", ["team.f", "team.rewards_extra.f", "os.system", "xteam.rewards.f"])
def test_other_modules_are_refused(path: str) -> None:
    message = refusal(["team.rewards"], customRmPath=path)
    assert path in message and "rewardModules allow team.rewards" in message


@pytest.mark.parametrize("path", ["f", ".", "team..f", "team.rewards:f", ".team.f"])
def test_what_is_no_dotted_path_is_refused(path: str) -> None:
    assert "no dotted path" in refusal(["team", ""], customRmPath=path)


@pytest.mark.parametrize(
    ("reward", "field"),
    [({"remote": {"url": "http://x"}}, "reward.remote"), ({"configMapRef": "c"}, "reward.configMapRef")],
)
def test_rewards_of_later_versions_are_refused_by_name(reward: dict[str, Any], field: str) -> None:
    assert refusal([], reward=reward).startswith(f"{field}: is not available")
