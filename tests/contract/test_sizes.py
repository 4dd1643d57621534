"""hack/check_sizes.py finds what is too long, and the tree has none of it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check_sizes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sizes", ROOT / "hack" / "check_sizes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(module: ModuleType, source: str) -> list[str]:
    return list(module.problems(Path("x.py"), source))


def test_the_tree_is_within_its_limits(check_sizes: ModuleType) -> None:
    files = check_sizes.python_files(ROOT)
    assert ROOT / "hack" / "check_sizes.py" in files
    problems = [text for file in files for text in check_sizes.problems(file.relative_to(ROOT), file.read_text())]
    assert problems == []


def test_a_file_of_401_lines_is_too_long(check_sizes: ModuleType) -> None:
    assert found(check_sizes, "x = 1\n" * 400) == []
    assert found(check_sizes, "x = 1\n" * 401) == ["x.py:1: 401 lines; at most 400: split the file"]


def test_a_function_of_61_lines_is_too_long_decorator_included(check_sizes: ModuleType) -> None:
    body = "    x = 1\n" * 58
    assert found(check_sizes, f"@d\ndef f():\n{body}") == []
    assert found(check_sizes, f"@d\ndef f():\n{body}    x = 1\n") == [
        "x.py:2: f has 61 lines; at most 60: extract a part"
    ]


def test_seven_positional_parameters_are_too_many_self_and_keywords_aside(check_sizes: ModuleType) -> None:
    assert found(check_sizes, "class C:\n    def f(self, a, b, c, d, e, g, *, h): ...\n") == []
    (problem,) = found(check_sizes, "async def f(a, b, c, d, /, e, g, h): ...\n")
    assert "takes 7 positional parameters" in problem
