"""A story ends well only when everything that it waits for comes true, and never holds up the others."""

from typing import Any

from lorafleet_local.kubectl import KubectlError
from lorafleet_local.stories import Director, Expect, Story, StoryError, Telling
from support.looks import World


def story(name: str, *expects: Expect, error: str | None = None) -> Story:
    def tell(director: Director) -> Telling:
        director.tell(name, "begins")
        for expect in expects:
            _ = yield expect  # not `yield from`: a tuple takes no look
        if error is not None:
            raise StoryError(error)
        return "all came true"

    return Story(name, f"run-{name}", "did", "expected", tell)


def step(run: str, wanted: int, seconds: float = 100.0, **more: Any) -> Expect:
    return Expect(f"step {wanted} of {run}", lambda look: look.step(run) >= wanted, seconds, **more)


def test_a_story_goes_on_when_its_wait_is_over() -> None:
    world, said = World(), []
    director = Director([story("a", step("one", 1), step("one", 2))], said.append)
    world.train("one", 0)
    for done in (0, 1, 2):
        world.set("one", step=done)
        director.advance(world.look())
    director.advance(world.look())
    told = director.story("a")
    assert (told.ok, told.happened, director.over) == (True, "all came true", True)
    assert said == ["[a] begins", "[a] ok: all came true"]


def test_a_deadline_fails_that_story_and_says_what_was_seen() -> None:
    world = World()
    director = Director([story("a", step("run-a", 1, seconds=3.0)), story("b", step("one", 1))], lambda line: None)
    world.set("run-a", conditions={"Ready": ("False", "SlotsExhausted", "position 2")})
    world.train("one", 0)
    for done in range(6):
        world.set("one", step=done)
        director.advance(world.look())
    assert director.story("a").happened == (
        "step 1 of run-a: not within 3 s; run-a is at step 0, Ready=False (SlotsExhausted) position 2"
    )
    assert [s.ok for s in director.stories] == [False, True]


def test_what_must_not_be_seen_ends_a_wait_at_once() -> None:
    world = World()
    expect = step("one", 9, sure=lambda look: "it failed" if look.is_true("one", "Failed") else None)
    director = Director([story("a", expect)], lambda line: None)
    world.train("one", 0)
    director.advance(world.look())
    world.set("one", conditions={"Failed": ("True", "RewardError", "x")})
    director.advance(world.look())
    director.advance(world.look())
    assert director.story("a").happened == "while waiting for step 9 of one: it failed"


def test_a_story_error_is_its_outcome() -> None:
    director = Director([story("a", error="another turn")], lambda line: None)
    director.advance(World().look())
    assert (director.story("a").ok, director.story("a").happened) == (False, "another turn")


def test_a_kubectl_that_fails_ends_its_story_only() -> None:
    def tell(director: Director) -> Telling:
        yield step("one", 0)
        raise KubectlError("kubectl patch: exit 1: refused")

    world = World()
    director = Director([Story("a", "run-a", "did", "expected", tell), story("b")], lambda line: None)
    director.advance(world.look())
    director.advance(world.look())
    assert (director.story("a").happened, director.story("b").ok) == ("kubectl patch: exit 1: refused", True)


def test_steps_that_go_back_and_restarts_are_faults() -> None:
    world = World()
    director = Director([], lambda line: None)
    world.train("one", 0, step=3)
    director.advance(world.look())
    assert director.faults == []
    world.set("one", step=2, restarts=1)
    director.advance(world.look())
    director.advance(world.look())
    assert director.faults == ["one went back from step 3 to 2 at 2.0 s", "one restarted 1 times"]


def test_neighbours_are_those_that_trained_when_it_began() -> None:
    world = World()
    director = Director([story("a", step("run-a", 1))], lambda line: None)
    world.train("one", 0, step=3)
    world.train("run-a", 1)
    world.set("waits")
    director.advance(world.look())
    world.set("one", step=5)
    world.set("run-a", step=1)
    director.advance(world.look())
    assert director.story("a").neighbours == {"one": (3, 5)}
    director.judge_neighbours({"one": 5})
    assert director.story("a").ok


def test_a_neighbour_that_stood_still_spoils_the_story() -> None:
    world = World()
    director = Director([story("a")], lambda line: None)
    world.train("one", 0, step=3)
    director.advance(world.look())
    director.judge_neighbours({"one": 3})
    assert (director.story("a").ok, director.story("a").happened) == (False, "all came true; no step afterwards: one")
