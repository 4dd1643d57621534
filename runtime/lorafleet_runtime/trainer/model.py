"""The frozen base model: a megatron-core GPTModel filled from Hugging Face files.

Owned by rank.py; passes.py hands it packed passes. With linear.py the only module that imports megatron. A
tensor-parallel rank has Megatron's share of each matrix and of the vocabulary; data-parallel ranks are alike and never
meet here. It patches nothing: packed rows, rotary tables and LoRA reach the layers through a PackedSeqParams subclass
and a context object.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lorafleet_runtime.errors import ConfigError
from lorafleet_runtime.trainer.attention import GroupRows, HeadNorm, Layout, PrefixSharedAttention, Tables, make_layout
from lorafleet_runtime.trainer.kernels.check import check_kernels
from lorafleet_runtime.trainer.kernels.swiglu import swiglu
from lorafleet_runtime.trainer.linear import LoraColumnParallelLinear, LoraRowParallelLinear
from lorafleet_runtime.trainer.lora import Columns, LoraContext, Segment
from lorafleet_runtime.trainer.losses.head import Vocabulary
from lorafleet_runtime.trainer.parallel import COLLECTIVE_TIMEOUT_SECONDS, Ranks
from lorafleet_runtime.trainer.shape import ModelShape, read_shape
from lorafleet_runtime.trainer.transfer import to_device
from lorafleet_runtime.trainer.weights import Target, load_weights

_FLASH_HEAD_DIM = 256
"""Largest that flash attention takes."""


@dataclass
class _PackedPass(PackedSeqParams):  # type: ignore[misc, unused-ignore]
    layout: Layout | None = None


class BaseModel:
    """The base model on one device.

    Args:
        directory: with config.json and *.safetensors.
        dtype: compute type.
        device: where the parameters live.
        ranks: of the trainer.
        recompute: compute each layer's activations again in the backward pass instead of keeping them.
        deterministic: add in a fixed order everywhere.

    Raises:
        ConfigError: config.json or the weights do not fit, cannot be split over the tensor-parallel ranks, or the
            kernels cannot run on this GPU.
    """

    def __init__(
        self,
        directory: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        recompute: bool = False,
        deterministic: bool = False,
    ) -> None:
        """Build and fill the model."""
        self.shape = read_shape(directory)
        _check_split(self.shape, ranks.tp)
        self.dtype, self.device, self.recompute = dtype, device, recompute
        self._fused = _has_kernels(device) and dtype != torch.float64  # which they do not know
        self._ranks, self._context = ranks, LoraContext(ranks, self._fused and dtype == torch.bfloat16)
        head_dim = self.shape.head_dim
        one_call = self._fused and dtype == torch.bfloat16 and head_dim % 8 == 0 and head_dim <= _FLASH_HEAD_DIM
        self._tables = Tables(head_dim, self.shape.rope, device, dtype, one_call)
        if device.type == "cuda":
            _fix_order(deterministic)
        if self._fused:
            check_kernels(device, dtype, head_dim, one_call)
        if not parallel_state.model_parallel_is_initialized():
            minutes = COLLECTIVE_TIMEOUT_SECONDS // 60
            parallel_state.initialize_model_parallel(ranks.tp, distributed_timeout_minutes=minutes)
        self._model = _build(self.shape, dtype, device, self._fused)
        load_weights(directory, _targets(self._model, self.shape, ranks), self.shape.tied)
        self._attach()

    @property
    def vocabulary(self) -> Vocabulary:
        """This rank's rows of the output projection."""
        tied = self.shape.tied
        weight: Tensor = (self._model.embedding.word_embeddings if tied else self._model.output_layer).weight
        return Vocabulary(weight, self._ranks)

    def hidden(self, ids: Tensor, groups: tuple[GroupRows, ...], segments: Sequence[Segment]) -> Tensor:
        """Final hidden states of one packed pass, after the last norm.

        The backward pass adds the gradients of A and B into the adapters' sums.

        Args:
            ids: [T] token ids.
            groups: row counts, summing to T.
            segments: rows that use an adapter; the others get the base model.

        Returns:
            [T, hidden].
        """
        layout = make_layout(groups, self._tables)
        packed = _packed(layout, self.device)
        self._context.begin(segments)
        x = self._model.embedding(ids[None], None)
        for layer in self._model.decoder.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(_run_layer, layer, x, packed, use_reentrant=False)
            else:
                x = _run_layer(layer, x, packed)
        out: Tensor = self._model.decoder.final_layernorm(x)
        return out[:, 0]

    def logits(self, ids: Tensor, segments: Sequence[Segment] = ()) -> Tensor:
        """[T, this rank's vocabulary] for one plain sequence, for tests and probes; training never holds all logits."""
        with torch.no_grad():
            return self.hidden(ids, (GroupRows(len(ids)),), segments) @ self.vocabulary.weight.t()

    def _attach(self) -> None:
        kv_groups = self.shape.num_kv_heads // self._ranks.tp
        query_width = self.shape.num_heads // self.shape.num_kv_heads * self.shape.head_dim
        width = self.shape.head_dim
        qkv = (
            Columns(kv_groups, 0, query_width),
            Columns(kv_groups, query_width, query_width + width),
            Columns(kv_groups, query_width + width, query_width + 2 * width),
        )
        ffn, hidden = self.shape.ffn_size // self._ranks.tp, self.shape.hidden_size
        for i, layer in enumerate(self._model.decoder.layers):
            attention, mlp = layer.self_attention, layer.mlp
            attention.linear_qkv.attach(self._context, i, "qkv", qkv)
            attention.linear_proj.attach(self._context, i, "o", (Columns(1, 0, hidden),))
            if self._fused:
                norms = (attention.q_layernorm, attention.k_layernorm)
                attention.core_attention.fuse(*(norm.weight if self.shape.qk_norm else None for norm in norms))
            mlp.linear_fc1.attach(self._context, i, "gate_up", (Columns(1, 0, ffn), Columns(1, ffn, 2 * ffn)))
            mlp.linear_fc2.attach(self._context, i, "down", (Columns(1, 0, hidden),))


