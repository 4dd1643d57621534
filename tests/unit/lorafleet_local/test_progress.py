"""What the demo prints about a run comes from its status."""

import datetime
import io
from typing import Any

from rich.console import Console

from lorafleet_local.progress import Progress, eta, line
from lorafleet_local.report import Reporter


def item(ready: str = "Training", deregistered: str = "False", **status: Any) -> dict[str, Any]:
    conditions = [
        {"type": "Ready", "status": "True", "reason": ready, "message": ""},
        {"type": "Deregistered", "status": deregistered, "reason": "InUse", "message": ""},
    ]
    return {"metadata": {"name": "addition"}, "status": {"conditions": conditions, **status}}


def printed(*updates: list[dict[str, Any]]) -> list[str]:
    output = io.StringIO()
    with Progress(Reporter(Console(file=output, width=200, highlight=False))) as progress:
        for update in updates:
            progress.update(update)
    return [text.split("] ", 1)[1].rstrip() for text in output.getvalue().splitlines()]


def test_a_line_names_step_target_reward_and_version() -> None:
    text = line(item(step=3, targetStep=15, rewardMean=0.4567, weightVersion=4))
    assert text.split() == ["addition", "Training", "step", "3/15", "reward", "0.457", "version", "4", "ETA", "-"]


def test_an_object_without_status_is_shown_as_pending() -> None:
    assert line({"metadata": {"name": "new"}}).split()[:2] == ["new", "Pending"]


def test_off_a_terminal_a_step_is_printed_once() -> None:
    first, second = item(step=1, targetStep=2), item(step=2, targetStep=2)
    assert len(printed([first], [first], [second], [second])) == 2


def test_a_change_of_state_is_printed() -> None:
    done = item(step=2, targetStep=2, ready="Completed")
    gone = item(step=2, targetStep=2, ready="Completed", deregistered="True")
    assert [text.split()[1] for text in printed([done], [gone])] == ["Completed", "Deregistered"]


def test_eta_is_the_time_left() -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=125.9)
    assert eta(item(estimatedCompletionTime=until.strftime("%Y-%m-%dT%H:%M:%SZ"))) in ("2:04", "2:05")


def test_eta_in_the_past_is_zero() -> None:
    assert eta(item(estimatedCompletionTime="2020-01-01T00:00:00Z")) == "0:00"
