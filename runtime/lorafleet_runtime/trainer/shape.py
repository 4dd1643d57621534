"""What the trainer knows of a base model from its config.json: sizes, rotary base, and which variants it refuses.

Read by model.py (to build), lora.py (projection sizes) and attention.py (rotary tables). Imports neither torch nor
megatron; never guesses: a setting that would change the numbers and is not supported is refused by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet_runtime.errors import ConfigError

SUPPORTED_MODELS = ("llama", "qwen2", "qwen3")


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
    rope_theta: float
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
            rope_theta=_rope_theta(config),
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
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(config.get("mlp_bias")),
        "attention_bias": bool(config.get("attention_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "quantization_config": config.get("quantization_config") is not None,
        "partial_rotary_factor": float(config.get("partial_rotary_factor") or 1.0) != 1.0,
    }
    for key, bad in refused.items():
        if bad:
            raise ConfigError(f"baseModel: {key}={config[key]!r} in {path} is not supported; use a model without it")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"baseModel: rope type {kind!r} in {path} is not supported; only 'default' is")


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    return 10000.0 if theta is None else float(theta)
