"""Writes a tiny random Hugging Face model with a working tokenizer, for tests that need a real model directory.

Called by tests of the trainer, the engines and the loop. Writes files only; keeps no state and no model in memory.
The head size is 32 because vLLM on CPU needs it.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 512
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, EOS_ID = 256, 258
"""Ids of <|endoftext|> and <|im_end|>; 0 to 255 are the bytes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(
    directory: str | Path, architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3", seed: int = 0, **fields: Any
) -> Path:
    """Write config.json, model.safetensors, generation_config.json and tokenizer files.

    Args:
        directory: where to write; made if missing.
        architecture: "qwen3" (query and key norm, tied embeddings, 2 layers), "qwen2" (query, key and value bias, tied,
            2 layers) or "llama" (untied, 3 layers).
        seed: of the random weights; the same seed writes the same bytes.
        fields: of its config, instead of those.

    Returns:
        The directory.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _ARCHITECTURES[architecture](**fields)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # all ones would hide a norm that is loaded into the wrong place
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif name.endswith("bias"):  # and all zeros a bias
                    parameter.normal_()
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token per UTF-8 byte, three special tokens, and fillers so that every id decodes."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for i in range(len(vocab) + 3, VOCAB_SIZE):
        vocab[f"<{i}>"] = i
    specials = [AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, IM_START, IM_END)]
    for i, text in enumerate((END_OF_TEXT, IM_START, IM_END)):
        vocab[text] = PAD_ID + i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""Within 200 positions some of its 16 frequencies are kept, some interpolated, some divided."""


def _common(**fields: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "bos_token_id": None, **fields,
    }  # fmt: skip


def _qwen3(**fields: Any) -> PreTrainedModel:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    return Qwen3ForCausalLM(
        Qwen3Config(**_common(**{**small, "tie_word_embeddings": True, "initializer_range": 0.1, **fields}))
    )


def _qwen2(**fields: Any) -> PreTrainedModel:
    small = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}
    return Qwen2ForCausalLM(
        Qwen2Config(**_common(**{**small, "tie_word_embeddings": True, "initializer_range": 0.1, **fields}))
    )


def _llama(**fields: Any) -> PreTrainedModel:
    small = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 32}
    return LlamaForCausalLM(
        LlamaConfig(
            **_common(
                **{**small, "tie_word_embeddings": False, "initializer_range": 0.08, "rms_norm_eps": 1e-5, **fields}
            )
        )
    )


_ARCHITECTURES = {"qwen3": _qwen3, "qwen2": _qwen2, "llama": _llama}
