"""Each story of `make demo-full` believes only what trainer, engines and objects show."""

import json
from typing import Any

import pytest
import yaml
from rich.text import Text

from lorafleet_local import demo_full, rewards
from lorafleet_local import demo_stories as module
from lorafleet_local.demo_stories import RAISED, Actions, demo_stories
from lorafleet_local.paths import repo_root
from lorafleet_local.report import Reporter
from lorafleet_local.stories import Snapshot, Stories, Story
from support.snapshots import World

THREE = ["addition", "json", "sentence"]
QUEUED: dict[str, Any] = {
    "queued": 1, "conditions": {"Registered": ("False", "SlotsExhausted", "all 4 slots are taken")},
}  # fmt: skip


class Rig:
    """The stories on a world whose kubectl only notes what it was told."""

    def __init__(self, only: str) -> None:
        self.world = World()
        self.commands: list[str] = []
        self.event: str | None = None
        self.said: list[str] = []
        actions = Actions(
            kubectl=self.kubectl,  # type: ignore[arg-type]
            apply=lambda name: self.commands.append(f"apply {name}"),
            runs={name: name for name in ("late", "paused", "deleted", "broken")},
            three=THREE,
        )
        self.stories = Stories(demo_stories(actions), self.said.append)
        for story in self.stories.all:
            if story.name != only:
                story.ended, story.ok = 0.0, True  # over, so that it is this one's turn
        for slot, name in enumerate(THREE):
            self.world.train(name, slot, step=1)
        self.poll()  # to the first wait

    def kubectl(self, *arguments: str) -> str:
        self.commands.append(" ".join(arguments))
        return json.dumps({"items": [] if self.event is None else [{"message": self.event}]})

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.stories.advance(self.world.snapshot())

    def story(self, name: str) -> Story:
        return self.stories.story(name)


def until_late(rig: Rig) -> None:
    rig.poll()
    assert rig.commands == ["apply late"]
    rig.world.train("late", 3)
    rig.poll()
    rig.world.leave("late", "COMPLETED", Complete=("True", "Completed", ""), Deregistered=("True", "Deregistered", ""))
    rig.world.set("late", step=4, target=4)


def test_the_late_joiner_gets_the_free_slot_and_leaves() -> None:
    rig = Rig("late")
    until_late(rig)
    rig.poll(2)
    assert rig.story("late").happened == "slot 3 at once, 4 steps, Complete"


def test_a_late_joiner_that_stays_on_an_engine_is_seen() -> None:
    rig = Rig("late")
    until_late(rig)
    rig.world.set("late", held=True, slot=3)
    rig.poll(2)
    assert not rig.story("late").ok
    assert "Deregistered, but held by trainer slot 3" in rig.story("late").happened


def test_a_late_joiner_that_queues_beside_a_free_slot_is_seen() -> None:
    rig = Rig("late")
    rig.poll()
    rig.world.set("late", **QUEUED)
    rig.poll()
    assert "it queues though a slot is free" in rig.story("late").happened


def until_paused(rig: Rig, resumed_at: int) -> None:
    rig.poll()
    rig.world.set("paused", **QUEUED)
    rig.poll()
    rig.world.train("paused", 3)
    rig.poll()
    rig.world.set("paused", step=2, target=5)
    rig.poll()
    assert '{"spec": {"suspend": true}}' in rig.commands[-1]
    rig.world.leave("paused", "SUSPENDED", Suspended=("True", "Suspended", ""))
    rig.poll(3)
    assert '{"spec": {"suspend": false}}' in rig.commands[-1]
    rig.world.train("paused", 3, step=resumed_at)
    rig.world.set("paused", conditions={"Suspended": ("False", "", "")})
    rig.poll()


def test_a_suspended_run_goes_on_where_it_stood() -> None:
    rig = Rig("paused")
    until_paused(rig, resumed_at=2)
    rig.world.leave("paused", "COMPLETED", Complete=("True", "", ""), Deregistered=("True", "", ""))
    rig.world.set("paused", step=5)
    rig.poll(2)
    assert rig.story("paused").ok, rig.story("paused").happened
    assert rig.story("paused").happened == (
        "queued at 1; suspended at step 2, slot given back, resumed at 2, Complete at 5"
    )


def test_a_resumed_run_that_begins_anew_is_seen() -> None:
    rig = Rig("paused")
    until_paused(rig, resumed_at=0)
    assert "it went back from step 2 to 0" in rig.story("paused").happened
    assert rig.stories.faults == [f"paused went back from step 2 to 0 at {rig.world.at:.1f} s"]


