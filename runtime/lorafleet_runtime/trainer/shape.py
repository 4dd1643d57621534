"""What the trainer knows of a base model from its config.json: sizes, rotary embedding, and the variants it refuses.

Read by model.py (to build), lora.py (projection sizes) and attention.py (rotary tables). Imports neither torch nor
megatron; never guesses: a setting that would change the numbers and is not supported is refused by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet_runtime.errors import ConfigError

SUPPORTED_MODELS = ("llama", "qwen2", "qwen3")
SUPPORTED_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding; attention.py computes its frequencies."""

    theta: float
    kind: str = "default"
    """default; linear (every frequency divided by factor, Chen et al. 2023); llama3 (Llama 3.1: low frequencies
    divided, high ones kept, those between interpolated)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0
    """Context length before the scaling; llama3 only."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model with grouped-query attention and a gated SiLU MLP."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    """Input and output embeddings are one matrix."""
    qkv_bias: bool

    @property
    def qk_norm(self) -> bool:
        """Query and key heads have an RMS norm of their own (Qwen3)."""
        return self.model_type == "qwen3"

    def projection_size(self, projection: str) -> tuple[int, int]:
        """(inputs, outputs) of one of the seven projections, by its HF name."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden_size, heads),
            "k_proj": (self.hidden_size, kv_heads),
            "v_proj": (self.hidden_size, kv_heads),
            "o_proj": (heads, self.hidden_size),
            "gate_proj": (self.hidden_size, self.ffn_size),
            "up_proj": (self.hidden_size, self.ffn_size),
            "down_proj": (self.ffn_size, self.hidden_size),
        }[projection]


def read_shape(directory: str | Path) -> ModelShape:
    """Parse `directory`/config.json.

    Raises:
        ConfigError: the file is missing or malformed, or names a variant that the trainer does not compute.
    """
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"baseModel: {path} cannot be read ({error}); give a directory with HF files") from error
    _refuse_variants(config, path)
    try:
        heads = int(config["num_attention_heads"])
        return ModelShape(
            model_type=config["model_type"],
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            ffn_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope=_read_rope(config, path),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=config["model_type"] == "qwen2",
        )
    except KeyError as error:
        raise ConfigError(f"baseModel: {path} lacks the key {error}") from error


def _refuse_variants(config: dict[str, Any], path: Path) -> None:
    """Name every setting that changes the forward pass in a way the trainer does not implement."""
    if config.get("model_type") not in SUPPORTED_MODELS:
        raise ConfigError(
            f"baseModel: model_type {config.get('model_type')!r} in {path} is not supported; use one of "
            f"{', '.join(SUPPORTED_MODELS)}"
        )
    rope = config.get("rope_parameters") or {}
    rotary_share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(config.get("mlp_bias")),
        "attention_bias": bool(config.get("attention_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "quantization_config": config.get("quantization_config") is not None,
        "partial_rotary_factor": float(rotary_share) != 1.0,
    }
    for key, bad in refused.items():
        if bad:
            value = config.get(key, rope.get(key))
            raise ConfigError(f"baseModel: {key}={value!r} in {path} is not supported; use a model without it")


def _read_rope(config: dict[str, Any], path: Path) -> Rope:
    """From rope_parameters (transformers 5), or from rope_scaling and rope_theta (before)."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in SUPPORTED_ROPE:
        raise ConfigError(
            f"baseModel: rope type {kind!r} in {path} is not supported; use a model with one of "
            f"{', '.join(SUPPORTED_ROPE)}, or a copy whose config.json leaves the long-context scaling out"
        )
    theta = found.get("rope_theta", config.get("rope_theta"))
    theta = 10000.0 if theta is None else float(theta)
    if kind == "default":
        return Rope(theta)
    # Some files have it beside the dictionary; Hugging Face prefers that one.
    outside = config.get("original_max_position_embeddings")
    settings = {**found, "original_max_position_embeddings": outside} if outside else found

    def number(name: str) -> float:
        value = settings.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"baseModel: rope type {kind!r} in {path} has {name}={value!r}; give a number above 0")
        return float(value)

    if kind == "linear":
        return Rope(theta, kind, number("factor"))
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if low >= high:
        raise ConfigError(f"baseModel: low_freq_factor={low} in {path} is not below high_freq_factor={high}; swap")
    return Rope(theta, kind, number("factor"), low, high, int(number("original_max_position_embeddings")))
