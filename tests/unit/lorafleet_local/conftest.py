"""Every test of this package has a cache of its own: ports are written down there."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LORAFLEET_CACHE_DIR", str(folder))
    return folder
