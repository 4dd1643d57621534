"""The fake cluster of the command line's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli_world import CliWorld, cli_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CliWorld]:
    """A cluster with one pool and no runs."""
    with cli_world(tmp_path) as world:
        yield world
