"""What a run leaves for people: its log and its steps' samples; written aside, bounded, and never a run's trouble."""

import gc
import json
import logging
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.loop import journal, samples
from lorafleet_runtime.loop.journal import Journal, about, append, read_log
from lorafleet_runtime.loop.samples import KEPT_STEPS, cut_samples, read_samples, recorded_steps, write_samples
from lorafleet_runtime.loop.writer import BackgroundWriter
from lorafleet_runtime.types import PromptGroup, Sample, VersionId
from support.fleets import World, build_world, ended, running
from support.runs import group, put


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A fleet of fakes whose log goes into its runs' files."""
    world = build_world(tmp_path)
    world.registry.sync([])
    handler = Journal(world.fleet.writer, world.fleet.locate)
    handler.install()
    yield world
    handler.remove()


def messages(directory: Path) -> list[str]:
    return [entry["message"] for entry in read_log(directory, None)[0]]


async def test_a_completed_runs_samples_and_log_are_on_storage(world: World, tmp_path: Path) -> None:
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: ended(world, "a"))
    assert world.fleet.writer.flush(5)
    directory = tmp_path / "storage" / "team" / "run-a" / "a"
    assert recorded_steps(directory) == [1, 2, 3]
    found = read_samples(directory, 2)
    assert found is not None
    assert (found["step"], found["groups"], found["samples"]) == (2, 2, 4)
    assert [(g["index"], g["version"]) for g in found["prompts"]] == [(2, 2), (3, 2)]
    assert found["prompts"][0]["samples"][1] == {
        "text": "b", "reward": 1.0, "advantage": 0.5, "truncated": False, "tokens": 2,
    }  # fmt: skip
    steps = [entry for entry in read_log(directory, None)[0] if "step" in entry]
    assert [(e["step"], e["reward"], e["lr"], e["gradNorm"], e["tokens"]) for e in steps] == [
        (n, 0.5, 1e-3, 0.5, 8) for n in (1, 2, 3)
    ]
    shares = ("mismatch", "entropy", "klSampler", "klSamplerK1", "klBase", "clipFraction", "tisFraction")
    for entry in steps:  # the four tokens of support.fake_actors.POLICY
        assert [entry[name] for name in shares] == pytest.approx([0.025, 1.5, 0.1, -0.05, 0.2, 0.25, 0.75])
    text = "\n".join(messages(directory))
    wanted = [
        "usable: 10 prompts", "loaded afresh into slot 0 of boot epoch 1", "version 1 is on every engine",
        "step 1 of 3", "checkpoint of step 3 written", "Complete: all 3 steps done; its slot is free",
    ]  # fmt: skip
    assert all(part in text for part in wanted), text


async def test_a_fault_is_logged_once_with_its_traceback_and_for_its_run_only(world: World, tmp_path: Path) -> None:
    def on_group(uid: str, index: int) -> None:
        if uid == "bad":
            raise RunError(reasons.REWARD_ERROR, "it raised", "Traceback: ValueError")

    async with running(world):
        world.worker.on_group = on_group
        put(world.registry, "bad")
        put(world.registry, "good")
        await world.until(lambda: ended(world, "bad") and ended(world, "good"))
    assert world.fleet.writer.flush(5)
    entries, _ = read_log(tmp_path / "storage" / "team" / "run-bad" / "bad", None)
    failed = [e for e in entries if e["message"].startswith("failed: RewardError: it raised")]
    assert [(e["level"], e["detail"]) for e in failed] == [("WARNING", "Traceback: ValueError")]
    assert not any("failed" in m for m in messages(tmp_path / "storage" / "team" / "run-good" / "good"))


async def test_the_slot_is_called_free_once_and_only_when_nobody_holds_the_run(world: World, tmp_path: Path) -> None:
    directory = tmp_path / "storage" / "team" / "run-a" / "a"
    async with running(world):
        put(world.registry, "a", numStep=1000)
        await world.until(lambda: world.registry.runs["a"].step >= 1)
        world.engines[0].target.lie = True
        world.registry.delete("a")
        await world.until(lambda: world.registry.runs["a"].state == "CLEANUP")
        await world.until(lambda: not world.registry.presence("a").trainer)
        await world.fleet.signal.wait(0.7)  # it is tried again meanwhile
        assert world.fleet.writer.flush(5)
        assert not any("its slot is free" in m for m in messages(directory))
        world.engines[0].target.lie = False
        await world.until(lambda: "a" not in world.registry.runs)
    assert world.fleet.writer.flush(5)
    told = [m for m in messages(directory) if "slot is free" in m]
    assert told == ["Deleted: the object is deleted; its slot is free"]
    assert len([m for m in messages(directory) if "still listed" in m]) == 1


async def test_a_full_disk_costs_no_run_anything_and_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "append", full)
    monkeypatch.setattr("lorafleet_runtime.loop.stepping.write_samples", full)
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: ended(world, "a"))
    assert world.registry.runs["a"].state == "COMPLETED"
    world.fleet.writer.flush(5)
    told = [r for r in caplog.records if "are not written" in r.getMessage()]
    assert len(told) == 1
    assert "No space left on device" in told[0].getMessage()


def test_a_disk_that_hangs_does_not_hold_up_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    writer, release, started = BackgroundWriter(), threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        release.wait(10)

    writer.submit(hang)
    assert started.wait(30)
    for _ in range(2000):
        writer.submit(lambda: None)
    assert not writer.flush(0.0)
    assert len([r for r in caplog.records if "the disk is too slow" in r.getMessage()]) == 1
    release.set()


