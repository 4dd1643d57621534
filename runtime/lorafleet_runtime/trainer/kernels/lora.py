"""LoRA products of all slots of a pass, one Triton launch for each kind of product whatever the number of slots.

Called by lora.py where the model is bfloat16 on CUDA. A job is one slot's matrix M [j, n] at one site (its stacked A,
or B of one projection) with that slot's rows. A tile never spans two jobs and nothing is added atomically: sums have a
fixed order, a NaN stays with its slot, and where a pass holds one slot (deterministic mode) its bits are its own. Ranks
are true: a job costs what its own needs. Grouped products as in S-LoRA (Sheng et al. 2023) and Punica (Chen et al.
2023), here with gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet_runtime.trainer.transfer import to_device

_ROWS = 64
"""Rows of a tile."""
_CHUNK = 2048
"""Rows whose weight gradients one program adds up; a job with more has several, added in order."""
_COLUMNS = (256, 128, 64)
"""Blocks along n of `widen`: the largest that straddles no two groups of columns. Measured on an H200."""
_BLOCKS = 2
"""Blocks that one program widens, one after the other: finding its job takes about as long as one."""
_FIELDS = tl.constexpr(13)


class Job(NamedTuple):
    """One matrix of one slot; sizes and strides in elements."""

    start: int
    """First row."""
    end: int
    """End row."""
    matrix: int
    """Address of M in layer 0."""
    grad: int
    """Address of its gradient sum in layer 0, laid out alike."""
    layer_stride: int
    """From a layer's matrix to the next layer's."""
    size_j: int
    """Rank, or rank times targets for a stacked A."""
    size_n: int
    stride_j: int
    stride_n: int
    first_j: int
    """Where the job's columns begin in the hidden buffer."""
    width: int
    """n lies at column n // width * group + first + n % width of the wide rows."""
    first: int
    group: int
    scale: float


class Table(NamedTuple):
    """The jobs of one site, on the device."""

    jobs: Tensor
    """[jobs, 13] int64."""
    scales: Tensor
    """[jobs] float32."""
    tiles: Tensor
    """[tiles, 2] int64: job, first row."""
    chunks: Tensor
    """[chunks, 4] int64: job, first row, end row, where its partial sum begins or -1 to add to the gradient itself."""
    merges: Tensor
    """[merges, 3] int64: job, where its partial sums begin, their number."""
    partial_size: int
    """Elements of all partial sums."""
    merge_size: int
    """Elements of the largest one."""
    max_j: int
    max_n: int
    unit_j: bool
    """M is contiguous along j (B), not along n (A)."""
    fast: bool
    """Blocks of wide columns are contiguous, and everything can be read in 16 bytes."""
    block_n: int
    """Of `widen`."""


def make_tables(jobs: Sequence[Job], device: torch.device, element_size: int) -> tuple[Table, ...]:
    """Copy the jobs of a site to the device; those whose sizes allow no 16-byte loads slow down only each other.

    Args:
        jobs: each with a row at least; all A or all B.
        device: of the model.
        element_size: bytes of the compute type.
    """
    kinds = [[job for job in jobs if _is_fast(job, element_size) is fast] for fast in (True, False)]
    return tuple(_make_table(chosen, device, fast) for chosen, fast in zip(kinds, (True, False), strict=True) if chosen)


def _make_table(jobs: Sequence[Job], device: torch.device, fast: bool) -> Table:
    tiles = [(i, row) for i, job in enumerate(jobs) for row in range(job.start, job.end, _ROWS)]
    chunks: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    partial_size = 0
    for i, job in enumerate(jobs):
        starts, size = range(job.start, job.end, _CHUNK), job.size_j * job.size_n
        if len(starts) > 1:
            merges.append((i, partial_size, len(starts)))
        for row in starts:
            chunks.append((i, row, min(row + _CHUNK, job.end), partial_size if len(starts) > 1 else -1))
            partial_size += size if len(starts) > 1 else 0
    fields = [job[:13] for job in jobs]
    flat = [value for rows in (fields, tiles, chunks, merges) for row in rows for value in row]
    sizes = [13 * len(jobs), 2 * len(tiles), 4 * len(chunks), 3 * len(merges)]
    table, tile, chunk, merge = torch.split(to_device(torch.tensor(flat, dtype=torch.int64), device), sizes)
    return Table(
        jobs=table.view(-1, 13),
        scales=to_device(torch.tensor([job.scale for job in jobs], dtype=torch.float32), device),
        tiles=tile.view(-1, 2),
        chunks=chunk.view(-1, 4),
        merges=merge.view(-1, 3),
        partial_size=partial_size,
        merge_size=max((jobs[i].size_j * jobs[i].size_n for i, *_ in merges), default=0),
        max_j=max(job.size_j for job in jobs),
        max_n=max(job.size_n for job in jobs),
        unit_j=jobs[0].stride_j == 1,
        fast=fast,
        block_n=next(n for n in _COLUMNS if n == _COLUMNS[-1] or (fast and all(_fits(job, n) for job in jobs))),
    )


