"""A fleet of fakes for the loop tests."""

from pathlib import Path

import pytest

from support.fleets import World, build_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two slots, the operator has spoken; nothing runs yet."""
    world = build_world(tmp_path)
    world.registry.sync([])
    return world
