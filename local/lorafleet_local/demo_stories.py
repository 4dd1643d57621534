"""The four stories of `make demo-full`, each in the order in which a user would see it.

Called by `demo_full`. Each says what it does and saw, and raises StoryError on another turn.
"""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

from lorafleet_api.v1alpha1.reasons import SLOTS_EXHAUSTED
from lorafleet_local.kubectl import Kubectl
from lorafleet_local.pool import POOL_NAME
from lorafleet_local.stories import Expect, Snapshot, Stories, Story, StoryError, Waits

_TURN_SECONDS = 420.0
"""Until a story's turn, or its slot, comes; the stories before it have deadlines of their own."""
_SLOT_SECONDS = 240.0
"""From a free slot to Registered."""
_STEPS_SECONDS = 180.0
_END_SECONDS = 60.0
RAISED = "string indices must be integers"
"""What Python says of `lorafleet_local.rewards.broken`."""
PAUSE_AT = 2
"""Steps before the suspension."""


@dataclass(frozen=True, slots=True)
class Actions:
    """What the stories do."""

    kubectl: Kubectl
    apply: Callable[[str], None]
    """Applies the manifest of that story's run."""
    runs: dict[str, str]
    """metadata.name of each story's run."""
    three: list[str]
    """The demo's own runs."""

    def patch(self, name: str, *, suspend: bool) -> None:
        """kubectl patch spec.suspend."""
        body = json.dumps({"spec": {"suspend": suspend}})
        self.kubectl("patch", "adapterrun", self.runs[name], "--type=merge", "-p", body)

    def pool_event(self, uid: str) -> str | None:
        """The message of the Event on the pool that says that this run is deregistered."""
        chosen = f"involvedObject.kind=AdapterPool,involvedObject.name={POOL_NAME},reason=Deregistered"
        events = json.loads(self.kubectl("get", "events", f"--field-selector={chosen}", "-o", "json"))["items"]
        return next((str(event["message"]) for event in events if uid in event["message"]), None)


def demo_stories(actions: Actions) -> list[Story]:
    """The stories, in the order in which they begin; the queue may serve them in another.

    Runs that were made in the same second have no order of their own.
    """
    return [
        Story(
            "late", actions.runs["late"], "applied while three train",
            "the free slot at once; Complete",
            lambda stories: _late(actions, stories),
        ),
        Story(
            "paused", actions.runs["paused"], "applied to a full pool; suspended, later resumed",
            "queues; gives its slot back; goes on at its step; Complete",
            lambda stories: _paused(actions, stories),
        ),
        Story(
            "deleted", actions.runs["deleted"], "applied to a full pool; deleted after a step",
            "queues; gone everywhere; an Event on the pool",
            lambda stories: _deleted(actions, stories),
        ),
        Story(
            "broken", actions.runs["broken"], "applied with a reward that raises",
            "queues; Failed with the exception's text; no step",
            lambda stories: _broken(actions, stories),
        ),
    ]  # fmt: skip


def _late(actions: Actions, stories: Stories) -> Waits:
    run = actions.runs["late"]
    snapshot = yield Expect(
        "a step of each of the three", lambda snapshot: _all_stepped(snapshot, actions.three), _TURN_SECONDS
    )
    slots = snapshot.listing.slots
    if slots.used >= slots.total:
        raise StoryError(f"{slots.used} of {slots.total} slots are used: none is free for a late joiner")
    stories.say("late", f"{slots.used} of {slots.total} slots are used")
    actions.apply("late")
    snapshot = yield _true(run, "Registered", _SLOT_SECONDS, _not_queued(run))
    uid, slot = _uid(snapshot, run), _view_slot(snapshot, run)
    stories.say(
        "late", f"Registered in slot {slot}; {snapshot.listing.slots.used} of {snapshot.listing.slots.total} used"
    )
    yield _true(run, "Complete", _STEPS_SECONDS, _not_failed(run))
    snapshot = yield from _deregistered(run, uid)
    _expect_target(snapshot, run)
    return f"slot {slot} at once, {snapshot.step(run)} steps, Complete"


