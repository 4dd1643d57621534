"""API-owned runs on storage that refuses: records and their removal."""

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorafleet_runtime.loop import api_runs
from lorafleet_runtime.loop.api_files import remove_durably
from lorafleet_runtime.storage import write_durably
from lorafleet_runtime.types import RunFault
from support.miles import Miles, ended, trained_to
from support.runs import put


def refuse(code: int) -> Callable[[Path, dict[str, Any]], None]:
    """A write_durably on storage that takes nothing."""

    def write(path: Path, document: dict[str, Any]) -> None:
        raise OSError(code, "refused")

    return write


def refuse_removal(path: Path) -> None:
    """A remove_durably on storage that removes nothing."""
    raise OSError(errno.EIO, "refused")


@pytest.mark.parametrize(("code", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EROFS, 503)])
async def test_storage_that_takes_no_record_registers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: int
) -> None:
    miles = Miles.at(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(api_runs, "write_durably", refuse(code))
        answer = await miles.post("a")
    assert (answer.status_code, answer.json()["field"]) == (status, "storage")
    assert miles.registry.runs == {}
    assert (await miles.post("a")).status_code == 200


async def test_a_delete_that_is_not_durable_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    miles = Miles.at(tmp_path)
    run = await trained_to(miles, "a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(api_runs, "write_durably", refuse(errno.ENOSPC))
        assert (await miles.client.delete("/adapter_runs/a")).status_code == 507
    assert run.state == "ACTIVE"
    assert (await miles.client.delete("/adapter_runs/a")).status_code == 200
    assert run.state == "RETIRING"


async def test_an_end_that_could_not_be_recorded_is_recorded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miles = Miles.at(tmp_path)
    run = await trained_to(miles, "a", 1)
    monkeypatch.setattr(api_runs, "RETRY_SECONDS", 0.01)
    real = write_durably
    tries: list[Path] = []

    def write(path: Path, document: dict[str, Any]) -> None:
        tries.append(path)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "full")
        real(path, document)

    monkeypatch.setattr(api_runs, "write_durably", write)
    [path] = miles.files
    keeper = asyncio.create_task(miles.runs.keep())
    miles.registry.fail(RunFault(run.uid, "RewardError", "why"))
    async with asyncio.timeout(30):
        while json.loads(path.read_text()).get("end") is None:
            await asyncio.sleep(0.005)
    keeper.cancel()
    assert len(tries) == 3


async def test_a_slot_taken_while_the_record_was_written_is_409_and_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miles = Miles.at(tmp_path)
    miles.registry.sync([])
    real = write_durably

    def write(path: Path, document: dict[str, Any]) -> None:
        real(path, document)
        for uid in ("u1", "u2"):
            put(miles.registry, uid)

    monkeypatch.setattr(api_runs, "write_durably", write)
    assert (await miles.post("a")).status_code == 409
    assert (miles.files, miles.runs.runs()) == ([], [])


async def test_an_old_record_that_cannot_be_removed_does_not_take_the_answer_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    miles = Miles.at(tmp_path)
    old = await ended(miles, "a")
    with monkeypatch.context() as patch:
        patch.setattr(api_runs, "remove_durably", refuse_removal)
        answer = await miles.post("a")
        assert answer.status_code == 200
        assert miles.run("a").uid == answer.json()["registration_id"] != old.uid
        assert f"{old.uid}.json should be gone" in caplog.text
        with pytest.raises(OSError, match="refused"):
            await miles.runs.flush()
    assert len(miles.files) == 2
    await miles.runs.flush()
    assert [path.stem for path in miles.files] == [miles.run("a").uid]


async def test_a_refused_post_whose_record_cannot_be_removed_at_once_leaves_no_ghost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miles = Miles.at(tmp_path)
    real = write_durably

    def write(path: Path, document: dict[str, Any]) -> None:
        real(path, document)
        raise OSError(errno.EIO, "after the rename")

    with monkeypatch.context() as patch:
        patch.setattr(api_runs, "write_durably", write)
        patch.setattr(api_runs, "remove_durably", refuse_removal)
        assert (await miles.post("a")).status_code == 503
    assert (len(miles.files), miles.registry.runs) == (1, {})
    await miles.runs.flush()
    assert miles.files == []


async def test_slots_are_looked_at_after_every_await_before_a_run_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miles = Miles.at(tmp_path)
    miles.registry.sync([])
    await ended(miles, "a")
    real = remove_durably

    def remove(path: Path) -> None:
        for uid in ("u1", "u2"):  # the operator takes what is free while the old record goes away
            put(miles.registry, uid)
        real(path)

    monkeypatch.setattr(api_runs, "remove_durably", remove)
    assert (await miles.post("a")).status_code == 200
    slots = [r.uid for r in miles.registry.runs.values()]
    assert slots == [miles.run("a").uid, "u1", "u2"]  # the answered run came first


async def test_posts_at_once_share_the_slots(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    answers = await asyncio.gather(*(miles.post(f"r{i}") for i in range(6)), miles.post("r0"))
    assert sorted(a.status_code for a in answers) == [200, 200, 400, 409, 409, 409, 409]
    assert len(miles.files) == 2
