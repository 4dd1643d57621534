"""Each story of `make demo-full` believes only what trainer, engines and objects show."""

import json

import pytest
import yaml

from lorafleet_local import demo_stories, rewards
from lorafleet_local.demo_stories import RAISED, Scene, stories
from lorafleet_local.paths import repo_root
from lorafleet_local.stories import Director, Story
from support.looks import World

THREE = ["addition", "json", "sentence"]
QUEUED = {"Registered": ("False", "SlotsExhausted", "position 1 of 1 in the queue")}


class Stage:
    """The stories on a world whose kubectl only notes what it was told."""

    def __init__(self, only: str) -> None:
        self.world = World()
        self.commands: list[str] = []
        self.event: str | None = None
        scene = Scene(
            kubectl=self.kubectl,  # type: ignore[arg-type]
            apply=lambda name: self.commands.append(f"apply {name}"),
            runs={name: name for name in ("late", "paused", "deleted", "broken")},
            three=THREE,
        )
        self.director = Director(stories(scene), lambda line: None)
        for story in self.director.stories:
            if story.name != only:
                story.ended, story.ok = 0.0, True  # over, so that it is this one's turn
        for slot, name in enumerate(THREE):
            self.world.train(name, slot, step=1)
        self.look()  # to the first wait

    def kubectl(self, *arguments: str) -> str:
        self.commands.append(" ".join(arguments))
        return json.dumps({"items": [] if self.event is None else [{"message": self.event}]})

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.director.advance(self.world.look())

    def story(self, name: str) -> Story:
        return self.director.story(name)


def play_late(stage: Stage) -> None:
    stage.look()
    assert stage.commands == ["apply late"]
    stage.world.train("late", 3)
    stage.look()
    stage.world.leave(
        "late", "COMPLETED", Complete=("True", "Completed", ""), Deregistered=("True", "Deregistered", "")
    )
    stage.world.set("late", step=4, target=4)


def test_the_late_joiner_gets_the_free_slot_and_leaves() -> None:
    stage = Stage("late")
    play_late(stage)
    stage.look(2)
    assert stage.story("late").happened == "Registered in slot 3, 4 steps, Complete, Deregistered"


def test_a_late_joiner_that_stays_on_an_engine_is_seen() -> None:
    stage = Stage("late")
    play_late(stage)
    stage.world.set("late", held=True, slot=3)
    stage.look(2)
    assert not stage.story("late").ok
    assert "Deregistered, but held by trainer slot 3" in stage.story("late").happened


def test_a_late_joiner_that_queues_beside_a_free_slot_is_seen() -> None:
    stage = Stage("late")
    stage.look()
    stage.world.set("late", conditions=QUEUED)
    stage.look()
    assert "it queues though a slot is free" in stage.story("late").happened


def play_paused(stage: Stage, resumed_at: int) -> None:
    stage.look()
    stage.world.set("paused", conditions=QUEUED)
    stage.look()
    stage.world.train("paused", 3)
    stage.look()
    stage.world.set("paused", step=2, target=5)
    stage.look()
    assert '{"spec": {"suspend": true}}' in stage.commands[-1]
    stage.world.leave("paused", "SUSPENDED", Suspended=("True", "Suspended", ""))
    stage.look(3)
    assert '{"spec": {"suspend": false}}' in stage.commands[-1]
    stage.world.train("paused", 3, step=resumed_at)
    stage.world.set("paused", conditions={"Suspended": ("False", "", "")})
    stage.look()


def test_a_suspended_run_goes_on_where_it_stood() -> None:
    stage = Stage("paused")
    play_paused(stage, resumed_at=2)
    stage.world.leave("paused", "COMPLETED", Complete=("True", "", ""), Deregistered=("True", "", ""))
    stage.world.set("paused", step=5)
    stage.look(2)
    assert stage.story("paused").ok, stage.story("paused").happened
    assert "position 1 of 1 in the queue; suspended at step 2" in stage.story("paused").happened


def test_a_resumed_run_that_begins_anew_is_seen() -> None:
    stage = Stage("paused")
    play_paused(stage, resumed_at=0)
    assert "it went back from step 2 to 0" in stage.story("paused").happened
    assert stage.director.faults == [f"paused went back from step 2 to 0 at {stage.world.at:.1f} s"]


def test_a_suspended_run_that_keeps_its_slot_is_seen() -> None:
    stage = Stage("paused")
    stage.look()
    stage.world.train("paused", 3)
    stage.look(2)
    stage.world.set("paused", step=2)
    stage.look()
    stage.world.leave("paused", "SUSPENDED", Suspended=("True", "Suspended", ""))
    stage.world.set("paused", slot=3)
    stage.look(2)
    assert "still counts slot 3" in stage.story("paused").happened


def play_deleted(stage: Stage) -> None:
    stage.look()
    stage.world.set("deleted", conditions=QUEUED)
    stage.look()
    stage.world.train("deleted", 3)
    stage.look()
    stage.world.set("deleted", step=1)
    stage.look()
    assert stage.commands[-1] == "delete adapterrun deleted --wait=false"


def test_a_deleted_run_leaves_only_an_event() -> None:
    stage = Stage("deleted")
    play_deleted(stage)
    del stage.world.runs["deleted"]
    stage.look(3)
    assert not stage.story("deleted").over
    stage.event = "AdapterRun default/deleted (uid-deleted) deregistered at step 1 of 200, artifact x"
    stage.look()
    assert stage.story("deleted").ok, stage.story("deleted").happened
    assert stage.story("deleted").happened.endswith("AdapterRun default/deleted deregistered at step 1 of 200")


def test_a_deleted_run_that_the_trainer_keeps_is_seen() -> None:
    stage = Stage("deleted")
    play_deleted(stage)
    look = stage.world.look()
    stage.director.advance(type(look)(look.at, {name: look.items[name] for name in THREE}, look.listing))
    assert "the object is gone, but held by trainer slot 3" in stage.story("deleted").happened


@pytest.mark.parametrize(
    ("reason", "message", "ok"),
    [
        ("RewardError", f"TypeError: {RAISED}, not 'str'", True),
        ("RewardError", "timed out", False),
        ("DataError", f"TypeError: {RAISED}", False),
    ],
)
def test_a_broken_reward_is_told_by_its_own_words(reason: str, message: str, ok: bool) -> None:
    stage = Stage("broken")
    stage.look()
    stage.world.set("broken", conditions=QUEUED)
    stage.look()
    stage.world.leave("broken", "FAILED", Failed=("True", reason, message), Deregistered=("True", "", ""))
    stage.look(2)
    assert stage.story("broken").over
    assert stage.story("broken").ok is ok


def test_the_broken_reward_raises_what_its_story_expects() -> None:
    with pytest.raises(TypeError, match=RAISED):
        rewards.broken(prompt="1 + 2 =", response="3", label="3", metadata={}, truncated=False)


@pytest.mark.parametrize("name", ["late", "paused", "deleted", "broken"])
def test_its_manifest_says_what_the_story_needs(name: str) -> None:
    document = yaml.safe_load((repo_root() / "manifests" / "examples" / "demo-full" / f"{name}.yaml").read_text())
    spec = document["spec"]
    assert document["metadata"]["name"] == name
    assert spec["customRmPath"] == f"lorafleet_local.rewards.{'broken' if name == 'broken' else 'addition'}"
    assert spec["numStep"] > demo_stories.PAUSE_AT
