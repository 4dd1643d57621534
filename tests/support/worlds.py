"""Runs a small training on a world of ranks, one process and one CUDA device each, and reads what it left on disk."""

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import start_processes

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.trainer.parallel import Ranks
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, RunFault
from support.trainer import make_groups, make_request

STEPS = 4
RUNS: dict[str, dict[str, Any]] = {
    "a": {"rank": 4, "algorithm": {"klCoef": 0.1}},
    "b": {"rank": 16, "alpha": 16, "targetModules": ["q_proj", "o_proj", "down_proj"], "optimizer": {"lr": 3e-3}},
    "c": {"rank": 8, "algorithm": {"lossReduction": "tokenMean", "tisMode": "Off"}},
}


def train_world(
    model: Path, out: Path, dp: int, tp: int, uids: str = "abc", dtype: str = "float32", **trainer: Any
) -> dict[str, dict[str, Tensor]]:
    """Train RUNS for STEPS on dp x tp devices; masters and moments by run, in the canonical layout."""
    out.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spec = {
        "baseModel": {"path": str(model), "dtype": dtype}, "slots": 4, "maxRank": 16,
        "trainer": {"dataParallel": dp, "tensorParallel": tp, **trainer},
    }  # fmt: skip
    start_processes(_train, (spec, str(model), str(out), port, uids), nprocs=dp * tp, start_method="spawn")
    return {uid: load_file(out / uid / f"step_{STEPS}" / "optimizer.safetensors") for uid in uids}


def _train(rank: int, spec: dict[str, Any], model: str, out: str, port: int, uids: str) -> None:
    torch.cuda.set_device(rank)
    pool = AdapterPoolSpec.model_validate(spec)
    world = pool.trainer.data_parallel * pool.trainer.tensor_parallel
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False) if world > 1 else None
    ranks = Ranks.start(
        rank, pool.trainer.data_parallel, pool.trainer.tensor_parallel, store, torch.device("cuda", rank)
    )
    trainer = TrainerRank(pool, model, out, snapshots=Path(out) / "snapshots", ranks=ranks)
    for slot, uid in enumerate(uids):
        trainer.load(make_request(uid, slot, **RUNS[uid]))
    for step in range(STEPS):
        groups = {uid: make_groups(uid, 3, seed=step) for uid in uids}
        assert not trainer.accumulate([g for own in groups.values() for g in own[:1]]).faults
        assert not trainer.accumulate([g for own in groups.values() for g in own[1:]]).faults
        for uid in uids:
            assert not isinstance(trainer.step(uid, Cursor()), RunFault)
    for uid in uids:
        trainer.export(uid)
        trainer.checkpoint(uid, f"{out}/{uid}", Cursor())
    dist.destroy_process_group()
