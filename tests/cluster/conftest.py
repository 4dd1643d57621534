"""One real stack for all cluster tests: API server, etcd, controller manager, Ray, runtime, operator; a tiny model."""

from collections.abc import Iterator

import pytest

from support.cluster import Cluster
from support.tiny_stack import tiny_stack


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The stack; its logs are in the folder that is printed when a test fails."""
    with tiny_stack(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    """Every test starts and ends without runs."""
    yield
    cluster.kubectl("delete", "adapterruns", "--all", "--timeout=90s")
