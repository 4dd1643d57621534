"""Megatron's two parallel linear layers, extended by the LoRA work of the pass under way.

Built by model.py through the layer spec. Together with model.py the only modules that import megatron.
"""

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from lorafleet_runtime.trainer.lora import Columns, LoraContext, lora_linear


class _LoraSite:
    """What a linear layer knows of LoRA; `attach` is called once, after construction."""

    _context: LoraContext | None = None
    _key: tuple[int, str]
    _columns: tuple[Columns, ...]

    def attach(self, context: LoraContext, layer: int, site: str, columns: tuple[Columns, ...]) -> None:
        """Bind the layer to the context that model.py fills before each pass."""
        self._context, self._key, self._columns = context, (layer, site), columns

    def apply_lora(self, x: Tensor, weight: Tensor, bias: Tensor | None, sum_input_gradient: bool) -> Tensor | None:
        """The linear with the adapters of this pass, or None when no row has one here.

        Args:
            x: [..., in].
            weight: this rank's share.
            bias: this rank's share, or None.
            sum_input_gradient: every rank has a part of it (Megatron's allreduce_dgrad).
        """
        if self._context is None:
            return None
        plan = self._context.plan(*self._key, self._columns, sum_input_gradient)
        return lora_linear(x, weight, bias, plan) if plan is not None else None


class LoraColumnParallelLinear(_LoraSite, ColumnParallelLinear):  # type: ignore[misc, unused-ignore]
    """q, k, v or gate, up."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.apply_lora(input, weight, kwargs.get("bias"), kwargs["allreduce_dgrad"])
        return super()._forward_impl(input, weight, *args, **kwargs) if y is None else y


class LoraRowParallelLinear(_LoraSite, RowParallelLinear):  # type: ignore[misc, unused-ignore]
    """o or down."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.apply_lora(input, weight, kwargs.get("bias"), kwargs["allreduce_dgrad"])
        return super()._forward_impl(input, weight, *args, **kwargs) if y is None else y
