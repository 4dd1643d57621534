"""The ranks of one trainer: who they are, and what they tell each other outside of the model's own collectives.

Built by actor.py (several ranks) or rank.py (one), used by every module of the trainer that moves data between ranks.
Ranks are numbered as in Megatron: rank = data-parallel rank * tensor-parallel size + tensor-parallel rank. Every call
of the trainer reaches every rank with the same arguments, so all of them make the same collectives in the same order.
"""

import datetime
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lorafleet_runtime.errors import ConfigError, RuntimeFault

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_SECONDS = 1800
"""A rank that waits longer for its peers raises, and the loop replaces them all. One that dies is noticed at once; this
is for one that hangs, and above what rank 0 may take for the files of a large base model."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of its trainer."""

    rank: int
    dp: int
    """Data-parallel size."""
    tp: int
    """Tensor-parallel size."""
    dp_group: Any = None
    """The ranks with this one's share of each matrix; None where it is alone."""
    tp_group: Any = None
    """The ranks with this one's share of the groups; None where it is alone."""

    @classmethod
    def start(cls, rank: int, dp: int, tp: int, store: Any, device: torch.device) -> "Ranks":
        """Join the other ranks.

        Args:
            rank: of this process, 0 to dp * tp - 1.
            dp: data-parallel size.
            tp: tensor-parallel size.
            store: torch.distributed.Store, the rendezvous of all ranks; None for a single rank, which needs no port.
            device: of the model; on CUDA tensors go by NCCL, objects by gloo.

        Raises:
            ConfigError: this process has joined ranks of other sizes before.
        """
        timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.HashStore() if store is None else store,  # type: ignore[attr-defined, unused-ignore]
                rank=rank,
                world_size=dp * tp,
                timeout=timeout,
            )
        if (dist.get_rank(), dist.get_world_size()) != (rank, dp * tp):
            raise ConfigError(f"trainer: this process is one of {dist.get_world_size()} ranks already; start a new one")
        by_tp = [[d * tp + t for d in range(dp)] for t in range(tp)] if dp > 1 else []
        by_dp = [[d * tp + t for t in range(tp)] for d in range(dp)] if tp > 1 else []
        # Every rank takes part in making every group, also those that it is no member of.
        groups = [[dist.new_group(members, timeout) for members in kind] for kind in (by_tp, by_dp)]
        mine = [kind[at] if kind else None for kind, at in zip(groups, (rank % tp, rank // tp), strict=True)]
        return cls(rank, dp, tp, *mine)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.dp * self.tp

    @property
    def dp_rank(self) -> int:
        """Which share of the groups, masters and moments this rank has."""
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        """Which share of each matrix this rank has."""
        return self.rank % self.tp

    @property
    def is_first(self) -> bool:
        """Rank 0, the only one that reads and writes files."""
        return self.rank == 0

    def on_first[T](self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, on every rank.

        Raises:
            RuntimeFault: as `work` raised it on rank 0, on every rank: nobody may wait for an answer that never comes.
        """
        if self.world == 1:
            return work()
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer[0] = work()
            except RuntimeFault as error:
                answer[1] = error
            except Exception as error:  # told to the others as it is to the loop
                log.exception("rank 0 raised; all ranks raise with it")
                answer[1] = RuntimeFault(f"{type(error).__name__}: {error}")
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        result: T = answer[0]
        return result

    def gather_from_dp(self, value: Any) -> list[Any]:
        """`value` of every data-parallel rank, in their order, on each of them."""
        if self.dp == 1:
            return [value]
        found: list[Any] = [None] * self.dp
        dist.all_gather_object(found, value, group=self.dp_group)
        return found

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in their order, on each of them."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def sum_over_tp(self, tensor: Tensor) -> Tensor:
        """The sum over tensor-parallel ranks, in place; the same bits on each of them."""
        if self.tp > 1:
            dist.all_reduce(tensor, group=self.tp_group)
        return tensor

    def max_over_tp(self, tensor: Tensor) -> Tensor:
        """The maximum over tensor-parallel ranks, in place."""
        if self.tp > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.tp_group)
        return tensor

    def exchange_over_dp(self, chunks: Tensor) -> Tensor:
        """[dp, n] to [dp, n]: row i goes to data-parallel rank i; row j of the result came from rank j."""
        received = torch.empty_like(chunks)
        dist.all_to_all_single(received, chunks, group=self.dp_group)
        return received

    def collect_over_dp(self, share: Tensor) -> Tensor:
        """[n] to [dp, n], each rank's share in order. All shares have one length: gloo refuses uneven ones."""
        out = share.new_empty(self.dp * len(share))
        dist.all_gather_into_tensor(out, share, group=self.dp_group)
        return out.view(self.dp, -1)

    def collect_on_first_dp(self, share: Tensor) -> list[Tensor] | None:
        """Each data-parallel rank's tensor, all of one shape, on the first of them; None on the others."""
        return _collect_on_first(share, self.dp, self.dp_rank, self.dp_group)

    def collect_on_first_tp(self, share: Tensor) -> list[Tensor] | None:
        """Each tensor-parallel rank's tensor, all of one shape, on the first of them; None on the others."""
        return _collect_on_first(share, self.tp, self.tp_rank, self.tp_group)


def _collect_on_first(share: Tensor, size: int, position: int, group: Any) -> list[Tensor] | None:
    if size == 1:
        return [share]
    out = [torch.empty_like(share) for _ in range(size)] if position == 0 else None
    dist.gather(share, out, group=group, group_dst=0)
    return out
