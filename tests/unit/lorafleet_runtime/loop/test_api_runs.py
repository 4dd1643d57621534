"""API-owned runs over restarts, full disks and damaged records."""

import asyncio
import logging
from pathlib import Path

import pytest

from lorafleet_runtime.loop.api_runs import ApiRuns
from lorafleet_runtime.loop.operator_epoch import keep_operator_epoch, last_operator_epoch
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry, StaleOperator
from lorafleet_runtime.types import DatasetInfo, RunFault
from support.fleets import build_world, running
from support.miles import Miles, miles_config, trained_to
from support.runs import DATASET, pool_spec, put

# --- boot --------------------------------------------------------------------------------------------------------


async def test_a_live_run_comes_back_as_it_was(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    run = await trained_to(miles, "a", 1)
    again = miles.restarted().run("a")
    assert (again.uid, again.owner, again.namespace, again.spec) == (run.uid, "api", "api", run.spec)
    assert (again.created, again.start_time, again.target_step, again.state) == (run.created, 100.0, 3, "QUEUED")


async def test_a_run_that_was_just_answered_survives_a_kill(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    uid = (await miles.post("a", save="out")).json()["registration_id"]
    later = miles.restarted()
    assert later.run("a").uid == uid
    assert later.runs.record(later.run("a")).save == str(tmp_path / "out")


async def test_an_ended_run_comes_back_as_a_record_and_never_trains(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    run = await trained_to(miles, "a", 3)
    artifact = miles.save(run)  # killed before trainer and engines were cleared
    await miles.runs.flush()
    later = miles.restarted()
    again = later.run("a")
    assert (again.state, again.visible_outcome, again.step, again.artifact) == ("COMPLETED", "Complete", 3, artifact)
    assert (again.start_time, again.completion_time) == (100.0, 200.0)
    assert later.registry.assign() == []
    assert not later.registry.holds_slot(run.uid)


async def test_a_failed_run_keeps_its_reason(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    run = await trained_to(miles, "a", 1)
    miles.registry.fail(RunFault(run.uid, "RewardError", "customRmPath: raised; fix it"))
    await miles.runs.flush()
    again = miles.restarted().run("a")
    assert (again.state, again.reason, again.message) == ("FAILED", "RewardError", "customRmPath: raised; fix it")


async def test_a_kill_between_delete_and_cleanup_does_not_bring_the_run_back(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    await trained_to(miles, "a", 1)
    assert (await miles.client.delete("/adapter_runs/a")).status_code == 200  # killed right after the answer
    later = miles.restarted()
    again = later.run("a")
    assert (again.state, again.visible_outcome) == ("COMPLETED", "Cancelled")
    assert again.artifact is None
    later.registry.sync([])
    assert later.registry.assign() == []


async def test_a_target_does_not_move_when_the_data_shrinks(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    assert (await miles.post("a", num_step=None)).status_code == 200
    assert miles.activate("a").target_step == 5  # 10 rows, 2 a step
    await miles.runs.flush()
    later = miles.restarted()
    later.registry.checked(later.run("a").uid, DatasetInfo(rows=4, skipped=0, digest="d"))
    assert later.run("a").target_step == 5


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 2}',
        '{"format": 1, "uid": "../x", "name": "x", "spec": {}, "created": 1}',
        '{"format": 1, "uid": "other", "name": "x", "spec": {}, "created": 1}',
        '{"format": 1, "uid": "odd", "name": "x", "spec": {"colour": "red"}, "created": 1}',
        "\x00\x00",
    ],
)
async def test_a_damaged_or_foreign_record_is_named_and_skipped(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    miles = Miles.at(tmp_path)
    await miles.post("a")
    odd = miles.files[0].with_name("odd.json")
    odd.write_text(content)
    with caplog.at_level(logging.ERROR):
        later = miles.restarted()
    assert [r.name for r in later.runs.runs()] == ["a"]
    assert str(odd) in caplog.text
    assert odd.read_text() == content


async def test_a_temporary_file_of_a_killed_write_is_no_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    miles = Miles.at(tmp_path)
    await miles.post("a")
    path = miles.files[0]
    path.rename(path.with_name(f".tmp-{path.name}"))
    assert miles.restarted().runs.runs() == []
    assert caplog.text == ""


# --- the operator's slots ----------------------------------------------------------------------------------------


async def test_a_restored_run_takes_its_slot_before_the_operator_speaks_and_leaves_the_others(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path)
    miles.registry.sync([])
    put(miles.registry, "op")
    miles.registry.checked("op", DATASET)
    miles.registry.assign()
    await trained_to(miles, "a", 1)
    later = miles.restarted(operator_epoch=3)
    assert later.activate("a").state == "ACTIVE"
    later.registry.put(
        "op", miles.registry.runs["op"].spec.to_wire(), namespace="team", name="op", generation=1, created=0.0,
        start_time=50.0,
    )  # fmt: skip
    later.registry.sync(["op"])
    later.registry.checked("op", DATASET)
    assert [r.uid for r in later.registry.assign()] == ["op"]


async def test_a_post_waits_for_an_operator_that_has_runs_to_tell(tmp_path: Path) -> None:
    miles = Miles.at(tmp_path, operator_epoch=3)
    answer = await miles.post("a")
    assert (answer.status_code, answer.json()["field"]) == (503, "slots")
    assert miles.files == []
    miles.registry.sync([])
    assert (await miles.post("a")).status_code == 200


async def test_an_older_operator_is_refused_after_a_restart_of_the_runtime(tmp_path: Path) -> None:
    signal = Signal()
    registry = Registry(pool_spec(), 1, signal.set)
    keeper = asyncio.create_task(keep_operator_epoch(registry, signal, tmp_path))
    await asyncio.sleep(0)
    registry.fence(7)
    registry.sync([])
    async with asyncio.timeout(30):
        while last_operator_epoch(tmp_path) != 7:
            await asyncio.sleep(0)
    keeper.cancel()
    later = Registry(pool_spec(), 2)
    later.fence(last_operator_epoch(tmp_path))
    with pytest.raises(StaleOperator):
        later.fence(6)


def test_a_damaged_epoch_is_named_and_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "operator.json").write_text("{}")
    assert last_operator_epoch(tmp_path) == 0
    assert str(tmp_path / "operator.json") in caplog.text


# --- on the loop -------------------------------------------------------------------------------------------------


async def test_a_run_goes_on_from_its_checkpoint_and_trains_no_step_twice(tmp_path: Path) -> None:
    root = tmp_path / "storage"
    root.mkdir()
    (root / "train.jsonl").write_text("{}\n")
    world = build_world(tmp_path)
    runs = ApiRuns(world.registry, world.fleet.signal, root / "records", root)
    async with running(world):
        uid = (await runs.post("a", miles_config(num_step=6, checkpoint={"interval_steps": 2}))).uid
        await world.until(lambda: uid in world.disk)
    await runs.flush()
    done = world.disk[uid][0]
    assert 2 <= done < 6

    later = build_world(tmp_path)
    later.disk.update(world.disk)
    again = ApiRuns(later.registry, later.fleet.signal, root / "records", root)
    again.restore()
    async with running(later):  # no operator ever speaks
        await later.until(lambda: later.registry.runs[uid].state == "COMPLETED")
    await again.flush()
    assert [step for _, _, step in later.trained()] == [s for s in range(done + 1, 7) for _ in range(2)]
    assert later.registry.runs[uid].step == 6

    last = Registry(pool_spec(), 3)
    ApiRuns(last, Signal(), root / "records", root).restore()
    assert (last.runs[uid].state, last.runs[uid].step) == ("COMPLETED", 6)
