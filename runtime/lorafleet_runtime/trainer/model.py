"""The frozen base model: a megatron-core GPTModel filled from Hugging Face files.

Owned by rank.py, which hands it packed passes. With linear.py the only module that imports megatron. Runs on one rank
with tensor and data parallel size 1. It patches nothing: packed rows, rotary tables and LoRA reach the layers through
a PackedSeqParams subclass and a context object.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lorafleet_runtime.trainer.attention import GroupRows, Layout, PrefixSharedAttention, make_layout
from lorafleet_runtime.trainer.linear import LoraColumnParallelLinear, LoraRowParallelLinear
from lorafleet_runtime.trainer.lora import Columns, LoraContext, Segment
from lorafleet_runtime.trainer.shape import ModelShape, read_shape
from lorafleet_runtime.trainer.weights import Target, load_weights


@dataclass
class _PackedPass(PackedSeqParams):  # type: ignore[misc, unused-ignore]
    layout: Layout | None = None


class BaseModel:
    """The base model on one device.

    Args:
        directory: with config.json and *.safetensors.
        dtype: compute type.
        device: where the parameters live.
        recompute: compute each layer's activations again in the backward pass instead of keeping them.

    Raises:
        ConfigError: config.json or the weights do not fit.
    """

    def __init__(
        self, directory: str | Path, dtype: torch.dtype, device: torch.device, recompute: bool = False
    ) -> None:
        """Build and fill the model."""
        self.shape = read_shape(directory)
        self.dtype, self.device, self.recompute = dtype, device, recompute
        self._context = LoraContext()
        _start_single_rank(device)
        self._model = _build(self.shape, dtype, device)
        load_weights(directory, _targets(self._model, self.shape), self.shape.tied)
        self._attach()

    @property
    def head_weight(self) -> Tensor:
        """[vocabulary, hidden]: the output projection."""
        tied = self.shape.tied
        weight: Tensor = (self._model.embedding.word_embeddings if tied else self._model.output_layer).weight
        return weight

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
        layout = make_layout(groups, self.shape.head_dim, self.shape.rope_theta, self.device, self.dtype)
        packed = _packed(layout, self.device)
        self._context.segments = tuple(segments)
        x = self._model.embedding(ids[None], None)
        for layer in self._model.decoder.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(_run_layer, layer, x, packed, use_reentrant=False)
            else:
                x = _run_layer(layer, x, packed)
        out: Tensor = self._model.decoder.final_layernorm(x)
        return out[:, 0]

    def logits(self, ids: Tensor, segments: Sequence[Segment] = ()) -> Tensor:
        """[T, vocabulary] for one plain sequence, for tests and probes; training never holds all logits."""
        with torch.no_grad():
            return self.hidden(ids, (GroupRows(len(ids)),), segments) @ self.head_weight.t()

    def _attach(self) -> None:
        kv_groups = self.shape.num_kv_heads
        query_width = self.shape.num_heads // kv_groups * self.shape.head_dim
        width = self.shape.head_dim
        qkv = (
            Columns(kv_groups, 0, query_width),
            Columns(kv_groups, query_width, query_width + width),
            Columns(kv_groups, query_width + width, query_width + 2 * width),
        )
        ffn, hidden = self.shape.ffn_size, self.shape.hidden_size
        for i, layer in enumerate(self._model.decoder.layers):
            attention, mlp = layer.self_attention, layer.mlp
            attention.linear_qkv.attach(self._context, i, "qkv", qkv)
            attention.linear_proj.attach(self._context, i, "o", (Columns(1, 0, hidden),))
            mlp.linear_fc1.attach(self._context, i, "gate_up", (Columns(1, 0, ffn), Columns(1, ffn, 2 * ffn)))
            mlp.linear_fc2.attach(self._context, i, "down", (Columns(1, 0, hidden),))


def _run_layer(layer: Any, x: Tensor, packed: _PackedPass) -> Tensor:
    out: Tensor = layer(x, attention_mask=None, packed_seq_params=packed)[0]
    return out


def _packed(layout: Layout, device: torch.device) -> _PackedPass:
    sizes = [group.total for group in layout.groups]
    bounds = torch.tensor([0, *sizes], device=device).cumsum(0).int()
    return _PackedPass(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(sizes),
        max_seqlen_kv=max(sizes),
        layout=layout,
    )


def _start_single_rank(device: torch.device) -> None:
    """Megatron's layers ask for process groups even on one rank; an in-memory store needs no port."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def _build(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Any:
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


def _targets(model: Any, shape: ModelShape) -> dict[str, Target]:
    """HF key to the place in the model; megatron holds q, k, v per KV group and [gate; up] in one matrix."""
    hidden, ffn, width = shape.hidden_size, shape.ffn_size, shape.head_dim
    targets = {
        "model.embed_tokens.weight": _whole(model.embedding.word_embeddings.weight),
        "model.norm.weight": _whole(model.decoder.final_layernorm.weight),
    }
    if not shape.tied:
        targets["lm_head.weight"] = _whole(model.output_layer.weight)
    queries = shape.num_heads // shape.num_kv_heads
    heads = {"q": slice(0, queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, queries + 2)}
    for i, layer in enumerate(model.decoder.layers):
        attention, mlp, prefix = layer.self_attention, layer.mlp, f"model.layers.{i}."
        qkv = attention.linear_qkv.weight.view(shape.num_kv_heads, queries + 2, width, hidden)
        for name, part in heads.items():
            rows = shape.projection_size(f"{name}_proj")[1]
            targets[f"{prefix}self_attn.{name}_proj.weight"] = Target(qkv[:, part], (rows, hidden))
            if shape.qkv_bias:
                bias = attention.linear_qkv.bias.view(shape.num_kv_heads, queries + 2, width)
                targets[f"{prefix}self_attn.{name}_proj.bias"] = Target(bias[:, part], (rows,))
        if shape.qk_norm:
            targets[f"{prefix}self_attn.q_norm.weight"] = _whole(attention.q_layernorm.weight)
            targets[f"{prefix}self_attn.k_norm.weight"] = _whole(attention.k_layernorm.weight)
        targets[f"{prefix}self_attn.o_proj.weight"] = _whole(attention.linear_proj.weight)
        targets[f"{prefix}mlp.gate_proj.weight"] = _whole(mlp.linear_fc1.weight[:ffn])
        targets[f"{prefix}mlp.up_proj.weight"] = _whole(mlp.linear_fc1.weight[ffn:])
        targets[f"{prefix}mlp.down_proj.weight"] = _whole(mlp.linear_fc2.weight)
        targets[f"{prefix}input_layernorm.weight"] = _whole(layer.input_layernorm.weight)
        targets[f"{prefix}post_attention_layernorm.weight"] = _whole(layer.pre_mlp_layernorm.weight)
    return targets


def _whole(tensor: Tensor) -> Target:
    return Target(tensor, tuple(tensor.shape))
