"""What the files of a base model say: shapes of its projections, its end tokens, its vocabulary.

Called by the engines at their start. Reads headers and JSON only; loads no weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import safe_open

from lorafleet_runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model on this node."""

    directory: Path
    linear_shapes: dict[str, tuple[int, int]]
    """Layer name, as model.layers.0.self_attn.q_proj, to the (out, in) shape of its weight."""
    stop_token_ids: tuple[int, ...]
    """Every end-of-sequence token that the model's files name."""
    vocab_size: int
    has_tokenizer: bool


def read_base_model(name_or_path: str, revision: str | None, target_modules: tuple[str, ...]) -> BaseModel:
    """Find the model's files (fetching them once for a hub name) and read what publishing and sampling need.

    Args:
        name_or_path: directory, or hub name.
        revision: of the hub name.
        target_modules: projections to give shapes of.

    Raises:
        ConfigError: baseModel has no config.json or no safetensors, or none of the projections.
    """
    directory = Path(name_or_path)
    if not directory.is_dir():
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        directory = Path(snapshot_download(name_or_path, revision=revision, allow_patterns=patterns))
    config = _json(directory / "config.json")
    if not config:
        raise ConfigError(f"baseModel {name_or_path}: has no config.json; name a Hugging Face model directory")
    text = config.get("text_config", config)
    return BaseModel(
        directory=directory,
        linear_shapes=_linear_shapes(directory, target_modules),
        stop_token_ids=_stop_token_ids(text, _json(directory / "generation_config.json")),
        vocab_size=int(text["vocab_size"]),
        has_tokenizer=any((directory / f).exists() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")),
    )


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _stop_token_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for config in configs:
        ids = config.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def _linear_shapes(directory: Path, target_modules: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (no mapping)
                layer = key.removesuffix(".weight")
                if layer != key and layer.rsplit(".", 1)[-1] in target_modules:
                    out_size, in_size = tensors.get_slice(key).get_shape()
                    shapes[layer] = (out_size, in_size)
    if not shapes:
        wanted = list(target_modules)
        raise ConfigError(f"baseModel {directory}: no safetensors weight of {wanted}; check path and targetModules")
    return shapes