def test_steps_that_wait_for_a_disk_that_hangs_keep_little_and_log_lines_still_fit() -> None:
    writer, release, started = BackgroundWriter(), threading.Event(), threading.Event()
    big: list[weakref.ref[Any]] = []
    written: list[str] = []

    def hang() -> None:
        started.set()
        release.wait(10)

    writer.submit(hang)
    assert started.wait(30)
    for _ in range(200):
        text = threading.Event()  # stands for a step's text, and can be referred to weakly
        big.append(weakref.ref(text))
        writer.submit(lambda text=text: written.append(repr(text)), bulky=True)  # type: ignore[misc]
        del text
    gc.collect()
    assert sum(ref() is not None for ref in big) == 64
    writer.submit(lambda: written.append("line"))
    release.set()
    assert writer.flush(5)
    assert (len(written), written[-1]) == (65, "line")
    for _ in range(64):  # their places are free again
        writer.submit(lambda: written.append("more"), bulky=True)
    assert writer.flush(5)
    assert len(written) == 129


def test_what_is_cut_of_a_step_holds_no_group_and_no_sample() -> None:
    groups = [group("a", n) for n in range(3)]
    text = "x" * (2 * samples.MOST_CHARACTERS)
    groups[0] = replace(groups[0], prompt=text)
    lines = cut_samples(1, groups)
    json.dumps(lines)  # plain values only: nothing that leads to tokens or log-probabilities
    assert lines[1]["prompt"] == text[: samples.MOST_CHARACTERS]
    keys = {key for line in lines[1:] for sample in line["samples"] for key in sample}
    assert keys == {"text", "reward", "advantage", "truncated", "tokens"}


async def test_a_step_that_waits_to_be_written_does_not_keep_its_groups(world: World) -> None:
    release, started = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        release.wait(30)

    world.fleet.writer.submit(hang)
    assert started.wait(30)
    async with running(world):
        put(world.registry, "a")
        await world.until(lambda: ended(world, "a"))
        jobs = list(world.fleet.writer._jobs.queue)
    kept, seen, waiting = [], set(), [*jobs]
    while waiting:  # everything that a job leads to
        item = waiting.pop()
        if id(item) not in seen and isinstance(item, (PromptGroup, list, dict, tuple, FunctionType, CellType)):
            seen.add(id(item))
            kept += [item] if isinstance(item, PromptGroup) else []
            waiting += gc.get_referents(item) if not isinstance(item, FunctionType) else item.__closure__ or ()
    release.set()
    assert jobs
    assert kept == []


def test_a_log_is_rotated_and_a_reader_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "ROTATE_BYTES", 400)
    seen: list[int] = []
    cursor: str | None = None
    for number in range(40):
        append(tmp_path, json.dumps({"message": "x" * 20, "n": number}))
        if number % 3 == 0:
            entries, cursor = read_log(tmp_path, cursor)
            seen += [entry["n"] for entry in entries]
    seen += [entry["n"] for entry in read_log(tmp_path, cursor)[0]]
    assert seen == list(range(40))
    kept = [entry["n"] for entry in read_log(tmp_path, None)[0]]
    assert kept == list(range(kept[0], 40))
    assert 10 < len(kept) < 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.1.jsonl", "log.jsonl"]


def test_a_line_that_a_crash_cut_spoils_no_other(tmp_path: Path) -> None:
    append(tmp_path, json.dumps({"message": "one"}))
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"message": "tw')
    assert messages(tmp_path) == ["one"]
    append(tmp_path, json.dumps({"message": "three"}))
    assert messages(tmp_path) == ["one", "three"]


def test_records_of_no_run_and_of_unknown_runs_stay_out(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    handler = Journal(writer, lambda uid: tmp_path if uid == "a" else None)
    handler.install()
    log = logging.getLogger("lorafleet_runtime.test")
    try:
        log.info("of nobody")
        log.info("run b: unknown", extra=about("b"))
        log.info("run a: known \ud800", extra=about("a", lr=None, gradNorm=float("nan")))
    finally:
        handler.remove()
    assert writer.flush(5)
    entries, _ = read_log(tmp_path, None)
    assert [{k: v for k, v in e.items() if k != "time"} for e in entries] == [
        {"level": "INFO", "message": "known ?", "gradNorm": "nan"}
    ]


def test_only_the_newest_steps_stay(tmp_path: Path) -> None:
    for step in range(1, KEPT_STEPS + 3):
        write_samples(tmp_path, cut_samples(step, [group("a", step)]))
    assert recorded_steps(tmp_path) == list(range(3, KEPT_STEPS + 3))
    assert read_samples(tmp_path, 1) is None
    newest = read_samples(tmp_path, None)
    assert newest is not None
    assert newest["step"] == KEPT_STEPS + 2


def test_a_big_step_keeps_its_first_samples_and_its_true_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MOST_SAMPLES", 5)
    monkeypatch.setattr(samples, "MOST_CHARACTERS", 3)
    one = Sample((5,), (-0.5,), 0.0, 0.0, False)
    version = VersionId("a", "1.1", 1)
    groups = [PromptGroup("a", version, n, (1,), (one, one), ("a long text", ""), "a prompt") for n in range(4)]
    write_samples(tmp_path, cut_samples(1, groups))
    found = read_samples(tmp_path, 1)
    assert found is not None
    assert (found["groups"], found["samples"]) == (4, 8)
    assert [g["index"] for g in found["prompts"]] == [0, 1]
    assert found["prompts"][0]["prompt"] == "a p"
    assert [s["text"] for s in found["prompts"][0]["samples"]] == ["a l", ""]
