"""The record of one run. Only the registry changes it; others read."""

from dataclasses import dataclass, field
from typing import Literal

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.wire import (
    AdapterView,
    ArtifactView,
    DroppedView,
    Outcome,
    PresenceView,
    RunState,
)
from lorafleet_runtime.registry.admission import without_effect
from lorafleet_runtime.types import Artifact, DatasetInfo, Loaded, PolicyMeans, PolicySums, StepResult, VersionId

_STEP_TIME_DECAY = 0.7

TERMINAL: frozenset[RunState] = frozenset({"COMPLETED", "FAILED", "SUSPENDED"})
"""States in which nothing of the run is held anywhere."""

HOLDS_SLOT: frozenset[RunState] = frozenset({"PENDING", "ACTIVE", "RETIRING", "CLEANUP"})
"""States in which the run's slot is taken."""


@dataclass(slots=True)
class Ending:
    """Why and how a run leaves its slot."""

    outcome: Outcome
    reason: str
    message: str
    save: bool
    """A last checkpoint is wanted."""


@dataclass(slots=True)
class Progress:
    """Figures of the last committed step, and the sums that the next one is made of."""

    reward_mean: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    policy: PolicyMeans | None = None
    """None also where no group of the step needed the model."""
    last_step_time: float | None = None
    since: float | None = None
    """Start of the step under way: the last step, or this registration."""
    seconds_per_step: float | None = None
    """Exponential mean over steps."""
    reward_sum: float = 0.0
    reward_count: int = 0
    policy_sums: PolicySums = field(default_factory=PolicySums)
    unsaved_means: list[float | None] = field(default_factory=list)
    """Mean reward of each step since the last checkpoint, or since this registration where that was later."""
    buffered: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """What checkpoint.keepBest compares: the mean reward over the steps since the last checkpoint."""
        means = [mean for mean in self.unsaved_means if mean is not None]
        return sum(means) / len(means) if means else None

    def finish_step(self, result: StepResult, now: float) -> None:
        """Make the sums the figures of the step, and begin the next one."""
        if self.since is not None:
            seconds, old = now - self.since, self.seconds_per_step
            kept = 0.0 if old is None else _STEP_TIME_DECAY
            self.seconds_per_step = kept * (old or 0.0) + (1 - kept) * seconds
        self.last_step_time = self.since = now
        self.lr, self.grad_norm = result.lr, result.grad_norm
        self.reward_mean = self.reward_sum / self.reward_count if self.reward_count else None
        self.policy = self.policy_sums.means()
        self.unsaved_means.append(self.reward_mean)
        self.clear_sums()

    def clear_sums(self) -> None:
        """Nothing of the next step is accumulated."""
        self.reward_sum, self.reward_count = 0.0, 0
        self.policy_sums = PolicySums()


