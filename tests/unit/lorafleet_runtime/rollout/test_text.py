"""Decoding completions."""

import json
from pathlib import Path

from lorafleet_runtime.rollout.text import Decoder, eos_token_ids
from lorafleet_runtime.types import Completion
from support.tiny_model import EOS_ID, PAD_ID, make_tokenizer


def text(decoder: Decoder, *ids: int) -> str:
    return decoder.text(Completion(ids, (0.0,) * len(ids), "stop"))


def test_only_the_closing_end_token_is_dropped(tmp_path: Path) -> None:
    decoder = Decoder(make_tokenizer(), tmp_path)
    ids = make_tokenizer().encode(" a , b")
    assert text(decoder, *ids, EOS_ID) == text(decoder, *ids) == " a , b"
    assert text(decoder, EOS_ID, *ids, EOS_ID) == "<|im_end|> a , b"


def test_end_tokens_come_from_tokenizer_model_and_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [PAD_ID, 9]}))
    assert eos_token_ids(make_tokenizer(), tmp_path) == {EOS_ID, 7, PAD_ID, 9}
