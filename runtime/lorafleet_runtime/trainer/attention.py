"""Core attention over packed prompt groups: rotary embedding, then attention in which samples share their prompt.

Rows of a group lie as [prompt | response 1 | response 2 ...]. A response row sees the prompt and its own earlier rows,
so the prompt is computed once per group. Built into the model by model.py; imports no megatron.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet_runtime.trainer.shape import Rope

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


def make_layout(
    groups: tuple[GroupRows, ...], head_dim: int, rope: Rope, device: torch.device, dtype: torch.dtype
) -> Layout:
    """Positions, rotary tables and masks for packed groups.

    Every response's positions go on from its prompt. The tables are computed in float32, as Hugging Face does.
    """
    starts: list[tuple[int, int]] = []
    for group in groups:
        starts += [(0, group.prompt), *((group.prompt, rows) for rows in group.responses)]
    positions = torch.cat([torch.arange(first, first + n) for first, n in starts]).to(device)
    angles = torch.outer(positions.float(), inverse_frequencies(rope, head_dim, device))
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    masks = tuple(_tree_mask(g, device) if g.responses and _prefers_tree(g) else None for g in groups)
    return Layout(groups, masks, angles.cos().to(dtype), angles.sin().to(dtype))


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


class PrefixSharedAttention(torch.nn.Module):
    """The core attention of one layer; megatron constructs it with (config, layer_number, ...) and calls forward."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        """Hold nothing: all state comes with the batch."""
        super().__init__()

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
        query, key = _rotate(query, layout), _rotate(key, layout)
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


def _rotate(x: Tensor, layout: Layout) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * layout.cos + torch.cat([-right, left], dim=-1) * layout.sin


def _tree_mask(group: GroupRows, device: torch.device) -> Tensor:
    sizes = torch.tensor([group.prompt, *group.responses], device=device)
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)
    row = torch.arange(len(owner), device=device)
    return (row[:, None] >= row) & ((owner == 0) | (owner[:, None] == owner))


def _prefers_tree(group: GroupRows) -> bool:
    """One masked call beats a call per response until the masked-out area dominates."""
    useful = group.prompt**2 + sum(n * (group.prompt + n) for n in group.responses)
    return group.total <= _SMALL_GROUP_ROWS or group.total**2 <= _TREE_WASTE * useful
