"""When the runtime is told what: PUT gating, generations, deadlines, Events."""

from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_operator.reconcile.observed import Refusal
from lorafleet_operator.reconcile.run import plan_run
from support.operator_world import (
    CREATED,
    SETTINGS,
    T0,
    UID,
    held,
    link,
    listing,
    pool_object,
    run_object,
    seen,
    view,
)  # fmt: skip


def test_finalizer_comes_before_the_first_put() -> None:
    plan = plan_run(seen(run_object(finalizer=False)), SETTINGS)
    assert plan.add_finalizer
    assert plan.put is None
    plan = plan_run(seen(run_object(finalizer=True)), SETTINGS)
    assert not plan.add_finalizer
    assert plan.put is not None


def test_put_carries_the_spec_as_written_and_the_epoch() -> None:
    run = run_object(generation=4, scheduling={"priority": 9}, rank=8)
    put = plan_run(seen(run), SETTINGS).put
    assert put is not None
    assert put.spec == run["spec"]
    assert (put.generation, put.operator_epoch, put.priority, put.creation_timestamp) == (4, 3, 9, T0)
    assert (put.namespace, put.name) == ("team", "r")


def test_put_tells_when_the_run_was_first_registered() -> None:
    put = plan_run(seen(run_object(status={"startTime": CREATED})), SETTINGS).put
    assert put is not None
    assert put.start_time == T0


@pytest.mark.parametrize(
    "observed",
    [
        seen(run_object(), listing(view(generation=1))),
        seen(run_object(), link=link(listing(), ready=False)),
        seen(run_object(), link=None),
        seen(run_object(), pool=None),
        seen(run_object(), refusal=Refusal(1, reasons.INVALID_SPEC, "no")),
        seen(run_object(), listing(view("COMPLETED", outcome="Complete", generation=0))),
    ],
    ids=["known", "silent runtime", "no connection", "no pool", "refused", "ended"],
)
def test_nothing_to_put(observed: object) -> None:
    assert plan_run(observed, SETTINGS).put is None  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"suspend": True}, {"cancel": True}, {"numStep": 30}])
def test_suspend_cancel_and_growth_travel_as_a_new_generation(change: dict[str, Any]) -> None:
    plan = plan_run(seen(run_object(generation=2, **change), listing(view(generation=1))), SETTINGS)
    assert plan.put is not None
    assert plan.put.generation == 2
    assert plan.put.spec.items() >= change.items()
    assert not plan.delete


def test_corrected_spec_is_put_again_after_a_refusal() -> None:
    run = run_object(generation=3)
    assert (
        plan_run(seen(run, listing(view()), refusal=Refusal(2, reasons.INVALID_SPEC, "no")), SETTINGS).put is not None
    )


def test_run_without_a_ready_pool_gets_no_finalizer_and_so_can_be_deleted_at_once() -> None:
    plan = plan_run(seen(run_object(finalizer=False), link=link(ready=False)), SETTINGS)
    assert not plan.add_finalizer
    assert plan_run(seen(run_object(finalizer=False, deleting=True), link=link(ready=False)), SETTINGS).status is None


def test_run_failed_by_the_operator_is_taken_from_the_runtime() -> None:
    queued = listing(view("QUEUED", reason=reasons.SLOTS_EXHAUSTED))
    failed = plan_run(seen(run_object(registrationDeadlineSeconds=60), queued), SETTINGS).status
    run = run_object(registrationDeadlineSeconds=60, status=failed)
    assert plan_run(seen(run, queued), SETTINGS).delete


def test_deadline_is_left_to_the_runtime_for_a_moment() -> None:
    run = run_object(activeDeadlineSeconds=96, status={"startTime": CREATED})
    plan = plan_run(seen(run, listing(view(), engine=held(), trainer={0: UID})), SETTINGS)
    assert plan.status is not None
    assert "completionTime" not in plan.status
    assert plan.again_in == pytest.approx(1.05, abs=0.01)


def test_events_tell_transitions_and_nothing_else() -> None:
    training = seen(run_object(), listing(view(slot=0), engine=held(), trainer={0: UID}))
    first = plan_run(training, SETTINGS)
    assert [notice.reason for notice in first.notices] == [reasons.REGISTERED]
    stepped = listing(view(step=3, slot=0), engine=held(), trainer={0: UID})
    second = plan_run(seen(run_object(status=first.status), stepped), SETTINGS)
    assert second.notices == ()


@pytest.mark.parametrize(
    ("state", "outcome", "kind", "reason"),
    [
        ("COMPLETED", "Complete", "Normal", reasons.COMPLETED),
        ("FAILED", "Failed", "Warning", reasons.NON_FINITE),
        ("COMPLETED", "Cancelled", "Normal", reasons.CANCELLED),
    ],
)
def test_events_of_ends(state: str, outcome: str, kind: str, reason: str) -> None:
    ended = listing(view(state, outcome=outcome, registered=False, reason=reasons.NON_FINITE))
    notices = plan_run(seen(run_object(), ended), SETTINGS).notices
    assert (kind, reason) in [(notice.kind, notice.reason) for notice in notices]


def test_lost_runtime_is_an_event_once() -> None:
    status = plan_run(seen(run_object(), listing(view())), SETTINGS).status
    lost = plan_run(seen(run_object(status=status), link=link(ready=False)), SETTINGS)
    assert [notice.reason for notice in lost.notices] == [reasons.RUNTIME_LOST]
    again = plan_run(seen(run_object(status=lost.status), link=link(ready=False)), SETTINGS)
    assert again.notices == ()


def test_pool_in_an_allowed_namespace_serves_the_run() -> None:
    pool = pool_object(allowedNamespaces=["team"])
    pool["metadata"]["namespace"] = "other"
    run = run_object(poolRef={"name": "demo", "namespace": "other"})
    assert plan_run(seen(run, pool=pool), SETTINGS).put is not None