def _paused(actions: Actions, stories: Stories) -> Waits:
    run = actions.runs["paused"]
    yield _turn(stories, "late", lambda snapshot: snapshot.is_true(actions.runs["late"], "Registered"))
    snapshot = yield from _queue(actions, stories, "paused")
    queued = _placed(snapshot, run)
    snapshot = yield _true(run, "Registered", _TURN_SECONDS, _not_failed(run))
    uid = _uid(snapshot, run)
    stories.say("paused", f"Registered in slot {_view_slot(snapshot, run)}")
    yield _step(run, PAUSE_AT)
    stories.say("paused", f"kubectl patch adapterrun {run}: suspend: true")
    actions.patch("paused", suspend=True)
    yield _true(run, "Suspended", _END_SECONDS, _not_failed(run))
    snapshot = yield Expect(
        f"the end of {uid} on trainer and engines", lambda snapshot: not snapshot.traces(uid), _END_SECONDS
    )
    at = snapshot.step(run)
    if (slot := _view_slot(snapshot, run)) is not None:
        raise StoryError(f"Suspended, but the runtime still counts slot {slot} as its own")
    stories.say("paused", f"Suspended at step {at}; its slot is free for another")
    snapshot = yield Expect("the end of the other stories", lambda snapshot: _others_over(stories), _TURN_SECONDS)
    if snapshot.step(run) != at or not snapshot.is_true(run, "Suspended"):
        raise StoryError(f"Suspended at step {at}, but it is at step {snapshot.step(run)} now")
    stories.say("paused", f"kubectl patch adapterrun {run}: suspend: false")
    actions.patch("paused", suspend=False)
    snapshot = yield _true(run, "Registered", _SLOT_SECONDS, _not_below(run, at))
    stories.say("paused", f"Registered again, at step {snapshot.step(run)}")
    yield _true(run, "Complete", _STEPS_SECONDS, _not_below(run, at))
    snapshot = yield from _deregistered(run, uid)
    _expect_target(snapshot, run)
    return f"{queued}; suspended at step {at}, slot given back, resumed at {at}, Complete at {snapshot.step(run)}"


def _deleted(actions: Actions, stories: Stories) -> Waits:
    run = actions.runs["deleted"]
    yield _turn(stories, "paused", lambda snapshot: _is_placed(snapshot, actions.runs["paused"]))
    snapshot = yield from _queue(actions, stories, "deleted")
    queued = _placed(snapshot, run)
    snapshot = yield _true(run, "Registered", _TURN_SECONDS, _not_failed(run))
    uid = _uid(snapshot, run)
    snapshot = yield _step(run, 1)
    step, held = snapshot.step(run), snapshot.traces(uid)
    if not held:
        raise StoryError(f"trained a step, but neither trainer nor engine lists {uid}")
    stories.say("deleted", f"kubectl delete adapterrun {run}, at step {step}, held by {_places(held, uid)}")
    actions.kubectl("delete", "adapterrun", run, "--wait=false")
    snapshot = yield Expect(f"the end of {run}", lambda snapshot: run not in snapshot.items, _END_SECONDS)
    if left := snapshot.traces(uid):
        raise StoryError(f"the object is gone, but held by {_places(left, uid)}")
    yield Expect(f"{uid} gone from GET /v1/adapters", lambda snapshot: snapshot.view(run) is None, _END_SECONDS)
    stories.say("deleted", "object gone, finalizer released; neither trainer, engines nor runtime list it")
    found: list[str] = []
    yield Expect("an Event on the pool", lambda snapshot: _found(actions.pool_event(uid), found), _END_SECONDS)
    stories.say("deleted", f"Event on the pool: {found[0]}")
    return f"{queued}; deleted at step {step}, held nowhere, Event on the pool"


def _broken(actions: Actions, stories: Stories) -> Waits:
    run = actions.runs["broken"]
    yield _turn(stories, "deleted", lambda snapshot: _is_placed(snapshot, actions.runs["deleted"]))
    snapshot = yield from _queue(actions, stories, "broken")
    queued = _placed(snapshot, run)
    snapshot = yield _true(run, "Failed", _TURN_SECONDS, _not_complete(run))
    uid, failed = _uid(snapshot, run), snapshot.condition(run, "Failed")
    said = f"{failed['reason']}: {failed['message']}"
    stories.say("broken", f"Failed: {said}")
    if failed["reason"] != "RewardError" or RAISED not in failed["message"]:
        raise StoryError(f"Failed with {said}; expected RewardError and {RAISED!r}")
    snapshot = yield from _deregistered(run, uid)
    if snapshot.step(run) != 0:
        raise StoryError(f"it failed in its first batch, but counts {snapshot.step(run)} steps")
    if (slot := _view_slot(snapshot, run)) is not None:
        raise StoryError(f"Deregistered, but the runtime still counts slot {slot} as its own")
    text = re.search(rf"\w+: {re.escape(RAISED)}[^;]*", failed["message"])
    return f"{queued}; {failed['reason']}: {text.group() if text else RAISED}"


