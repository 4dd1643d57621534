"""vLLM general plugin: puts segmented_lora under vLLM on CPU.

vLLM's own CPU path copies A and B once per token, and gives tokens without an adapter the adapter in the last slot
(index -1). vLLM loads this in every process through the entry point `lorafleet_cpu_lora`; on other platforms it does
nothing. The projections come in through add_lora_linear, and through add_shrink and add_expand where LoRA is fully
sharded; embeddings and the output layer are kept out by lora_target_modules.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from lorafleet_runtime.engines.segmented_lora import Segments, add_lora, expand, segments, shrink


class SegmentedPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM has no types
    """vLLM's calls, answered per adapter instead of per token. Argument names and shapes are vLLM's."""

    _segments: Segments = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Called once per batch, before its forward pass."""
        super().update_metadata(*args, **kwargs)
        self._segments = segments(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        lora_b_stacked: Sequence[torch.Tensor],
        scale: float,
        output_slices: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """See segmented_lora.add_lora; alpha / rank is already in B, and scale is 1."""
        add_lora(y, x, lora_a_stacked, lora_b_stacked, scale, self._segments)

    def add_shrink(
        self,
        y: Sequence[torch.Tensor] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """See segmented_lora.shrink."""
        shrink(y, x.view(-1, x.shape[-1]), lora_a_stacked, scale, self._segments)

    def add_expand(
        self,
        y: torch.Tensor,
        x: Sequence[torch.Tensor] | torch.Tensor,
        lora_b_stacked: Sequence[torch.Tensor],
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """See segmented_lora.expand."""
        expand(y.view(-1, y.shape[-1]), x, lora_b_stacked, offset_start, add_inputs, self._segments)


def register() -> None:
    """Entry point of vLLM's plugin system; called once or more in every process of vLLM."""
    if not current_platform.is_cpu():
        return
    qualified = f"{SegmentedPunicaWrapper.__module__}.{SegmentedPunicaWrapper.__qualname__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: qualified)