def _is_fast(job: Job, element_size: int) -> bool:
    stride = job.stride_n if job.stride_j == 1 else job.stride_j
    steps = (job.size_j, job.first_j, stride, job.layer_stride)
    return (
        _fits(job, _COLUMNS[-1])
        and all(column % 16 == 0 for column in (job.first, job.group, job.size_n))
        and job.matrix % 16 == 0
        and all(step * element_size % 16 == 0 for step in steps)
    )


def _fits(job: Job, block: int) -> bool:
    """Blocks of that many columns are contiguous."""
    return job.width == job.size_n or job.width % block == 0


def narrow(x: Tensor, out: Tensor, table: Table, layer: int) -> None:
    """out[rows, j] = scale * sum over n of x[rows, n] M[j, n], for each job's rows: x A^T, or dy B.

    Args:
        x: [T, wide], contiguous.
        out: [T, >= first_j + size_j of every job], contiguous; other places are left as they are.
        table: of the site.
        layer: whose matrices.
    """
    block = _block_j(table)
    grid = (len(table.tiles), triton.cdiv(table.max_j, block))
    _narrow[grid](
        x, x.stride(0), out, out.stride(0), table.jobs, table.scales, table.tiles, layer,
        ROWS=_ROWS, J=block, N=64, UNIT_J=table.unit_j, FAST=table.fast, num_warps=4, num_stages=4,
    )  # fmt: skip


def widen(h: Tensor, out: Tensor, table: Table, layer: int) -> None:
    """out[rows, n] += sum over j of h[rows, j] M[j, n], for each job's rows: h B^T, or dh A.

    Args:
        h: [T, hidden buffer], contiguous.
        out: [T, wide], contiguous.
        table: of the site.
        layer: whose matrices.
    """
    n = table.block_n
    grid = (triton.cdiv(table.max_n, _BLOCKS * n), len(table.tiles))  # neighbours in a row run together
    _widen[grid](
        h, h.stride(0), out, out.stride(0), table.jobs, table.tiles, layer,
        ROWS=_ROWS, J=32, N=n, BLOCKS=_BLOCKS, UNIT_J=table.unit_j, FAST=table.fast, num_warps=4, num_stages=2,
    )  # fmt: skip


def add_gradients(x: Tensor, h: Tensor, table: Table, layer: int) -> None:
    """grad[j, n] += sum over the job's rows of h[row, j] x[row, n].

    Args:
        x: [T, wide], contiguous: x of A, dy of B.
        h: [T, hidden buffer], contiguous: dh of A, h of B.
        table: of the site.
        layer: whose gradient sums; float32.
    """
    block = _block_j(table)
    partial = torch.empty(table.partial_size, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(table.max_n, 64), len(table.chunks), triton.cdiv(table.max_j, block))
    _add_gradients[grid](
        x, x.stride(0), h, h.stride(0), partial, table.jobs, table.chunks, layer,
        ROWS=_ROWS, J=block, N=64, UNIT_J=table.unit_j, FAST=table.fast, num_warps=4, num_stages=3,
    )  # fmt: skip
    if table.partial_size:
        merge_grid = (len(table.merges), triton.cdiv(table.merge_size, 1024))
        _merge[merge_grid](partial, table.jobs, table.merges, layer, BLOCK=1024, num_warps=4)


def _block_j(table: Table) -> int:
    return min(128, max(16, 1 << (table.max_j - 1).bit_length()))