@dataclass(slots=True)
class Run:
    """One registration of one AdapterRun."""

    uid: str
    namespace: str
    name: str
    owner: Literal["operator", "api"]
    spec: AdapterRunSpec
    generation: int
    priority: int
    created: float
    """Unix seconds of the object's creation: the order of the queue."""
    state: RunState = "QUEUED"
    reason: str = reasons.CHECKING_DATA
    message: str = "data and reward are being opened"
    ending: Ending | None = None
    deleted: bool = False
    dataset: DatasetInfo | None = None
    check_failures: int = 0
    """Times in a row that the check found its worker dead."""
    slot: int | None = None
    incarnation: str = ""
    loaded: bool = False
    """The trainer holds this incarnation."""
    was_loaded: bool = False
    """A trainer held this incarnation."""
    loaded_from: str = ""
    """The incarnation that made the step from which this one began."""
    load_deaths: int = 0
    """Times in a row that the trainer died while it loaded the run."""
    weight_version: int = 0
    """The newest version verified on every engine; 0 before the first."""
    step: int = 0
    start_step: int = 0
    """step at this registration."""
    target_step: int | None = None
    accumulated_groups: int = 0
    restored_groups: int = 0
    """Those of them that came with the load: no buffer has them, and a trainer that dies finds them again."""
    artifact: Artifact | None = None
    note: str = ""
    """What the user has to know of this registration's load."""
    restarts: int = 0
    crashes: int = 0
    """Trainer crashes with this run in the batch."""
    save_deaths: int = 0
    """Times in a row that the trainer died during a save of this run."""
    start_time: float | None = None
    completion_time: float | None = None
    queue_position: int | None = None
    progress: Progress = field(default_factory=Progress)

    def begin(self, slot: int, incarnation: str) -> None:
        """A new registration in this slot: nothing published or accumulated before it counts."""
        self.slot = slot
        self.incarnation = incarnation
        self.state = "PENDING"
        self.reason, self.message = reasons.LOADING, f"loading into slot {slot}"
        self.queue_position = None
        self.loaded = self.was_loaded = False
        self.weight_version = self.restored_groups = 0
        self.note = ""
        self.completion_time = None
        self.progress.unsaved_means.clear()
        self.discard_batch()

    def take_over(self, loaded: Loaded) -> None:
        """The trainer has this state, with the groups that a suspension or a stop had saved."""
        if not self.was_loaded:
            self.step = self.start_step = loaded.step
            self.loaded_from = loaded.incarnation
        self.loaded = self.was_loaded = True
        self.accumulated_groups = self.restored_groups = loaded.groups
        self.progress.reward_sum, self.progress.reward_count = loaded.reward_sum, loaded.samples
        self.progress.policy_sums = loaded.policy
        self.note = "; ".join([*filter(None, [self.note]), *loaded.passed_over])
        durable = -1 if loaded.durable_step is None else loaded.durable_step
        if self.artifact is not None and self.artifact.step > min(self.step, durable):
            self.artifact = None  # it is not there any more, or is damaged; it has to be written again

    def activate(self, now: float) -> None:
        """Every engine has the version that the trainer holds."""
        self.state = "ACTIVE"
        self.reason, self.message = reasons.TRAINING, self.training_message
        self.start_time = self.start_time or now
        self.progress.since = now

    def end(self) -> None:
        """Nothing of the run is held anywhere any more."""
        assert self.ending is not None
        outcome = self.ending.outcome
        self.state = "FAILED" if outcome == "Failed" else "SUSPENDED" if outcome == "Suspended" else "COMPLETED"
        self.reason, self.message = self.ending.reason, self.ending.message
        self.slot = None
        self.loaded = False
        self.queue_position = None
        self.accumulated_groups = 0

    def is_where_it_was(self, loaded: Loaded) -> bool:
        """Whether the trainer loaded the very weights that this incarnation was at, and the groups it counts on."""
        made_by = self.loaded_from if self.step == self.start_step else self.incarnation
        return (loaded.step, loaded.incarnation, loaded.groups) == (self.step, made_by, self.restored_groups)

    def discard_batch(self) -> None:
        """Forget what was accumulated since the last step: the trainer does not have it."""
        self.accumulated_groups = 0
        self.progress.since = None
        self.progress.clear_sums()

    def keep(self, artifact: Artifact) -> None:
        """A checkpoint is durable; steps that it does not have count for the next one's score."""
        self.artifact = artifact
        means = self.progress.unsaved_means
        del means[: max(len(means) - (self.step - artifact.step), 0)]

    def retarget(self) -> None:
        """The step at which the run is complete; may grow until its end is decided."""
        if self.dataset is None or (self.ending is not None and self.ending.outcome != "Suspended"):
            return
        epochs = self.spec.num_epoch or 1
        wanted = self.spec.num_step or max(1, epochs * self.dataset.rows // self.groups_per_step)
        self.target_step = max(wanted, self.target_step or 0, self.step)

    @property
    def groups_per_step(self) -> int:
        """Prompt groups that fill the run's batch."""
        return self.spec.rollout_batch_size

    @property
    def batch_is_full(self) -> bool:
        """All groups of the next step are accumulated."""
        return self.accumulated_groups == self.groups_per_step

    @property
    def queue_priority(self) -> int:
        """What the operator sent, or what the pool's defaults say where it sent nothing."""
        return self.priority or self.spec.scheduling.priority

    @property
    def trainer_version(self) -> int:
        """The version number of the weights that the trainer holds now."""
        return 1 + self.step - self.start_step

    @property
    def version(self) -> VersionId | None:
        """The version that new requests use."""
        return VersionId(self.uid, self.incarnation, self.weight_version) if self.weight_version else None

    @property
    def training_message(self) -> str:
        """While it trains, with settings that do nothing."""
        idle = without_effect(self.spec, self.target_step)
        return "; ".join(filter(None, [f"training in slot {self.slot}", self.note, *idle]))

    @property
    def registered(self) -> bool:
        """Slot held, trainer loaded, first version verified on every engine."""
        return self.state == "ACTIVE" or (self.state == "RETIRING" and self.weight_version > 0)

    @property
    def visible_outcome(self) -> Outcome | None:
        """An end shows only once its last checkpoint is durable, or none is wanted."""
        if self.ending is None or (self.ending.save and self.state == "RETIRING"):
            return None
        return self.ending.outcome

    def view(self, presence: PresenceView) -> AdapterView:
        """What the HTTP API tells of this run."""
        p = self.progress
        remaining = None if self.target_step is None else self.target_step - self.step
        eta = None
        if p.seconds_per_step and p.last_step_time and remaining and self.state == "ACTIVE":
            eta = p.last_step_time + remaining * p.seconds_per_step
        artifact = self.artifact
        return AdapterView(
            uid=self.uid,
            namespace=self.namespace,
            name=self.name,
            owner=self.owner,
            generation=self.generation,
            state=self.state,
            outcome=self.visible_outcome,
            reason=self.reason,
            message=self.message,
            registered=self.registered,
            slot=self.slot,
            queue_position=self.queue_position,
            step=self.step,
            start_step=self.start_step,
            target_step=self.target_step,
            accumulated_groups=self.accumulated_groups,
            groups_per_step=self.groups_per_step,
            weight_version=self.weight_version,
            steps_per_minute=60.0 / p.seconds_per_step if p.seconds_per_step else None,
            estimated_completion_time=eta,
            last_step_time=p.last_step_time,
            start_time=self.start_time,
            completion_time=self.completion_time,
            reward_mean=p.reward_mean,
            lr=p.lr,
            grad_norm=p.grad_norm,
            mismatch=None if p.policy is None else p.policy.mismatch,
            buffered=p.buffered,
            usable_rows=self.dataset.rows if self.dataset else None,
            skipped_rows=self.dataset.skipped if self.dataset else None,
            dropped=DroppedView(
                stale=p.dropped.get("stale", 0),
                filtered=p.dropped.get("filtered", 0),
                aborted=p.dropped.get("aborted", 0),
                reward_error=p.dropped.get("rewardError", 0),
            ),
            restarts=self.restarts,
            artifact=ArtifactView(path=artifact.path, step=artifact.step, digest=artifact.digest) if artifact else None,
            presence=presence,
        )


def may_replace(old: Outcome, new: Outcome) -> bool:
    """Whether an end that is under way gives way to another: a completion to a fault, a suspension to anything."""
    return (old == "Complete" and new == "Failed") or (old == "Suspended" and new != "Suspended")
