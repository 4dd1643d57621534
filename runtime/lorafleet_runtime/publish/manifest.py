"""Checks a flat adapter buffer against its manifest before an engine is touched.

Called by the engines for every publish. vLLM itself copies an adapter that is too small into the corner of its slot,
ignores layers that the model does not have and loads NaN without a word; all of that is refused here. Imports no
torch and writes no files.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.types import Manifest, TensorEntry

ITEM_SIZE = {"float32": 4, "bfloat16": 2}
"""Bytes of one element."""

_KEY = re.compile(r"base_model\.model\.(?P<layer>.+\.(?P<module>[A-Za-z0-9_]+))\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an engine can serve."""

    max_rank: int
    """Largest rank."""
    target_modules: tuple[str, ...]
    """Projections that may be adapted, as q_proj."""
    base_shapes: Mapping[str, tuple[int, int]]
    """Layer name, as model.layers.0.self_attn.q_proj, to the (out, in) shape of its weight."""


def check_adapter(manifest: Manifest, buffer: memoryview, limits: AdapterLimits) -> None:
    """Accept the adapter or say what is wrong with it.

    Args:
        manifest: what the sender says the buffer holds.
        buffer: the adapter's bytes, one dimension of uint8.
        limits: what the engine can serve.

    Raises:
        RunError: PublishError; the message names the field, the value and the fix.
    """
    _check_bytes(manifest, buffer)
    _check_config(manifest, limits)
    _check_layout(manifest)
    _check_shapes(manifest, limits)
    _check_finite(manifest, buffer)


def publish_error(field: str, value: object, fix: str) -> RunError:
    """The error that a refused adapter raises."""
    return RunError(reasons.PUBLISH_ERROR, f"{field} {value}: {fix}")


def _check_bytes(manifest: Manifest, buffer: memoryview) -> None:
    if buffer.nbytes != manifest.num_bytes:
        fix = f"the manifest says {manifest.num_bytes}; send the whole buffer"
        raise publish_error("buffer of bytes", buffer.nbytes, fix)
    digest = hashlib.sha256(buffer).hexdigest()
    if digest != manifest.digest:
        raise publish_error(
            "digest", digest, f"the manifest says {manifest.digest}; the buffer is damaged, send it again"
        )


def _check_config(manifest: Manifest, limits: AdapterLimits) -> None:
    if manifest.dtype not in ITEM_SIZE:
        raise publish_error("dtype", manifest.dtype, f"use one of {sorted(ITEM_SIZE)}")
    if not 1 <= manifest.rank <= limits.max_rank:
        raise publish_error("rank", manifest.rank, f"this pool serves 1 to {limits.max_rank}; raise the pool's maxRank")
    if manifest.alpha <= 0:
        raise publish_error("alpha", manifest.alpha, "must be positive")
    if not manifest.tensors:
        raise publish_error("tensors", "()", "the adapter is empty; export at least one lora_A and lora_B pair")
    foreign = sorted(set(manifest.target_modules) - set(limits.target_modules))
    if foreign:
        raise publish_error("target_modules", foreign, f"this pool adapts only {list(limits.target_modules)}")


def _check_layout(manifest: Manifest) -> None:
    end = 0
    for entry in sorted(manifest.tensors, key=lambda t: t.offset):
        size = prod(entry.shape) * ITEM_SIZE[manifest.dtype]
        if len(entry.shape) != 2 or size <= 0:
            raise publish_error(f"shape of {entry.name}", entry.shape, "two positive dimensions are needed")
        if entry.offset != end:
            fix = f"the previous tensor ends at {end}; pack without gaps"
            raise publish_error(f"offset of {entry.name}", entry.offset, fix)
        end += size
    if end != manifest.num_bytes:
        raise publish_error("num_bytes", manifest.num_bytes, f"the tensors cover {end} bytes")


def _check_shapes(manifest: Manifest, limits: AdapterLimits) -> None:
    sides: dict[str, set[str]] = {}
    for entry in manifest.tensors:
        found = _KEY.fullmatch(entry.name)
        if found is None:
            raise publish_error("tensor", entry.name, "expected base_model.model.LAYER.lora_A.weight or .lora_B.weight")
        layer, side = found["layer"], found["side"]
        if found["module"] not in manifest.target_modules:
            raise publish_error("tensor", entry.name, f"target_modules are {list(manifest.target_modules)}")
        if layer not in limits.base_shapes:
            raise publish_error("tensor", entry.name, "the base model has no such layer")
        if side in sides.setdefault(layer, set()):
            raise publish_error("tensor", entry.name, "is there twice")
        sides[layer].add(side)
        _check_shape(entry, side, manifest.rank, limits.base_shapes[layer])
    for layer, present in sides.items():
        if len(present) == 1:
            raise publish_error("tensor", f"{layer}.lora_{present.pop()}", "its partner is missing")


def _check_shape(entry: TensorEntry, side: str, rank: int, base: tuple[int, int]) -> None:
    out_size, in_size = base
    expected = (rank, in_size) if side == "A" else (out_size, rank)
    if tuple(entry.shape) != expected:
        raise publish_error(f"shape of {entry.name}", tuple(entry.shape), f"rank and base model give {expected}")


def _check_finite(manifest: Manifest, buffer: memoryview) -> None:
    if all_finite(buffer, manifest.dtype):
        return
    for entry in manifest.tensors:
        size = prod(entry.shape) * ITEM_SIZE[manifest.dtype]
        if not all_finite(buffer[entry.offset : entry.offset + size], manifest.dtype):
            fix = "holds NaN or infinity; the run has diverged, lower its learning rate"
            raise publish_error("tensor", entry.name, fix)


def all_finite(buffer: memoryview, dtype: str) -> bool:
    """Whether no element is NaN or infinite: in both types those have every exponent bit set."""
    if dtype == "float32":
        return bool(np.isfinite(np.frombuffer(buffer, dtype=np.float32)).all())
    exponent = np.uint16(0x7F80)
    return not bool(((np.frombuffer(buffer, dtype=np.uint16) & exponent) == exponent).any())
