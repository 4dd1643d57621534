"""The registry's state machine, one behaviour a test."""

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.registry.admission import SpecProblem
from lorafleet_runtime.registry.registry import Registry, StaleOperator
from lorafleet_runtime.types import Artifact, Cursor, EngineStatus, Loaded, PolicySums, RunFault, StepResult
from support.runs import DATASET, activate, pool_spec, put, run_spec

ARTIFACT = Artifact("/storage/x/step_3", 3, "abc")


@pytest.fixture
def registry() -> Registry:
    registry = Registry(pool_spec(), boot_epoch=7)
    registry.observe_trainer({})
    registry.sync([])
    return registry


def one_step(registry: Registry, uid: str, now: float = 110.0) -> bool:
    run = registry.runs[uid]
    assert not registry.commit(uid, 1, [0.0], PolicySums(tokens=10, mismatch=0.1))
    assert registry.commit(uid, 1, [1.0], PolicySums(tokens=10, mismatch=0.3))
    return registry.stepped(StepResult(uid, run.step + 1, 1e-3, 0.5), now)


def test_a_run_goes_from_queued_to_active(registry: Registry) -> None:
    put(registry, "a")
    assert registry.runs["a"].state == "QUEUED"
    assert registry.assign() == []  # data is not checked yet
    registry.checked("a", DATASET)
    assert [r.uid for r in registry.assign()] == ["a"]
    run = registry.runs["a"]
    assert (run.state, run.slot, run.incarnation, run.registered) == ("PENDING", 0, "7.1", False)
    registry.loaded(Loaded("a", 0, Cursor()), now=1.0)
    assert not run.registered
    registry.published("a", 1, now=5.0)
    assert (run.state, run.registered, run.weight_version, run.start_time) == ("ACTIVE", True, 1, 5.0)


def test_no_slot_is_given_before_the_operator_has_spoken() -> None:
    registry = Registry(pool_spec(), boot_epoch=1)
    put(registry, "a")
    registry.checked("a", DATASET)
    assert registry.assign() == []
    registry.sync(["a"])
    assert [r.uid for r in registry.assign()] == ["a"]


def test_sync_retires_runs_that_the_operator_does_not_name(registry: Registry) -> None:
    activate(registry, "a")
    activate(registry, "b")
    registry.sync(["b"])
    assert registry.runs["a"].state == "RETIRING"
    assert registry.runs["a"].deleted
    assert registry.runs["b"].state == "ACTIVE"


def test_a_sync_of_some_namespaces_leaves_the_runs_of_others_alone(registry: Registry) -> None:
    activate(registry, "a")
    registry.put("b", run_spec(), namespace="lab", name="b", generation=1, created=0.0)
    registry.sync([], ["lab"])
    assert (registry.runs["a"].state, "b" in registry.runs, registry.expects_others) == ("ACTIVE", False, True)
    registry.sync([], ["team", "lab"])
    assert registry.runs["a"].deleted


def test_waiting_runs_have_a_position_and_take_the_next_free_slot_by_age(registry: Registry) -> None:
    for number, uid in enumerate("abcd"):
        put(registry, uid, created=float(number))
        registry.checked(uid, DATASET)
    registry.assign()
    c, d = registry.runs["c"], registry.runs["d"]
    assert (c.queue_position, d.queue_position) == (1, 2)
    assert c.reason == reasons.SLOTS_EXHAUSTED
    assert "position 1" in c.message
    registry.loaded(Loaded("a", 0, Cursor()), now=1.0)
    registry.fail(RunFault("a", reasons.DATA_ERROR, "x"))
    registry.saved("a", None, now=9.0)
    assert registry.cleaned("a")
    assert [r.uid for r in registry.assign()] == ["c"]
    assert registry.runs["c"].slot == 0


def test_runs_of_the_same_second_queue_in_the_order_in_which_they_came(registry: Registry) -> None:
    """creationTimestamp has whole seconds; uids are random."""
    for uid in ("z", "m", "a", "k"):
        put(registry, uid, created=5.0)
        registry.checked(uid, DATASET)
    assert [run.uid for run in registry.assign()] == ["z", "m"]
    assert [(uid, registry.view(uid).queue_position) for uid in ("a", "k")] == [("a", 1), ("k", 2)]


