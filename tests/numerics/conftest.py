"""The Ray and the engine that the numerics tests share: starting one takes tens of seconds."""

from collections.abc import Iterator

import pytest

from support.engine_actor import EngineUnderTest, running_engine
from support.local_ray import local_ray


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """One Ray for engines and trainers of several ranks."""
    with local_ray():
        yield


@pytest.fixture(scope="session")
def shared_engine(ray_here: None) -> Iterator[EngineUnderTest]:
    with running_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """The shared engine, with no adapter left behind."""
    yield shared_engine
    shared_engine.retire_everything()
