"""One real stack for all cluster tests: API server, etcd, controller manager, Ray, runtime, operator; a tiny model."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lorafleet_local.pool import Document
from lorafleet_local.report import Reporter
from lorafleet_local.stack import down, up
from support.cluster import Cluster
from support.tiny_model import make_tiny_model


def tiny_pool(model: Path, storage: Path) -> Document:
    """A pool of three slots on a tiny random model, sized for a busy two-core machine."""
    return {
        "baseModel": {"path": str(model), "dtype": "float32"},
        "slots": 3,
        "maxRank": 8,
        "trainer": {"numThreads": 1, "microBatchTokens": 512},
        "engines": {"maxModelLen": 128, "maxNumSeqs": 32, "kvCacheBytes": 64 << 20, "numThreads": 1},
        "rollout": {"globalBatchSize": 32, "workers": 1},
        "defaults": {"maxStaleness": 1},
        "storage": {"path": str(storage)},
        "rewardModules": ["support.rewards"],
        "env": {"PYTHONPATH": str(Path(__file__).parents[1])},
    }


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The stack; its logs are in the folder that is printed when a test fails."""
    folder = tmp_path_factory.mktemp("cluster")
    model = make_tiny_model(folder / "model")
    storage = folder / "state" / "storage"
    storage.mkdir(parents=True)
    with (storage / "train.jsonl").open("w") as file:
        for number in range(64):
            file.write(json.dumps({"prompt": f"{number} plus", "label": str(number)}) + "\n")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # the runtime finds support.rewards
    stack = up(folder / "state", Reporter(), progress_seconds=0.2, spec=tiny_pool(model, storage))
    headers = {"Authorization": f"Bearer {stack.token_file.read_text().strip()}"}
    with httpx.Client(base_url=stack.runtime_url, headers=headers, timeout=70.0, trust_env=False) as client:
        yield Cluster(stack, client)
    down(folder / "state", Reporter())


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    """Every test starts and ends without runs."""
    yield
    cluster.kubectl("delete", "adapterruns", "--all", "--timeout=90s")
