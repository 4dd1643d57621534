"""Deletion: the finalizer goes only on evidence, a lying runtime proves nothing, and no create comes after it."""

import pytest

from lorafleet_api.v1alpha1 import names, reasons
from lorafleet_api.v1alpha1.wire import ArtifactView
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

DELETING = run_object(deleting=True)


def test_delete_is_asked_for_and_asked_again() -> None:
    plan = plan_run(seen(DELETING, listing(view(), engine=held(), trainer={0: UID})), SETTINGS)
    assert plan.delete
    assert not plan.remove_finalizer
    assert plan.again_in == pytest.approx(5.0)


def test_nothing_is_put_once_deletion_began() -> None:
    for listed in (listing(), listing(view(generation=0)), listing(boot_epoch=2)):
        assert plan_run(seen(DELETING, listed), SETTINGS).put is None
    assert not plan_run(seen(run_object(finalizer=False, deleting=True)), SETTINGS).add_finalizer


def test_absence_alone_is_no_evidence_before_a_delete_was_answered() -> None:
    plan = plan_run(seen(DELETING, listing()), SETTINGS)
    assert plan.delete
    assert not plan.remove_finalizer


def test_absence_after_a_confirmed_delete_releases() -> None:
    plan = plan_run(seen(DELETING, listing(), delete_confirmed=True), SETTINGS)
    assert plan.remove_finalizer
    assert not plan.delete
    assert plan.status is not None
    assert condition(plan.status, reasons.DEREGISTERED)["reason"] == reasons.VERIFIED


@pytest.mark.parametrize(
    "listed",
    [
        listing(engine=held()),
        listing(engine=(f"{UID}@9.4.v12",)),
        listing(trainer={1: UID}),
        listing(view("CLEANUP", outcome="Deleted", registered=False)),
    ],
    ids=["engine", "engine, older version", "trainer slot", "still in the list"],
)
def test_lying_runtime_keeps_the_run(listed: object) -> None:
    plan = plan_run(seen(DELETING, listed, delete_confirmed=True), SETTINGS)  # type: ignore[arg-type]
    assert not plan.remove_finalizer
    assert plan.delete
    assert plan.status is not None
    assert not flags(plan.status)["Deregistered"]


def test_absence_from_a_listing_that_is_not_complete_releases_nothing() -> None:
    early = listing().model_copy(update={"listed": False})
    plan = plan_run(seen(DELETING, early, delete_confirmed=True), SETTINGS)
    assert not plan.remove_finalizer
    assert plan.status is not None
    assert "not told yet" in condition(plan.status, reasons.DEREGISTERED)["message"]


def test_the_record_of_a_deleted_run_names_its_last_checkpoint() -> None:
    artifact = ArtifactView(path="/s/step_37", step=37, digest="d")
    gone = view("CLEANUP", outcome="Deleted", registered=False, step=37, artifact=artifact)
    plan = plan_run(seen(DELETING, listing(gone)), SETTINGS)
    assert plan.status is not None
    assert (plan.status["step"], plan.status["artifact"]["path"]) == (37, "/s/step_37")


def test_adapters_of_other_runs_do_not_hold_this_one() -> None:
    other = f"{UID[:-1]}6@1.1.v1"
    plan = plan_run(seen(DELETING, listing(engine=(other,), trainer={0: "x"}), delete_confirmed=True), SETTINGS)
    assert plan.remove_finalizer


def test_message_names_who_lies() -> None:
    plan = plan_run(seen(DELETING, listing(engine=held(), trainer={1: UID}), delete_confirmed=True), SETTINGS)
    assert plan.status is not None
    message = condition(plan.status, reasons.DEREGISTERED)["message"]
    assert message == "still listed by trainer slot 1, engine e0 although a DELETE was answered with success"


def test_silent_runtime_keeps_the_run() -> None:
    plan = plan_run(seen(DELETING, link=link(listing(), ready=False), delete_confirmed=True), SETTINGS)
    assert not plan.remove_finalizer
    assert not plan.delete


def test_pool_that_is_gone_counts_as_deregistered() -> None:
    for gone in (None, link(listing(engine=held()), ready=False)):
        plan = plan_run(seen(DELETING, pool=None, link=gone), SETTINGS)
        assert plan.remove_finalizer
        assert plan.status is not None
        assert condition(plan.status, reasons.DEREGISTERED)["reason"] == reasons.POOL_GONE


def test_pool_that_is_gone_but_answers_is_still_cleared() -> None:
    plan = plan_run(seen(DELETING, listing(view(), engine=held()), pool=None), SETTINGS)
    assert plan.delete
    assert not plan.remove_finalizer


def test_force_release_releases_and_says_so() -> None:
    run = run_object(deleting=True)
    run["metadata"]["annotations"] = {names.FORCE_RELEASE: "true"}
    plan = plan_run(seen(run, link=link(ready=False)), SETTINGS)
    assert plan.remove_finalizer
    assert ("Warning", reasons.FORCE_RELEASED) in [(notice.kind, notice.reason) for notice in plan.notices]


@pytest.mark.parametrize("value", ["false", "", "True!"])
def test_force_release_takes_only_true(value: str) -> None:
    run = run_object(deleting=True)
    run["metadata"]["annotations"] = {names.FORCE_RELEASE: value}
    assert not plan_run(seen(run, link=link(ready=False)), SETTINGS).remove_finalizer


def test_force_release_of_a_live_object_does_nothing() -> None:
    run = run_object()
    run["metadata"]["annotations"] = {names.FORCE_RELEASE: "true"}
    plan = plan_run(seen(run, listing(view(), engine=held())), SETTINGS)
    assert not plan.remove_finalizer
    assert plan.status is not None
    assert not flags(plan.status)["Deregistered"]


def test_record_goes_to_the_pool_with_step_and_artifact() -> None:
    status = {"step": 7, "targetStep": 15, "artifact": {"path": "/s/step_7", "step": 7, "digest": "ab"}}
    run = run_object(deleting=True, status=status)
    plan = plan_run(seen(run, delete_confirmed=True), SETTINGS)
    records = [notice.message for notice in plan.notices if notice.on_pool]
    assert records == [f"AdapterRun team/r ({UID}) deregistered at step 7 of 15, artifact /s/step_7"]


def test_deleted_object_keeps_what_it_was() -> None:
    complete = plan_run(
        seen(run_object(), listing(view("CLEANUP", outcome="Complete"), engine=held())), SETTINGS
    ).status
    assert complete is not None
    run = run_object(deleting=True, status=complete)
    status = plan_run(seen(run, listing(engine=held()), now=T0 + 200), SETTINGS).status
    assert status is not None
    got = flags(status)
    assert (got["Complete"], got["Finished"], got["Failed"], got["Ready"]) == (True, True, False, False)
