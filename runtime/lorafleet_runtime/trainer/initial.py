"""The weights an adapter starts from: one of PEFT's initialisations, or a PEFT adapter directory.

Called by rank.py when a run is loaded for the first time.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lorafleet_runtime.storage import WEIGHTS_FILE
from lorafleet_runtime.trainer.layout import FlatTensor
from lorafleet_runtime.trainer.warm_start import check_tensors, init_error


def init_fresh(layout: Sequence[FlatTensor], scheme: str, seed: int) -> Tensor:
    """A from the run's initScheme, B zero.

    kaiming: uniform in +-1/sqrt(in), PEFT's default (kaiming_uniform_ with a = sqrt(5)). gaussian: normal with standard
    deviation 1/rank, PEFT's init_lora_weights="gaussian".

    Every matrix has a random stream of its own, from the seed and its name, so the values depend neither on the slot
    nor on which other projections are adapted.

    Args:
        layout: of the whole adapter.
        scheme: the run's initScheme.
        seed: the run's initSeed.

    Returns:
        [elements] float32 on the host.
    """
    flat = torch.zeros(layout[-1].end)
    for entry in layout:
        if entry.kind != "lora_A":
            continue
        name_hash = hashlib.sha256(f"{seed}:{entry.module}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(name_hash[:8], "little") >> 1)
        rank, inputs = entry.shape
        drawn = entry.view(flat)
        if scheme == "gaussian":
            drawn.normal_(0.0, 1.0 / rank, generator=generator)
        else:
            drawn.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
    return flat


def load_peft(layout: Sequence[FlatTensor], directory: Path) -> Tensor:
    """A PEFT adapter's A and B.

    Returns:
        [elements] float32 on the host, in the order of `layout`, which is the whole adapter's.

    Raises:
        RunError: InitError; the file is damaged, or its tensors are not those of the run's targetModules and rank.
    """
    check_tensors(directory, layout)
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise init_error(f"{path} cannot be read ({error}); save the adapter again") from error
    flat = torch.zeros(layout[-1].end)
    for entry in layout:
        tensor = tensors[entry.key]
        if not bool(torch.isfinite(tensor).all()):
            raise init_error(f"{path}: {entry.key} holds NaN or infinite values; give an adapter without them")
        entry.view(flat).copy_(tensor)
    return flat