def test_a_suspended_run_that_keeps_its_slot_is_seen() -> None:
    rig = Rig("paused")
    rig.poll()
    rig.world.train("paused", 3)
    rig.poll(2)
    rig.world.set("paused", step=2)
    rig.poll()
    rig.world.leave("paused", "SUSPENDED", Suspended=("True", "Suspended", ""))
    rig.world.set("paused", slot=3)
    rig.poll(2)
    assert "still counts slot 3" in rig.story("paused").happened


def until_deleted(rig: Rig) -> None:
    rig.poll()
    rig.world.set("deleted", **QUEUED)
    rig.poll()
    rig.world.train("deleted", 3)
    rig.poll()
    rig.world.set("deleted", step=1)
    rig.poll()
    assert rig.commands[-1] == "delete adapterrun deleted --wait=false"


def test_a_deleted_run_leaves_only_an_event() -> None:
    rig = Rig("deleted")
    until_deleted(rig)
    del rig.world.runs["deleted"]
    rig.poll(3)
    assert not rig.story("deleted").over
    rig.event = "AdapterRun default/deleted (uid-deleted) deregistered at step 1 of 200, artifact x"
    rig.poll()
    assert rig.story("deleted").ok, rig.story("deleted").happened
    assert rig.story("deleted").happened == "queued at 1; deleted at step 1, held nowhere, Event on the pool"


def test_a_deleted_run_that_the_trainer_keeps_is_seen() -> None:
    rig = Rig("deleted")
    until_deleted(rig)
    snapshot = rig.world.snapshot()
    rig.stories.advance(Snapshot(snapshot.at, {name: snapshot.items[name] for name in THREE}, snapshot.listing))
    assert "the object is gone, but held by trainer slot 3" in rig.story("deleted").happened


@pytest.mark.parametrize(
    ("reason", "message", "ok"),
    [
        ("RewardError", f"TypeError: {RAISED}, not 'str'", True),
        ("RewardError", "timed out", False),
        ("DataError", f"TypeError: {RAISED}", False),
    ],
)
def test_a_broken_reward_is_told_by_its_own_words(reason: str, message: str, ok: bool) -> None:
    rig = Rig("broken")
    rig.poll()
    rig.world.set("broken", **QUEUED)
    rig.poll()
    rig.world.leave("broken", "FAILED", Failed=("True", reason, message), Deregistered=("True", "", ""))
    rig.poll(2)
    assert rig.story("broken").over
    assert rig.story("broken").ok is ok


def test_the_broken_reward_raises_what_its_story_expects() -> None:
    with pytest.raises(TypeError, match=RAISED):
        rewards.broken(prompt="1 + 2 =", response="3", label="3", metadata={}, truncated=False)


@pytest.mark.parametrize("name", ["late", "paused", "deleted", "broken"])
def test_its_manifest_says_what_the_story_needs(name: str) -> None:
    document = yaml.safe_load((repo_root() / "manifests" / "examples" / "demo-full" / f"{name}.yaml").read_text())
    spec = document["spec"]
    assert document["metadata"]["name"] == name
    assert spec["customRmPath"] == f"lorafleet_local.rewards.{'broken' if name == 'broken' else 'addition'}"
    assert spec["numStep"] > module.PAUSE_AT


def test_the_queue_may_serve_another_run_first() -> None:
    rig = Rig("paused")
    rig.poll()
    rig.world.set("paused", queued=2, conditions=QUEUED["conditions"])
    rig.poll()
    rig.world.train("deleted", 3)  # made in the same second
    rig.world.at += 300.0
    rig.poll()
    rig.world.leave("deleted", "COMPLETED")
    rig.world.train("paused", 3)
    rig.poll()
    assert not rig.story("paused").over, rig.story("paused").happened


def test_a_place_in_the_queue_is_its_number_not_a_word() -> None:
    rig = Rig("deleted")
    rig.poll()
    rig.world.set("deleted", conditions={"Registered": ("False", "Pending", "no position yet")})
    before = list(rig.said)
    rig.poll()
    assert rig.said == before
    rig.world.set("deleted", queued=1)
    rig.poll()
    assert rig.said[-1] == "[deleted] queued at 1"


def test_the_table_of_a_log_is_readable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal, of 80 columns
    rig = Rig("broken")
    story = rig.story("broken")
    story.happened, story.neighbours = f"queued at 3; RewardError: TypeError: {RAISED}, not 'str'", {"json": (1, 7)}
    demo_full._print_stories(Reporter(), rig.stories)
    lines = Text.from_ansi(capsys.readouterr().out).plain.splitlines()
    rows = [line for line in lines if line.startswith(("┃", "│"))]
    assert {len(line) for line in rows} == {120}
    assert len(rows) <= 4 * 4, "a row is at most three lines"
    assert any("json 1->7" in line for line in rows)
