"""Reward functions of the demo's three tasks, as a user would write them for customRmPath.

Called in a run's reward process (`customRmPath: lorafleet_local.rewards.addition`), by `prove` and by `baseline`.
Standard library only. Each closes the ways to earn a reward without doing the task that were seen in training.
"""

import json
import re
from typing import Any

_INTEGER = re.compile(r"-?[0-9]+")


def addition(*, prompt: Any, response: str, label: Any, metadata: dict[str, Any], truncated: bool) -> float:
    """0.2 for ending with an integer in reach, and 0.8 if the last integer is the sum.

    Only a reply that ended itself earns anything. Only the last integer counts, never the expression: "7 + 18 = ?"
    does not earn 25.

    Args:
        prompt: not used.
        response: the reply.
        label: the sum, as a string or an integer.
        metadata: not used.
        truncated: the reply ran into maxTokens.
    """
    del prompt, metadata
    integers = _INTEGER.findall(response)
    if truncated or not integers:
        return 0.0
    return 1.0 if _is(integers[-1], label) else 0.2


def broken(*, prompt: Any, response: str, label: Any, metadata: dict[str, Any], truncated: bool) -> float:
    """Raises at every call: takes the label for an object. `make demo-full` shows what a run with such a reward says.

    Args:
        prompt: not used.
        response: the reply.
        label: a string, which has no "sum".
        metadata: not used.
        truncated: not used.
    """
    del prompt, metadata, truncated
    return float(response == label["sum"])


def first_integer_is(response: str, label: Any) -> bool:
    """The first integer of a reply is the sum, whether or not the reply stopped there; arithmetic without manners."""
    found = _INTEGER.search(response)
    return found is not None and _is(found.group(), label)


def json_object(*, prompt: Any, response: str, label: Any, metadata: dict[str, Any], truncated: bool) -> float:
    """0.2 for an opening brace, 0.3 for a JSON object, 0.2 for exactly the right keys, 0.15 each for name and age.

    A reply that is not JSON still earns 0.1 per key that it writes. The age must be an integer: "54" is not.

    Args:
        prompt: not used.
        response: the reply.
        label: {"name": str, "age": int}.
        metadata: not used.
        truncated: not used; a cut object does not parse.
    """
    del prompt, metadata, truncated
    text = response.strip()
    score = 0.2 if text.startswith("{") else 0.0
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return score + 0.1 * ('"name"' in text) + 0.1 * ('"age"' in text)
    if not isinstance(value, dict):
        return score
    score += 0.3
    if set(value) == {"name", "age"}:
        right_age = type(value["age"]) is int and value["age"] == label["age"]
        score += 0.2 + 0.15 * (value["name"] == label["name"]) + 0.15 * right_age
    return round(score, 6)


def sentence(*, prompt: Any, response: str, label: Any, metadata: dict[str, Any], truncated: bool) -> float:
    """0.5 for using the word exactly once, 0.5 for a sentence: ended itself, 4 to 8 words, a final full stop.

    "A doll is a doll." uses the word twice and earns nothing; neither does echoing the instruction, whose giveaways are
    "word" and "sentence".

    Args:
        prompt: not used.
        response: the reply.
        label: the word, lower case.
        metadata: not used.
        truncated: the reply ran into maxTokens.
    """
    del prompt, metadata
    text = response.lower()
    uses = len(re.findall(rf"\b{re.escape(label)}", text))
    echo = re.search(r"\b(word|sentence)", text) is not None
    formed = not truncated and text.strip().endswith(".") and 4 <= len(text.split()) <= 8
    return 0.5 * (uses == 1 and not echo) + 0.5 * (formed and (uses <= 1 or echo))


def _is(digits: str, label: Any) -> bool:
    # Python refuses to convert thousands of digits, and no sum is that long.
    return len(digits) <= 18 and int(digits) == int(label)
