"""What is read from a base model's files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorafleet_runtime.errors import ConfigError
from lorafleet_runtime.publish.base_model import read_base_model


def _model(path: Path) -> Path:
    (path / "config.json").write_text(json.dumps({"vocab_size": 32, "eos_token_id": 2}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "top_k": 20}))
    weights = {
        "model.embed_tokens.weight": torch.zeros(32, 8),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(12, 8, dtype=torch.bfloat16),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(12),
        "model.layers.0.self_attn.k_proj.weight": torch.zeros(4, 8),
    }
    save_file(weights, path / "model.safetensors")
    return path


def test_shapes_are_out_by_in_of_the_asked_projections(tmp_path: Path) -> None:
    base = read_base_model(str(_model(tmp_path)), None, ("q_proj",))
    assert base.linear_shapes == {"model.layers.0.self_attn.q_proj": (12, 8)}


def test_every_end_token_counts(tmp_path: Path) -> None:
    assert read_base_model(str(_model(tmp_path)), None, ("q_proj",)).stop_token_ids == (2, 7)


def test_a_directory_without_tokenizer_is_seen(tmp_path: Path) -> None:
    assert not read_base_model(str(_model(tmp_path)), None, ("q_proj",)).has_tokenizer
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_base_model(str(tmp_path), None, ("q_proj",)).has_tokenizer


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_base_model(str(tmp_path), None, ("q_proj",))


def test_a_model_without_the_projections_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="c_attn"):
        read_base_model(str(_model(tmp_path)), None, ("c_attn",))
