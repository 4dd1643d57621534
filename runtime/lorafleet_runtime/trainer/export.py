"""An adapter as others read it: a flat buffer for engines, a PEFT directory for people and checkpoints.

Called by rank.py. Tensors carry the compute type (float32 for a float64 trainer) and true rank; q, k
and v have an A of their own.
"""

import hashlib
from typing import Any, Literal

import torch
from torch import Tensor

from lorafleet_runtime.trainer.lora import SlotAdapter
from lorafleet_runtime.types import Manifest, TensorEntry


def flat_export(adapter: SlotAdapter, weights: Tensor, base_model: str) -> tuple[Manifest, bytes]:
    """The adapter in one buffer, tensors in manifest order without gaps.

    Args:
        adapter: of a live slot.
        weights: [elements] of the whole adapter, in the compute type and the canonical layout.
        base_model: name or path that engines know the base model by.
    """
    flat = _flat(weights)
    buffer = flat.view(torch.uint8).numpy().tobytes()
    size = flat.element_size()
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if flat.dtype == torch.bfloat16 else "float32"
    manifest = Manifest(
        rank=adapter.rank,
        alpha=adapter.alpha,
        target_modules=adapter.targets,
        base_model=base_model,
        dtype=dtype,
        tensors=tuple(TensorEntry(e.key, e.shape, e.offset * size) for e in adapter.canonical_layout),
        num_bytes=len(buffer),
        digest=hashlib.sha256(buffer).hexdigest(),
        use_rslora=adapter.rslora,
    )
    return manifest, buffer


def peft_config(adapter: SlotAdapter, base_model: str) -> dict[str, Any]:
    """What adapter_config.json says."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rslora,
        "target_modules": list(adapter.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def peft_tensors(adapter: SlotAdapter, weights: Tensor) -> dict[str, Tensor]:
    """What adapter_model.safetensors holds: copies on the host by PEFT key.

    Args:
        adapter: of a live slot.
        weights: [elements] of the whole adapter, in the compute type and the canonical layout.
    """
    flat = _flat(weights)
    return {entry.key: entry.view(flat).clone() for entry in adapter.canonical_layout}


def _flat(weights: Tensor) -> Tensor:
    dtype = torch.float32 if weights.dtype == torch.float64 else weights.dtype
    return weights.detach().to(device="cpu", dtype=dtype).contiguous()
