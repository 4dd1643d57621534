"""Reading data files: equal rows from both formats, and faults that name the field, the place and the fix."""

import gzip
import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lorafleet_api.v1alpha1.reasons import DATA_ERROR
from lorafleet_runtime.data import files
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


def test_carriage_returns_before_newlines_are_blanks(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert read_file("d.jsonl", tmp_path).rows == ({"text": "a"}, {"text": "b"})


@pytest.mark.parametrize("line", ['{"text": "a", "text": "b"}', '{"text": {"n": 1, "n": 2}, "n": 3}'])
def test_a_key_that_is_there_twice_is_refused_at_every_depth(tmp_path: Path, line: str) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "ok"}\n' + line + "\n")
    twice = "'text'" if "b" in line else "'n'"
    assert f"line 2 is not JSON (key {twice} is there twice)" in refusal("d.jsonl", tmp_path)


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "d.jsonl")
    assert "cannot be read (it is no regular file)" in refusal("d.jsonl", tmp_path)


def test_a_link_to_a_device_is_outside_the_storage(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").symlink_to("/dev/zero")
    assert "outside the pool's storage" in refusal("d.jsonl", tmp_path)


@pytest.mark.parametrize("name", ["one\ntwo.jsonl", "gr\u00f6\u00dfe \u2713.jsonl", "a b;$(id).jsonl"])
def test_any_name_that_a_file_can_have_is_read_and_told_in_one_line(tmp_path: Path, name: str) -> None:
    assert "\n" not in refusal(name, tmp_path)
    (tmp_path / name).write_text('{"text": "a"}\n')
    assert read_file(name, tmp_path).rows == ({"text": "a"},)


@pytest.mark.parametrize("name", ["a\0b.jsonl", "x" * 300 + ".jsonl", "loop.jsonl"])
def test_what_is_no_usable_path_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    message = refusal(name, tmp_path)
    assert message.startswith("data: ") and "; " in message


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_beyond_the_limit_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 3 << 20)
    (tmp_path / f"d.{suffix}").write_bytes(b"x" * ((3 << 20) + 1))
    assert "is larger than 3 MiB; split it" in refusal(f"d.{suffix}", tmp_path)


def test_a_small_parquet_file_that_unpacks_to_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 3 << 20)
    table = pyarrow.table({"text": ["x" * (4 << 20)]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "d.parquet").stat().st_size < 100_000
    assert "it unpacks to more than 3 MiB" in refusal("d.parquet", tmp_path)


def test_a_parquet_file_whose_dictionary_unpacks_to_much_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 3 << 20)
    codes = pyarrow.array([0] * 4000, pyarrow.int32())
    table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array(["x" * (64 << 10)]))})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", compression="zstd")  # 250 MiB in a few KiB
    about = pyarrow.parquet.read_metadata(tmp_path / "d.parquet")
    assert about.row_group(0).total_byte_size < 100_000  # the file's own sizes do not show it
    before = pyarrow.default_memory_pool().max_memory()
    assert "it unpacks to more than 3 MiB" in refusal("d.parquet", tmp_path)
    assert pyarrow.default_memory_pool().max_memory() < before + (32 << 20)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_of_very_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(files, "MAX_ROWS", 100)
    for count in (100, 101):
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"n": [1] * count}), tmp_path / f"{count}.parquet")
        else:
            (tmp_path / f"{count}.jsonl").write_text('{"n": 1}\n' * count)
    assert len(read_file(f"100.{suffix}", tmp_path).rows) == 100
    assert "has more than 100 rows" in refusal(f"101.{suffix}", tmp_path)


def test_a_parquet_file_of_several_batches_and_row_groups_keeps_its_rows_in_order(tmp_path: Path) -> None:
    table = pyarrow.table({"n": list(range(500))})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=170)
    assert read_file("d.parquet", tmp_path).rows == tuple({"n": n} for n in range(500))


def test_a_compressed_jsonl_file_is_refused_by_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n')[:-4])
    assert "'.gz'; give a .jsonl or .parquet file" in refusal("d.jsonl.gz", tmp_path)


def test_a_column_name_can_always_be_told(tmp_path: Path) -> None:
    """A message with half a surrogate pair would break the HTTP API's listing of all runs."""
    (tmp_path / "d.jsonl").write_text('{"\\ud800": 1}\n')
    assert RunError(DATA_ERROR, read_file("d.jsonl", tmp_path).column_list).message == "?"


def test_of_very_many_columns_only_some_are_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({f"column_{n:04}": 0 for n in range(5000)}) + "\n")
    named = read_file("d.jsonl", tmp_path).column_list
    assert named.startswith("column_0000, column_0001, ") and named.endswith(", column_0019 and 4980 more")


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_has_no_rows(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    assert "has no rows" in refusal("d.jsonl", tmp_path)


def parquet(compression: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), sink, compression=compression)
    content: bytes = sink.getvalue().to_pybytes()
    return content


@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1 nothing", parquet("gzip")[:-20], parquet("gzip")[20:], parquet("gzip")[:4] + bytes(40)],
    ids=["empty", "text", "tail cut", "head cut", "zeros"],
)
def test_a_malformed_parquet_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.parquet").write_bytes(content)
    message = refusal("d.parquet", tmp_path)
    assert "no readable parquet file" in message and "write it again" in message


def test_a_parquet_file_whose_pages_are_damaged_is_refused(tmp_path: Path) -> None:
    content = bytearray(parquet("gzip"))
    content[4:40] = bytes(36)  # the footer is whole
    (tmp_path / "d.parquet").write_bytes(content)
    assert "no readable parquet file" in refusal("d.parquet", tmp_path)


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "d.parquet")
    assert "has no rows" in refusal("d.parquet", tmp_path)


def test_a_parquet_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    assert "'text'" in refusal("d.parquet", tmp_path)


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
    store = type("Store", (MemoryFileSystem,), {"protocol": "s3"})
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "s3", store)
    with fsspec.open("s3://bucket/d.jsonl", "wb") as file:
        file.write(b'{"text": "a"}\n')
    assert read_file("s3://bucket/d.jsonl", tmp_path).rows == ({"text": "a"},)
    assert "cannot be read (FileNotFoundError" in refusal("s3://bucket/other.jsonl", tmp_path)
