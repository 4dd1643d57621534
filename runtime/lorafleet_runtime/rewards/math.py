"""The built-in reward `math`: 1.0 when the response's last answer equals the label, by math-verify.

Called inside the reward child process. The answer is taken from one place only, the last one: an earlier box, or an
expression that merely evaluates to the label (echoing "7 + 18 =" for 25), earns nothing.
"""

import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_NUMBER = r"(?:(?<![\w.)}\]])[-+\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER_RE = re.compile(_NUMBER)
_MARKED = re.compile(rf"####\s*\$?\s*({_NUMBER}(?:\s*/\s*\d[\d,]*)?)")  # GSM8K
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE_BOXED = re.compile(r"[^\s${}\\]+")  # \boxed 5, which TeX accepts too
_UNFINISHED = re.compile(r"[ \t.,/^*+eE\\-]*\Z")  # between an answer and a cut: more of the answer may have followed
_DECORATION = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s*\{[^{}]*\}|\^\s*\{?\s*\\circ\s*\}?|\\(?:left|right|quad|qquad)"
    r"|\\[$%!,;: ]|[$%~]"
)
_FRACTION = re.compile(rf"^\s*(-?)\s*\\[dt]?frac\s*\{{\s*({_NUMBER})\s*\}}\s*\{{\s*({_NUMBER})\s*\}}\s*$")
_SHORT_FRACTION = re.compile(r"(\\[dt]?frac)\s*(\d)\s*(\d)(?!\d)")  # \frac12
_OPERATORS = re.compile(
    r"[+*^_()|\u00d7\u00f7\u00b7\u221a{}\[\]]|\\[A-Za-z]|(?<=\S)\s*[-\u2212]\s*(?=\d)|\w\s+[-\u2212]\s"
)
_TIMEOUT_SECONDS = 5  # math-verify's own bound; the reward process has one of its own


def math_reward(*, prompt: Any, response: str, label: Any, metadata: dict[str, Any], truncated: bool) -> float:
    """Score 1.0 for a right answer, else 0.0.

    Args:
        prompt: not used.
        response: the answer is its last \\boxed{...} or GSM8K "#### number", whichever comes later; without either,
            its last number. A last box that is empty or not closed scores 0.
        label: a number or a string; of a string with "####" or \\boxed{...}, what these mark ("... #### 1,250").
        metadata: not used.
        truncated: the response was cut at maxTokens. Then an answer at its very end scores 0 unless its box is closed:
            "#### 12" may be the beginning of "#### 1250".
    """
    del prompt, metadata
    gold = label_answer(label)
    answer = response_answer(response, truncated=truncated)
    if not gold or not answer:
        return 0.0
    number = _literal(gold)
    if number is not None:
        answer = _literal(answer.rpartition("=")[2], fractions=not _is_integer(number)) or ""
        gold = number
    return float(bool(answer) and _equal(gold, answer))


def response_answer(response: str, *, truncated: bool = False) -> str | None:
    """The text of the response's last answer, or None; also None for one that a cut response may not have finished."""
    boxes = list(_BOX.finditer(response))
    marks = list(_MARKED.finditer(response))
    if boxes and (not marks or boxes[-1].start() > marks[-1].start()):
        start = boxes[-1].end()
        if response[start : start + 1] == "{":
            return _boxed(response, start)
        found = _BARE_BOXED.match(response, start)
    elif marks:
        found = marks[-1]
    else:
        found = next(reversed(list(_NUMBER_RE.finditer(response))), None)
    if found is None or (truncated and _UNFINISHED.match(response, found.end())):
        return None
    return found.group(found.lastindex or 0)


def label_answer(label: Any) -> str | None:
    """The text of the right answer in a label, or None."""
    text = str(label).strip()
    if "####" in text:
        return text.rpartition("####")[2].strip() or None
    boxes = list(_BOX.finditer(text))
    return _boxed(text, boxes[-1].end()) if boxes else text or None


def _boxed(text: str, start: int) -> str | None:
    """The content of the box whose brace is at `start`; None when it is empty or not closed."""
    if text[start : start + 1] != "{":
        bare = _BARE_BOXED.match(text, start)
        return bare.group() if bare else None
    depth = 0
    i = start
    while i < len(text):
        if text[i] == "\\":
            i += 2  # an escaped brace is no brace
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1 : i].strip() or None
        i += 1
    return None


def _literal(text: str, *, fractions: bool = True) -> str | None:
    """The one number that the text states, without units and commas; None when it is anything else."""
    fraction = _FRACTION.match(_SHORT_FRACTION.sub(r"\1{\2}{\3}", text))
    if fraction:
        sign, over, under = (part.replace(",", "") for part in fraction.groups())
        return f"{sign}{over}/{under}" if fractions else None
    plain = _DECORATION.sub(" ", text).replace("{,}", ",").strip().rstrip(".")
    numbers = list(_NUMBER_RE.finditer(plain))
    if fractions and len(numbers) == 2 and plain[numbers[0].end() : numbers[1].start()].strip() == "/":
        return f"{_plain(numbers[0])}/{_plain(numbers[1])}"
    if len(numbers) != 1:
        return None
    rest = f"{plain[: numbers[0].start()]}0{plain[numbers[0].end() :]}"  # units may stay, operators may not
    return None if _OPERATORS.search(rest) or "/" in rest else _plain(numbers[0])


def _plain(match: re.Match[str]) -> str:
    return match.group().replace(",", "").replace("\u2212", "-").lstrip("+")


def _is_integer(number: str) -> bool:
    return re.fullmatch(r"-?\d+", number) is not None


def _equal(gold: str, answer: str) -> bool:
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed = [
        parse(f"\\boxed{{{text}}}", extraction_config=configs, parsing_timeout=_TIMEOUT_SECONDS)
        for text in (gold, answer)
    ]
    return bool(verify(parsed[0], parsed[1], timeout_seconds=_TIMEOUT_SECONDS))
