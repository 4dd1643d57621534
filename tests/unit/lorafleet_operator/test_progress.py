"""Figures of the runtime in status fields: rounded, finite, in the strict schema."""

import math

from lorafleet_api.v1alpha1.status import AdapterRunStatus
from lorafleet_operator.reconcile.run import plan_run
from support.operator_world import SETTINGS, T0, UID, condition, held, listing, run_object, seen, view


def test_every_figure_lands_in_its_field() -> None:
    full = view(
        step=7, start_step=2, slot=1, weight_version=6, accumulated_groups=3, steps_per_minute=4.26789,
        reward_mean=0.87654321, lr=1e-3, grad_norm=1.23456789, mismatch=6.789e-6, buffered=2, restarts=1,
        last_step_time=T0 + 5, estimated_completion_time=T0 + 65.9, start_time=T0,
        artifact={"path": "/s", "step": 5, "digest": "ab"},
        dropped={"stale": 1, "filtered": 2, "aborted": 3, "rewardError": 4},
    )  # fmt: skip
    status = plan_run(seen(run_object(), listing(full, engine=held(), trainer={1: UID})), SETTINGS).status
    assert status is not None
    assert {key: value for key, value in status.items() if key != "conditions"} == {
        "observedGeneration": 1, "slot": 1, "bootEpoch": 1, "weightVersion": 6, "step": 7, "startStep": 2,
        "targetStep": 15, "accumulatedGroups": 3, "groupsPerStep": 8, "stepsPerMinute": 4.27, "rewardMean": 0.8765,
        "lr": 0.001, "gradNorm": 1.23457, "mismatch": 6.79e-06, "buffered": 2, "restarts": 1,
        "startTime": "2026-11-29T12:00:00Z",
        "lastStepTime": "2026-11-29T12:00:05Z", "estimatedCompletionTime": "2026-11-29T12:01:05Z",
        "artifact": {"path": "/s", "step": 5, "digest": "ab"},
        "dropped": {"stale": 1, "filtered": 2, "aborted": 3, "rewardError": 4},
    }  # fmt: skip
    AdapterRunStatus.model_validate(status)


def test_nan_and_infinity_are_left_out() -> None:
    sick = view(grad_norm=math.nan, reward_mean=math.inf, lr=-math.inf, estimated_completion_time=math.inf)
    status = plan_run(seen(run_object(), listing(sick)), SETTINGS).status
    assert status is not None
    assert not {"gradNorm", "rewardMean", "lr", "estimatedCompletionTime"} & status.keys()


def test_eta_and_speed_go_when_the_run_does_not_train() -> None:
    training = listing(view(steps_per_minute=4.0, estimated_completion_time=T0 + 60))
    status = plan_run(seen(run_object(), training), SETTINGS).status
    suspended = listing(view("SUSPENDED", outcome="Suspended", registered=False, steps_per_minute=4.0))
    run = run_object(suspend=True, status=status)
    later = plan_run(seen(run, suspended), SETTINGS).status
    assert later is not None
    assert not {"stepsPerMinute", "estimatedCompletionTime", "slot"} & later.keys()


def test_skipped_rows_show_in_a_field_and_in_the_message() -> None:
    training = view(usable_rows=62, skipped_rows=2, message="training in slot 0")
    status = plan_run(seen(run_object(), listing(training)), SETTINGS).status
    assert status is not None
    AdapterRunStatus.model_validate(status)
    assert (status["usableRows"], status["skippedRows"]) == (62, 2)
    message = condition(status, "Ready")["message"]
    assert message == "training in slot 0; 2 rows of 'd.jsonl' are skipped, their prompts are too long"
    ended = listing(view("COMPLETED", outcome="Complete", registered=False))
    later = plan_run(seen(run_object(status=status), ended), SETTINGS).status
    assert later is not None
    assert (later["usableRows"], later["skippedRows"]) == (62, 2)


def test_queue_position_is_there_only_while_queued() -> None:
    queued = plan_run(seen(run_object(), listing(view("QUEUED", queue_position=3))), SETTINGS).status
    assert queued is not None
    assert queued["queuePosition"] == 3
    training = plan_run(seen(run_object(status=queued), listing(view())), SETTINGS).status
    assert training is not None
    assert "queuePosition" not in training


def test_reason_that_the_schema_would_refuse_is_replaced() -> None:
    status = plan_run(seen(run_object(), listing(view("PENDING", reason="no good!"))), SETTINGS).status
    assert status is not None
    AdapterRunStatus.model_validate(status)
