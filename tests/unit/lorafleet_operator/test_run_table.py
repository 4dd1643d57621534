"""The state table of the design, row by row: what is observed in, the nine conditions out."""

from dataclasses import replace

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_operator.reconcile.observed import Observed, Refusal
from lorafleet_operator.reconcile.run import AFTER_A_FAILURE, plan_run
from support.operator_world import (
    CREATED,
    SETTINGS,
    T0,
    UID,
    condition,
    flags,
    held,
    link,
    listing,
    pool_object,
    run_object,
    seen,
    view,
)  # fmt: skip

ORDER = ("Registered", "Ready", "Suspended", "Complete", "Failed", "Finished", "Deregistered", "Stalled")


def row(text: str) -> dict[str, bool]:
    """A row of the table as written there."""
    return dict(zip(ORDER, (letter == "T" for letter in text.split()), strict=True))


def started(registered: str = "True", reason: str = reasons.TRAINING, **status: object) -> dict[str, object]:
    """A stored status of a run that was registered in boot epoch 1."""
    entry = {
        "type": "Registered", "status": registered, "reason": reason, "message": "", "lastTransitionTime": CREATED
    }  # fmt: skip
    return {"startTime": CREATED, "bootEpoch": 1, "conditions": [entry], **status}


RESUMING = listing(view("PENDING", reason=reasons.LOADING), boot_epoch=2)

ROWS: list[tuple[str, Observed, str, str]] = [
    ("just created", seen(run_object(finalizer=False)), "F F F F F F F F", reasons.PENDING),
    (
        "queued",
        seen(run_object(), listing(view("QUEUED", reason=reasons.SLOTS_EXHAUSTED, queue_position=2))),
        "F F F F F F F F",
        reasons.SLOTS_EXHAUSTED,
    ),
    ("pool not ready", seen(run_object(), link=link(ready=False)), "F F F F F F F F", reasons.POOL_NOT_READY),
    (
        "loading",
        seen(run_object(), listing(view("PENDING", reason=reasons.LOADING, slot=0))),
        "F F F F F F F F",
        reasons.LOADING,
    ),
    (
        "training",
        seen(run_object(), listing(view(), engine=held(), trainer={0: UID})),
        "T T F F F F F F",
        reasons.TRAINING,
    ),
    (
        "runtime lost",
        seen(run_object(status=started()), link=link(ready=False, since=T0)),
        "F F F F F F F F",
        reasons.RUNTIME_LOST,
    ),
    (
        "runtime back, not yet registered again",
        seen(run_object(status=started()), RESUMING),
        "F F F F F F F F",
        reasons.RUNTIME_LOST,
    ),
    (
        "suspending",
        seen(
            run_object(status=started(), suspend=True),
            listing(view("RETIRING", reason=reasons.SAVING, registered=True), engine=held()),
        ),
        "T F F F F F F F",
        reasons.SAVING,
    ),
    (
        "suspended",
        seen(run_object(status=started(), suspend=True), listing(view("SUSPENDED", outcome="Suspended"))),
        "F T T F F F F F",
        reasons.SUSPENDED_REASON,
    ),
    (
        "complete, still held",
        seen(run_object(), listing(view("CLEANUP", outcome="Complete", registered=False), engine=held())),
        "F T F T F T F F",
        reasons.COMPLETED,
    ),
    (
        "complete, deregistered",
        seen(run_object(), listing(view("COMPLETED", outcome="Complete"))),
        "F T F T F T T F",
        reasons.COMPLETED,
    ),
    (
        "failed, still held",
        seen(
            run_object(),
            listing(view("CLEANUP", outcome="Failed", reason=reasons.NON_FINITE, registered=False), engine=held()),
        ),
        "F F F F T T F T",
        reasons.NON_FINITE,
    ),
    (
        "failed, deregistered",
        seen(run_object(), listing(view("FAILED", outcome="Failed", reason=reasons.DATA_ERROR))),
        "F F F F T T T T",
        reasons.DATA_ERROR,
    ),
    (
        "cancelled, still held",
        seen(
            run_object(cancel=True), listing(view("CLEANUP", outcome="Cancelled", registered=False), trainer={0: UID})
        ),
        "F T F F F T F F",
        reasons.CANCELLED,
    ),
    (
        "cancelled, deregistered",
        seen(run_object(cancel=True), listing(view("COMPLETED", outcome="Cancelled"))),
        "F T F F F T T F",
        reasons.CANCELLED,
    ),
    (
        "deleting while training",
        seen(run_object(deleting=True, status=started()), listing(view(), engine=held(), trainer={0: UID})),
        "F F F F F F F F",
        reasons.DELETED,
    ),
    (
        "deleting, let go",
        seen(run_object(deleting=True, status=started()), delete_confirmed=True),
        "F F F F F F T F",
        reasons.DELETED,
    ),
    (
        "pool unknown, young",
        seen(run_object(finalizer=False), pool=None, link=None, now=T0 + 1.0),
        "F F F F F F F F",
        reasons.POOL_NOT_FOUND,
    ),
    (
        "pool unknown, past the grace",
        seen(run_object(finalizer=False), pool=None, link=None),
        "F F F F T T T T",
        reasons.POOL_NOT_FOUND,
    ),
    (
        "pool does not allow the namespace",
        seen(
            run_object(finalizer=False, poolRef={"name": "demo", "namespace": "other"}),
            pool=pool_object() | {"metadata": pool_object()["metadata"] | {"namespace": "other"}},
        ),
        "F F F F T T T T",
        reasons.POOL_NOT_ALLOWED,
    ),
    (
        "spec refused at create",
        seen(run_object(), refusal=Refusal(1, reasons.RANK_TOO_LARGE, "rank 64 is above maxRank 32")),
        "F F F F T T T T",
        reasons.RANK_TOO_LARGE,
    ),
    (
        "edit refused while training",
        seen(
            run_object(generation=2, status=started()),
            listing(view(), engine=held(), trainer={0: UID}),
            refusal=Refusal(2, reasons.STALENESS_TOO_LARGE, "maxStaleness 9"),
        ),
        "T F F F F F F T",
        reasons.STALENESS_TOO_LARGE,
    ),
    (
        "never registered in time",
        seen(run_object(registrationDeadlineSeconds=60), listing(view("QUEUED", reason=reasons.SLOTS_EXHAUSTED))),
        "F F F F T T F T",
        reasons.DEADLINE_EXCEEDED,
    ),
]


