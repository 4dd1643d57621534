"""Status of AdapterRun and AdapterPool, written by the operator alone.

The CRD schemas are generated from these types and are strict: a field or a reason that does not fit is refused by the
API server, so the operator validates against these types before it writes.
"""

from typing import Annotated, Literal

from pydantic import Field

from lorafleet_api.v1alpha1.meta import ApiModel

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)]
"""RFC 3339 in UTC with whole seconds, as 2026-11-29T17:00:00Z."""

REASON_PATTERN = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
"""metav1.Condition's pattern of a reason."""

MAX_MESSAGE = 4096
"""Longest condition message, in characters."""


class Condition(ApiModel):
    """metav1.Condition. Types and reasons are the constants of `reasons`."""

    type: str = Field(min_length=1, max_length=64)
    """Condition type."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: int | None = Field(default=None, ge=0)
    """metadata.generation that this condition was derived from."""
    last_transition_time: Timestamp
    """When status last flipped; a new reason or message does not move it."""
    reason: str = Field(min_length=1, max_length=64, pattern=REASON_PATTERN)
    """CamelCase reason for programs."""
    message: str = Field(max_length=MAX_MESSAGE)
    """For people."""


Conditions = Annotated[list[Condition], Field(max_length=16)]


class EvaluationStatus(ApiModel):
    """Scores on the held-out prompts."""

    step: int = Field(ge=0)
    """Step of the newest evaluation."""
    score: float
    """Mean reward of the newest evaluation."""
    baseline: float | None = None
    """Mean reward of the untrained adapter."""
    best: float | None = None
    """Best mean reward so far."""


class DroppedStatus(ApiModel):
    """Prompt groups that yielded no samples, by reason."""

    stale: int = Field(default=0, ge=0)
    """Older than maxStaleness allows."""
    filtered: int = Field(default=0, ge=0)
    """Taken out by a filter."""
    aborted: int = Field(default=0, ge=0)
    """Stopped by a suspend, a restart or an engine."""
    reward_error: int = Field(default=0, ge=0)
    """The reward raised or hung (rewardFailurePolicy Drop)."""


class ArtifactStatus(ApiModel):
    """The newest durable checkpoint: a servable PEFT directory."""

    path: str = Field(max_length=4096)
    """Directory on the pool's storage."""
    step: int = Field(ge=0)
    """Optimizer steps in it."""
    digest: str = Field(max_length=128)
    """SHA-256 of adapter_model.safetensors."""


class AdapterRunStatus(ApiModel):
    """Where a run stands."""

    conditions: Conditions = Field(default_factory=list)
    """Registered, Ready, Reconciling, Stalled, Suspended, Complete, Failed, Finished, Deregistered."""
    observed_generation: int | None = Field(default=None, ge=0)
    """metadata.generation that this status was derived from."""
    slot: int | None = Field(default=None, ge=0)
    """Trainer slot held now."""
    boot_epoch: int | None = Field(default=None, ge=0)
    """Boot epoch of the runtime that last registered the run."""
    weight_version: int | None = Field(default=None, ge=0)
    """Version served by the engines; 1 is the first of a registration."""
    step: int | None = Field(default=None, ge=0)
    """Optimizer steps done."""
    start_step: int | None = Field(default=None, ge=0)
    """Step at which the current registration began."""
    target_step: int | None = Field(default=None, ge=0)
    """Step at which the run is complete; fixed at the first registration, grows only with numStep."""
    accumulated_groups: int | None = Field(default=None, ge=0)
    """Prompt groups in the batch being filled."""
    groups_per_step: int | None = Field(default=None, ge=0)
    """Prompt groups per optimizer step."""
    steps_per_minute: float | None = None
    """Recent speed."""
    estimated_completion_time: Timestamp | None = None
    """When the target will be reached at this speed."""
    last_step_time: Timestamp | None = None
    """When the newest step was done."""
    reward_mean: float | None = None
    """Mean reward of the newest step's samples."""
    lr: float | None = None
    """Learning rate of the newest step."""
    grad_norm: float | None = None
    """Gradient norm of the newest step, before clipping."""
    mismatch: float | None = None
    """Mean absolute difference of trainer and sampler log-probabilities in the newest step."""
    evaluation: EvaluationStatus | None = None
    """Held-out scores."""
    buffered: int | None = Field(default=None, ge=0)
    """Prompt groups waiting to train."""
    usable_rows: int | None = Field(default=None, ge=0)
    """Rows of the data file whose prompts are used."""
    skipped_rows: int | None = Field(default=None, ge=0)
    """Rows skipped because their prompts are longer than maxPromptTokens, or than the engine's length leaves."""
    dropped: DroppedStatus | None = None
    """Groups that yielded no samples."""
    restarts: int | None = Field(default=None, ge=0)
    """Times the run was resumed from a checkpoint after a crash."""
    artifact: ArtifactStatus | None = None
    """Newest durable checkpoint."""
    queue_position: int | None = Field(default=None, ge=0)
    """Position in the queue for a slot; 1 is next."""
    start_time: Timestamp | None = None
    """First registration."""
    completion_time: Timestamp | None = None
    """When the run finished."""


class SlotsStatus(ApiModel):
    """Slots of the pool."""

    total: int = Field(ge=0)
    """Slots that the trainer has."""
    used: int = Field(ge=0)
    """Slots taken."""
    queued: int = Field(ge=0)
    """Runs waiting for a slot."""


class AdapterPoolStatus(ApiModel):
    """Where a pool stands."""

    conditions: Conditions = Field(default_factory=list)
    """Ready, ClusterReady, RuntimeReady."""
    observed_generation: int | None = Field(default=None, ge=0)
    """metadata.generation that this status was derived from."""
    slots: SlotsStatus | None = None
    """Slots and queue."""
    boot_epoch: int | None = Field(default=None, ge=0)
    """Counts the starts of the runtime."""
    operator_epoch: int | None = Field(default=None, ge=0)
    """Counts the operators of this pool; the runtime refuses older ones."""
    versions: dict[str, str] | None = None
    """Versions of the runtime's parts."""
