"""The four stories of `make demo-full`, each told in the order in which a user would see it.

Called by `demo_full`. Each says what it did and saw through the director, and raises StoryError on another turn.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from lorafleet_api.v1alpha1.reasons import SLOTS_EXHAUSTED
from lorafleet_local.kubectl import Kubectl
from lorafleet_local.pool import POOL_NAME
from lorafleet_local.stories import Director, Expect, Look, Part, Story, StoryError, Telling

_TURN_SECONDS = 420.0
"""Until a story's turn comes; the stories before it have deadlines of their own."""
_SLOT_SECONDS = 240.0
"""In the queue, and from a free slot to Registered."""
_STEPS_SECONDS = 180.0
_END_SECONDS = 60.0
RAISED = "string indices must be integers"
"""What Python says of `lorafleet_local.rewards.broken`."""
PAUSE_AT = 2
"""Steps before the suspension."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What the stories act with."""

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


def stories(scene: Scene) -> list[Story]:
    """The stories, in the order in which they begin."""
    return [
        Story(
            "late", scene.runs["late"], "kubectl apply while three runs train",
            "gets the free slot at once, trains beside them, completes, deregisters",
            lambda director: _late(scene, director),
        ),
        Story(
            "paused", scene.runs["paused"], "applied to a full pool; patched suspend: true, later suspend: false",
            "queues with a position; Suspended gives the slot back; resumes at the same step and completes",
            lambda director: _paused(scene, director),
        ),
        Story(
            "deleted", scene.runs["deleted"], "applied to a full pool; kubectl delete after its first step",
            "queues; the object goes once nobody holds the run; no trace in GET /v1/adapters; an Event on the pool",
            lambda director: _deleted(scene, director),
        ),
        Story(
            "broken", scene.runs["broken"], "applied with a reward function that raises",
            "queues; Failed with RewardError and the exception's text; holds no slot",
            lambda director: _broken(scene, director),
        ),
    ]  # fmt: skip


def _late(scene: Scene, director: Director) -> Telling:
    run = scene.runs["late"]
    look = yield Expect("a step of each of the three", lambda look: _all_stepped(look, scene.three), _TURN_SECONDS)
    slots = look.listing.slots
    if slots.used >= slots.total:
        raise StoryError(f"{slots.used} of {slots.total} slots are used: none is free for a late joiner")
    director.tell("late", f"{slots.used} of {slots.total} slots are used")
    scene.apply("late")
    look = yield _true(run, "Registered", _SLOT_SECONDS, _not_queued(run))
    uid, slot = _uid(look, run), _view_slot(look, run)
    director.tell("late", f"Registered in slot {slot}; {look.listing.slots.used} of {look.listing.slots.total} used")
    yield _true(run, "Complete", _STEPS_SECONDS, _not_failed(run))
    look = yield from _deregistered(run, uid)
    _expect_target(look, run)
    return f"Registered in slot {slot}, {look.step(run)} steps, Complete, Deregistered"


def _paused(scene: Scene, director: Director) -> Telling:
    run = scene.runs["paused"]
    yield _turn(director, "late", lambda look: look.is_true(scene.runs["late"], "Registered"))
    look = yield from _queue(scene, director, "paused")
    queued = _registered(look, run)
    look = yield _true(run, "Registered", _SLOT_SECONDS, _not_failed(run))
    uid = _uid(look, run)
    director.tell("paused", f"Registered in slot {_view_slot(look, run)}")
    yield _step(run, PAUSE_AT)
    director.tell("paused", f"kubectl patch adapterrun {run}: suspend: true")
    scene.patch("paused", suspend=True)
    yield _true(run, "Suspended", _END_SECONDS, _not_failed(run))
    look = yield Expect(f"the end of {uid} on trainer and engines", lambda look: not look.traces(uid), _END_SECONDS)
    at = look.step(run)
    if (slot := _view_slot(look, run)) is not None:
        raise StoryError(f"Suspended, but the runtime still counts slot {slot} as its own")
    director.tell("paused", f"Suspended at step {at}; its slot is free for the next in the queue")
    look = yield Expect("the end of the stories behind it", lambda look: _others_over(director), _TURN_SECONDS)
    if look.step(run) != at or not look.is_true(run, "Suspended"):
        raise StoryError(f"Suspended at step {at}, but it is at step {look.step(run)} now")
    director.tell("paused", f"kubectl patch adapterrun {run}: suspend: false")
    scene.patch("paused", suspend=False)
    look = yield _true(run, "Registered", _SLOT_SECONDS, _not_below(run, at))
    director.tell("paused", f"Registered again, at step {look.step(run)}")
    yield _true(run, "Complete", _STEPS_SECONDS, _not_below(run, at))
    look = yield from _deregistered(run, uid)
    _expect_target(look, run)
    return f"{queued}; suspended at step {at}, slot given back, resumed at {at}, Complete at {look.step(run)}"


