"""The built-in math reward: one answer counts, the last one, and echoing an expression earns nothing."""

from typing import Any

import pytest

from lorafleet_runtime.rewards.math import label_answer, math_reward, response_answer


def score(response: str, label: Any, truncated: bool = False) -> float:
    return math_reward(prompt="", response=response, label=label, metadata={}, truncated=truncated)


def test_an_unfinished_or_empty_last_box_scores_nothing() -> None:
    """Case 1 (marin-community/marin#9163): output cut inside the last box earned the credit of an earlier one."""
    responses = (
        r"Try \boxed{12}. No, wait: \boxed{",
        r"Try \boxed{12}. Final: \boxed{}",
        r"It is \boxed{12}.",
        r"Try \boxed{12}. Final: \boxed{1",
    )
    rewards = [score(response, "12") for response in responses]
    assert rewards == [0.0, 0.0, 1.0, 0.0]
    assert sum(rewards) / 4 == 0.25


@pytest.mark.parametrize("response", ["#### 1250", "#### 1,250", "#### $1,250.00", "25*50 = 1,250", r"\boxed{1250}"])
def test_gsm8k_labels_and_completions(response: str) -> None:
    assert score(response, "25*50=1250\n#### 1,250") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "7 + 18 = ?",
        "7 + 18",
        r"\boxed{7+18}",
        r"\boxed{50/2}",
        r"\boxed{\frac{50}{2}}",
        r"\boxed{28 - 3}",
        r"\boxed{5^2}",
    ],
)
def test_an_expression_is_no_answer_to_a_number(response: str) -> None:
    assert score(response, 25) == 0.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("10-7 = 3", "3"),
        ("It is -7.", "-7"),
        (r"\boxed{7 + 18 = 25}", 25),
        (r"\boxed{12\text{ cm}}", "12"),
        (r"\boxed{\$1,250}", 1250),
        (r"\boxed{10{,}000}", "10000"),
        (r"\boxed 5", "5"),
        (r"\boxed{12.0}", "12"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\frac12}", "1/2"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{1+x}", "x+1"),
        (r"\boxed{\{1,2\}}", r"\{1, 2\}"),
        (r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}"),
        (r"so \boxed{12}, no: #### 13", "13"),
        ("#### Step 1\n5 and 1\n6", "6"),
        (r"\boxed{7}", r"It is \boxed{7}."),
    ],
)
def test_right_answers(response: str, label: Any) -> None:
    assert score(response, label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("12, or maybe 13", "12"),
        ("12 / 4", "3"),
        ("10-7", "-7"),
        (r"\boxed{1,2}", "12"),
        (r"\boxed{12\pi}", "12"),
        (r"\boxed{3\sqrt{2}}", "3"),
        (r"\boxed{-12}", "12"),
        (r"It is \boxed{12", "12"),
        (r"#### 12 and \boxed{13}", "12"),
        ("no number", "12"),
        ("", "12"),
        ("x + 1", "x+1"),
        ("12", ""),
    ],
)
def test_wrong_answers(response: str, label: Any) -> None:
    assert score(response, label) == 0.0


@pytest.mark.parametrize(
    "response",
    ["#### 12", "#### $12", "#### 12.", "#### 12 /", "so it is 12", "10 + 2 = 12 ", r"\boxed 12", "#### 12,"],
)
def test_an_answer_at_the_very_end_of_a_cut_response_may_be_half_of_one(response: str) -> None:
    assert score(response, "12") == 1.0
    assert score(response, "12", truncated=True) == 0.0


@pytest.mark.parametrize(
    "response",
    [r"\boxed{12}", r"\boxed{12} and", "#### 12\n", "12 jars and", r"\boxed 12 and", r"$12$", "#### 12 jars"],
)
def test_an_answer_that_was_finished_before_the_cut_counts(response: str) -> None:
    assert score(response, "12", truncated=True) == 1.0


def test_where_answers_are_taken_from() -> None:
    assert response_answer(r"\boxed{a \} b}") == r"a \} b"
    assert response_answer(r"\boxed{\frac{1}{2}} then 3") == r"\frac{1}{2}"
    assert response_answer("\\boxedly {3}") == "3"
    assert label_answer("1 + 1\n#### 2") == "2"
    assert label_answer(0) == "0"
