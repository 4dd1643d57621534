"""The prompt stream: rendering, token ids, skipping, order, and faults of single rows."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.reasons import DATA_ERROR, INVALID_SPEC
from lorafleet_runtime.data.prompts import PromptSource, epoch_order, open_source
from lorafleet_runtime.errors import RunError
from support.tiny_model import make_tokenizer

TOOL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if 'name' in m %}={{ m['name'] }}{% endif %}"
    "{{ '' + m['content'] }}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Weigh 3 crates", "name": "dock"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weigh", "arguments": {"n": 3}}}],
    },
    {"role": "tool", "content": "41"},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def spec(**fields: Any) -> AdapterRunSpec:
    base = {"poolRef": {"name": "p"}, "data": "d.jsonl", "rmType": "math", "sampling": {"maxTokens": 16}}
    return AdapterRunSpec.model_validate(base | fields)


def write(root: Path, *rows: dict[str, Any]) -> None:
    (root / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(root: Path, tokenizer: PreTrainedTokenizerFast, max_model_len: int = 512, **fields: Any) -> PromptSource:
    return open_source(spec(**fields), tokenizer, root, max_model_len)


def refusal(root: Path, tokenizer: PreTrainedTokenizerFast, reason: str = DATA_ERROR, **fields: Any) -> str:
    with pytest.raises(RunError) as caught:
        opened(root, tokenizer, **fields)
    assert caught.value.reason == reason
    return caught.value.message


def test_a_string_is_taken_as_it_is(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": "7 + 5 =", "label": 12})
    row = opened(tmp_path, tokenizer, labelKey="label").row(0)
    assert row.prompt_ids == tuple(tokenizer.convert_tokens_to_ids(list("7\u0120+\u01205\u0120=")))
    assert (row.prompt, row.label, row.metadata) == ("7 + 5 =", 12, {})


def test_messages_are_rendered_with_the_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": [{"role": "user", "content": "hi"}]})
    ids = opened(tmp_path, tokenizer).row(0).prompt_ids
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_apply_chat_template_true_makes_a_string_a_user_turn(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    write(tmp_path, {"text": "hi"})
    ids = opened(tmp_path, tokenizer, applyChatTemplate=True).row(0).prompt_ids
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_last_assistant_message_is_continued(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]})
    ids = opened(tmp_path, tokenizer).row(0).prompt_ids
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell,"


def test_apply_chat_template_false_refuses_messages(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": [{"role": "user", "content": "hi"}]})
    message = refusal(tmp_path, tokenizer, applyChatTemplate=False)
    assert "applyChatTemplate: false" in message and "(line 1 of 'd.jsonl')" in message


def test_a_tokenizer_without_template_refuses_messages(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    write(tmp_path, {"text": [{"role": "user", "content": "hi"}]})
    assert "no chat template" in refusal(tmp_path, tokenizer)


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Case 3 (huggingface/datasets#7617): Arrow gives every message the union of keys, absent ones as null."""
    tokenizer.chat_template = TOOL_TEMPLATE
    other = [{"role": "user", "content": "x"}, {"role": "tool", "content": "1"}]
    rows = [{"text": TOOL_MESSAGES, "label": "41"}, {"text": other, "label": "1"}]
    write(tmp_path, *rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    jsonl = opened(tmp_path, tokenizer)
    parquet = opened(tmp_path, tokenizer, data="d.parquet")
    assert [jsonl.row(i) for i in range(2)] == [parquet.row(i) for i in range(2)]
    text = tokenizer.decode(parquet.row(0).prompt_ids)
    assert "user=dockWeigh 3 crates" in text and 'assistantweigh{"n": 3}<' in text and "None" not in text


def test_a_template_that_fails_names_the_row(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    write(tmp_path, {"text": [{"role": "user", "content": "hi"}]})
    message = refusal(tmp_path, tokenizer)
    assert "roles must alternate" in message and "line 1 of 'd.jsonl'" in message


@pytest.mark.parametrize("value", [3, [], [{"content": "no role"}], ["hi"]])
def test_an_input_of_another_shape_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, value: object
) -> None:
    write(tmp_path, {"text": "ok"}, {"text": value})
    message = refusal(tmp_path, tokenizer)
    assert "inputKey: 'text' must be a string or a list of messages" in message and "line 2" in message


def with_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<|im_start|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    return tokenizer


def test_begin_of_sequence_comes_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_bos(tokenizer)
    bos = tokenizer.bos_token_id
    write(tmp_path, {"text": "hi"}, {"text": "<|im_start|>hi"}, {"text": [{"role": "user", "content": "hi"}]})
    source = opened(tmp_path, tokenizer)
    plain, marked, chat = (source.row(i).prompt_ids for i in range(3))
    assert plain == marked and plain[0] == bos and plain[1] != bos
    assert chat[0] == bos and chat[1] != bos


def test_a_missing_column_names_those_present(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"question": "A crate holds 25 jars. How many in 50 crates?", "answer": "25*50=1250\n#### 1,250"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    fields: dict[str, Any] = {"data": "d.parquet", "inputKey": "question"}
    message = refusal(tmp_path, tokenizer, **fields, labelKey="reward_model")
    assert "labelKey: 'reward_model'" in message and "answer, question" in message
    assert opened(tmp_path, tokenizer, **fields, labelKey="answer").row(0).label == row["answer"]


def test_a_row_without_label_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": "a", "label": "1"}, {"text": "b", "label": None})
    assert "labelKey: 'label' is missing or null" in refusal(tmp_path, tokenizer, labelKey="label")


def test_an_empty_prompt_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": "a"}, {"text": ""})
    assert "inputKey: 'text' is empty" in refusal(tmp_path, tokenizer)


def test_the_rows_metadata_lies_over_the_runs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": "a", "meta": {"level": 2}}, {"text": "b"})
    source = opened(tmp_path, tokenizer, metadataKey="meta", sampleMetadata={"level": 1, "kind": "x"})
    assert [source.row(i).metadata for i in range(2)] == [{"level": 2, "kind": "x"}, {"level": 1, "kind": "x"}]


def test_metadata_that_is_no_object_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": "a", "meta": "level 2"})
    assert "metadataKey: 'meta' is a str" in refusal(tmp_path, tokenizer, metadataKey="meta")


def test_prompts_longer_than_the_engine_leaves_are_skipped_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    write(
        tmp_path, {"text": "count: 1"}, {"text": "count: " + "tick " * 9000}, {"text": "x" * 496}, {"text": "x" * 497}
    )
    source = opened(tmp_path, tokenizer, max_model_len=512)  # 512 - maxTokens 16 leaves 496
    assert (source.info.rows, source.info.skipped) == (2, 2)
    assert [source.row(i).prompt for i in range(3)] == ["count: 1", "x" * 496, "count: 1"]


def test_an_over_long_row_between_good_ones_is_skipped_and_named_in_the_log(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 9 (huggingface/trl#3180, unsloth#1642), its first file: three rows, the second too long."""
    write(tmp_path, {"text": "count: 1"}, {"text": "count: " + "tick " * 9000}, {"text": "count: 2"})
    source = opened(tmp_path, tokenizer, max_model_len=512)
    assert [source.row(i).prompt for i in range(4)] == ["count: 1", "count: 2", "count: 1", "count: 2"]
    assert "skipped 1 of 3 prompts, longer than 496 tokens: line 2" in caplog.text


def test_a_file_of_over_long_rows_has_no_usable_row(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Case 9, its second file."""
    write(tmp_path, *({"text": "count: " + "tick " * (9000 + n)} for n in range(3)))
    message = refusal(tmp_path, tokenizer)
    assert "0 usable rows: all 3 prompts are longer than 496 tokens; shorten them" in message


def test_a_line_of_fifty_megabytes_is_skipped_without_being_tokenised(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer needs about a hundred bytes per character of it: gigabytes, in a process that all runs share."""
    write(tmp_path, {"text": "short"}, {"text": "x" * 50_000_000})
    lengths: list[int] = []
    encode = type(tokenizer).__call__

    def counted(self: PreTrainedTokenizerFast, texts: list[str], **options: Any) -> Any:
        lengths.extend(len(text) for text in texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    assert opened(tmp_path, tokenizer).info.skipped == 1
    assert lengths == [5]


def test_half_a_surrogate_pair_is_the_rows_fault(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "ok"}\n{"text": "half \\ud800"}\n')
    message = refusal(tmp_path, tokenizer)
    assert "holds half a surrogate pair" in message and "line 2" in message
    message.encode()


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ('"  "', "'label' is empty; give every row an answer"),
        ("[1]", "'label' is a list; rmType math needs a string or a number"),
        ('{"n": 1}', "'label' is a dict; rmType math"),
        ("true", "'label' is a bool; rmType math"),
        ("NaN", "'label' is nan; give every row a finite value"),
        ("1e400", "'label' is inf; give every row a finite value"),
        ("null", "'label' is missing or null; give every row a value"),
    ],
)
def test_a_label_that_no_answer_can_equal_names_its_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, label: str, text: str
) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a", "label": "1"}\n{"text": "b", "label": ' + label + "}\n")
    message = refusal(tmp_path, tokenizer, labelKey="label")
    assert text in message and "line 2 of 'd.jsonl'" in message and message.startswith("labelKey: ")


def test_a_users_own_reward_may_have_labels_of_any_kind(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": "a", "label": [1, {"n": True}]})
    row = opened(tmp_path, tokenizer, labelKey="label", rmType=None, customRmPath="a.b").row(0)
    assert row.label == [1, {"n": True}]


def test_messages_with_null_content_print_no_none(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TOOL_TEMPLATE
    bare = [{k: v for k, v in m.items() if k != "content" or v} for m in TOOL_MESSAGES]
    nulls = [{"content": None, "tool_calls": None} | m for m in bare]
    write(tmp_path, {"text": TOOL_MESSAGES}, {"text": nulls})
    source = opened(tmp_path, tokenizer)
    assert source.row(0).prompt_ids == source.row(1).prompt_ids


def test_a_parquet_file_of_gsm8k_names_its_columns_when_another_is_asked_for(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Case 2 (verl-project/verl#758), (a): the reward column of another dataset."""
    row = {"question": "A crate holds 25 jars. How many in 50 crates?", "answer": "25*50=1250\n#### 1,250"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    fields: dict[str, Any] = {"data": "d.parquet", "inputKey": "question"}
    message = refusal(tmp_path, tokenizer, labelKey="reward_model", **fields)
    assert message == (
        "labelKey: 'reward_model' is no column of 'd.parquet', which has answer, question; set labelKey to one of them"
    )
    assert opened(tmp_path, tokenizer, labelKey="answer", **fields).row(0).label == row["answer"]


def test_max_prompt_tokens_is_a_lower_limit(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": "xx"}, {"text": "xxx"})
    assert opened(tmp_path, tokenizer, maxPromptTokens=2).info.skipped == 1
    write(tmp_path, {"text": "xx"}, {"text": "x" * 497})
    assert opened(tmp_path, tokenizer, maxPromptTokens=4096).info.skipped == 1


def test_digest_changes_with_the_usable_rows_and_their_ids(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def digest(**fields: Any) -> str:
        return opened(tmp_path, tokenizer, **fields).info.digest

    write(tmp_path, {"text": "xx"}, {"text": "xxx"}, {"text": "x"})
    first = digest()
    assert digest(sampling={"maxTokens": 99}) == digest(shuffleSeed=1) == first  # the rows are the same
    assert digest(maxPromptTokens=2) != first  # row 2 is gone, and every later position shifts
    assert digest(sampling={"maxTokens": 510}) == digest(maxPromptTokens=2)
    assert digest(applyChatTemplate=True) != first
    tokenizer.chat_template += " "
    assert digest() == first
    write(tmp_path, {"text": "xx", "label": 1}, {"text": "xxx"}, {"text": "x"})
    assert digest() != first


def test_digest_is_pinned(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Checkpoints hold it: the file's digest, then number, length and ids of each usable row."""
    write(tmp_path, {"text": "a"}, {"text": "x" * 600}, {"text": "bc"})
    ids = tokenizer.convert_tokens_to_ids(list("abc"))
    file_digest = hashlib.sha256((tmp_path / "d.jsonl").read_bytes()).hexdigest()
    expected = file_digest.encode() + struct.pack("<qqi", 0, 1, ids[0]) + struct.pack("<qqii", 2, 2, *ids[1:])
    assert opened(tmp_path, tokenizer).info.digest == hashlib.sha256(expected).hexdigest()


def test_no_usable_row_is_a_data_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, {"text": "x" * 600}, {"text": "x" * 700})
    message = refusal(tmp_path, tokenizer)
    assert "0 usable rows" in message and "496 tokens" in message


def test_max_tokens_that_leaves_no_prompt_is_an_invalid_spec(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    write(tmp_path, {"text": "x"})
    message = refusal(tmp_path, tokenizer, INVALID_SPEC, sampling={"maxTokens": 512})
    assert "sampling.maxTokens: 512" in message and "512; lower maxTokens" in message


def test_file_order_repeats_without_seed(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path, *({"text": c} for c in "abc"))
    source = opened(tmp_path, tokenizer)
    assert "".join(str(source.row(i).prompt) for i in range(7)) == "abcabca"


def test_shuffled_epochs_are_the_pinned_permutations(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    # Sorted by random.Random(7).random() and random.Random(8).random(); a resumed run depends on these.
    assert list(epoch_order(6, 7, 0)) == [3, 1, 0, 5, 4, 2]
    assert list(epoch_order(6, 7, 1)) == list(epoch_order(6, 8, 0)) == [4, 2, 0, 5, 3, 1]
    write(tmp_path, *({"text": c} for c in "abcdef"))
    source = opened(tmp_path, tokenizer, shuffleSeed=7)
    assert "".join(str(source.row(i).prompt) for i in range(12)) == "dbafec" + "ecafdb"
