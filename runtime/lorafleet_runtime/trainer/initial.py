"""The weights an adapter starts from: PEFT's default initialisation, or a PEFT adapter directory.

Called by rank.py when a run is loaded for the first time.
"""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lorafleet_runtime.storage import WEIGHTS_FILE
from lorafleet_runtime.trainer.lora import SlotAdapter
from lorafleet_runtime.trainer.warm_start import check_tensors, init_error


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


def load_peft(adapter: SlotAdapter, directory: Path) -> None:
    """Copy a PEFT adapter's A and B into the masters.

    Raises:
        RunError: InitError; the file is damaged, or its tensors are not those of the run's targetModules and rank.
    """
    check_tensors(directory, adapter.layout)
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise init_error(f"{path} cannot be read ({error}); save the adapter again") from error
    for entry in adapter.layout:
        tensor = tensors[entry.key]
        if not bool(torch.isfinite(tensor).all()):
            raise init_error(f"{path}: {entry.key} holds NaN or infinite values; give an adapter without them")
        entry.view(adapter.master).copy_(tensor)
    adapter.refresh()
