"""LoRA adapters of the live slots, and the linear operation that applies them to packed rows.

A `SlotAdapter` keeps one run's A and B matrices in a flat buffer at true rank: masters, gradient sum, and, below
float32 or with data-parallel ranks, a compute copy. The layout is layout.py's: [A of each target | B of each target] at
each site, so the A matrices of one site lie side by side and one GEMM serves q, k and v (or gate and up) although each
has its own A. A tensor-parallel rank has its share of each matrix, as Megatron splits the frozen weight, and needs no
collectives of its own: the model's sum over ranks of a layer's output (o, down) or input gradient (qkv, gate_up) covers
the adapters' part.

`lora_linear` is called by linear.py inside the model. In bfloat16 on CUDA kernels/lora.py does all row segments at
once, elsewhere a loop. Neither masks: a NaN in one slot stays in that slot's rows. Slots without rows cost nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorafleet_runtime.trainer.kernels import lora as kernels
from lorafleet_runtime.trainer.layout import PARENT, SITES, FlatTensor, flat_layout
from lorafleet_runtime.trainer.parallel import Ranks
from lorafleet_runtime.trainer.shape import ModelShape
from lorafleet_runtime.trainer.shares import Shares

_SINGLE = Ranks(0, 1, 1)


@dataclass(frozen=True, slots=True)
class SitePart:
    """B of one projection of a site."""

    projection: int
    """Position in SITES[site]."""
    b: Tensor
    grad_b: Tensor


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """One slot's matrices at one site of one layer."""

    a: Tensor
    """[targets * rank, in]: the A matrices of the targeted projections, stacked."""
    grad_a: Tensor
    parts: tuple[SitePart, ...]
    rank: int
    scale: float


@dataclass(slots=True)
class SlotAdapter:
    """One run's adapter in memory.

    Args:
        shape: of the base model.
        rank: LoRA rank.
        alpha: LoRA alpha.
        targets: HF projection names.
        dtype: compute type; masters and gradient sums are float32, or float64 when this is.
        device: of the base model.
        rslora: scale by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023).
        ranks: of the trainer; one without them.
    """

    shape: ModelShape
    rank: int
    alpha: int
    targets: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    rslora: bool = False
    ranks: Ranks = _SINGLE
    layout: tuple[FlatTensor, ...] = field(init=False)
    """Of this rank's share of the matrices."""
    shares: Shares = field(init=False)
    master: Tensor = field(init=False)
    """[own elements], what the optimizer updates: everything, or with data-parallel ranks this rank's share."""
    grad: Tensor = field(init=False)
    """[elements], sum over the tokens of the groups that this rank has seen since the last step."""
    weights: Tensor = field(init=False)
    """[elements] in the compute type; the masters themselves when the types agree and nobody else has a share."""
    sites: dict[tuple[int, str], SiteWeights] = field(init=False)

    def __post_init__(self) -> None:
        """Allocate the buffers, all zero."""
        self.layout = flat_layout(self.shape, self.rank, self.targets, self.ranks.tp)
        self.shares = Shares(self.layout, self.ranks)
        master_type = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.grad = torch.zeros(self.layout[-1].end, dtype=master_type, device=self.device)
        self.master = self.grad.new_zeros(self.shares.own_size)
        alone = self.ranks.dp == 1 and self.dtype == master_type
        self.weights = self.master if alone else torch.zeros_like(self.grad, dtype=self.dtype)
        self.sites = self._make_sites()

    @property
    def canonical_layout(self) -> tuple[FlatTensor, ...]:
        """Of the whole adapter, as files and exports hold it."""
        return self.layout if self.ranks.tp == 1 else flat_layout(self.shape, self.rank, self.targets)

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def refresh(self) -> None:
        """Bring the compute copy up to date after the masters changed, on every rank."""
        if self.weights is not self.master:
            self.weights.copy_(self.shares.whole(self.master.to(self.dtype)))

    def install(self, master: Tensor) -> None:
        """Take new weights.

        Args:
            master: [elements] of the whole adapter, in the canonical layout.
        """
        self.master.copy_(self.shares.own(master))
        self.refresh()

    def _make_sites(self) -> dict[tuple[int, str], SiteWeights]:
        entries = {(entry.module, entry.kind): entry for entry in self.layout}
        sites: dict[tuple[int, str], SiteWeights] = {}
        for layer in range(self.shape.num_layers):
            for site, projections in SITES.items():
                chosen = [p for p in projections if p in self.targets]
                if not chosen:
                    continue
                modules = [f"model.layers.{layer}.{PARENT[p]}.{p}" for p in chosen]
                first = entries[modules[0], "lora_A"]
                stacked = first._replace(shape=(self.rank * len(chosen), first.shape[1]))
                parts = tuple(
                    SitePart(projections.index(p), entry.view(self.weights), entry.view(self.grad))
                    for p, entry in ((p, entries[m, "lora_B"]) for p, m in zip(chosen, modules, strict=True))
                )
                sites[layer, site] = SiteWeights(
                    stacked.view(self.weights), stacked.view(self.grad), parts, self.rank, self.scale
                )
        return sites


