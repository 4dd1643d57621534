"""An adapter as others read it: a flat buffer for engines, a PEFT directory for people and checkpoints.

Called by rank.py and checkpoint.py. Tensors carry the compute type (float32 for a float64 trainer) and true rank; q, k
and v have an A of their own.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from lorafleet_runtime.storage import CONFIG_FILE, WEIGHTS_FILE
from lorafleet_runtime.trainer.lora import SlotAdapter
from lorafleet_runtime.types import Manifest, TensorEntry


def flat_export(adapter: SlotAdapter, base_model: str) -> tuple[Manifest, bytes]:
    """The adapter in one buffer, tensors in manifest order without gaps.

    Args:
        adapter: of a live slot.
        base_model: name or path that engines know the base model by.
    """
    flat = _flat(adapter)
    buffer = flat.view(torch.uint8).numpy().tobytes()
    size = flat.element_size()
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if flat.dtype == torch.bfloat16 else "float32"
    manifest = Manifest(
        rank=adapter.rank,
        alpha=adapter.alpha,
        target_modules=adapter.targets,
        base_model=base_model,
        dtype=dtype,
        tensors=tuple(TensorEntry(e.key, e.shape, e.offset * size) for e in adapter.layout),
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


def write_adapter(adapter: SlotAdapter, base_model: str, directory: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json into an existing directory.

    Raises:
        OSError: the disk refused.
    """
    flat = _flat(adapter)
    tensors = {entry.key: entry.view(flat).clone() for entry in adapter.layout}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(peft_config(adapter, base_model), indent=2) + "\n")


def _flat(adapter: SlotAdapter) -> Tensor:
    dtype = torch.float32 if adapter.dtype == torch.float64 else adapter.dtype
    return adapter.weights.detach().to(device="cpu", dtype=dtype).contiguous()
