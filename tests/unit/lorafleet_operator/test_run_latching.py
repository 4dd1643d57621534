"""What must never go back: ends, target, start, step, transition times."""

from typing import Any

import pytest

from lorafleet_api.v1alpha1 import names, reasons
from lorafleet_api.v1alpha1.wire import ArtifactView
from lorafleet_operator.reconcile.conditions import timestamp
from lorafleet_operator.reconcile.run import plan_run
from support.operator_world import (
    SETTINGS,
    T0,
    UID,
    condition,
    flags,
    held,
    link,
    listing,
    run_object,
    seen,
    view,
)  # fmt: skip


def status_after(*steps: Any, run: dict[str, Any] | None = None) -> dict[str, Any]:
    """The stored status after the operator saw each listing in turn."""
    run = run or run_object()
    for now, listed in enumerate(steps):
        status = plan_run(seen(run, listed, now=T0 + now), SETTINGS).status
        assert status is not None
        run = run | {"status": status}
    stored: dict[str, Any] = run["status"]
    return stored


TRAINING = listing(view(step=14, slot=0, weight_version=15), engine=held(), trainer={0: UID})
ARTIFACT = ArtifactView(path="/s/team/r/step_15", step=15, digest="ab")
COMPLETED = listing(view("COMPLETED", outcome="Complete", step=15, registered=False, artifact=ARTIFACT))


@pytest.mark.parametrize(
    "later",
    [listing(), listing(boot_epoch=2), listing(view("QUEUED"), boot_epoch=2), listing(view("ACTIVE", step=1))],
    ids=["forgotten", "new epoch", "queued again", "active again"],
)
def test_complete_stays_complete_whatever_the_runtime_says_later(later: Any) -> None:
    status = status_after(TRAINING, COMPLETED, later)
    assert flags(status) | {"Complete": True, "Finished": True, "Deregistered": True, "Ready": True} == flags(status)
    assert (status["step"], status["targetStep"], status["artifact"]["path"]) == (15, 15, ARTIFACT.path)


def test_failed_keeps_its_first_reason_and_message() -> None:
    first = listing(view("FAILED", outcome="Failed", reason=reasons.REWARD_ERROR, message="reward raised"))
    second = listing(view("FAILED", outcome="Failed", reason=reasons.DATA_ERROR, message="other"))
    failed = condition(status_after(TRAINING, first, second), reasons.FAILED)
    assert (failed["reason"], failed["message"]) == (reasons.REWARD_ERROR, "reward raised")


def test_finished_run_is_not_put_again_after_an_epoch_change() -> None:
    run = run_object(status=status_after(TRAINING, COMPLETED))
    plan = plan_run(seen(run, listing(boot_epoch=2)), SETTINGS)
    assert plan.put is None
    assert not plan.add_finalizer


def test_finished_run_is_not_put_again_though_not_yet_deregistered() -> None:
    held_still = listing(view("CLEANUP", outcome="Complete", step=15, registered=False), engine=held())
    run = run_object(status=status_after(TRAINING, held_still))
    assert not flags(run["status"])["Deregistered"]
    plan = plan_run(seen(run, listing(boot_epoch=2)), SETTINGS)
    assert plan.put is None
    assert plan.status is not None
    assert flags(plan.status)["Deregistered"]


def test_finalizer_goes_and_the_runtime_may_forget_once_the_end_is_stored() -> None:
    run = run_object(status=status_after(TRAINING, COMPLETED))
    plan = plan_run(seen(run, COMPLETED), SETTINGS)
    assert plan.delete
    assert plan.remove_finalizer


def test_the_runtime_may_not_forget_before_the_end_is_stored() -> None:
    plan = plan_run(seen(run_object(status=status_after(TRAINING)), COMPLETED), SETTINGS)
    assert not plan.delete
    assert not plan.remove_finalizer


def test_engine_that_still_lists_a_finished_run_keeps_deregistered_false() -> None:
    lied = listing(view("COMPLETED", outcome="Complete", step=15, registered=False), engine=held())
    status = status_after(TRAINING, lied)
    assert not flags(status)["Deregistered"]
    assert "engine e0" in condition(status, reasons.DEREGISTERED)["message"]


