"""A whole stack on a tiny random model: API server, etcd, controller manager, Ray, runtime, operator.

Called by the fixtures of tests/cluster and tests/chaos.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from lorafleet_local.guardian import guarded
from lorafleet_local.pool import Document
from lorafleet_local.report import Reporter
from lorafleet_local.stack import down, up
from support.cluster import Cluster
from support.tiny_model import make_tiny_model

TESTS = Path(__file__).parents[1]


def tiny_pool(model: Path, storage: Path, env: Mapping[str, str]) -> Document:
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
        "env": dict(env),
    }


@contextmanager
def tiny_stack(
    folder: Path, env: Mapping[str, str] | None = None, paths: Sequence[Path] = (), **changes: Any
) -> Iterator[Cluster]:
    """Bring the stack up and, whatever happens, even to pytest, down again.

    Args:
        folder: gets the model, and the stack's state with logs and storage below `state`.
        env: of the pool; with `paths` of every process of the stack.
        paths: before the folder of support.rewards on PYTHONPATH.
        changes: fields of the pool's spec other than in `tiny_pool`.
    """
    search = [*map(str, paths), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(search), **(env or {})}
    model, storage = make_tiny_model(folder / "model"), folder / "state" / "storage"
    storage.mkdir(parents=True, exist_ok=True)
    with (storage / "train.jsonl").open("w") as file:
        for number in range(64):
            file.write(json.dumps({"prompt": f"{number} plus", "label": str(number)}) + "\n")
    spec = tiny_pool(model, storage, env) | changes
    everywhere = env if paths else {}  # what `paths` hold is for every process; rewards are found by the pool's env
    before = {name: os.environ.get(name) for name in everywhere}
    os.environ.update(everywhere)
    try:
        with guarded(folder / "state") as me:
            try:
                stack = up(folder / "state", Reporter(), progress_seconds=0.2, spec=spec, owner=me)
                headers = {"Authorization": f"Bearer {stack.token_file.read_text().strip()}"}
                with httpx.Client(base_url=stack.runtime_url, headers=headers, timeout=70.0, trust_env=False) as client:
                    yield Cluster(stack, client)
            finally:
                down(folder / "state", Reporter())
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