class Segment(NamedTuple):
    """A run of rows that belongs to one slot."""

    adapter: SlotAdapter
    start: int
    end: int


class Columns(NamedTuple):
    """Where a projection's outputs lie in its site's output row, seen as [groups, width]."""

    groups: int
    start: int
    end: int


class SiteTables(NamedTuple):
    """All segments of a pass at one site, for kernels/lora.py."""

    a: tuple[kernels.Table, ...]
    b: tuple[kernels.Table, ...]
    width: int
    """Of the hidden buffer: room for the largest rank times targets."""


class LoraPlan(NamedTuple):
    """The LoRA work of one linear in one pass."""

    work: tuple[tuple[SiteWeights, int, int], ...]
    """(matrices, first row, end row) per slot."""
    columns: tuple[Columns, ...]
    """Where each projection of the site lies in the output."""
    ranks: Ranks | None = None
    """Over which the gradient of the input is summed; None where it is whole."""
    layer: int = 0
    tables: SiteTables | None = None
    """The same work for kernels/lora.py; None to loop over it."""


@dataclass(slots=True)
class LoraContext:
    """Which rows of the pass under way use which adapter; model.py sets it before each pass."""

    ranks: Ranks
    grouped: bool = False
    """kernels/lora.py does all segments at once; otherwise a loop."""
    segments: tuple[Segment, ...] = ()
    _tables: dict[str, SiteTables] = field(default_factory=dict)

    def begin(self, segments: Sequence[Segment]) -> None:
        """Set what the next pass uses."""
        self.segments, self._tables = tuple(segments), {}

    def plan(self, layer: int, site: str, columns: tuple[Columns, ...], sum_input_gradient: bool) -> LoraPlan | None:
        """The LoRA work of one linear, or None when no row has an adapter there.

        Args:
            layer: of the linear.
            site: of the linear.
            columns: where each projection of the site lies in its output.
            sum_input_gradient: every tensor-parallel rank has a part of it (Megatron's allreduce_dgrad).
        """
        key = (layer, site)
        work = tuple((s.adapter.sites[key], s.start, s.end) for s in self.segments if key in s.adapter.sites)
        if not work:
            return None
        if self.grouped and site not in self._tables:
            self._tables[site] = _site_tables(site, self.segments, columns)
        tables = self._tables.get(site)
        return LoraPlan(work, columns, self.ranks if sum_input_gradient else None, layer, tables)