def _run_layer(layer: Any, x: Tensor, packed: _PackedPass) -> Tensor:
    out: Tensor = layer(x, attention_mask=None, packed_seq_params=packed)[0]
    return out


def _has_kernels(device: torch.device) -> bool:
    """Flash attention, and matrix products of bfloat16 in Triton, need an Ampere GPU or a newer one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _fix_order(deterministic: bool) -> None:
    """Let torch, and flash attention's backward pass with it, add in a fixed order in this process, or not."""
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch asks for it; cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _packed(layout: Layout, device: torch.device) -> _PackedPass:
    sizes = [group.total for group in layout.groups]
    bounds = to_device(torch.tensor([0, *sizes]).cumsum(0).int(), device)
    return _PackedPass(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(sizes),
        max_seqlen_kv=max(sizes),
        layout=layout,
    )


def _check_split(shape: ModelShape, tp: int) -> None:
    """Refuse what Megatron could only pad or replicate."""
    for name, size in (
        ("num_key_value_heads", shape.num_kv_heads), ("num_attention_heads", shape.num_heads),
        ("intermediate_size", shape.ffn_size), ("vocab_size", shape.vocab_size),
    ):  # fmt: skip
        if size % tp:
            raise ConfigError(
                f"trainer.tensorParallel: {tp} does not divide the base model's {name} {size}; use a divisor of it"
            )