def test_places_in_the_queue_never_tie(registry: Registry) -> None:
    for number in range(7):
        put(registry, f"r{number}", created=float(number % 3))
        registry.checked(f"r{number}", DATASET)
        registry.assign()
        places = [v.queue_position for v in registry.listing().adapters if v.state == "QUEUED"]
        assert sorted(places) == list(range(1, len(places) + 1))  # type: ignore[type-var]


def test_settings_that_do_nothing_are_told_while_the_run_trains(registry: Registry) -> None:
    put(registry, "a", optimizer={"minLr": 1e-6}, algorithm={"dualClip": 3})
    registry.checked("a", DATASET)
    registry.assign()
    registry.loaded(Loaded("a", 0, Cursor()), now=1.0)
    registry.published("a", 1, now=2.0)
    assert registry.view("a").message == (
        "training in slot 0; optimizer.minLr 1e-06 has no effect: schedule is constant; algorithm.dualClip 3.0 has no"
        " effect: tisMode is Clip"
    )


def test_bad_runs_free_the_only_slot_for_the_next_one() -> None:
    """Case 11 (kubernetes-sigs/kueue#13413): rank above the limit, and a failure after the slot was taken."""
    registry = Registry(pool_spec(slots=1), boot_epoch=1)
    registry.observe_trainer({})
    registry.sync([])
    put(registry, "rank", rank=64)
    assert (registry.runs["rank"].state, registry.runs["rank"].reason) == ("FAILED", reasons.RANK_TOO_LARGE)
    activate(registry, "odd")
    registry.fail(RunFault("odd", reasons.REWARD_ERROR, "it raised"))
    put(registry, "next")
    registry.checked("next", DATASET)
    assert registry.assign() == []
    registry.saved("odd", None, 1.0)
    assert registry.cleaned("odd")
    assert [run.uid for run in registry.assign()] == ["next"]


def test_priority_goes_before_age(registry: Registry) -> None:
    registry.pool = pool_spec(slots=1)
    put(registry, "old", created=0.0)
    put(registry, "urgent", created=1.0, scheduling={"priority": 5})
    for uid in ("old", "urgent"):
        registry.checked(uid, DATASET)
    assert [r.uid for r in registry.assign()] == ["urgent"]


def test_steps_and_groups_move_only_by_commit(registry: Registry) -> None:
    activate(registry, "a")
    run = registry.runs["a"]
    one_step(registry, "a", now=110.0)
    assert (run.step, run.accumulated_groups, run.trainer_version, run.weight_version) == (1, 0, 2, 1)
    assert run.progress.reward_mean == 0.5
    assert run.progress.policy is not None and run.progress.policy.mismatch == pytest.approx(0.02)
    assert run.progress.seconds_per_step == 10.0


def test_a_batch_never_overshoots(registry: Registry) -> None:
    activate(registry, "a")
    with pytest.raises(ValueError, match="overshoot"):
        registry.commit("a", 3, [], PolicySums())


def test_complete_shows_only_after_the_final_checkpoint_and_deregisters_after_both_listings(registry: Registry) -> None:
    activate(registry, "a")
    registry.observe_trainer({0: "a"})
    registry.observe_engine(EngineStatus("engine-0", True, ("a@7.1.v1",), 1.0))
    assert [one_step(registry, "a") for _ in range(3)] == [False, False, True]
    run = registry.runs["a"]
    assert (run.state, run.visible_outcome) == ("RETIRING", None)
    registry.saved("a", ARTIFACT, now=9.0)
    assert (run.state, run.visible_outcome, run.artifact) == ("CLEANUP", "Complete", ARTIFACT)
    registry.observe_trainer({})
    assert not registry.cleaned("a")  # the engine still lists it
    assert registry.view("a").presence.engines == ["engine-0"]
    registry.observe_engine(EngineStatus("engine-0", True, (), 2.0))
    assert registry.cleaned("a")
    assert (run.state, run.slot, run.completion_time) == ("COMPLETED", None, 9.0)


def test_target_is_numstep_or_epochs_over_rows(registry: Registry) -> None:
    put(registry, "a", numStep=None, numEpoch=2)
    registry.checked("a", DATASET)
    assert registry.runs["a"].target_step == 2 * 10 // 2


def test_a_resumed_run_trains_no_extra_steps(registry: Registry) -> None:
    activate(registry, "a", step=2)
    assert registry.runs["a"].trainer_version == 1
    assert one_step(registry, "a")
    assert registry.runs["a"].step == 3


