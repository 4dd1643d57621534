"""The trainer rank as a Ray actor, and the group of all ranks.

Called by the loop. Imports no torch: the actor sets its thread count before torch starts its thread pool. Ray runs the
calls of an actor one at a time, in order and on one thread, apart from those in the other lanes.
"""

import hashlib
import os
import socket
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.trainer.group import Seat, TrainerGroup
from lorafleet_runtime.trainer.saves import Saves
from lorafleet_runtime.types import (
    Artifact,
    BatchResult,
    Cursor,
    Loaded,
    LoadRequest,
    Manifest,
    PromptGroup,
    Retention,
    RunFault,
    StepResult,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from lorafleet_runtime.trainer.prepare import Prepared
    from lorafleet_runtime.trainer.rank import TrainerRank

RESOURCE = "lorafleet_trainer"
"""Custom Ray resource of the nodes that trainer ranks are placed on."""

_SAVES = "saves"
"""Ray concurrency group of the calls that wait for checkpoints; all other calls keep their order and their thread."""

_SNAPSHOTS = "snapshots"
"""Of those that wait for snapshots: another disk, another lane."""

_READS = "reads"
"""Of those that read what a load starts from; the loop sends no more than there are threads."""

_PROCESS = "process"
"""Of the call that must answer also while the storage hangs."""

LANES = {_SAVES: 4, _SNAPSHOTS: 4, _READS: 4, _PROCESS: 1}
"""Concurrency groups of the actor's class."""


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
        self._store: Store | None = None
        self._saves = Saves()
        self._wanted: dict[str, LoadRequest] = {}
        """Being read, by uid."""
        self._prepared: dict[str, tuple[LoadRequest, Prepared]] = {}
        self._preparing = threading.Lock()

    def node(self) -> str:
        """The Ray node that the actor was placed on."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def open_store(self, neighbours: int) -> tuple[str, int]:
        """Open the rendezvous of all ranks; called on rank 0 only. Returns its address and port."""
        self._limit_threads(neighbours)
        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)  # the store itself would listen on every address
        port: int = listener.getsockname()[1]
        self._store = _connect(address, port, listener.detach())
        return address, port

    def start(self, seat: Seat = Seat()) -> dict[int, str]:
        """Join the other ranks and load the base model; apart from the constructor, whose errors kill the actor.

        Raises:
            ConfigError: the base model or the trainer's settings are unusable.
        """
        pool_spec, model_path, storage_root, pool = self._arguments
        self._limit_threads(seat.neighbours)
        import torch

        from lorafleet_runtime.trainer import rank
        from lorafleet_runtime.trainer.parallel import Ranks

        if seat.store is not None:
            _stay_on_interface(ray.util.get_node_ip_address())
            if self._store is None:
                self._store = _connect(*seat.store)
        sizes = (pool_spec.trainer.data_parallel, pool_spec.trainer.tensor_parallel)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._rank: TrainerRank = rank.TrainerRank(
            pool_spec,
            model_path,
            storage_root,
            snapshots=_snapshots(storage_root, pool),
            defer=self._saves.defer,
            ranks=Ranks.start(seat.rank, *sizes, self._store, device),
        )
        return self._rank.slots()

    def _limit_threads(self, neighbours: int) -> None:
        """Before the first import of torch: `numThreads`, or this rank's share of the node's cores."""
        # Ray sets OMP_NUM_THREADS=1 in its workers, so the count is always explicit; waiting threads must not spin on
        # cores that an engine shares.
        threads = self._arguments[0].trainer.num_threads or max(1, len(os.sched_getaffinity(0)) // neighbours)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        import torch

        torch.set_num_threads(threads)

    @ray.method(concurrency_group=_READS)  # type: ignore[untyped-decorator, unused-ignore]
    def prepare(self, request: LoadRequest) -> None:
        """Read what `load` of the same run starts from; rank 0 only. See TrainerRank.prepare."""
        self._wanted[request.uid] = request
        prepared = self._rank.prepare(request)
        with self._preparing:
            if self._wanted.get(request.uid) is request:  # else nobody waits for it any more
                self._prepared[request.uid] = (request, prepared)

    def load(self, request: LoadRequest) -> Loaded:
        """See TrainerRank.load; with what was prepared for this very request."""
        wanted, prepared = self._take(request.uid)
        return self._rank.load(request, prepared if wanted == request else None)

    def drop(self, uid: str, keep_snapshot: bool = False) -> str:
        """See TrainerRank.drop."""
        self._take(uid)
        return self._rank.drop(uid, keep_snapshot)

    def _take(self, uid: str) -> "tuple[LoadRequest | None, Prepared | None]":
        """What was prepared for the run; what is still being read for it will not be kept."""
        with self._preparing:
            self._wanted.pop(uid, None)
            return self._prepared.pop(uid, (None, None))

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

    @ray.method(concurrency_group=_SNAPSHOTS)  # type: ignore[untyped-decorator, unused-ignore]
    def snapshotted(self, ticket: str) -> bool:
        """See TrainerRank.snapshotted; rank 0 only."""
        return self._rank.snapshotted(ticket)

    def export(self, uid: str) -> tuple[Manifest, bytes] | None:
        """See TrainerRank.export; on rank 0 called with num_returns=2, to keep the buffer in the object store."""
        return self._rank.export(uid)

    def capture(
        self, uid: str, directory: str, cursor: Cursor, partial: bool = False, retention: Retention | None = None
    ) -> str:
        """Copy what a checkpoint holds and return; rank 0 writes it beside the calls that follow.

        Returns:
            A ticket for `saved`.
        """
        save = self._rank.capture(uid, directory, cursor, partial, retention)
        return "" if save is None else self._saves.add(save.write)

    @ray.method(concurrency_group=_SAVES)  # type: ignore[untyped-decorator, unused-ignore]
    def saved(self, ticket: str) -> Artifact | None:
        """See Saves.result; rank 0 only."""
        return self._saves.result(ticket)

    @ray.method(concurrency_group=_PROCESS)  # type: ignore[untyped-decorator, unused-ignore]
    def pid(self) -> int:
        """The actor's process; does not wait for a call that is running."""
        return os.getpid()


def _stay_on_interface(address: str) -> None:
    """Ranks talk over the network that Ray talks over; gloo by itself takes the one that the host's name leads to."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _connect(address: str, port: int, listener: int | None = None) -> "Store":
    """The rendezvous store; with a listening socket's file number this process serves it."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=listener is not None,
        timeout=timedelta(minutes=10),  # until the last rank is up
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _snapshots(storage_root: str, pool: str) -> Path:
    """A folder that no other pool, storage or user of this node has."""
    key = hashlib.sha256(f"{storage_root}\0{pool}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"lorafleet-snapshots-{os.getuid()}" / key


def start_trainer(
    pool_spec: AdapterPoolSpec, model_path: str, storage_root: str, pool: str, local_resources: bool
) -> TrainerGroup:
    """Start the trainer: one actor per rank.

    Args:
        pool_spec: of the pool.
        model_path: directory of the base model.
        storage_root: shared storage.
        pool: NAMESPACE/NAME of the pool.
        local_resources: one machine without custom resources; the actors then ask for no CPU and no GPU of their own.

    Returns:
        Its handle, at once; `start` waits until every rank is placed and has loaded the base model.
    """
    world = pool_spec.trainer.data_parallel * pool_spec.trainer.tensor_parallel
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,  # a trainer without its runs is of no use: the loop starts a new one and loads them
        "runtime_env": {"env_vars": dict(pool_spec.env)},
    }
    placement = None
    if not local_resources:
        options |= {"resources": {RESOURCE: 1}, "num_gpus": 1}
        if world > 1:  # all ranks or none, on as few nodes as will do
            placement = placement_group([{RESOURCE: 1, "GPU": 1}] * world, strategy="PACK")
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement)
    actor = ray.remote(concurrency_groups=LANES)(TrainerActor).options(**options)
    arguments = (pool_spec, model_path, storage_root, pool)
    return TrainerGroup([actor.remote(*arguments) for _ in range(world)], placement)
