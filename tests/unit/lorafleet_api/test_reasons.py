"""Every reason fits the CRD's pattern, has its own value and is documented."""

import ast
import itertools
import re
from pathlib import Path

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.status import REASON_PATTERN

CONSTANTS = {name: value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_reason_fits_the_schema(name: str) -> None:
    assert re.fullmatch(REASON_PATTERN, CONSTANTS[name])
    assert len(CONSTANTS[name]) <= 64


def test_every_constant_is_documented() -> None:
    body = ast.parse(Path(reasons.__file__).read_text(encoding="utf-8")).body
    documented = set()
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            documented |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    assert CONSTANTS.keys() <= documented


def test_failure_reasons_are_constants() -> None:
    assert set(CONSTANTS.values()) >= reasons.FAILURE_REASONS
