"""What a run counts on: groups that came with a load, scores of its checkpoints, and a target that is fixed once."""

import pytest

from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.types import Artifact, Cursor, DatasetInfo, Loaded, PolicySums, StepResult
from support.runs import DATASET, activate, pool_spec, put


@pytest.fixture
def registry() -> Registry:
    registry = Registry(pool_spec(), boot_epoch=7)
    registry.observe_trainer({})
    registry.sync([])
    return registry


def resumed(registry: Registry) -> None:
    """A run of two groups a step that comes back at step 1 with one group of the next, of rewards 1 and 0."""
    put(registry, "a")
    registry.checked("a", DATASET)
    registry.assign()
    registry.loaded(Loaded("a", 1, Cursor(3), "6.1", groups=1, reward_sum=1.0, samples=2), now=1.0)
    registry.published("a", 1, now=2.0)


def test_the_figures_of_a_step_are_of_the_groups_too_that_were_saved_before_it(registry: Registry) -> None:
    put(registry, "a")
    registry.checked("a", DATASET)
    registry.assign()
    saved = PolicySums(tokens=2.0, mismatch=1.0, entropy=4.0)
    registry.loaded(Loaded("a", 1, Cursor(3), "6.1", 1, 1.0, 2, policy=saved), now=1.0)
    registry.published("a", 1, now=2.0)
    registry.commit("a", 1, [0.0], PolicySums(tokens=2.0, mismatch=3.0, entropy=0.0))
    registry.stepped(StepResult("a", 2, 1e-3, 0.5), now=9.0)
    policy = registry.runs["a"].progress.policy
    assert policy is not None
    assert (policy.mismatch, policy.entropy) == (1.0, 1.0)


def one_step(registry: Registry, uid: str, reward: float) -> None:
    run = registry.runs[uid]
    registry.commit(uid, run.groups_per_step - run.accumulated_groups, [reward], PolicySums())
    registry.stepped(StepResult(uid, run.step + 1, 1e-3, 0.5), now=9.0)


def test_groups_that_came_with_the_load_count_towards_the_batch_and_its_reward(registry: Registry) -> None:
    resumed(registry)
    run = registry.runs["a"]
    assert (run.state, registry.view("a").accumulated_groups) == ("ACTIVE", 1)
    assert registry.commit("a", 1, [2.0, 3.0], PolicySums())
    registry.stepped(StepResult("a", 2, 1e-3, 0.5), now=3.0)
    assert run.progress.reward_mean == (1.0 + 0.0 + 2.0 + 3.0) / 4
    assert (run.accumulated_groups, run.restored_groups) == (0, 0)


def test_groups_that_came_with_the_load_are_there_again_after_the_trainer_died(registry: Registry) -> None:
    resumed(registry)
    registry.trainer_lost()
    run = registry.runs["a"]
    assert (run.accumulated_groups, run.progress.reward_count) == (0, 0)
    registry.loaded(Loaded("a", 1, Cursor(3), "6.1", groups=1, reward_sum=1.0, samples=2), now=4.0)
    assert (run.state, run.incarnation, run.weight_version) == ("ACTIVE", "7.1", 1)
    assert (run.accumulated_groups, run.progress.reward_count) == (1, 2)


@pytest.mark.parametrize("groups", [0, 2])
def test_a_load_with_other_groups_than_the_run_counts_on_begins_a_new_incarnation(
    registry: Registry, groups: int
) -> None:
    resumed(registry)
    registry.trainer_lost()
    registry.loaded(Loaded("a", 1, Cursor(2 + groups), "6.1", groups=groups), now=4.0)
    run = registry.runs["a"]
    assert (run.state, run.incarnation, run.weight_version) == ("PENDING", "7.2", 0)
    assert run.accumulated_groups == groups


