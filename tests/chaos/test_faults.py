"""Faults inside a process, put there by the seam, and a storage that is full."""

from pathlib import Path

from lorafleet_runtime.storage import is_whole, step_directories
from support.chaos import Scenario, gone

FULL = "No space left on device"


def test_aborting_batch(scenario: Scenario) -> None:
    """Invariant 7: it fails its own run after backoffLimit; the neighbours lose no step and no prompt group."""
    limit = 1
    scenario.start(first={"backoffLimit": limit, "numStep": 500})
    victim, *neighbours = scenario.uids
    uid = scenario.uids[victim]
    scenario.strike("trainer, by abort() in every batch of one run", lambda: scenario.chaos.ask("abort", uid))
    scenario.cluster.wait(victim, "Failed", 200)
    scenario.recover(but=[victim])
    scenario.finish(failed={victim: "TrainerCrashed"})
    assert {name: scenario.lost_groups(name) for name in neighbours} == dict.fromkeys(neighbours, 0)


def test_torn_batch(scenario: Scenario) -> None:
    """The trainer raises between two passes of a batch: it is replaced, and what it had summed up counts for nobody."""
    scenario.start()
    old = scenario.chaos.processes("ray::TrainerActor")
    scenario.strike("trainer, by an exception between two passes", lambda: scenario.chaos.ask("torn"))
    scenario.cluster.until("the torn trainer is gone", lambda: gone(old), 30.0)
    scenario.recover()
    scenario.finish()


def test_engine_dies_while_it_publishes(scenario: Scenario) -> None:
    scenario.start()
    old = scenario.chaos.processes("ray::EngineActor")
    old += [child for process in old for child in process.children(recursive=True)]
    scenario.strike("engine actor, between loading a version and saying so", lambda: scenario.chaos.ask("publish-kill"))
    scenario.cluster.until("the engine died", lambda: gone(old), 30.0)
    scenario.recover()
    scenario.finish()
    assert scenario.row.restarts == 0


def test_full_storage(scenario: Scenario) -> None:
    """A failed checkpoint in between harms nobody; the last one is tried again until saveTimeoutSeconds are over."""
    first = {"numStep": 8, "saveTimeoutSeconds": 5}
    scenario.start(first, checkpoint={"intervalSteps": 2}, saveTimeoutSeconds=200)
    storage = scenario.cluster.stack.storage
    impatient, *others = scenario.uids
    scenario.strike("storage (no space left)", lambda: fill(storage / "filler"))
    try:
        scenario.cluster.wait(impatient, "Failed", 100)
        assert FULL in scenario.cluster.condition(impatient, "Failed")["message"]
        scenario.cluster.until("a run waits and says why", lambda: any(tells(scenario, n) for n in others), 120.0)
    finally:
        (storage / "filler").unlink()
    scenario.recover(but=[impatient])
    scenario.finish(failed={impatient: "StorageError"})
    assert list(storage.rglob(".tmp-*")) == []
    for name, uid in scenario.uids.items():
        found = step_directories(storage / "default" / name / uid)
        assert all(is_whole(path) for _, path in found), found


def tells(scenario: Scenario, name: str) -> bool:
    """The run is not over, and its conditions speak of the full storage."""
    conditions = {c["type"]: c for c in scenario.objects()[name]["status"]["conditions"]}
    return conditions["Finished"]["status"] == "False" and any(FULL in c["message"] for c in conditions.values())


def fill(path: Path) -> None:
    """Write until the filesystem has no block left."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    continue
            except OSError as error:
                assert FULL in str(error)
