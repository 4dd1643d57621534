"""The trainer rank as a Ray actor.

Called by the loop. Imports no torch: the actor sets its thread count before torch starts its thread pool.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.types import (
    Artifact,
    BatchResult,
    Cursor,
    Loaded,
    LoadRequest,
    Manifest,
    PromptGroup,
    RunFault,
    StepResult,
)

if TYPE_CHECKING:
    from lorafleet_runtime.trainer.rank import TrainerRank

RESOURCE = "lorafleet_trainer"
"""Custom Ray resource of the nodes that trainer ranks are placed on."""


class TrainerActor:
    """Forwards every call to the TrainerRank; `docs/interfaces.md` section 6 is its contract.

    Args:
        pool_spec: of the pool.
        model_path: directory of the base model.
        storage_root: shared storage.
        pool: tells this pool's snapshots from others of the node.
    """

    def __init__(self, pool_spec: AdapterPoolSpec, model_path: str, storage_root: str, pool: str) -> None:
        self._arguments = (pool_spec, model_path, storage_root, pool)

    def start(self) -> dict[int, str]:
        """Load the base model; apart from the constructor, whose errors Ray turns into a dead actor.

        Raises:
            ConfigError: the base model or the trainer's settings are unusable.
        """
        pool_spec, model_path, storage_root, pool = self._arguments
        # Ray sets OMP_NUM_THREADS=1 in its workers, so the count is always explicit; waiting threads must not spin on
        # cores that an engine shares.
        threads = pool_spec.trainer.num_threads or len(os.sched_getaffinity(0))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        import torch

        torch.set_num_threads(threads)
        from lorafleet_runtime.trainer import rank

        self._rank: TrainerRank = rank.TrainerRank(
            pool_spec, model_path, storage_root, snapshots=_snapshots(storage_root, pool)
        )
        return self._rank.slots()

    def load(self, request: LoadRequest) -> Loaded:
        """See TrainerRank.load."""
        return self._rank.load(request)

    def drop(self, uid: str, keep_snapshot: bool = False) -> None:
        """See TrainerRank.drop."""
        self._rank.drop(uid, keep_snapshot)

    def retain(self, uids: list[str]) -> None:
        """See TrainerRank.retain."""
        self._rank.retain(uids)

    def slots(self) -> dict[int, str]:
        """See TrainerRank.slots."""
        return self._rank.slots()

    def accumulate(self, groups: list[PromptGroup]) -> BatchResult:
        """See TrainerRank.accumulate."""
        return self._rank.accumulate(groups)

    def step(self, uid: str, cursor: Cursor, incarnation: str) -> StepResult | RunFault:
        """See TrainerRank.step."""
        return self._rank.step(uid, cursor, incarnation)

    def export(self, uid: str) -> tuple[Manifest, bytes]:
        """See TrainerRank.export; call it with num_returns=2 to keep the buffer in the object store."""
        return self._rank.export(uid)

    def checkpoint(self, uid: str, directory: str, cursor: Cursor) -> Artifact:
        """See TrainerRank.checkpoint."""
        return self._rank.checkpoint(uid, directory, cursor)

    def pid(self) -> int:
        """The actor's process."""
        return os.getpid()


def _snapshots(storage_root: str, pool: str) -> Path:
    """A folder that no other pool, storage or user of this node has."""
    key = hashlib.sha256(f"{storage_root}\0{pool}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"lorafleet-snapshots-{os.getuid()}" / key


def start_trainer(
    pool_spec: AdapterPoolSpec, model_path: str, storage_root: str, pool: str, local_resources: bool
) -> Any:
    """Start a trainer actor.

    Args:
        pool_spec: of the pool.
        model_path: directory of the base model.
        storage_root: shared storage.
        pool: NAMESPACE/NAME of the pool.
        local_resources: one machine without custom resources; the actor then asks for no CPU and no GPU of its own.

    Returns:
        The Ray handle, at once; the first call waits until the base model is loaded.
    """
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,  # a trainer without its runs is of no use: the loop starts a new one and loads them
        "runtime_env": {"env_vars": dict(pool_spec.env)},
    }
    if not local_resources:
        options["resources"] = {RESOURCE: 1}
        options["num_gpus"] = 1
    return ray.remote(TrainerActor).options(**options).remote(pool_spec, model_path, storage_root, pool)
