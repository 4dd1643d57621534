"""The engine that the numerics tests share: starting one takes tens of seconds."""

from collections.abc import Iterator

import pytest

from support.engine_actor import EngineUnderTest, running_engine


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[EngineUnderTest]:
    with running_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """The shared engine, with no adapter left behind."""
    yield shared_engine
    shared_engine.retire_everything()
