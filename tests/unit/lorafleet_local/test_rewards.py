"""The demo's rewards, with the replies that earned too much in training."""

import subprocess
import sys
from typing import Any

import pytest

from lorafleet_local.rewards import addition, first_integer_is, json_object, sentence


def call(function: Any, response: str, label: Any, truncated: bool = False) -> float:
    return float(function(prompt="", response=response, label=label, metadata={}, truncated=truncated))


@pytest.mark.parametrize(
    ("response", "truncated", "reward"),
    [
        (" 25", False, 1.0),
        (" 24, no, 25", False, 1.0),
        (" 25, or 24", False, 0.2),
        (" 7 + 18 = ?", False, 0.2),
        (" -25", False, 0.2),
        (" 025", False, 1.0),
        (" 25", True, 0.0),
        (" ?", False, 0.0),
        ("", False, 0.0),
        ("9" * 5000, False, 0.2),
    ],
)
def test_addition(response: str, truncated: bool, reward: float) -> None:
    assert call(addition, response, "25", truncated) == reward


def test_first_integer() -> None:
    assert first_integer_is(" 25\n\n25 + 1 = 26", "25")
    assert not first_integer_is(" 7 + 18 = 25", "25") and not first_integer_is("none", "25")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"name": "Gus", "age": 54}', 1.0),
        (' {"age": 54, "name": "Gus"}\n', 1.0),
        ('{"name": "Gus", "age": "54"}', 0.85),
        ('{"name": "Gus", "age": 54.0}', 0.85),
        ('{"name": "Ann", "age": 54}', 0.85),
        ('{"name": "Ann", "age": true}', 0.7),
        ('{"name": "Gus", "age": 54, "x": 1}', 0.5),
        ("{}", 0.5),
        ("[1]", 0.0),
        ('{"name": "Gus", "age"', 0.4),
        ('{"name": "Gus"', 0.3),
        ('```json {"name"', 0.1),
        ("Gus is 54.", 0.0),
    ],
)
def test_json_object(response: str, reward: float) -> None:
    assert call(json_object, response, {"name": "Gus", "age": 54}) == pytest.approx(reward, abs=1e-9)


@pytest.mark.parametrize(
    ("response", "truncated", "reward"),
    [
        ("The doll is in the house.", False, 1.0),
        (" The Doll is old. ", False, 1.0),
        ("The doll is in the house.", True, 0.5),
        ("A doll is a doll.", False, 0.0),
        ("Short sentence with the word doll.", False, 0.5),
        ("The word is doll.", False, 0.5),
        ("The cat is in the house.", False, 0.5),
        ("The doll is in the house", False, 0.5),
        ("Old doll.", False, 0.5),
        ("The old doll is in the big red house.", False, 0.5),
    ],
)
def test_sentence(response: str, truncated: bool, reward: float) -> None:
    assert call(sentence, response, "doll", truncated) == reward


def test_the_module_is_light() -> None:
    code = "import sys, lorafleet_local.rewards; print(any(m in sys.modules for m in ('torch', 'ray', 'sympy')))"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "False"
