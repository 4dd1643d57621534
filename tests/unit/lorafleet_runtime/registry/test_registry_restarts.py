"""What a registry knows of runs that an earlier runtime had, and how targets and ends behave over edits."""

import pytest

from lorafleet_runtime.registry.admission import SpecProblem
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.types import Artifact, Cursor, EngineStatus, Loaded, PolicySums, StepResult
from support.runs import DATASET, activate, pool_spec, put, run_spec

ARTIFACT = Artifact("/storage/x/step_3", 3, "abc")


@pytest.fixture
def registry() -> Registry:
    registry = Registry(pool_spec(), boot_epoch=7)
    registry.observe_trainer({})
    registry.sync([])
    return registry


def test_a_run_that_trained_before_a_restart_goes_before_younger_ones_and_before_its_check_is_done() -> None:
    registry = Registry(pool_spec(slots=1), boot_epoch=2)
    registry.sync(["old", "young"])
    registry.put("old", run_spec(), namespace="team", name="old", generation=1, created=5.0, start_time=6.0)
    put(registry, "young", created=1.0)
    registry.checked("young", DATASET)
    assert registry.assign() == []  # the slot is kept
    registry.checked("old", DATASET)
    assert [r.uid for r in registry.assign()] == ["old"]


def test_a_restart_does_not_start_the_registration_deadline_anew() -> None:
    registry = Registry(pool_spec(), boot_epoch=2)
    registry.put("a", run_spec(), namespace="team", name="a", generation=1, created=5.0, start_time=6.0)
    assert registry.runs["a"].start_time == 6.0


def test_an_edit_beyond_the_pools_limits_is_refused_and_changes_nothing(registry: Registry) -> None:
    activate(registry, "a")
    with pytest.raises(SpecProblem) as caught:
        put(registry, "a", generation=2, mixedVersions=True)
    assert caught.value.field == "mixedVersions"
    assert registry.runs["a"].generation == 1


def test_numstep_may_grow_while_suspended(registry: Registry) -> None:
    activate(registry, "a")
    put(registry, "a", generation=2, suspend=True)
    registry.saved("a", None, now=9.0)
    registry.cleaned("a")
    put(registry, "a", generation=3, numStep=60)
    registry.checked("a", DATASET)
    assert registry.runs["a"].target_step == 60


def test_numepoch_may_grow(registry: Registry) -> None:
    put(registry, "a", numStep=None, numEpoch=1)
    registry.checked("a", DATASET)
    put(registry, "a", generation=2, numStep=None, numEpoch=3)
    assert registry.runs["a"].target_step == 15


def test_no_end_shows_before_its_last_checkpoint(registry: Registry) -> None:
    activate(registry, "a")
    put(registry, "a", generation=2, cancel=True)
    run = registry.runs["a"]
    assert run.visible_outcome is None
    registry.saved("a", ARTIFACT, now=9.0)
    assert (registry.runs["a"].visible_outcome, registry.runs["a"].artifact) == ("Cancelled", ARTIFACT)


def test_nothing_is_listed_until_trainer_and_engines_have_told() -> None:
    registry = Registry(pool_spec(), boot_epoch=1)
    assert not registry.listing().listed
    registry.observe_trainer({})
    assert not registry.listing().listed
    registry.observe_engine(EngineStatus("engine-0", True, (), 1.0))
    assert registry.listing().listed


def test_a_cancel_that_gave_way_to_a_completion_holds_when_the_completion_is_lost(registry: Registry) -> None:
    activate(registry, "a", step=2)
    registry.commit("a", 2, [], PolicySums())
    registry.stepped(StepResult("a", 3, 1e-3, 1.0), now=9.0)
    put(registry, "a", generation=2, cancel=True)
    registry.trainer_lost()
    registry.loaded(Loaded("a", 2, Cursor()), now=10.0)
    ending = registry.runs["a"].ending
    assert ending is not None
    assert ending.outcome == "Cancelled"


def test_a_target_never_shrinks(registry: Registry) -> None:
    activate(registry, "a")
    with pytest.raises(SpecProblem, match="numStep: 1: is below the run's target step 3 and may only grow"):
        put(registry, "a", generation=2, numStep=1)
    assert (registry.runs["a"].target_step, registry.runs["a"].generation) == (3, 1)
