"""Random LoRA adapters as flat buffers. Called by tests of publishing and of the engines."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lorafleet_runtime.types import Manifest, TensorEntry

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class RandomAdapter:
    manifest: Manifest
    buffer: bytes
    tensors: dict[str, np.ndarray]
    """PEFT key to a float32 array."""


def random_adapter(
    shapes: dict[str, tuple[int, int]], rank: int, seed: int, alpha: int = 16, scale: float = 0.3
) -> RandomAdapter:
    """An adapter with B far from zero on every layer in `shapes` (layer name to (out, in))."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer, (out_size, in_size) in shapes.items():
        a = generator.standard_normal((rank, in_size)) / in_size**0.5
        b = generator.standard_normal((out_size, rank)) * scale / rank
        tensors[f"base_model.model.{layer}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = b.astype(np.float32)
    modules = tuple(dict.fromkeys(layer.rsplit(".", 1)[-1] for layer in shapes))
    manifest, buffer = pack(tensors, rank, alpha, modules)
    return RandomAdapter(manifest, buffer, tensors)


def pack(
    tensors: dict[str, np.ndarray], rank: int, alpha: int, modules: Sequence[str] = ALL_LINEAR, rslora: bool = False
) -> tuple[Manifest, bytes]:
    """Tensors one after another in a buffer, with a true manifest."""
    entries, offset = [], 0
    for name, array in tensors.items():
        entries.append(TensorEntry(name, array.shape, offset))
        offset += array.nbytes
    buffer = b"".join(np.ascontiguousarray(a).tobytes() for a in tensors.values())
    digest = hashlib.sha256(buffer).hexdigest()
    return Manifest(rank, alpha, tuple(modules), "tiny", "float32", tuple(entries), offset, digest, rslora), buffer
