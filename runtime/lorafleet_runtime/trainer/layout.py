"""Names, shapes and places of an adapter's matrices in its flat buffer.

Read by rank.py and lora.py (to allocate) and warm_start.py (to check a PEFT file before a slot is taken). Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lorafleet_runtime.trainer.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

SITES: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The model's four linear operations per layer, and the projections that each computes at once."""

PROJECTIONS = tuple(projection for projections in SITES.values() for projection in projections)
"""All seven, in the order of the flat buffer."""

PARENT = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip
"""HF module that holds a projection."""


_ROW_PARALLEL = ("o", "down")
"""Sites whose inputs are split over tensor-parallel ranks; the others have their outputs split."""


class FlatTensor(NamedTuple):
    """One A or B matrix inside the flat buffer."""

    module: str
    """HF module path, as model.layers.0.self_attn.q_proj."""
    kind: str
    """lora_A [rank, in] or lora_B [out, rank]."""
    offset: int
    """In elements."""
    shape: tuple[int, int]
    split: int | None = None
    """Dimension that tensor-parallel ranks share; None for a matrix that each of them has whole."""

    @property
    def end(self) -> int:
        """Offset behind the matrix, in elements."""
        return self.offset + self.shape[0] * self.shape[1]

    @property
    def key(self) -> str:
        """PEFT's name of the tensor."""
        return f"base_model.model.{self.module}.{self.kind}.weight"

    def view(self, flat: Tensor) -> Tensor:
        """This matrix as a view of `flat`."""
        return flat[self.offset : self.end].view(self.shape)


def flat_layout(
    shape: ModelShape, rank: int, targets: Sequence[str], tensor_parallel: int = 1
) -> tuple[FlatTensor, ...]:
    """Every A and B of an adapter in buffer order, layer by layer and site by site: [A of each target | B of each].

    Args:
        shape: of the base model.
        rank: LoRA rank.
        targets: HF projection names.
        tensor_parallel: sizes are those of one of this many ranks; 1 is the canonical layout of files and exports.
    """
    layout: list[FlatTensor] = []
    offset = 0
    for layer in range(shape.num_layers):
        for site, projections in SITES.items():
            chosen = [p for p in projections if p in targets]
            for kind in ("lora_A", "lora_B"):
                for projection in chosen:
                    inputs, outputs = shape.projection_size(projection)
                    size = [rank, inputs] if kind == "lora_A" else [outputs, rank]
                    split = _split_dimension(site, kind)
                    if split is not None:
                        size[split] //= tensor_parallel
                    module = f"model.layers.{layer}.{PARENT[projection]}.{projection}"
                    layout.append(FlatTensor(module, kind, offset, (size[0], size[1]), split))
                    offset = layout[-1].end
    return tuple(layout)


def _split_dimension(site: str, kind: str) -> int | None:
    """As Megatron splits the frozen weight: B's rows where outputs are split, A's columns where inputs are."""
    if site in _ROW_PARALLEL:
        return 1 if kind == "lora_A" else None
    return 0 if kind == "lora_B" else None