@pytest.mark.parametrize(("name", "observed", "expected", "reason"), ROWS, ids=[entry[0] for entry in ROWS])
def test_conditions_of_the_row(name: str, observed: Observed, expected: str, reason: str) -> None:
    status = plan_run(observed, SETTINGS).status
    assert status is not None
    got = flags(status)
    assert {kind: got[kind] for kind in ORDER} == row(expected)
    assert condition(status, reasons.READY)["reason"] == reason


@pytest.mark.parametrize(("name", "observed", "expected", "reason"), ROWS, ids=[entry[0] for entry in ROWS])
def test_exactly_one_of_ready_reconciling_stalled(name: str, observed: Observed, expected: str, reason: str) -> None:
    status = plan_run(observed, SETTINGS).status
    assert status is not None
    got = flags(status)
    assert [got["Ready"], got["Reconciling"], got["Stalled"]].count(True) == 1


REGISTERED_REASONS = {
    "suspended": "Suspended",
    "complete, deregistered": "Completed",
    "failed, deregistered": "Failed",
    "cancelled, deregistered": "Cancelled",
    "deleting while training": "Deleted",
    "runtime lost": "RuntimeLost",
    "queued": "SlotsExhausted",
}


@pytest.mark.parametrize("name", sorted(REGISTERED_REASONS))
def test_registered_says_why_not(name: str) -> None:
    observed = next(entry[1] for entry in ROWS if entry[0] == name)
    status = plan_run(observed, SETTINGS).status
    assert status is not None
    assert condition(status, reasons.REGISTERED)["reason"] == REGISTERED_REASONS[name]


def test_every_condition_of_the_api_is_always_set() -> None:
    for _, observed, _, _ in ROWS:
        status = plan_run(observed, SETTINGS).status
        assert status is not None
        assert {c["type"] for c in status["conditions"]} == set(reasons.RUN_CONDITIONS)


def test_message_of_a_refusal_reaches_the_failed_condition() -> None:
    observed = next(entry[1] for entry in ROWS if entry[0] == "spec refused at create")
    status = plan_run(observed, SETTINGS).status
    assert status is not None
    assert condition(status, reasons.FAILED)["message"] == "rank 64 is above maxRank 32"


@pytest.mark.parametrize("name", ["spec refused at create", "failed, deregistered", "pool unknown, past the grace"])
def test_a_failed_run_says_once_what_the_user_does_next(name: str) -> None:
    observed = next(entry[1] for entry in ROWS if entry[0] == name)
    once = plan_run(observed, SETTINGS).status
    assert once is not None
    later = plan_run(replace(observed, run={**observed.run, "status": once}), SETTINGS).status
    assert later is not None
    for status in (once, later):
        cause = condition(status, reasons.FAILED)["message"]
        for kind in (reasons.READY, reasons.STALLED, reasons.REGISTERED):
            assert condition(status, kind)["message"] == f"{cause}; {AFTER_A_FAILURE}"


def test_what_the_user_does_next_stays_however_long_the_cause_is() -> None:
    observed = seen(run_object(), listing(view("FAILED", outcome="Failed", reason="DataError", message="x" * 9000)))
    status = plan_run(observed, SETTINGS).status
    assert status is not None
    assert condition(status, reasons.STALLED)["message"].endswith(f"xx; {AFTER_A_FAILURE}")
    assert len(condition(status, reasons.STALLED)["message"]) == 4096