def test_target_step_never_shrinks_and_outlives_a_forgetful_runtime() -> None:
    assert status_after(listing(view(target_step=15)), listing(view(target_step=10)))["targetStep"] == 15
    assert status_after(listing(view(target_step=15)), listing(view("QUEUED", target_step=None)))["targetStep"] == 15
    assert status_after(listing(view(target_step=15)), listing(view(target_step=20)))["targetStep"] == 20


def test_start_time_is_the_first_registration() -> None:
    first = timestamp(T0 + 7)
    status = status_after(listing(view(start_time=T0 + 7)), listing(view(start_time=T0 + 99)))
    assert status["startTime"] == first


def test_step_goes_back_only_with_a_new_registration_which_counts_as_a_restart() -> None:
    resumed = listing(view(step=10, start_step=10), engine=held(), boot_epoch=2)
    status = status_after(TRAINING, listing(view("QUEUED", step=0), boot_epoch=2))
    assert status["step"] == 14
    status = status_after(TRAINING, listing(view("QUEUED", step=0), boot_epoch=2), resumed)
    assert (status["step"], status["startStep"], status["restarts"], status["bootEpoch"]) == (10, 10, 1, 2)


def test_restart_is_counted_once() -> None:
    again = listing(view(step=11), boot_epoch=2)
    assert status_after(TRAINING, listing(boot_epoch=2), again, again)["restarts"] == 1


def test_transition_time_moves_only_on_flips() -> None:
    loading = listing(view("PENDING", reason=reasons.LOADING))
    queued = listing(view("QUEUED", reason=reasons.SLOTS_EXHAUSTED))
    registered = condition(status_after(queued, loading, TRAINING), reasons.REGISTERED)
    waiting = condition(status_after(queued, loading), reasons.REGISTERED)
    assert waiting["lastTransitionTime"] == timestamp(T0)
    assert waiting["reason"] == reasons.LOADING
    assert registered["lastTransitionTime"] == timestamp(T0 + 2)


def test_conditions_of_other_writers_stay() -> None:
    foreign = {"type": "Paid", "status": "True", "reason": "Yes", "message": "", "lastTransitionTime": timestamp(T0)}
    run = run_object(status={"conditions": [foreign]})
    plan = plan_run(seen(run, TRAINING), SETTINGS)
    assert plan.status is not None
    assert foreign in plan.status["conditions"]


def test_short_silence_of_the_runtime_changes_no_condition() -> None:
    run = run_object(status=status_after(TRAINING))
    plan = plan_run(seen(run, link=link(TRAINING, ready=False, since=T0 + 95)), SETTINGS)
    assert plan.status is not None
    assert flags(plan.status) == flags(run["status"])
    assert plan.again_in == pytest.approx(SETTINGS.lost_grace_seconds - 5.0, abs=0.1)


def test_suspended_run_stays_suspended_while_the_runtime_is_away() -> None:
    suspended = listing(view("SUSPENDED", outcome="Suspended", registered=False))
    run = run_object(suspend=True, status=status_after(TRAINING, suspended, run=run_object(suspend=True)))
    plan = plan_run(seen(run, link=link(ready=False)), SETTINGS)
    assert plan.status is not None
    assert flags(plan.status)["Suspended"]
    assert flags(plan.status)["Ready"]


def test_ttl_deletes_the_object_only_after_the_deregistration() -> None:
    run = run_object(ttlSecondsAfterFinished=10, status=status_after(TRAINING, COMPLETED))
    assert plan_run(seen(run, now=T0 + 60), SETTINGS).delete_object
    early = plan_run(seen(run, now=T0 + 5), SETTINGS)
    assert not early.delete_object
    assert early.again_in == pytest.approx(6.0, abs=0.2)
    held_still = listing(view("CLEANUP", outcome="Complete", registered=False), engine=held())
    run = run_object(ttlSecondsAfterFinished=10, status=status_after(TRAINING, held_still))
    assert not plan_run(seen(run, held_still, now=T0 + 60), SETTINGS).delete_object


def test_forever_latched_without_finalizer_needs_no_runtime() -> None:
    run = run_object(finalizer=False, deleting=True, status=status_after(TRAINING, COMPLETED))
    assert plan_run(seen(run, pool=None, link=None), SETTINGS) == plan_run(seen(run), SETTINGS)
    assert names.FINALIZER not in run["metadata"].get("finalizers", [])