def _true(run: str, kind: str, seconds: float, never: Callable[[Snapshot], str | None]) -> Expect:
    return Expect(f"{run} {kind}", lambda snapshot: snapshot.is_true(run, kind), seconds, never)


def _step(run: str, step: int) -> Expect:
    return Expect(
        f"step {step} of {run}", lambda snapshot: snapshot.step(run) >= step, _STEPS_SECONDS, _not_failed(run)
    )


def _turn(stories: Stories, before: str, holds: Callable[[Snapshot], bool]) -> Expect:
    story = stories.story(before)
    return Expect(f"its turn, after {before}", lambda snapshot: story.over or holds(snapshot), _TURN_SECONDS)


def _queue(actions: Actions, stories: Stories, name: str) -> Generator[Expect, Snapshot, Snapshot]:
    """Apply, and wait for the queue position, or for the slot where one was free."""
    run = actions.runs[name]
    assert stories.newest is not None
    slots = stories.newest.listing.slots
    stories.say(name, f"{slots.used} of {slots.total} slots are used, {slots.queued} queued")
    actions.apply(name)

    what = f"a queue position or a slot for {run}"
    snapshot = yield Expect(what, lambda snapshot: _is_placed(snapshot, run), _END_SECONDS, _not_failed(run))
    stories.say(name, _placed(snapshot, run))
    return snapshot


def _is_placed(snapshot: Snapshot, run: str) -> bool:
    return snapshot.is_true(run, "Registered") or snapshot.queue_position(run) is not None


def _placed(snapshot: Snapshot, run: str) -> str:
    position = snapshot.queue_position(run)
    return "a slot was free" if position is None else f"queued at {position}"


def _deregistered(run: str, uid: str) -> Generator[Expect, Snapshot, Snapshot]:
    snapshot = yield Expect(f"{run} Deregistered", lambda snapshot: snapshot.is_true(run, "Deregistered"), _END_SECONDS)
    if left := snapshot.traces(uid):
        raise StoryError(f"Deregistered, but held by {_places(left, uid)}")
    return snapshot


def _places(held: list[str], uid: str) -> str:
    return ", ".join(place.replace(uid, "its adapter ") for place in held)


def _all_stepped(snapshot: Snapshot, runs: list[str]) -> bool:
    return all(snapshot.step(run) >= 1 for run in runs)


def _others_over(stories: Stories) -> bool:
    return all(stories.story(name).over for name in ("deleted", "broken"))


def _not_failed(run: str) -> Callable[[Snapshot], str | None]:
    def never(snapshot: Snapshot) -> str | None:
        failed = snapshot.condition(run, "Failed")
        return f"Failed: {failed['reason']}: {failed['message']}" if failed["status"] == "True" else None

    return never


def _not_queued(run: str) -> Callable[[Snapshot], str | None]:
    def never(snapshot: Snapshot) -> str | None:
        registered = snapshot.condition(run, "Registered")
        queued = registered["reason"] == SLOTS_EXHAUSTED
        return f"it queues though a slot is free: {registered['message']}" if queued else _not_failed(run)(snapshot)

    return never


def _not_below(run: str, step: int) -> Callable[[Snapshot], str | None]:
    def never(snapshot: Snapshot) -> str | None:
        return (
            f"it went back from step {step} to {snapshot.step(run)}"
            if snapshot.step(run) < step
            else _not_failed(run)(snapshot)
        )

    return never


def _not_complete(run: str) -> Callable[[Snapshot], str | None]:
    return lambda snapshot: "it completed" if snapshot.is_true(run, "Complete") else None


def _found(value: str | None, into: list[str]) -> bool:
    if value is not None:
        into.append(value)
    return value is not None


def _uid(snapshot: Snapshot, run: str) -> str:
    return str(snapshot.items[run]["metadata"]["uid"])


def _view_slot(snapshot: Snapshot, run: str) -> int | None:
    view = snapshot.view(run)
    return None if view is None else view.slot


def _expect_target(snapshot: Snapshot, run: str) -> None:
    status = snapshot.items[run]["status"]
    if status["step"] != status["targetStep"]:
        raise StoryError(f"Complete at step {status['step']} of {status['targetStep']}")
