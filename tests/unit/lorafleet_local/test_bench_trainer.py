"""The trainer benchmark compares equal work, counts tokens alike for both sides, and writes the shared schema."""

import json
from pathlib import Path

import pytest

from lorafleet_local import bench_trainer
from lorafleet_local.bench_peft import _batches
from lorafleet_local.bench_work import count_tokens, drawn_group, plain
from lorafleet_local.measure import update_file


def test_rows_have_mean_range_and_count_and_the_file_says_where_and_when(tmp_path: Path) -> None:
    bench = bench_trainer.Bench(tmp_path)
    bench.add("x_seconds", [1.0, 3.0], "s")
    bench.add("y_bytes", 7, "bytes")
    assert bench.rows[0] == {"name": "trainer.x_seconds", "value": 2.0, "unit": "s", "n": 2, "min": 1.0, "max": 3.0}
    update_file(tmp_path / "trainer.json", "make bench-trainer", lambda name: True, bench.rows)
    update_file(tmp_path / "trainer.json", "make bench-trainer", lambda name: True, bench.rows)
    document = json.loads((tmp_path / "trainer.json").read_text())
    assert document.keys() == {"hardware", "commit", "command", "date", "results"}
    assert document["results"] == bench.rows and document["command"] == "make bench-trainer"


def test_work_that_is_not_the_same_is_no_comparison() -> None:
    bench_trainer._check_same("a", [1.0, 2.0], [1.0005, 2.0])
    with pytest.raises(bench_trainer.BenchError, match="b: gradient norms"):
        bench_trainer._check_same("b", [1.0, 2.0], [1.0, 2.1])


def test_a_shared_prompt_is_one_prompts_work_on_both_sides() -> None:
    group = drawn_group("a", 10, (3, 4), 0)
    assert drawn_group("a", 10, (3, 4), 0) == group != drawn_group("a", 10, (3, 4), 1)
    assert count_tokens([group]) == 17
    assert [(g.prompt_ids, g.samples) for g in plain([group])] == [(group.prompt_ids, (s,)) for s in group.samples]


def test_padded_batches_hold_every_sample_once_within_the_budget() -> None:
    groups = [drawn_group("a", n, (3, 9), n) for n in (4, 20, 30)]
    pairs = [(group, sample) for group in groups for sample in group.samples]
    batches = list(_batches(pairs, 60))
    assert [pair for batch in batches for pair in batch] == pairs
    for batch in batches:
        width = max(len(g.prompt_ids) for g, _ in batch) + max(len(s.token_ids) for _, s in batch)
        assert len(batch) == 1 or width * len(batch) <= 60
