"""Reads a run's configuration as users of miles write it: snake_case keys, `metadata`, `save`. Pure.

Called by `api_runs` alone. It translates names and refuses what JSON and Kubernetes could not hold or what has no
meaning for a run without an object; values are checked by `admission.parse_spec`.
"""

import math
import re
from typing import Any

from pydantic import ValidationError
from pydantic.alias_generators import to_camel, to_snake

from lorafleet_runtime.registry.admission import SpecProblem

POOL_REF = {"name": "api"}
"""What `poolRef` says for runs that have no object: they are the runtime's own pool's."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""A run's name; it is a folder's too."""

_WITHOUT_OBJECT = {
    "poolRef": "this runtime has one pool",
    "suspend": "use DELETE and POST",
    "cancel": "use DELETE",
    "deletionPolicy": "DELETE always writes a last checkpoint",
    "ttlSecondsAfterFinished": "a finished run's record takes no room in the pool",
}
"""Fields of an object's life, and what to do instead."""

_MALFORMED = frozenset({"missing", "extra_forbidden", "int_from_float", "int_parsing_size", "finite_number"})
_MAX_DEPTH = 32
_INT64 = 2**63


class ConfigProblem(Exception):
    """A field of the configuration is not usable.

    Args:
        field: as the user wrote it.
        value: what was received; None where the fix says it.
        fix: what is wrong, and what to do.
        malformed: its shape is wrong (a missing or unknown key, another type), not its value.
    """

    def __init__(self, field: str, value: Any, fix: str, *, malformed: bool = False) -> None:
        super().__init__(f"{field}: {fix}")
        self.field, self.value, self.fix, self.malformed = field, value, fix, malformed


def to_spec(config: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The AdapterRun spec in wire form, and `save`.

    Raises:
        ConfigProblem: a value that JSON cannot hold, a number beyond 64 bits, or a field of objects only.
    """
    _check_value("config", config, 0)
    spec: dict[str, Any] = {"poolRef": POOL_REF}
    save = config.get("save")
    if save is not None and not (isinstance(save, str) and save):
        raise ConfigProblem("save", save, "give a directory on the pool's storage, or leave it out", malformed=True)
    for key, value in config.items():
        field = "sampleMetadata" if key == "metadata" else to_camel(key)
        if field in _WITHOUT_OBJECT:
            raise ConfigProblem(key, value, f"not for runs made here; {_WITHOUT_OBJECT[field]}", malformed=True)
        if field in spec:
            raise ConfigProblem(key, value, "is there twice, in two spellings; keep one", malformed=True)
        if key != "save" and value is not None:  # miles writes null for "the default"
            spec[field] = value if field == "sampleMetadata" else _camel(value)
    return spec, save


def explain(problem: SpecProblem) -> ConfigProblem:
    """A refused spec in the user's own spelling."""
    cause = problem.__cause__
    kind = cause.errors()[0]["type"] if isinstance(cause, ValidationError) else ""
    malformed = kind in _MALFORMED or kind.endswith(("_type", "_parsing"))
    return ConfigProblem(users_field(problem.field), problem.value, problem.fix, malformed=malformed)


def users_field(field: str) -> str:
    """A dotted field as users of miles write it."""
    return ".".join("metadata" if part == "sampleMetadata" else to_snake(part) for part in field.split("."))


def _camel(value: Any) -> Any:
    if isinstance(value, dict):
        return {to_camel(key): _camel(inner) for key, inner in value.items()}
    return [_camel(inner) for inner in value] if isinstance(value, list) else value


def _check_value(field: str, value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ConfigProblem(field, "...", f"is nested deeper than {_MAX_DEPTH}; flatten it", malformed=True)
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigProblem(field, key, "a key must be a string", malformed=True)
            _check_value(key if depth == 0 else f"{field}.{key}", inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_value(field, inner, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigProblem(field, str(value), "is no finite number; write one", malformed=True)
    elif isinstance(value, int) and not isinstance(value, bool) and not -_INT64 <= value < _INT64:
        raise ConfigProblem(field, "(an integer beyond 64 bits)", "write a smaller number")
    elif not (value is None or isinstance(value, str | int | float)):
        raise ConfigProblem(field, repr(value), "is no JSON value; quote it", malformed=True)
