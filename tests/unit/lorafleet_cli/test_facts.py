"""Durations, bars and sparklines."""

import pytest

from lorafleet_cli.facts import bar, duration, number, printable, sparkline


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0s"), (59.9, "59s"), (60, "1m"), (200, "3m20s"), (7500, "2h5m"), (273600, "3d4h")],
)
def test_durations_read_as_kubectls_ages(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_bar_is_full_only_at_the_target() -> None:
    assert bar(0, 8, 4) == "\u2591" * 4
    assert bar(7, 8, 4) == "\u2588" * 3 + "\u2591"
    assert bar(9, 8, 4) == "\u2588" * 4
    assert bar(3, None, 4) == "\u2591" * 4


def test_a_sparkline_spans_lowest_to_highest_of_the_newest_values() -> None:
    assert sparkline([9.0, 0.0, 0.5, 1.0], width=3) == "\u2581\u2584\u2588"
    assert sparkline([0.3, 0.3]) == "\u2584\u2584"
    assert sparkline([]) == ""


def test_figures_have_few_digits() -> None:
    assert [number(None), number(0.123456), number(1e-05)] == ["-", "0.1235", "1e-05"]


def test_control_characters_are_spelled_out() -> None:
    assert printable("a\tb\n\x1b[2J\r\x9bA\u2588") == "a\tb\n\\x1b[2J\\x0d\\x9bA\u2588"
