"""Decodes a completion into the text that the reward and people see.

Called by the rollout worker.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lorafleet_runtime.types import Completion


class Decoder:
    """Token ids to text.

    Args:
        tokenizer: the base model's.
        model_path: directory whose config.json and generation_config.json name the end-of-sequence tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_path: Path) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_ids(tokenizer, model_path)

    def text(self, completion: Completion) -> str:
        """The response without its closing end-of-sequence token.

        Other special tokens stay visible: the reward must see everything that the policy is paid for writing.
        """
        ids = list(completion.token_ids)
        if ids and ids[-1] in self._eos:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def prompt(self, ids: Sequence[int]) -> str:
        """The prompt as the model reads it, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, model_path: Path) -> frozenset[int]:
    """Every token that ends a completion: the tokenizer's, the model's and the generation config's."""
    found: set[int] = set()
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    for name in ("config.json", "generation_config.json"):
        path = model_path / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
