"""A step that the storage refuses to record: the step counts, and its run says so."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorafleet_runtime.loop.journal import Journal, read_log
from lorafleet_runtime.types import Cursor, Loaded, LoadRequest, StepResult
from support.fake_actors import FakeTrainer
from support.fleets import World, build_world, ended, running
from support.runs import put


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A fleet of fakes whose log goes into its runs' files."""
    made = build_world(tmp_path)
    made.registry.sync([])
    handler = Journal(made.fleet.writer, made.fleet.locate)
    handler.install()
    yield made
    handler.remove()


async def test_a_run_that_records_says_so_to_the_trainer(world: World) -> None:
    asked: dict[str, Any] = {}

    def watch(trainer: FakeTrainer) -> None:
        load = trainer.load

        def seen(request: LoadRequest) -> Loaded:
            asked[request.uid] = request.spec.get("recordSteps")
            return load(request)

        trainer.load = seen  # type: ignore[method-assign]

    world.configure_trainer = watch
    async with running(world):
        put(world.registry, "a", numStep=1000, recordSteps=True)
        put(world.registry, "b", numStep=1000)
        await world.until(lambda: asked.keys() == {"a", "b"})
    assert asked["a"] is True and not asked["b"]


async def test_step_without_a_record_counts_and_is_told(world: World, tmp_path: Path) -> None:
    def refuse(trainer: FakeTrainer) -> None:
        step = trainer.step

        def unrecorded(uid: str, cursor: Cursor, incarnation: str) -> StepResult:
            return replace(step(uid, cursor, incarnation), unrecorded="recordSteps: disk full")

        trainer.step = unrecorded  # type: ignore[method-assign]

    world.configure_trainer = refuse
    async with running(world):
        put(world.registry, "a", numStep=1000, checkpoint={"intervalSteps": 900})
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        assert world.registry.runs["a"].message == "recordSteps: disk full"
        assert world.registry.runs["a"].state == "ACTIVE"
        world.registry.delete("a")
    assert world.fleet.writer.flush(5)
    entries, _ = read_log(tmp_path / "storage" / "team" / "run-a" / "a", None)
    assert ("ERROR", "recordSteps: disk full") in [(e["level"], e["message"]) for e in entries]


@pytest.mark.parametrize("spec", [{}, {"suspend": True}])
async def test_a_last_step_without_a_record_is_told_where_the_run_ends(
    world: World, tmp_path: Path, spec: dict[str, Any]
) -> None:
    def refuse(trainer: FakeTrainer) -> None:
        drop = trainer.drop

        def unrecorded(*arguments: Any) -> str:
            there = arguments[0] in trainer.loaded
            drop(*arguments)
            return "recordSteps: disk full" if there else ""

        trainer.drop = unrecorded  # type: ignore[method-assign, assignment]

    world.configure_trainer = refuse
    async with running(world):
        put(world.registry, "a", numStep=3 + 1000 * len(spec))
        await world.until(lambda: world.registry.runs["a"].step >= 3)
        put(world.registry, "a", generation=2, numStep=3 + 1000 * len(spec), **spec)
        await world.until(lambda: ended(world, "a"))
    view = world.registry.view("a")
    assert (view.state, view.outcome) == (("SUSPENDED", "Suspended") if spec else ("COMPLETED", "Complete"))
    assert view.message.endswith("; recordSteps: disk full")
    assert world.fleet.writer.flush(5)
    entries, _ = read_log(tmp_path / "storage" / "team" / "run-a" / "a", None)
    assert ("ERROR", "recordSteps: disk full") in [(e["level"], e["message"]) for e in entries]
