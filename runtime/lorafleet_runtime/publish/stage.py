"""Writes a checked adapter as a PEFT directory that appears whole or not at all.

Called by the engines, in a thread. vLLM reads an adapter again from its directory when it has to, so each version
keeps one of its own until it is retired. Knows nothing of vLLM.
"""

import json
import re
import shutil
import uuid
from math import prod
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from lorafleet_runtime.publish.manifest import ITEM_SIZE, publish_error
from lorafleet_runtime.types import Manifest, VersionId

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def version_directory(root: Path, version: VersionId) -> Path:
    """`{root}/{uid}/{incarnation}/v{n}`.

    Raises:
        RunError: PublishError; a part would leave its folder.
    """
    for field, part in (("uid", version.uid), ("incarnation", version.incarnation)):
        if not _SEGMENT.fullmatch(part):
            raise publish_error(field, repr(part), "use letters, digits, '.', '_' and '-'")
    return root / version.uid / version.incarnation / f"v{version.n}"


def stage(manifest: Manifest, buffer: memoryview, directory: Path) -> None:
    """Write the adapter to `directory` by rename; what stood there before is replaced.

    Args:
        manifest: of an adapter that check_adapter accepted.
        buffer: its bytes, one dimension of uint8.
        directory: the version's own directory.

    Raises:
        OSError: the disk is full or not writable; nothing is left behind.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.parent / f".tmp-{directory.name}-{uuid.uuid4().hex}"
    try:
        write_peft(manifest, buffer, temporary)
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def unstage(root: Path, directory: Path) -> None:
    """Delete a version's directory and the parents up to `root` that it leaves empty; missing is fine."""
    shutil.rmtree(directory, ignore_errors=True)
    for parent in directory.parents:
        if parent == root or not parent.is_relative_to(root):
            return
        try:
            parent.rmdir()
        except OSError:  # another version lives there, or it is gone already
            return


def write_peft(manifest: Manifest, buffer: memoryview, directory: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors into a new directory."""
    directory.mkdir(parents=True)
    # Each tensor is copied out of the buffer: save_file refuses tensors that share memory.
    tensors = {}
    for entry in manifest.tensors:
        size = prod(entry.shape) * ITEM_SIZE[manifest.dtype]
        flat = np.frombuffer(buffer[entry.offset : entry.offset + size], dtype=np.uint8).copy()
        tensors[entry.name] = torch.from_numpy(flat).view(_DTYPES[manifest.dtype]).reshape(entry.shape)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(peft_config(manifest), indent=2))


def peft_config(manifest: Manifest) -> dict[str, object]:
    """The adapter_config.json of a LoRA; its scale is alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": manifest.base_model,
        "r": manifest.rank,
        "lora_alpha": manifest.alpha,
        "target_modules": list(manifest.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": manifest.use_rslora,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