class _Activation(torch.nn.Module):
    """The MLP's activation as a kernel; megatron constructs it where it would construct Transformer Engine's."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def _build(shape: ModelShape, dtype: torch.dtype, device: torch.device, fused: bool) -> Any:
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        use_te_activation_func=fused,  # the seam for _Activation; nothing of Transformer Engine is used
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    layer = get_gpt_layer_local_submodules(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    attention = _submodules(layer.self_attention)
    attention.core_attention = PrefixSharedAttention
    attention.linear_qkv, attention.linear_proj = LoraColumnParallelLinear, LoraRowParallelLinear
    mlp = _submodules(layer.mlp)
    mlp.linear_fc1, mlp.linear_fc2 = LoraColumnParallelLinear, LoraRowParallelLinear
    if fused:
        mlp.activation_func = _Activation
        if shape.qk_norm:
            attention.q_layernorm = attention.k_layernorm = HeadNorm
    model = GPTModel(
        config,
        ModuleSpec(module=TransformerLayer, submodules=layer),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        position_embedding_type="none",
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
    )
    # Norm weights of the local spec start on the CPU in float32 whatever the config says.
    return model.to(device=device, dtype=dtype).requires_grad_(False)


def _submodules(spec: Any) -> Any:
    """The submodules of a layer spec entry, which megatron gives as a ModuleSpec or as a partial."""
    return spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]


def _targets(model: Any, shape: ModelShape, ranks: Ranks) -> dict[str, Target]:
    """HF key to the place in the model; megatron holds q, k, v per KV group and [gate; up] in one matrix."""
    tp, rows, columns = ranks.tp, (0, ranks.tp_rank), (1, ranks.tp_rank)
    hidden, ffn, width = shape.hidden_size, shape.ffn_size // tp, shape.head_dim
    table = (shape.vocab_size, hidden)
    targets = {
        "model.embed_tokens.weight": Target(model.embedding.word_embeddings.weight, table, rows),
        "model.norm.weight": _whole(model.decoder.final_layernorm.weight),
    }
    if not shape.tied:
        targets["lm_head.weight"] = Target(model.output_layer.weight, table, rows)
    queries, kv_groups = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads // tp
    heads = {"q": slice(0, queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, queries + 2)}
    for i, layer in enumerate(model.decoder.layers):
        attention, mlp, prefix = layer.self_attention, layer.mlp, f"model.layers.{i}."
        qkv = attention.linear_qkv.weight.view(kv_groups, queries + 2, width, hidden)
        for name, part in heads.items():
            outputs = shape.projection_size(f"{name}_proj")[1]
            targets[f"{prefix}self_attn.{name}_proj.weight"] = Target(qkv[:, part], (outputs, hidden), rows)
            if shape.qkv_bias:
                bias = attention.linear_qkv.bias.view(kv_groups, queries + 2, width)
                targets[f"{prefix}self_attn.{name}_proj.bias"] = Target(bias[:, part], (outputs,), rows)
        if shape.qk_norm:
            targets[f"{prefix}self_attn.q_norm.weight"] = _whole(attention.q_layernorm.weight)
            targets[f"{prefix}self_attn.k_norm.weight"] = _whole(attention.k_layernorm.weight)
        o_size, down_size = (shape.projection_size(name)[::-1] for name in ("o_proj", "down_proj"))
        targets[f"{prefix}self_attn.o_proj.weight"] = Target(attention.linear_proj.weight, o_size, columns)
        targets[f"{prefix}mlp.gate_proj.weight"] = Target(mlp.linear_fc1.weight[:ffn], (ffn * tp, hidden), rows)
        targets[f"{prefix}mlp.up_proj.weight"] = Target(mlp.linear_fc1.weight[ffn:], (ffn * tp, hidden), rows)
        targets[f"{prefix}mlp.down_proj.weight"] = Target(mlp.linear_fc2.weight, down_size, columns)
        targets[f"{prefix}input_layernorm.weight"] = _whole(layer.input_layernorm.weight)
        targets[f"{prefix}post_attention_layernorm.weight"] = _whole(layer.pre_mlp_layernorm.weight)
    return targets


def _whole(tensor: Tensor) -> Target:
    return Target(tensor, tuple(tensor.shape))