def _site_tables(site: str, segments: Sequence[Segment], columns: tuple[Columns, ...]) -> SiteTables:
    # two programs would add to one gradient at once
    assert len({id(segment.adapter) for segment in segments}) == len(segments), "a slot has one segment of a pass"
    a: list[kernels.Job] = []
    b: list[kernels.Job] = []
    for adapter, start, end in segments:
        matrices = adapter.sites.get((0, site))
        if matrices is None:
            continue
        rank, layer_stride = matrices.rank, adapter.weights.numel() // adapter.shape.num_layers
        stacked, wide = matrices.a.shape
        addresses = matrices.a.data_ptr(), matrices.grad_a.data_ptr()
        a.append(
            kernels.Job(start, end, *addresses, layer_stride, stacked, wide, wide, 1, 0, wide, 0, 0, matrices.scale)
        )
        row = sum(c.groups * (c.end - c.start) for c in columns)
        for i, part in enumerate(matrices.parts):
            at, outputs = columns[part.projection], len(part.b)
            addresses = part.b.data_ptr(), part.grad_b.data_ptr()
            place = (i * rank, at.end - at.start, at.start, row // at.groups)
            b.append(kernels.Job(start, end, *addresses, layer_stride, rank, outputs, 1, rank, *place, matrices.scale))
    device, size = adapter.weights.device, adapter.weights.element_size()
    return SiteTables(
        kernels.make_tables(a, device, size), kernels.make_tables(b, device, size), max(job.size_j for job in a)
    )


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LoraPlan) -> Tensor:
    """x W^T + bias, plus scale * (x A^T) B^T on each slot's rows.

    The gradients of A and B are added into the slots' own sums during the backward pass; W is frozen.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out] or None.
        plan: which rows use which matrices.

    Returns:
        [..., out].
    """
    # Without an input that needs a gradient (layer 0: the embedding is frozen) autograd would skip the backward pass.
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y: Tensor = _LoraLinear.apply(rows, weight, bias, anchor, plan)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, plan: LoraPlan) -> Tensor:
        y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        hidden = _add_each(x, y, plan) if plan.tables is None else _add_all(x, y, plan, plan.tables)
        ctx.save_for_backward(x, weight, *hidden)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *hidden = ctx.saved_tensors
        plan: LoraPlan = ctx.plan
        dy = grads[0].contiguous()
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        if plan.tables is None:
            _backward_each(x, dy, dx, hidden, plan)
        else:
            _backward_all(x, dy, dx, hidden[0], plan, plan.tables)
        if dx is not None and plan.ranks is not None:
            plan.ranks.sum_over_tp(dx)
        return dx, None, None, None, None


def _add_all(x: Tensor, y: Tensor, plan: LoraPlan, tables: SiteTables) -> list[Tensor]:
    """y += scale * (x A^T) B^T on every segment. Returns what the backward pass needs of it."""
    h = x.new_empty(len(x), tables.width)
    for table in tables.a:
        kernels.narrow(x, h, table, plan.layer)
    for table in tables.b:
        kernels.widen(h, y, table, plan.layer)
    return [h]


def _backward_all(x: Tensor, dy: Tensor, dx: Tensor | None, h: Tensor, plan: LoraPlan, tables: SiteTables) -> None:
    dh = torch.empty_like(h)
    for table in tables.b:
        kernels.narrow(dy, dh, table, plan.layer)
        kernels.add_gradients(dy, h, table, plan.layer)
    for table in tables.a:
        kernels.add_gradients(x, dh, table, plan.layer)
        if dx is not None:
            kernels.widen(dh, dx, table, plan.layer)


def _add_each(x: Tensor, y: Tensor, plan: LoraPlan) -> list[Tensor]:
    hidden = []
    for site, start, end in plan.work:
        h = (x[start:end] @ site.a.t()).mul_(site.scale)
        hidden.append(h)
        for i, part in enumerate(site.parts):
            _add_columns(y[start:end], h[:, i * site.rank : (i + 1) * site.rank], part.b, plan.columns[part.projection])
    return hidden


def _backward_each(x: Tensor, dy: Tensor, dx: Tensor | None, hidden: list[Tensor], plan: LoraPlan) -> None:
    for (site, start, end), h in zip(plan.work, hidden, strict=True):
        dh = torch.empty_like(h)
        for i, part in enumerate(site.parts):
            rank_columns = slice(i * site.rank, (i + 1) * site.rank)
            d = _take_columns(dy[start:end], plan.columns[part.projection])
            torch.mm(d, part.b, out=dh[:, rank_columns])
            _add_product(part.grad_b, d.t(), h[:, rank_columns])
        dh.mul_(site.scale)
        _add_product(site.grad_a, dh.t(), x[start:end])
        if dx is not None:
            dx[start:end].addmm_(dh, site.a)


def _add_columns(y: Tensor, h: Tensor, b: Tensor, at: Columns) -> None:
    """y[:, at] += h B^T, in place."""
    if at.groups == 1:
        y[:, at.start : at.end].addmm_(h, b.t())
    else:
        delta = (h @ b.t()).view(len(h), at.groups, -1)
        y.view(len(y), at.groups, -1)[:, :, at.start : at.end].add_(delta)


def _take_columns(y: Tensor, at: Columns) -> Tensor:
    if at.groups == 1:
        return y[:, at.start : at.end]
    return y.view(len(y), at.groups, -1)[:, :, at.start : at.end].reshape(len(y), -1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, with the sum kept in `total`'s type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))
