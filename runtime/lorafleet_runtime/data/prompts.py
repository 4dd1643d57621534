"""A run's prompt stream: which prompts are usable, their token ids, and the order in which they are handed out.

Called by the rollout worker. `PromptSource` is immutable and holds no cursor: row(index) is a pure function of the
file, the spec and the index, so a restarted worker continues anywhere. Loads no model.
"""

import hashlib
import logging
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.reasons import DATA_ERROR, INVALID_SPEC
from lorafleet_runtime.data.files import DataFile, read_file
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.types import DatasetInfo

log = logging.getLogger(__name__)

_TOKENIZE_ROWS = 1024  # rows per tokenizer call: enough for its threads, little memory
_SHRINKAGE = 4  # characters that a tokenizer's normaliser may make one of
_SHOWN_PLACES = 5  # skipped rows that the log names


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt, ready for the engine and the reward."""

    prompt_ids: tuple[int, ...]
    """[P]"""
    prompt: str | list[dict[str, Any]]
    """The input column as it is in the file; the reward sees this."""
    label: Any
    """The label column, or None without labelKey."""
    metadata: dict[str, Any]
    """The row's metadata over the run's sampleMetadata."""


@dataclass(frozen=True, slots=True)
class _Usable:
    ids: "array[int]"
    row: int


class PromptSource:
    """The usable rows of one data file; `open_source` makes it."""

    def __init__(self, file: DataFile, spec: AdapterRunSpec, usable: Sequence[_Usable]) -> None:
        self._file = file
        self._spec = spec
        self._usable = tuple(usable)
        self.info = DatasetInfo(len(usable), len(file.rows) - len(usable), _stream_digest(file, usable))

    def order(self, epoch: int) -> Sequence[int]:
        """A permutation of the usable rows: the file's order, or shuffled with shuffleSeed + epoch."""
        return epoch_order(self.info.rows, self._spec.shuffle_seed, epoch)

    def row(self, index: int) -> PromptRow:
        """The row at a position of the endless stream: order(epoch)[index % rows] with epoch = index // rows.

        Args:
            index: position, 0 or more.
        """
        epoch, position = divmod(index, self.info.rows)
        usable = self._usable[self.order(epoch)[position]]
        row, spec = self._file.rows[usable.row], self._spec
        own = row.get(spec.metadata_key, {}) if spec.metadata_key else {}
        return PromptRow(
            prompt_ids=tuple(usable.ids),
            prompt=row[spec.input_key],
            label=row[spec.label_key] if spec.label_key else None,
            metadata={**(spec.sample_metadata or {}), **own},
        )


def _stream_digest(file: DataFile, usable: Sequence[_Usable]) -> str:
    """SHA-256 over the file's digest and each usable row's number and prompt ids, in order.

    The file alone would not do: with another maxTokens, maxModelLen, tokenizer or template other rows are usable, and
    a cursor would point at other prompts.
    """
    total = hashlib.sha256(file.digest.encode())
    for row in usable:
        total.update(row.row.to_bytes(8, "little") + len(row.ids).to_bytes(8, "little"))
        total.update(row.ids)
    return total.hexdigest()


@lru_cache(maxsize=64)
def epoch_order(rows: int, shuffle_seed: int | None, epoch: int) -> Sequence[int]:
    """The order of one epoch.

    Sorts the rows by draws of `random.Random(shuffle_seed + epoch).random()`: Python guarantees that sequence across
    versions, which neither `random.shuffle` nor numpy's Generator does, and a resumed run must see the same order.

    Args:
        rows: number of usable rows.
        shuffle_seed: None keeps the file's order.
        epoch: 0 for the first pass.
    """
    if shuffle_seed is None:
        return range(rows)
    random = Random(shuffle_seed + epoch)
    keys = [random.random() for _ in range(rows)]
    return tuple(sorted(range(rows), key=keys.__getitem__))


