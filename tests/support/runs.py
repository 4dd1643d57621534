"""Small builders of specs, groups and registries for tests."""

from typing import Any

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.types import Cursor, DatasetInfo, Loaded, PromptGroup, Sample, VersionId


def pool_spec(**changes: Any) -> AdapterPoolSpec:
    """A pool of two slots that lets runs be three versions stale."""
    spec: dict[str, Any] = {
        "baseModel": {"path": "/model", "dtype": "float32"},
        "slots": 2,
        "maxRank": 8,
        "defaults": {"maxStaleness": 3},
        "rewardModules": ["support.rewards"],
    }
    return AdapterPoolSpec.model_validate(spec | changes)


def run_spec(**changes: Any) -> dict[str, Any]:
    """A run of two groups of two samples per step, three steps."""
    spec: dict[str, Any] = {
        "poolRef": {"name": "pool"},
        "data": "train.jsonl",
        "rmType": "math",
        "rank": 4,
        "rolloutBatchSize": 2,
        "nSamplesPerPrompt": 2,
        "numStep": 3,
        "maxStaleness": 0,
        "sampling": {"maxTokens": 8},
    }
    return {k: v for k, v in (spec | changes).items() if v is not None}


def put(registry: Registry, uid: str, *, created: float = 0.0, generation: int = 1, **changes: Any) -> None:
    """PUT a run named after its uid."""
    registry.put(uid, run_spec(**changes), namespace="team", name=f"run-{uid}", generation=generation, created=created)


DATASET = DatasetInfo(rows=10, skipped=0, digest="d")


def group(uid: str, index: int, *, incarnation: str = "1.1", n: int = 1) -> PromptGroup:
    """A finished group of two one-token responses, with rewards 0 and 1."""
    rewards, mean = (0.0, 1.0), 0.5
    samples = tuple(Sample((5,), (-0.5,), r, r - mean, False) for r in rewards)
    return PromptGroup(uid, VersionId(uid, incarnation, n), index, (1, 2, 3), samples, tuple("x" for _ in rewards))


def activate(registry: Registry, uid: str, step: int = 0) -> None:
    """Bring a new run to ACTIVE."""
    put(registry, uid)
    registry.checked(uid, DATASET)
    registry.assign()
    registry.loaded(Loaded(uid, step, Cursor()), now=99.0)
    registry.published(uid, 1, now=100.0)