def test_a_run_that_had_all_its_steps_completes_on_load(registry: Registry) -> None:
    put(registry, "a")
    registry.checked("a", DATASET)
    registry.assign()
    registry.loaded(Loaded("a", 3, Cursor()), now=1.0)
    assert registry.runs["a"].state == "RETIRING"


def test_limits_of_the_pool_fail_the_run_without_a_slot(registry: Registry) -> None:
    put(registry, "a", rank=16)
    run = registry.runs["a"]
    assert (run.state, run.reason, run.slot) == ("FAILED", reasons.RANK_TOO_LARGE, None)
    assert "16" in run.message
    assert "maxRank 8" in run.message


def test_a_spec_that_does_not_parse_is_refused_by_field(registry: Registry) -> None:
    with pytest.raises(SpecProblem) as caught:
        put(registry, "a", nSamplesPerPrompt=0)
    assert caught.value.field == "nSamplesPerPrompt"
    assert "a" not in registry.runs


def test_the_pools_defaults_fill_what_the_run_leaves_open() -> None:
    registry = Registry(pool_spec(defaults={"optimizer": {"lr": 0.5, "eps": 1e-6}, "maxStaleness": 3}), boot_epoch=1)
    put(registry, "a", optimizer={"lr": 0.25})
    optimizer = registry.runs["a"].spec.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.betas) == (0.25, 1e-6, (0.9, 0.98))


def test_suspend_keeps_the_checkpoint_and_resume_queues_again(registry: Registry) -> None:
    activate(registry, "a")
    one_step(registry, "a")
    put(registry, "a", generation=2, suspend=True)
    assert registry.runs["a"].state == "RETIRING"
    run = registry.runs["a"]
    assert run.ending is not None
    assert run.ending.save
    registry.saved("a", Artifact("/p", 1, "d"), now=9.0)
    registry.observe_trainer({})
    assert registry.cleaned("a")
    assert (run.state, run.slot) == ("SUSPENDED", None)
    put(registry, "a", generation=3, suspend=False)
    assert run.state == "QUEUED"
    assert registry.assign() == []  # data and reward are checked again first
    registry.checked("a", DATASET)
    assert [r.uid for r in registry.assign()] == ["a"]
    assert (run.incarnation, run.completion_time) == ("7.2", None)


def test_resume_while_still_suspending_comes_back_after_cleanup(registry: Registry) -> None:
    activate(registry, "a")
    put(registry, "a", generation=2, suspend=True)
    put(registry, "a", generation=3, suspend=False)
    registry.saved("a", None, now=9.0)
    assert registry.cleaned("a")
    assert registry.runs["a"].state == "QUEUED"


def test_delete_of_a_live_run_is_gone_only_after_cleanup(registry: Registry) -> None:
    activate(registry, "a")
    assert not registry.delete("a")
    assert not registry.delete("a")
    registry.saved("a", None, now=9.0)
    assert registry.cleaned("a")
    assert registry.delete("a")
    assert "a" not in registry.runs


def test_delete_of_a_queued_run_is_gone_at_once(registry: Registry) -> None:
    put(registry, "a")
    assert registry.delete("a")


def test_delete_while_suspending_is_not_resumed(registry: Registry) -> None:
    activate(registry, "a")
    put(registry, "a", generation=2, suspend=True)
    assert not registry.delete("a")
    registry.saved("a", None, now=9.0)
    assert registry.cleaned("a")
    assert "a" not in registry.runs


def test_a_fault_replaces_a_complete_that_never_became_durable(registry: Registry) -> None:
    activate(registry, "a", step=2)
    one_step(registry, "a")
    registry.fail(RunFault("a", reasons.STORAGE_ERROR, "disk full"))
    registry.saved("a", None, now=9.0)
    assert registry.runs["a"].visible_outcome == "Failed"


def test_the_first_fault_stays(registry: Registry) -> None:
    activate(registry, "a")
    registry.fail(RunFault("a", reasons.NON_FINITE, "first"))
    registry.fail(RunFault("a", reasons.REWARD_ERROR, "second"))
    ending = registry.runs["a"].ending
    assert ending is not None
    assert ending.reason == reasons.NON_FINITE