def open_source(
    spec: AdapterRunSpec,
    tokenizer: PreTrainedTokenizerBase,
    storage_root: Path,
    max_model_len: int,
    data: str | None = None,
) -> PromptSource:
    """Read the file, check its columns, render and count every prompt.

    Args:
        spec: the run's resolved spec.
        tokenizer: the base model's.
        storage_root: root of the pool's storage.
        max_model_len: the engines' longest prompt plus completion, tokens.
        data: another file with the same keys, as evaluation.data; unset means spec.data.

    Raises:
        RunError: DataError names the column, row or length at fault; InvalidSpec when maxTokens leaves no prompt.
    """
    field = "data" if data is None else "evaluation.data"
    limit = prompt_limit(spec, max_model_len)
    file = read_file(spec.data if data is None else data, storage_root, field)
    _check_columns(file, spec)
    usable = _usable_rows(file, spec, tokenizer, limit)
    if not usable:
        raise RunError(
            DATA_ERROR,
            f"{field}: {file.name!r} has 0 usable rows: all {len(file.rows)} prompts are longer than {limit} tokens; "
            "shorten them, or raise maxPromptTokens (and the pool's engines.maxModelLen)",
        )
    if len(usable) < len(file.rows):
        kept = {row.row for row in usable}
        places = [file.places[number] for number in range(len(file.rows)) if number not in kept]
        shown = ", ".join(places[:_SHOWN_PLACES]) + (", ..." if len(places) > _SHOWN_PLACES else "")
        log.warning(
            "%s: %r: skipped %d of %d prompts, longer than %d tokens: %s",
            field, file.name, len(places), len(file.rows), limit, shown,
        )  # fmt: skip
    return PromptSource(file, spec, usable)


