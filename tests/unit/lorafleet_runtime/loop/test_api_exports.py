"""Copies of API-owned runs' checkpoints to `save`; and what is known of runs that are over."""

import asyncio
import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest

from lorafleet_runtime.loop import api_runs
from lorafleet_runtime.loop.exports import export
from lorafleet_runtime.registry import api_owned
from lorafleet_runtime.storage import write_durably
from lorafleet_runtime.types import RunFault
from support.miles import Miles, ended, trained_to


def exported(root: Path) -> dict[str, bytes]:
    """Every file of the save directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


async def test_save_receives_a_servable_copy_and_replaces_an_older_one(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    (tmp_path / "out" / "step_1").mkdir(parents=True)
    (tmp_path / "out" / "step_1" / "adapter_model.safetensors").write_text("of an earlier run")
    await miles.post("a", save="out")
    run = miles.activate("a")
    miles.step(run)
    await miles.client.delete("/adapter_runs/a")
    miles.save(run)
    await miles.runs.flush()
    assert exported(tmp_path / "out") == {
        "step_1/adapter_config.json": b"{}",
        "step_1/adapter_model.safetensors": b"weights of step 1",
    }
    assert (await miles.client.get("/adapter_runs/a")).json()["exported_step"] == 1


async def test_a_copy_that_a_kill_prevented_is_made_after_the_restart(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    await miles.post("a", save="out")
    run = miles.activate("a")
    miles.step(run)
    await miles.client.delete("/adapter_runs/a")
    miles.save(run)
    later = miles.restarted()
    later.registry.runs[run.uid].artifact = run.artifact
    await later.runs.flush()
    assert "step_1/adapter_model.safetensors" in exported(tmp_path / "out")


async def test_save_never_writes_over_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    miles = Miles.at(tmp_path)
    await miles.post("a", save="out")
    (tmp_path / "out" / "step_1").mkdir(parents=True)
    (tmp_path / "out" / "step_1" / "state.json").write_text("progress")
    run = miles.activate("a")
    miles.step(run)
    await miles.client.delete("/adapter_runs/a")
    miles.save(run)
    await miles.runs.flush()
    assert exported(tmp_path / "out") == {"step_1/state.json": b"progress"}
    assert "not written over" in caplog.text
    miles.clear(run)
    refused = await miles.post("b", save="out")
    assert (refused.status_code, refused.json()["field"]) == (400, "save")


async def saving(miles: Miles, name: str) -> Any:
    """A run that has made a step and its last checkpoint, which is to be copied to out-{name}."""
    assert (await miles.post(name, save=f"out-{name}")).status_code == 200
    run = miles.activate(name)
    miles.step(run)
    await miles.client.delete(f"/adapter_runs/{name}")
    miles.save(run)
    return run


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_a_copy_that_fails_is_made_after_a_pause_whatever_happens_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    miles = Miles.at(tmp_path)
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    real, tries = export, [0]

    def copy(root: Path, artifact: Any, save: str) -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise OSError(code, "refused")
        real(root, artifact, save)

    monkeypatch.setattr(api_runs, "export", copy)
    await saving(miles, "a")
    for wanted in (1, 2, 3):
        for _ in range(5):  # events in between
            await miles.runs.flush()
        assert tries[0] == wanted
        clock[0] += api_runs.RETRY_SECONDS
    assert exported(tmp_path / "out-a")["step_1/adapter_model.safetensors"] == b"weights of step 1"
    assert miles.runs.record(miles.run("a")).exported_step == 1
    assert caplog.text.count("not copied to save") == 1


async def test_a_copy_is_tried_again_without_any_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    miles = Miles.at(tmp_path)
    monkeypatch.setattr(api_runs, "RETRY_SECONDS", 0.02)
    real, tries = export, [0]
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def copy(root: Path, artifact: Any, save: str) -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise OSError(errno.ENOSPC, "full")
        real(root, artifact, save)
        loop.call_soon_threadsafe(done.set)

    monkeypatch.setattr(api_runs, "export", copy)
    await saving(miles, "a")
    keeper = asyncio.create_task(miles.runs.keep())
    async with asyncio.timeout(30):
        await done.wait()
    keeper.cancel()
    assert tries[0] == 3


async def test_one_runs_failing_copy_holds_up_neither_records_nor_other_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miles = Miles.at(tmp_path)
    real = export
    order: list[str] = []

    def copy(root: Path, artifact: Any, save: str) -> None:
        ends = [json.loads(path.read_text())["end"] is not None for path in miles.files]
        order.append(f"{Path(save).name} with {sum(ends)} ends recorded")
        if save.endswith("out-a"):
            raise OSError(errno.ENOSPC, "full")
        real(root, artifact, save)

    monkeypatch.setattr(api_runs, "export", copy)
    await saving(miles, "a")
    await saving(miles, "b")
    await miles.runs.flush()
    assert order == ["out-a with 2 ends recorded", "out-b with 2 ends recorded"]
    assert "step_1/adapter_model.safetensors" in exported(tmp_path / "out-b")


async def test_one_record_that_storage_refuses_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miles = Miles.at(tmp_path)
    first, second = await trained_to(miles, "a", 1), await trained_to(miles, "b", 1)
    real = write_durably
    tries: list[str] = []

    def write(path: Path, document: dict[str, Any]) -> None:
        tries.append(path.stem)
        if path.stem == first.uid:
            raise OSError(errno.EIO, "a bad sector")
        real(path, document)

    monkeypatch.setattr(api_runs, "write_durably", write)
    for run in (first, second):
        miles.registry.fail(RunFault(run.uid, "RewardError", "why"))
    with pytest.raises(api_runs.Refused, match="bad sector"):
        await miles.runs.flush()
    assert tries == [first.uid, second.uid]
    assert miles.runs.record(second).end is not None


async def test_a_full_disk_is_asked_once_a_pause_however_many_events_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miles = Miles.at(tmp_path)
    run = await trained_to(miles, "a", 1)
    tries: list[Path] = []
    paused = asyncio.Event()

    def write(path: Path, document: dict[str, Any]) -> None:
        tries.append(path)
        raise OSError(errno.ENOSPC, "full")

    async def pause(seconds: float) -> None:
        assert seconds == api_runs.RETRY_SECONDS
        paused.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(api_runs, "write_durably", write)
    monkeypatch.setattr(asyncio, "sleep", pause)
    miles.registry.fail(RunFault(run.uid, "RewardError", "why"))
    keeper = asyncio.create_task(miles.runs.keep())
    async with asyncio.timeout(30):
        await paused.wait()
    monkeypatch.undo()
    for _ in range(100):
        miles.registry.sync([])  # an event
        await asyncio.sleep(0)
    keeper.cancel()
    assert len(tries) == 1


async def test_a_copy_of_the_base_adapter_is_made_once(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    await miles.post("a", save="out")
    run = miles.activate("a")
    await miles.client.delete("/adapter_runs/a")
    miles.save(run)
    async with asyncio.timeout(30):
        await miles.runs.flush()
    assert miles.runs.record(run).exported_step == 0


async def test_ended_runs_cost_no_look_once_they_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    miles = Miles.at(tmp_path)
    for name in "abcd":
        await ended(miles, name)
    live = await trained_to(miles, "e", 1)
    later = miles.restarted()
    await later.runs.flush()
    looked: list[str] = []
    real = api_owned.observe

    def observe(record: Any, run: Any) -> Any:
        looked.append(run.uid)
        return real(record, run)

    monkeypatch.setattr(api_runs, "observe", observe)
    await later.runs.flush()
    assert set(looked) == {live.uid}
    later.registry.retire(live.uid, "Cancelled", "Cancelled", "over", save=False)
    await later.runs.flush()
    assert later.runs.record(later.run("e")).end is not None
    looked.clear()
    await later.runs.flush()
    assert looked == []


async def test_old_records_are_forgotten_beyond_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_runs, "KEPT_ENDED", 2)
    miles = Miles.at(tmp_path)
    for name in "abc":
        await miles.post(name)
        await miles.client.delete(f"/adapter_runs/{name}")
    await miles.runs.flush()
    assert [r.name for r in miles.runs.runs()] == ["b", "c"]
    assert len(miles.files) == 2
