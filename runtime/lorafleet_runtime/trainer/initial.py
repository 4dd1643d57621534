"""The weights an adapter starts from: PEFT's default initialisation, or a PEFT adapter directory.

Called by rank.py when a run is loaded for the first time.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.trainer.export import CONFIG_FILE, WEIGHTS_FILE
from lorafleet_runtime.trainer.lora import SlotAdapter

_NOT_UNIFORM: dict[str, tuple[Any, ...]] = {
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "megatron_config": (None,),
}
"""adapter_config.json fields and the values that a plain, uniform LoRA has."""


def init_kaiming(adapter: SlotAdapter, seed: int) -> None:
    """A uniform in +-1/sqrt(in), B zero: PEFT's default (kaiming_uniform_ with a = sqrt(5)).

    Every matrix has a random stream of its own, from the seed and its name, so the values depend neither on the slot
    nor on which other projections are adapted.
    """
    adapter.master.zero_()
    for entry in adapter.layout:
        if entry.kind != "lora_A":
            continue
        name_hash = hashlib.sha256(f"{seed}:{entry.module}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(name_hash[:8], "little") >> 1)
        bound = entry.shape[1] ** -0.5
        entry.view(adapter.master).copy_(torch.empty(entry.shape).uniform_(-bound, bound, generator=generator))
    adapter.refresh()


def read_peft_config(directory: str, rank: int, alpha: int) -> bool:
    """Check that initFrom is a plain LoRA with the run's rank and alpha.

    Returns:
        Whether it is scaled by alpha / sqrt(rank) (rsLoRA).

    Raises:
        RunError: InitError; the message names the field of adapter_config.json, its value and the fix.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _error(f"{path} cannot be read ({error}); give a PEFT adapter directory") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise _error(f"{path}: peft_type is no LORA; only plain LoRA adapters can be trained further")
    for field, plain in _NOT_UNIFORM.items():
        if config.get(field) not in plain:
            raise _error(f"{path}: {field} is {config[field]!r}; only uniform LoRA adapters without it are supported")
    for field, name, wanted in (("r", "rank", rank), ("lora_alpha", "alpha", alpha)):
        if config.get(field) != wanted:
            raise _error(f"{path}: {field} is {config.get(field)!r}, the run's {name} {wanted}; set {name} to match")
    return bool(config.get("use_rslora", False))


def load_peft(adapter: SlotAdapter, directory: str) -> None:
    """Copy a PEFT adapter's A and B into the masters.

    Raises:
        RunError: InitError; the file is damaged, or its tensors are not those of the run's targetModules and rank.
    """
    path = Path(directory) / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _error(f"{path} cannot be read ({error})") from error
    expected = {entry.key: entry for entry in adapter.layout}
    for what, keys in (("lacks", expected.keys() - tensors.keys()), ("has", tensors.keys() - expected.keys())):
        if keys:
            raise _error(f"{path} {what} {min(keys)!r} ({len(keys)} such); set targetModules to the adapter's own")
    for key, entry in expected.items():
        tensor = tensors[key]
        if tuple(tensor.shape) != entry.shape:
            raise _error(f"{path}: {key} has shape {tuple(tensor.shape)}; rank and base model ask for {entry.shape}")
        if not bool(torch.isfinite(tensor).all()):
            raise _error(f"{path}: {key} holds NaN or infinite values")
        entry.view(adapter.master).copy_(tensor)
    adapter.refresh()


def _error(text: str) -> RunError:
    return RunError(reasons.INIT_ERROR, f"initFrom: {text}")
