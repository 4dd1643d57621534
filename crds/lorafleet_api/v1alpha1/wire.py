"""Bodies of the runtime's HTTP API: what the operator sends and reads. Both sides import these types."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from lorafleet_api.v1alpha1.meta import ApiModel

OPERATOR_EPOCH_HEADER = "X-LoraFleet-Operator-Epoch"

RunState = Literal["QUEUED", "PENDING", "ACTIVE", "RETIRING", "CLEANUP", "COMPLETED", "FAILED", "SUSPENDED"]
Outcome = Literal["Complete", "Failed", "Cancelled", "Suspended", "Deleted"]


class _Answer(ApiModel):
    """What the runtime tells. A newer one may tell more, which must not stop an operator that waits for its upgrade."""

    model_config = ConfigDict(extra="ignore")


class ArtifactView(_Answer):
    """The newest durable checkpoint: a PEFT directory."""

    path: str
    step: int
    digest: str


class DroppedView(_Answer):
    """Groups that yielded no samples, by reason."""

    stale: int = 0
    filtered: int = 0
    aborted: int = 0
    reward_error: int = 0


class PresenceView(_Answer):
    """Who holds the run, by their own listings."""

    trainer: bool = False
    engines: list[str] = Field(default_factory=list)


class AdapterView(_Answer):
    """One run as the runtime sees it."""

    uid: str
    namespace: str
    name: str
    owner: Literal["operator", "api"]
    generation: int
    state: RunState
    outcome: Outcome | None = None
    """Set when the run's end is decided: Complete only once the final checkpoint is durable."""
    reason: str
    message: str
    registered: bool
    """Slot held, trainer loaded, first version verified on every engine."""
    slot: int | None = None
    queue_position: int | None = None
    """1 is next."""
    step: int = 0
    start_step: int = 0
    target_step: int | None = None
    accumulated_groups: int = 0
    groups_per_step: int = 0
    weight_version: int = 0
    steps_per_minute: float | None = None
    estimated_completion_time: float | None = None
    """Unix seconds."""
    last_step_time: float | None = None
    """Unix seconds."""
    start_time: float | None = None
    """Unix seconds of the first registration of this uid."""
    completion_time: float | None = None
    """Unix seconds."""
    reward_mean: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    mismatch: float | None = None
    buffered: int = 0
    usable_rows: int | None = None
    """Prompts of the data file; None before it was opened."""
    skipped_rows: int | None = None
    """Prompts that are too long."""
    dropped: DroppedView = DroppedView()
    restarts: int = 0
    artifact: ArtifactView | None = None
    presence: PresenceView = PresenceView()


class EngineView(_Answer):
    """One engine's own listing."""

    engine: str
    ready: bool
    adapters: list[str]
    listed_at: float


class SlotsView(_Answer):
    """Slots of the pool."""

    total: int
    used: int
    queued: int


class TrainerView(_Answer):
    """The trainer's own listing."""

    ready: bool
    slots: dict[int, str]


class AdapterList(_Answer):
    """Answer of GET /v1/adapters."""

    boot_epoch: int
    revision: int
    synced: bool
    operator_epoch: int
    listed: bool = False
    """The trainer and every engine have told what they hold since this runtime started; before that, absence from a
    listing proves nothing."""
    slots: SlotsView
    trainer: TrainerView
    engines: list[EngineView]
    adapters: list[AdapterView]


class PoolView(_Answer):
    """Answer of GET and PUT /v1/pool."""

    boot_epoch: int
    revision: int
    synced: bool
    operator_epoch: int
    spec: dict[str, Any]
    slots: SlotsView
    engines: list[EngineView]
    versions: dict[str, str] = Field(default_factory=dict)
    operator_silent_seconds: float | None = None
    """Since the newest operator's last call, or since the runtime's start."""


class PutPool(ApiModel):
    """Body of PUT /v1/pool."""

    operator_epoch: int = Field(ge=0)
    uids: list[str]
    namespaces: list[str] | None = None
    """Namespaces that `uids` is the full list of; runs of others are not retired. Unset: all."""
    spec: dict[str, Any] | None = None
    """The AdapterPool's spec, to find a ConfigMismatch."""


class PutAdapter(ApiModel):
    """Body of PUT /v1/adapters/{uid}."""

    namespace: str = Field(min_length=1, max_length=63)
    name: str = Field(min_length=1, max_length=253)
    spec: dict[str, Any]
    """AdapterRunSpec as the user wrote it (camelCase); the runtime resolves it."""
    generation: int = Field(ge=0)
    operator_epoch: int = Field(ge=0)
    creation_timestamp: float
    """Unix seconds."""
    priority: int = 0
    start_time: float | None = None
    """Unix seconds of the first registration of this uid, from the object's status."""


class Problem(ApiModel):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    field: str | None = None
    value: Any = None
    fix: str | None = None