def _usable_rows(file: DataFile, spec: AdapterRunSpec, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[_Usable]:
    """The rows whose prompts have at most `limit` tokens, with their ids."""
    most_characters = limit * _SHRINKAGE * max(map(len, tokenizer.get_vocab()))
    usable: list[_Usable] = []
    for start in range(0, len(file.rows), _TOKENIZE_ROWS):
        rendered = {}
        for number in range(start, min(start + _TOKENIZE_ROWS, len(file.rows))):
            text, made = _render(file, number, spec, tokenizer)
            # The tokenizer needs about a hundred bytes per character: a row of 50 MB would take gigabytes.
            if len(text) <= most_characters:
                rendered[number] = (text, made)
        for number, ids in zip(rendered, _tokenize(list(rendered.values()), tokenizer), strict=True):
            if not ids:
                raise _row_error(file, number, f"inputKey: {spec.input_key!r} is empty; give every row a prompt")
            if len(ids) <= limit:
                usable.append(_Usable(array("i", ids), number))
    return usable


def prompt_limit(spec: AdapterRunSpec, max_model_len: int) -> int:
    """The longest usable prompt in tokens: maxPromptTokens, but never more than the engine leaves beside maxTokens.

    Raises:
        RunError: InvalidSpec; nothing is left.
    """
    room = max_model_len - spec.sampling.max_tokens
    if room < 1:
        raise RunError(
            INVALID_SPEC,
            f"sampling.maxTokens: {spec.sampling.max_tokens} leaves no room for a prompt in the pool's "
            f"engines.maxModelLen {max_model_len}; lower maxTokens",
        )
    return room if spec.max_prompt_tokens is None else min(spec.max_prompt_tokens, room)


def _check_columns(file: DataFile, spec: AdapterRunSpec) -> None:
    keys = (("inputKey", spec.input_key), ("labelKey", spec.label_key), ("metadataKey", spec.metadata_key))
    for field, column in keys:
        if column is not None and column not in file.columns:
            raise RunError(
                DATA_ERROR,
                f"{field}: {column!r} is no column of {file.name!r}, which has {file.column_list}; "
                f"set {field} to one of them",
            )
    for number, row in enumerate(file.rows):
        for field, column in keys[:2]:
            if column is not None and column not in row:
                raise _row_error(file, number, f"{field}: {column!r} is missing or null; give every row a value")
        if spec.label_key is not None:
            _check_label(file, number, spec, row[spec.label_key])
        own = row.get(spec.metadata_key, {}) if spec.metadata_key else {}
        if not isinstance(own, dict):
            raise _row_error(
                file, number, f"metadataKey: {spec.metadata_key!r} is a {type(own).__name__}; give an object"
            )


def _check_label(file: DataFile, number: int, spec: AdapterRunSpec, label: Any) -> None:
    """Refuse a label that no response can equal: the run would train on zeros to its end."""
    if isinstance(label, float) and not math.isfinite(label):
        raise _row_error(file, number, f"labelKey: {spec.label_key!r} is {label}; give every row a finite value")
    if spec.rm_type != "math":
        return
    if isinstance(label, bool) or not isinstance(label, str | int | float | Decimal):
        problem = f"is a {type(label).__name__}; rmType math needs a string or a number"
        raise _row_error(file, number, f"labelKey: {spec.label_key!r} {problem}")
    if isinstance(label, str) and not label.strip():
        raise _row_error(file, number, f"labelKey: {spec.label_key!r} is empty; give every row an answer")


def _render(file: DataFile, number: int, spec: AdapterRunSpec, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """The prompt's text, and whether a template made it (then it already holds its special tokens)."""
    text, made = _rendered(file, number, spec, tokenizer)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair; no tokenizer takes it
        raise _row_error(
            file, number, f"inputKey: {spec.input_key!r} holds half a surrogate pair ({error.reason}); write real text"
        ) from error
    return text, made


def _rendered(
    file: DataFile, number: int, spec: AdapterRunSpec, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, bool]:
    value, wanted = file.rows[number][spec.input_key], spec.apply_chat_template
    if isinstance(value, str):
        if not wanted:
            return value, False
        messages = [{"role": "user", "content": value}]
    else:
        messages = _messages(file, number, spec.input_key, value)
        if wanted is False:
            problem = f"applyChatTemplate: false, but inputKey {spec.input_key!r} holds messages; set it to true"
            raise _row_error(file, number, f"{problem} or give strings")
    if not tokenizer.chat_template:
        raise _row_error(
            file, number, "applyChatTemplate: the base model's tokenizer has no chat template; give strings and false"
        )
    prefilled = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not prefilled, continue_final_message=prefilled
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
        raise _row_error(
            file, number, f"inputKey: the chat template refuses {spec.input_key!r} ({error}); correct the messages"
        ) from error
    return str(text), True


def _messages(file: DataFile, number: int, column: str, value: Any) -> list[dict[str, Any]]:
    expected = f"inputKey: {column!r} must be a string or a list of messages with a role"
    if not isinstance(value, list) or not value:
        raise _row_error(file, number, f"{expected}; it is {value!r:.80}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _row_error(file, number, f"{expected}; one is {message!r:.80}")
    # A message whose content was null (a bare tool call) would print None or break the template.
    return [{"content": "", **message} for message in value]


def _tokenize(rendered: Sequence[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in rendered]
    bos = tokenizer.bos_token_id
    for templated in (False, True):
        numbers = [i for i, (_, made) in enumerate(rendered) if made is templated]
        if not numbers:
            continue
        texts = [rendered[i][0] for i in numbers]
        encoded = tokenizer(texts, add_special_tokens=not templated, verbose=False)["input_ids"]
        for i, row in zip(numbers, encoded, strict=True):
            ids[i] = list(row)
            # A string that already begins with the begin-of-sequence token must not get a second one.
            if not templated and bos is not None and ids[i][:2] == [bos, bos]:
                del ids[i][0]
    return ids


def _row_error(file: DataFile, number: int, problem: str) -> RunError:
    return RunError(DATA_ERROR, f"{problem} ({file.places[number]} of {file.name!r})")