def test_a_lost_trainer_sends_live_runs_back_to_load_again(registry: Registry) -> None:
    activate(registry, "a")
    activate(registry, "b")
    one_step(registry, "a")
    registry.commit("a", 1, [1.0], PolicySums())
    registry.fail(RunFault("b", reasons.NON_FINITE, "x"))
    registry.trainer_lost()
    a, b = registry.runs["a"], registry.runs["b"]
    assert (a.state, a.slot, a.loaded, a.accumulated_groups, a.restarts) == ("PENDING", 0, False, 0, 1)
    assert not a.registered
    assert (b.state, b.loaded) == ("RETIRING", False)


def test_a_run_that_loads_again_where_it_was_keeps_its_incarnation_and_versions(registry: Registry) -> None:
    activate(registry, "a")
    one_step(registry, "a")
    registry.published("a", 2, now=5.0)
    registry.trainer_lost()
    registry.loaded(Loaded("a", 1, Cursor(), "7.1"), now=6.0)
    a = registry.runs["a"]
    assert (a.state, a.incarnation, a.weight_version, a.trainer_version, a.step) == ("ACTIVE", "7.1", 2, 2, 1)


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_that_loads_again_elsewhere_begins_a_new_incarnation(registry: Registry, step: int) -> None:
    activate(registry, "a")
    one_step(registry, "a")
    registry.trainer_lost()
    registry.loaded(Loaded("a", step, Cursor()), now=6.0)
    a = registry.runs["a"]
    assert (a.state, a.incarnation, a.weight_version, a.step, a.start_step) == ("PENDING", "7.2", 0, step, step)


def test_a_completion_without_checkpoint_survives_a_lost_trainer(registry: Registry) -> None:
    activate(registry, "a", step=2)
    one_step(registry, "a")
    registry.trainer_lost()
    registry.loaded(Loaded("a", 3, Cursor(), "7.1"), now=6.0)
    run = registry.runs["a"]
    assert (run.state, run.loaded, run.step, run.incarnation) == ("RETIRING", True, 3, "7.1")


def test_the_same_step_of_another_incarnation_is_not_where_the_run_was(registry: Registry) -> None:
    activate(registry, "a")
    one_step(registry, "a")
    registry.trainer_lost()
    registry.loaded(Loaded("a", 1, Cursor(), "6.4"), now=6.0)
    assert registry.runs["a"].incarnation == "7.2"


def test_a_completion_found_at_boot_and_lost_before_it_was_saved_trains_again(registry: Registry) -> None:
    put(registry, "a")
    registry.checked("a", DATASET)
    registry.assign()
    registry.loaded(Loaded("a", 3, Cursor(), "6.1"), now=5.0)  # from a snapshot
    registry.trainer_lost()
    registry.loaded(Loaded("a", 2, Cursor(), "6.1"), now=6.0)  # from a checkpoint, on another node
    run = registry.runs["a"]
    assert (run.state, run.step, run.incarnation, run.ending) == ("PENDING", 2, "7.2", None)


def test_a_completion_whose_last_step_is_lost_trains_it_again(registry: Registry) -> None:
    activate(registry, "a", step=2)
    one_step(registry, "a")
    registry.trainer_lost()
    registry.loaded(Loaded("a", 2, Cursor()), now=6.0)
    run = registry.runs["a"]
    assert (run.state, run.ending, run.step) == ("PENDING", None, 2)


def test_a_suspension_survives_a_lost_trainer_at_any_step(registry: Registry) -> None:
    activate(registry, "a")
    one_step(registry, "a")
    put(registry, "a", generation=2, suspend=True)
    registry.trainer_lost()
    registry.loaded(Loaded("a", 0, Cursor()), now=6.0)
    run = registry.runs["a"]
    assert run.ending is not None
    assert (run.state, run.ending.outcome, run.step) == ("RETIRING", "Suspended", 0)


def test_an_older_operator_is_fenced(registry: Registry) -> None:
    registry.fence(5)
    registry.fence(5)
    with pytest.raises(StaleOperator, match="operatorEpoch: 4 is below 5"):
        registry.fence(4)


def test_numstep_may_grow_while_the_run_lives(registry: Registry) -> None:
    activate(registry, "a")
    put(registry, "a", generation=2, numStep=10)
    assert registry.runs["a"].target_step == 10


def test_an_old_generation_changes_nothing(registry: Registry) -> None:
    activate(registry, "a")
    put(registry, "a", generation=2, numStep=10)
    put(registry, "a", generation=1, numStep=4)
    assert registry.runs["a"].target_step == 10
