"""Reading data files: equal rows from both formats, and faults that name the field, the place and the fix."""

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lorafleet_api.v1alpha1.reasons import DATA_ERROR
from lorafleet_runtime.data.files import read_file
from lorafleet_runtime.errors import RunError

TOOL_ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Weigh 3 crates", "name": "dock"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weigh", "arguments": {"n": 3}}}],
        },
        {"role": "tool", "content": "41"},
    ],
    "label": "41",
}


def refusal(data: str, root: Path) -> str:
    with pytest.raises(RunError) as caught:
        read_file(data, root)
    assert caught.value.reason == DATA_ERROR
    return caught.value.message


def test_jsonl_rows_places_columns_and_digest(tmp_path: Path) -> None:
    content = b'{"text": "a", "label": 1}\n\n{"text": "b\xe2\x80\xa8c", "extra": null}\n'
    (tmp_path / "d.jsonl").write_bytes(content)
    file = read_file("d.jsonl", tmp_path)
    assert file.rows == ({"text": "a", "label": 1}, {"text": "b\u2028c"})
    assert file.places == ("line 1", "line 3")
    assert file.columns == ("extra", "label", "text")
    assert file.digest == hashlib.sha256(content).hexdigest()


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read_file("d.jsonl", tmp_path).columns == ("text",)


def test_parquet_gives_the_rows_of_jsonl_in_spite_of_arrows_null_keys(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps(TOOL_ROW) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([TOOL_ROW]), tmp_path / "d.parquet")
    raw = pyarrow.parquet.read_table(tmp_path / "d.parquet").to_pylist()[0]
    assert raw["messages"][0]["tool_calls"] is None  # the fault this guards against is really there
    assert read_file("d.parquet", tmp_path).rows == read_file("d.jsonl", tmp_path).rows == (TOOL_ROW,)


def test_null_list_elements_stay(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"label": [1, null, {"a": null}]}\n')
    assert read_file("d.jsonl", tmp_path).rows == ({"label": [1, None, {}]},)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n{"text": \n')
    message = refusal("d.jsonl", tmp_path)
    assert "'d.jsonl'" in message and "line 2 is not JSON" in message and "one JSON object per line" in message


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n[1]\n')
    assert "line 2 is a list" in refusal("d.jsonl", tmp_path)


@pytest.mark.parametrize(
    "line", [b'{"text": "\xff"}', b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"], ids=["utf-8", "depth", "digits"]
)
def test_odd_bytes_are_a_data_error_too(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "d.jsonl").write_bytes(line)
    assert "line 1 is not JSON" in refusal("d.jsonl", tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal("no/such.jsonl", tmp_path).startswith("data: 'no/such.jsonl' does not exist")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").mkdir()
    assert "cannot be read" in refusal("d.jsonl", tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_has_no_rows(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    assert "has no rows" in refusal("d.jsonl", tmp_path)


def test_a_malformed_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nothing")
    assert "no readable parquet file" in refusal("d.parquet", tmp_path)


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text\na\n")
    assert "'.csv'; give a .jsonl or .parquet file" in refusal("d.csv", tmp_path)


def test_paths_and_links_out_of_the_storage_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"text": "a"}\n')
    (root / "link.jsonl").symlink_to(secret)
    for data in ("../secret.jsonl", str(secret), "link.jsonl"):
        assert "outside the pool's storage" in refusal(data, root)


def test_an_absolute_path_inside_the_storage_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    assert read_file(str(tmp_path / "d.jsonl"), tmp_path).rows == ({"text": "a"},)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1/d.jsonl", "simplecache::s3://b/d.jsonl"])
def test_urls_that_reach_past_the_storage_are_refused(tmp_path: Path, url: str) -> None:
    assert "uses a URL other than s3" in refusal(url, tmp_path)


def test_an_object_store_url_goes_through_fsspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(MemoryFileSystem):  # type: ignore[misc]
        protocol = "s3"

    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "s3", Store)
    with fsspec.open("s3://bucket/d.jsonl", "wb") as file:
        file.write(b'{"text": "a"}\n')
    assert read_file("s3://bucket/d.jsonl", tmp_path).rows == ({"text": "a"},)
    assert "cannot be read (FileNotFoundError" in refusal("s3://bucket/other.jsonl", tmp_path)