@triton.jit
def _sizes(job: tl.tensor, FAST: tl.constexpr) -> tl.tuple:
    # Within a matrix, and within a tile, 32 bits are enough, and take half the registers of 64. What multiple_of says
    # sticks to an operation of the same function only: not to a call.
    size_j, size_n, first_j = (
        tl.load(job + 5).to(tl.int32),
        tl.load(job + 6).to(tl.int32),
        tl.load(job + 9).to(tl.int32),
    )
    if FAST:
        size_j, size_n, first_j = tl.multiple_of(size_j, 8), tl.multiple_of(size_n, 16), tl.multiple_of(first_j, 8)
    return size_j, size_n, first_j


@triton.jit
def _wide_columns(job: tl.tensor, n0: tl.tensor, N: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    width, first, group = tl.load(job + 10).to(tl.int32), tl.load(job + 11).to(tl.int32), tl.load(job + 12).to(tl.int32)
    if FAST:
        columns = tl.multiple_of(n0 // width * group + first + n0 % width, 16) + tl.arange(0, N)
    else:
        n = n0 + tl.arange(0, N)
        columns = n // width * group + first + n % width
    return columns


@triton.jit
def _strides(job: tl.tensor, UNIT_J: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    if UNIT_J:
        stride_j, stride_n = 1, tl.load(job + 8).to(tl.int32)
        if FAST:
            stride_n = tl.multiple_of(stride_n, 8)
    else:
        stride_j, stride_n = tl.load(job + 7).to(tl.int32), 1
        if FAST:
            stride_j = tl.multiple_of(stride_j, 8)
    return stride_j, stride_n


@triton.jit
def _matrix(job: tl.tensor, layer: tl.tensor, like: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    matrix = tl.load(job + 2).to(like.dtype) + tl.load(job + 4) * layer
    if FAST:
        matrix = tl.multiple_of(matrix, 16)
    return matrix


@triton.jit(do_not_specialize=["layer"])
def _narrow(
    x: tl.tensor, x_stride: tl.tensor, out: tl.tensor, out_stride: tl.tensor,
    jobs: tl.tensor, scales: tl.tensor, tiles: tl.tensor, layer: tl.tensor,
    ROWS: tl.constexpr, J: tl.constexpr, N: tl.constexpr, UNIT_J: tl.constexpr, FAST: tl.constexpr,
) -> None:  # fmt: skip
    number = tl.load(tiles + 2 * tl.program_id(0))
    row0 = tl.load(tiles + 2 * tl.program_id(0) + 1)
    x += row0 * x_stride
    out += row0 * out_stride
    job = jobs + number * _FIELDS
    size_j, size_n, first_j = _sizes(job, FAST)
    if tl.program_id(1) * J >= size_j:
        return
    rows = tl.arange(0, ROWS)
    js = tl.program_id(1) * J + tl.arange(0, J)
    here = rows < (tl.load(job + 1) - row0).to(tl.int32)
    matrix = _matrix(job, layer, x, FAST)
    stride_j, stride_n = _strides(job, UNIT_J, FAST)
    total = tl.full((ROWS, J), 0.0, tl.float32)
    for n0 in range(0, size_n, N):
        ns = n0 + tl.arange(0, N)
        columns = _wide_columns(job, n0, N, FAST)
        wide = tl.load(
            x + rows[:, None] * x_stride + columns[None, :], mask=here[:, None] & (ns[None, :] < size_n), other=0.0
        )
        m = tl.load(
            matrix + ns[:, None] * stride_n + js[None, :] * stride_j,
            mask=(ns[:, None] < size_n) & (js[None, :] < size_j), other=0.0,
        )  # fmt: skip
        total = tl.dot(wide, m, total)
    total *= tl.load(scales + number)
    at = out + rows[:, None] * out_stride + first_j + js[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=here[:, None] & (js[None, :] < size_j))


@triton.jit(do_not_specialize=["layer"])
def _widen(
    h: tl.tensor, h_stride: tl.tensor, out: tl.tensor, out_stride: tl.tensor,
    jobs: tl.tensor, tiles: tl.tensor, layer: tl.tensor,
    ROWS: tl.constexpr, J: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr,
    UNIT_J: tl.constexpr, FAST: tl.constexpr,
) -> None:  # fmt: skip
    job = jobs + tl.load(tiles + 2 * tl.program_id(1)) * _FIELDS
    row0 = tl.load(tiles + 2 * tl.program_id(1) + 1)
    h += row0 * h_stride
    out += row0 * out_stride
    rows = tl.arange(0, ROWS)
    size_j, size_n, first_j = _sizes(job, FAST)
    start = tl.program_id(0) * (BLOCKS * N)
    if start >= size_n:
        return
    here = rows < (tl.load(job + 1) - row0).to(tl.int32)
    matrix = _matrix(job, layer, h, FAST)
    stride_j, stride_n = _strides(job, UNIT_J, FAST)
    for n0 in range(start, tl.minimum(start + BLOCKS * N, size_n), N):
        ns = n0 + tl.arange(0, N)
        at = out + rows[:, None] * out_stride + _wide_columns(job, n0, N, FAST)[None, :]
        inside = here[:, None] & (ns[None, :] < size_n)
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        for j0 in range(0, size_j, J):
            js = j0 + tl.arange(0, J)
            hidden = tl.load(
                h + rows[:, None] * h_stride + first_j + js[None, :],
                mask=here[:, None] & (js[None, :] < size_j), other=0.0,
            )  # fmt: skip
            m = tl.load(
                matrix + js[:, None] * stride_j + ns[None, :] * stride_n,
                mask=(js[:, None] < size_j) & (ns[None, :] < size_n), other=0.0,
            )  # fmt: skip
            total = tl.dot(hidden, m, total)
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def _add_gradients(
    x: tl.tensor, x_stride: tl.tensor, h: tl.tensor, h_stride: tl.tensor, partial: tl.tensor,
    jobs: tl.tensor, chunks: tl.tensor, layer: tl.tensor,
    ROWS: tl.constexpr, J: tl.constexpr, N: tl.constexpr, UNIT_J: tl.constexpr, FAST: tl.constexpr,
) -> None:  # fmt: skip
    chunk = chunks + 4 * tl.program_id(1)
    job = jobs + tl.load(chunk) * _FIELDS
    size_j, size_n, first_j = _sizes(job, FAST)
    n0, j0 = tl.program_id(0) * N, tl.program_id(2) * J
    if (n0 >= size_n) | (j0 >= size_j):
        return
    ns, js = n0 + tl.arange(0, N), j0 + tl.arange(0, J)
    columns = _wide_columns(job, n0, N, FAST)
    row0 = tl.load(chunk + 1)
    x += row0 * x_stride
    h += row0 * h_stride
    end = (tl.load(chunk + 2) - row0).to(tl.int32)
    total = tl.full((N, J), 0.0, tl.float32)
    for begin in range(0, end, ROWS):
        rows = begin + tl.arange(0, ROWS)
        wide = tl.load(
            x + rows[None, :] * x_stride + columns[:, None],
            mask=(rows[None, :] < end) & (ns[:, None] < size_n), other=0.0,
        )  # fmt: skip
        hidden = tl.load(
            h + rows[:, None] * h_stride + first_j + js[None, :],
            mask=(rows[:, None] < end) & (js[None, :] < size_j), other=0.0,
        )  # fmt: skip
        total = tl.dot(wide, hidden, total)
    stride_j, stride_n = _strides(job, UNIT_J, False)
    at = ns[:, None] * stride_n + js[None, :] * stride_j
    inside = (ns[:, None] < size_n) & (js[None, :] < size_j)
    place = tl.load(chunk + 3)
    if place < 0:
        grad = tl.load(job + 3).to(partial.dtype) + tl.load(job + 4) * layer
        tl.store(grad + at, tl.load(grad + at, mask=inside, other=0.0) + total, mask=inside)
    else:
        tl.store(partial + place + at, total, mask=inside)


@triton.jit(do_not_specialize=["layer"])
def _merge(
    partial: tl.tensor, jobs: tl.tensor, merges: tl.tensor, layer: tl.tensor, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    merge = merges + 3 * tl.program_id(0)
    job = jobs + tl.load(merge) * _FIELDS
    elements = tl.load(job + 5) * tl.load(job + 6)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.full((BLOCK,), 0.0, tl.float32)
    place = partial + tl.load(merge + 1)
    for _ in range(tl.load(merge + 2)):
        total += tl.load(place + at, mask=inside, other=0.0)
        place += elements
    grad = tl.load(job + 3).to(partial.dtype) + tl.load(job + 4) * layer + at
    tl.store(grad, tl.load(grad, mask=inside, other=0.0) + total, mask=inside)
