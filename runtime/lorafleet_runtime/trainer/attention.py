"""Core attention over packed prompt groups: rotary embedding, then attention in which samples share their prompt.

Rows of a group lie as [prompt | response 1 | response 2 ...]. A response row sees the prompt and its own earlier rows,
so the prompt is computed once per group. Built into the model by model.py; imports no megatron. On CUDA the norm of
the heads and the rotary embedding are one kernel, and in bfloat16 all groups are one call.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet_runtime.trainer.kernels.attention import Sequences, attend, make_sequences
from lorafleet_runtime.trainer.kernels.rotary import norm_rotate
from lorafleet_runtime.trainer.shape import Rope
from lorafleet_runtime.trainer.transfer import to_device

_SMALL_GROUP_ROWS = 512
_TREE_WASTE = 4


class GroupRows(NamedTuple):
    """Row counts of one group; a plain sequence has no responses."""

    prompt: int
    responses: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """All rows."""
        return self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True)
class Layout:
    """What attention needs to know of one packed pass of T rows."""

    groups: tuple[GroupRows, ...]
    masks: tuple[Tensor | None, ...]
    """Per group: [rows, rows] bool, True where a row may look; None where no tree mask is used."""
    cos: Tensor
    """[T, 1, head_dim]."""
    sin: Tensor
    """[T, 1, head_dim]."""
    sequences: Sequences | None = None
    """All groups for kernels/attention.py; None for a call, or several, per group."""


class Tables(NamedTuple):
    """What layouts of one model are made of."""

    head_dim: int
    rope: Rope
    device: torch.device
    dtype: torch.dtype
    one_call: bool
    """kernels/attention.py does all groups at once, where that takes no more than a few times their memory."""


def make_layout(groups: tuple[GroupRows, ...], tables: Tables) -> Layout:
    """Positions, rotary tables and masks for packed groups.

    Every response's positions go on from its prompt. The tables are computed in float32, as Hugging Face does.
    """
    head_dim, rope, device, dtype, one_call = tables
    starts: list[tuple[int, int]] = []
    for group in groups:
        starts += [(0, group.prompt), *((group.prompt, rows) for rows in group.responses)]
    positions = torch.cat([torch.arange(first, first + n) for first, n in starts])
    positions = to_device(positions, device)
    angles = torch.outer(positions.float(), inverse_frequencies(rope, head_dim, device))
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    sequences = make_sequences(groups, device) if one_call else None
    if sequences is not None:
        return Layout(groups, (), cos, sin, sequences)
    # Where copies of prompts are too many for one call, a call per response would make as many.
    masks = tuple(
        _tree_mask(g, device) if g.responses and (one_call or _prefers_tree(g)) else None for g in groups
    )  # fmt: skip
    return Layout(groups, masks, cos, sin)


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Angle per position of each pair of a head's elements, [head_dim / 2] float32, with the model's rope scaling."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_positions * inverse / (2 * math.pi)  # within the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return keep * inverse + (1.0 - keep) * inverse / rope.factor
    return inverse


class HeadNorm(torch.nn.Module):
    """Holds the weight of a query or key norm that the core attention applies; megatron constructs and calls it."""

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        """Allocate the weight, [head_dim]."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Leave x to the kernel."""
        return x


class PrefixSharedAttention(torch.nn.Module):
    """The core attention of one layer; megatron constructs it with (config, layer_number, ...) and calls forward."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        """Hold no state of a batch: that comes with it."""
        super().__init__()
        self._eps: float = config.layernorm_epsilon
        self._fused = False
        self._norms: tuple[Tensor | None, Tensor | None] = (None, None)

    def fuse(self, query_norm: Tensor | None, key_norm: Tensor | None) -> None:
        """Use the kernel for rotary embedding and head norms.

        Args:
            query_norm: weight [head_dim], or None for a model without these norms.
            key_norm: likewise.
        """
        self._fused, self._norms = True, (query_norm, key_norm)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **batch: Any) -> Tensor:
        """Attend within each group.

        Args:
            query: [T, heads, head_dim], before the rotary embedding.
            key: [T, kv_heads, head_dim].
            value: [T, kv_heads, head_dim].
            attention_mask: unused; the layout says who sees whom.
            batch: megatron's keywords; packed_seq_params.layout is the Layout.

        Returns:
            [T, heads * head_dim].
        """
        layout: Layout = batch["packed_seq_params"].layout
        query, key = (self._rotate(x, norm, layout) for x, norm in zip((query, key), self._norms, strict=True))
        if layout.sequences is not None:
            return attend(query, key, value, layout.sequences).flatten(1)
        sizes = [group.total for group in layout.groups]
        out: list[Tensor] = []
        for group, mask, q, k, v in zip(
            layout.groups, layout.masks, *(torch.split(t, sizes) for t in (query, key, value)), strict=True
        ):
            if mask is not None or not group.responses:
                out.append(_attend(q, k, v, mask))
            else:
                out += _attend_each(group, q, k, v)
        return torch.cat(out).flatten(1)

    def _rotate(self, x: Tensor, norm: Tensor | None, layout: Layout) -> Tensor:
        if self._fused:
            return norm_rotate(x, norm, self._eps, layout.cos[:, 0], layout.sin[:, 0])
        left, right = x.chunk(2, dim=-1)
        return x * layout.cos + torch.cat([-right, left], dim=-1) * layout.sin


def _attend_each(group: GroupRows, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """One call per response over [prompt keys, own keys]: no work on pairs of rows that never see each other."""
    sizes = [group.prompt, *group.responses]
    (q0, *qs), (k0, *ks), (v0, *vs) = (torch.split(t, sizes) for t in (query, key, value))
    out = [_attend(q0, k0, v0, None)]
    for q, k, v in zip(qs, ks, vs, strict=True):
        mask = torch.ones(len(q), group.prompt + len(q), dtype=torch.bool, device=q.device).tril(group.prompt)
        out.append(_attend(q, torch.cat([k0, k]), torch.cat([v0, v]), mask))
    return out


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[rows, heads, head_dim] in and out; causal when there is no mask."""
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    gqa = query.shape[1] != key.shape[1]
    if gqa and mask is not None and query.is_cuda:  # CUDA's fused kernel with a mask takes no grouped heads
        k, v = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (k, v))
        gqa = False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
    return out[0].transpose(0, 1)


def _tree_mask(group: GroupRows, device: torch.device) -> Tensor:
    sizes = torch.tensor([group.prompt, *group.responses], device=device)
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)
    row = torch.arange(len(owner), device=device)
    return (row[:, None] >= row) & ((owner == 0) | (owner[:, None] == owner))


def _prefers_tree(group: GroupRows) -> bool:
    """One masked call beats a call per response until the masked-out area dominates."""
    useful = group.prompt**2 + sum(n * (group.prompt + n) for n in group.responses)
    return group.total <= _SMALL_GROUP_ROWS or group.total**2 <= _TREE_WASTE * useful