def test_a_score_is_the_mean_over_steps_that_no_checkpoint_has(registry: Registry) -> None:
    activate(registry, "a")
    assert registry.runs["a"].progress.score is None
    run = registry.runs["a"]
    run.target_step = 100
    for reward in (1.0, 2.0, 6.0):
        one_step(registry, "a", reward)
    assert run.progress.score == 3.0
    registry.checkpointed("a", Artifact("/step_2", 2, ""))  # it was on its way while step 3 was made
    assert run.progress.score == 6.0
    one_step(registry, "a", 8.0)
    assert run.progress.score == 7.0


def test_a_run_that_goes_back_begins_its_score_anew_and_forgets_a_checkpoint_that_is_gone(registry: Registry) -> None:
    activate(registry, "a")
    run = registry.runs["a"]
    run.target_step = 100
    for reward in (1.0, 2.0):
        one_step(registry, "a", reward)
    registry.checkpointed("a", Artifact("/step_2", 2, ""))
    one_step(registry, "a", 5.0)
    registry.trainer_lost()
    registry.loaded(Loaded("a", 1, Cursor(2), "7.1", passed_over=("step_2 is damaged",)), now=1.0)
    assert (run.progress.score, run.artifact) == (None, None)
    registry.published("a", 1, now=2.0)
    assert run.message == "training in slot 0; step_2 is damaged"


@pytest.mark.parametrize(("durable", "believed"), [(None, False), (1, False), (2, True), (4, True)])
def test_a_checkpoint_is_believed_in_only_as_far_as_the_storage_has_it(
    registry: Registry, durable: int | None, believed: bool
) -> None:
    activate(registry, "a")
    run = registry.runs["a"]
    run.target_step = 100
    for _ in range(2):
        one_step(registry, "a", 1.0)
    registry.checkpointed("a", Artifact("/step_2", 2, ""))
    registry.trainer_lost()
    registry.loaded(Loaded("a", 2, Cursor(4), run.incarnation, durable_step=durable), now=1.0)
    assert bool(run.artifact) == believed


def test_a_derived_target_stands_before_the_first_load_and_never_moves(registry: Registry) -> None:
    """It is the horizon of the schedule: the trainer is told it with the first load."""
    put(registry, "a", numStep=None, numEpoch=3)
    run = registry.runs["a"]
    assert run.target_step is None
    registry.checked("a", DatasetInfo(rows=7, skipped=0, digest="d"))
    assert registry.runs["a"].target_step == 3 * 7 // 2
    assert [run.uid for run in registry.assign()] == ["a"]  # no slot, so no load, before it
    registry.loaded(Loaded("a", 4, Cursor()), now=1.0)
    registry.trainer_lost()
    registry.loaded(Loaded("a", 4, Cursor()), now=2.0)
    assert (registry.runs["a"].start_step, registry.runs["a"].target_step) == (4, 10)


def test_less_than_a_batch_of_rows_still_makes_one_step(registry: Registry) -> None:
    put(registry, "a", numStep=None, rolloutBatchSize=8)
    registry.checked("a", DatasetInfo(rows=3, skipped=0, digest="d"))
    assert registry.runs["a"].target_step == 1


def test_a_crash_adds_no_steps_to_numstep(registry: Registry) -> None:
    activate(registry, "a")
    for _ in range(2):
        one_step(registry, "a", 0.0)
    registry.trainer_lost()
    registry.loaded(Loaded("a", 1, Cursor(2), "7.1"), now=1.0)  # a step was lost
    registry.published("a", 1, now=2.0)
    run = registry.runs["a"]
    assert (run.start_step, run.target_step) == (1, 3)
    one_step(registry, "a", 0.0)
    assert run.state == "ACTIVE"
    one_step(registry, "a", 0.0)
    assert (run.step, run.state) == (3, "RETIRING")


def test_a_target_that_grew_moves_the_end_and_not_the_start(registry: Registry) -> None:
    activate(registry, "a")
    one_step(registry, "a", 0.0)
    put(registry, "a", generation=2, numStep=5)
    run = registry.runs["a"]
    assert (run.start_step, run.target_step, run.trainer_version) == (0, 5, 2)