def _deleted(scene: Scene, director: Director) -> Telling:
    run = scene.runs["deleted"]
    yield _turn(director, "paused", lambda look: _is_placed(look, scene.runs["paused"]))
    look = yield from _queue(scene, director, "deleted")
    queued = _registered(look, run)
    look = yield _true(run, "Registered", _TURN_SECONDS, _not_failed(run))
    uid = _uid(look, run)
    look = yield _step(run, 1)
    step, held = look.step(run), look.traces(uid)
    if not held:
        raise StoryError(f"trained a step, but neither trainer nor engine lists {uid}")
    director.tell("deleted", f"kubectl delete adapterrun {run}, at step {step}, held by {_places(held, uid)}")
    scene.kubectl("delete", "adapterrun", run, "--wait=false")
    look = yield Expect(f"the end of {run}", lambda look: run not in look.items, _END_SECONDS)
    if left := look.traces(uid):
        raise StoryError(f"the object is gone, but held by {_places(left, uid)}")
    yield Expect(f"{uid} gone from GET /v1/adapters", lambda look: look.view(run) is None, _END_SECONDS)
    director.tell("deleted", "object gone, finalizer released; neither trainer, engines nor runtime list it")
    found: list[str] = []
    yield Expect("an Event on the pool", lambda look: _found(scene.pool_event(uid), found), _END_SECONDS)
    told = found[0].replace(f" ({uid})", "").partition(", artifact")[0]
    return f"{queued}; deleted at step {step}, held nowhere; Event on the pool: {told}"


def _broken(scene: Scene, director: Director) -> Telling:
    run = scene.runs["broken"]
    yield _turn(director, "deleted", lambda look: _is_placed(look, scene.runs["deleted"]))
    look = yield from _queue(scene, director, "broken")
    queued = _registered(look, run)
    look = yield _true(run, "Failed", _TURN_SECONDS, _not_complete(run))
    uid, failed = _uid(look, run), look.condition(run, "Failed")
    said = f"{failed['reason']}: {failed['message']}"
    director.tell("broken", f"Failed: {said}")
    if failed["reason"] != "RewardError" or RAISED not in failed["message"]:
        raise StoryError(f"Failed with {said}; expected RewardError and {RAISED!r}")
    look = yield from _deregistered(run, uid)
    if look.step(run) != 0:
        raise StoryError(f"it failed in its first batch, but counts {look.step(run)} steps")
    if (slot := _view_slot(look, run)) is not None:
        raise StoryError(f"Deregistered, but the runtime still counts slot {slot} as its own")
    return f"{queued}; {said}; no slot, held nowhere"


def _true(run: str, kind: str, seconds: float, sure: Callable[[Look], str | None]) -> Expect:
    return Expect(f"{run} {kind}", lambda look: look.is_true(run, kind), seconds, sure)


def _step(run: str, step: int) -> Expect:
    return Expect(f"step {step} of {run}", lambda look: look.step(run) >= step, _STEPS_SECONDS, _not_failed(run))


def _turn(director: Director, before: str, holds: Callable[[Look], bool]) -> Expect:
    story = director.story(before)
    return Expect(f"its turn, after {before}", lambda look: story.over or holds(look), _TURN_SECONDS)


def _queue(scene: Scene, director: Director, name: str) -> Part:
    """Apply, and wait for the queue position, or for the slot where one was free."""
    run = scene.runs[name]
    assert director.look is not None
    slots = director.look.listing.slots
    director.tell(name, f"{slots.used} of {slots.total} slots are used, {slots.queued} queued")
    scene.apply(name)

    what = f"a queue position or a slot for {run}"
    look = yield Expect(what, lambda look: _is_placed(look, run), _END_SECONDS, _not_failed(run))
    director.tell(name, _registered(look, run))
    return look


def _is_placed(look: Look, run: str) -> bool:
    registered = look.condition(run, "Registered")
    return bool(registered["status"] == "True" or "position" in registered.get("message", ""))


def _registered(look: Look, run: str) -> str:
    registered = look.condition(run, "Registered")
    return "a slot was free" if registered["status"] == "True" else f"{registered['reason']}: {registered['message']}"


def _deregistered(run: str, uid: str) -> Part:
    look = yield Expect(f"{run} Deregistered", lambda look: look.is_true(run, "Deregistered"), _END_SECONDS)
    if left := look.traces(uid):
        raise StoryError(f"Deregistered, but held by {_places(left, uid)}")
    return look


def _places(held: list[str], uid: str) -> str:
    return ", ".join(place.replace(uid, "its adapter ") for place in held)


def _all_stepped(look: Look, runs: list[str]) -> bool:
    return all(look.step(run) >= 1 for run in runs)


def _others_over(director: Director) -> bool:
    return all(director.story(name).over for name in ("deleted", "broken"))


def _not_failed(run: str) -> Callable[[Look], str | None]:
    def sure(look: Look) -> str | None:
        failed = look.condition(run, "Failed")
        return f"Failed: {failed['reason']}: {failed['message']}" if failed["status"] == "True" else None

    return sure


def _not_queued(run: str) -> Callable[[Look], str | None]:
    def sure(look: Look) -> str | None:
        registered = look.condition(run, "Registered")
        queued = registered["reason"] == SLOTS_EXHAUSTED
        return f"it queues though a slot is free: {registered['message']}" if queued else _not_failed(run)(look)

    return sure


def _not_below(run: str, step: int) -> Callable[[Look], str | None]:
    def sure(look: Look) -> str | None:
        return f"it went back from step {step} to {look.step(run)}" if look.step(run) < step else _not_failed(run)(look)

    return sure


def _not_complete(run: str) -> Callable[[Look], str | None]:
    return lambda look: "it completed" if look.is_true(run, "Complete") else None


def _found(value: str | None, into: list[str]) -> bool:
    if value is not None:
        into.append(value)
    return value is not None


def _uid(look: Look, run: str) -> str:
    return str(look.items[run]["metadata"]["uid"])


def _view_slot(look: Look, run: str) -> int | None:
    view = look.view(run)
    return None if view is None else view.slot


def _expect_target(look: Look, run: str) -> None:
    status = look.items[run]["status"]
    if status["step"] != status["targetStep"]:
        raise StoryError(f"Complete at step {status['step']} of {status['targetStep']}")
