"""A story ends well only when everything that it waits for comes true, and never holds up the others."""

from typing import Any

from lorafleet_local.kubectl import KubectlError
from lorafleet_local.stories import Expect, Stories, Story, StoryError, Waits
from support.snapshots import World


def story(name: str, *expects: Expect, error: str | None = None) -> Story:
    def begin(stories: Stories) -> Waits:
        stories.say(name, "begins")
        for expect in expects:
            _ = yield expect  # not `yield from`: a tuple takes no snapshot
        if error is not None:
            raise StoryError(error)
        return "all came true"

    return Story(name, f"run-{name}", "did", "expected", begin)


def step(run: str, wanted: int, seconds: float = 100.0, **more: Any) -> Expect:
    return Expect(f"step {wanted} of {run}", lambda snapshot: snapshot.step(run) >= wanted, seconds, **more)


def test_a_story_goes_on_when_its_wait_is_over() -> None:
    world = World()
    said: list[str] = []
    stories = Stories([story("a", step("one", 1), step("one", 2))], said.append)
    world.train("one", 0)
    for done in (0, 1, 2):
        world.set("one", step=done)
        stories.advance(world.snapshot())
    stories.advance(world.snapshot())
    told = stories.story("a")
    assert (told.ok, told.happened, stories.over) == (True, "all came true", True)
    assert said == ["[a] begins", "[a] ok: all came true"]


def test_a_deadline_fails_that_story_and_says_what_was_seen() -> None:
    world = World()
    stories = Stories([story("a", step("run-a", 1, seconds=3.0)), story("b", step("one", 1))], lambda line: None)
    world.set("run-a", conditions={"Ready": ("False", "SlotsExhausted", "position 2")})
    world.train("one", 0)
    for done in range(6):
        world.set("one", step=done)
        stories.advance(world.snapshot())
    assert stories.story("a").happened == (
        "step 1 of run-a: not within 3 s; run-a is at step 0, Ready=False (SlotsExhausted) position 2"
    )
    assert [s.ok for s in stories.all] == [False, True]


def test_what_must_not_be_seen_ends_a_wait_at_once() -> None:
    world = World()
    expect = step("one", 9, never=lambda snapshot: "it failed" if snapshot.is_true("one", "Failed") else None)
    stories = Stories([story("a", expect)], lambda line: None)
    world.train("one", 0)
    stories.advance(world.snapshot())
    world.set("one", conditions={"Failed": ("True", "RewardError", "x")})
    stories.advance(world.snapshot())
    stories.advance(world.snapshot())
    assert stories.story("a").happened == "while waiting for step 9 of one: it failed"


def test_a_story_error_is_its_outcome() -> None:
    stories = Stories([story("a", error="another turn")], lambda line: None)
    stories.advance(World().snapshot())
    assert (stories.story("a").ok, stories.story("a").happened) == (False, "another turn")


def test_a_kubectl_that_fails_ends_its_story_only() -> None:
    def begin(stories: Stories) -> Waits:
        yield step("one", 0)
        raise KubectlError("kubectl patch: exit 1: refused")

    world = World()
    stories = Stories([Story("a", "run-a", "did", "expected", begin), story("b")], lambda line: None)
    stories.advance(world.snapshot())
    stories.advance(world.snapshot())
    assert (stories.story("a").happened, stories.story("b").ok) == ("kubectl patch: exit 1: refused", True)


def test_steps_that_go_back_and_restarts_are_faults() -> None:
    world = World()
    stories = Stories([], lambda line: None)
    world.train("one", 0, step=3)
    stories.advance(world.snapshot())
    assert stories.faults == []
    world.set("one", step=2, restarts=1)
    stories.advance(world.snapshot())
    stories.advance(world.snapshot())
    assert stories.faults == ["one went back from step 3 to 2 at 2.0 s", "one restarted 1 times"]


def test_neighbours_are_those_that_trained_when_it_began() -> None:
    world = World()
    stories = Stories([story("a", step("run-a", 1))], lambda line: None)
    world.train("one", 0, step=3)
    world.train("run-a", 1)
    world.set("waits")
    stories.advance(world.snapshot())
    world.set("one", step=5)
    world.set("run-a", step=1)
    stories.advance(world.snapshot())
    assert stories.story("a").neighbours == {"one": (3, 5)}
    stories.judge_neighbours({"one": 5})
    assert stories.story("a").ok


def test_a_neighbour_that_stood_still_spoils_the_story() -> None:
    world = World()
    stories = Stories([story("a")], lambda line: None)
    world.train("one", 0, step=3)
    stories.advance(world.snapshot())
    stories.judge_neighbours({"one": 3})
    assert (stories.story("a").ok, stories.story("a").happened) == (False, "all came true; no step afterwards: one")
