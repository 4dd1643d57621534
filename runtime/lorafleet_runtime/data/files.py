"""Reads a JSONL or parquet file of prompts into plain rows; owns path rules and the digest.

Called by `prompts`. Both formats give equal rows: keys whose value is null are dropped at every depth, because Arrow
gives each struct the union of all keys. Knows nothing of tokenizers or runs.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet

from lorafleet_api.v1alpha1.reasons import DATA_ERROR
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.storage import inside, read_regular

OBJECT_STORES = ("s3", "gs", "gcs", "az", "abfs", "hf")
"""URL schemes that a run may name. Others (file, http, chained ones) would reach past the pool's storage."""

MAX_BYTES = 1 << 30
"""Largest file; of parquet also of what it unpacks to, counted while it is read. The rows' Python objects take a small
multiple of it, in a process that all runs share."""

MAX_ROWS = 4_000_000
"""Most rows: a few bytes of a file can stand for a row, whose Python objects take hundreds."""

_BATCH_ROWS = 64

_MAX_COLUMNS = 20
"""Column names in a message; a condition's message is cut at its end, where the fix is."""

_JSONL = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file's rows. `rows` and `places` have the same length."""

    name: str
    """The path as the user wrote it, for messages."""
    rows: tuple[dict[str, Any], ...]
    """Row objects without null values."""
    places: tuple[str, ...]
    """Where each row is, for messages: "line 3" or "row 3", counted from 1."""
    columns: tuple[str, ...]
    """Every column, sorted; for JSONL the keys of all rows."""
    digest: str
    """SHA-256 of the file's bytes, hexadecimal."""

    @property
    def column_list(self) -> str:
        """The columns, for messages; of very many only the first."""
        more = len(self.columns) - _MAX_COLUMNS
        return ", ".join(self.columns[:_MAX_COLUMNS]) + (f" and {more} more" if more > 0 else "")


def read_file(data: str, storage_root: Path, field: str = "data") -> DataFile:
    """Read the whole file.

    Args:
        data: a path on the pool's storage (relative to its root, or absolute inside it), or an object store URL.
        storage_root: the root of the pool's storage.
        field: the spec field to name in messages.

    Raises:
        RunError: DataError; the file is missing, outside the storage, malformed or empty.
    """
    content = _read_bytes(data, storage_root, field)
    suffix = PurePosixPath(data).suffix.lower()
    if suffix in _PARQUET:
        rows, columns = _parse_parquet(content, data, field)
        places = [f"row {i}" for i in range(1, len(rows) + 1)]
    elif suffix in _JSONL:
        rows, places = _parse_jsonl(content, data, field)
        columns = sorted({key for row in rows for key in row})
    else:
        raise _error(field, data, f"has suffix {suffix!r}; give a .jsonl or .parquet file")
    if not rows:
        raise _error(field, data, "has no rows; give a file with at least one prompt")
    rows = [drop_nulls(row) for row in rows]
    return DataFile(data, tuple(rows), tuple(places), tuple(columns), hashlib.sha256(content).hexdigest())


def drop_nulls(value: Any) -> Any:
    """The value without dictionary keys whose value is None, at every depth; list elements stay."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def _read_bytes(data: str, storage_root: Path, field: str) -> bytes:
    if "://" in data or "::" in data:
        return _read_url(data, field)
    try:
        path = inside(storage_root, data)
    except ValueError as error:
        raise _error(field, data, str(error)) from error
    try:
        content = read_regular(path, MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise _error(field, data, "does not exist on the pool's storage; upload it or correct the path") from error
    except OSError as error:
        raise _error(field, data, f"cannot be read ({error.strerror}); give a readable file") from error
    return _within_limit(content, data, field)


def _within_limit(content: bytes, data: str, field: str) -> bytes:
    if len(content) > MAX_BYTES:
        raise _error(field, data, f"is larger than {MAX_BYTES >> 20} MiB; split it, or drop columns that are not used")
    return content


def _read_url(data: str, field: str) -> bytes:
    scheme = data.partition("://")[0]
    if scheme not in OBJECT_STORES or "::" in data:
        raise _error(
            field, data, f"uses a URL other than {', '.join(OBJECT_STORES)}; give a path on the pool's storage"
        )
    try:
        with fsspec.open(data, "rb") as file:
            content: bytes = file.read(MAX_BYTES + 1)
    except (OSError, ImportError, ValueError) as error:
        raise _error(
            field, data, f"cannot be read ({type(error).__name__}: {error}); check URL and credentials"
        ) from error
    return _within_limit(content, data, field)


def _parse_jsonl(content: bytes, data: str, field: str) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    # Split on the newline byte only: str.splitlines would also split inside a JSON string at U+2028.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise _error(field, data, f"line {number} is not JSON ({error}); write one JSON object per line") from error
        if not isinstance(row, dict):
            raise _error(field, data, f"line {number} is a {type(row).__name__}; write one JSON object per line")
        if len(rows) == MAX_ROWS:
            raise _error(field, data, f"has more than {MAX_ROWS} rows; split it")
        rows.append(row)
        places.append(f"line {number}")
    return rows, places


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is there twice")
        found[key] = value
    return found


def _parse_parquet(content: bytes, data: str, field: str) -> tuple[list[dict[str, Any]], list[str]]:
    try:
        stored = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
        twice = [name for name, count in Counter(stored.schema_arrow.names).items() if count > 1]
        if twice:
            raise ValueError(f"column {twice[0]!r} is there twice")
        rows = _unpack(stored)
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _error(field, data, f"is no readable parquet file ({text}); write it again") from error
    return rows, sorted(stored.schema_arrow.names)


def _unpack(stored: pyarrow.parquet.ParquetFile) -> list[dict[str, Any]]:
    """All rows; stops as soon as they are too much.

    Raises:
        ValueError: more than MAX_BYTES or MAX_ROWS; the text says which.
    """
    too_much = f"it unpacks to more than {MAX_BYTES >> 20} MiB"
    sizes = [stored.metadata.row_group(i).total_byte_size for i in range(stored.metadata.num_row_groups)]
    if sum(sizes) > MAX_BYTES:
        raise ValueError(too_much)
    # The file's own sizes count a dictionary's values once, however often rows repeat them. No value is longer than its
    # row group, so that a batch of this many rows unpacks to little more than the limit.
    batch_rows = max(1, min(_BATCH_ROWS, MAX_BYTES // max([1, *sizes])))
    rows: list[dict[str, Any]] = []
    unpacked = 0
    for batch in stored.iter_batches(batch_size=batch_rows):
        unpacked += batch.nbytes
        if unpacked > MAX_BYTES:
            raise ValueError(too_much)
        if len(rows) + batch.num_rows > MAX_ROWS:
            raise ValueError(f"it has more than {MAX_ROWS} rows")
        rows += batch.to_pylist(maps_as_pydicts="strict")
    return rows


def _error(field: str, data: str, problem: str) -> RunError:
    return RunError(DATA_ERROR, f"{field}: {data!r} {problem}")
