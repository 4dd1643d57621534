"""Types that cross process borders inside the runtime. Imports no torch, ray or vllm.

Legend: P prompt tokens, R response tokens, G samples of one group.
"""

from dataclasses import astuple, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class VersionId:
    """One immutable adapter version. Never reused: a new registration has a new incarnation.

    Example: VersionId("5b1c…", "7.2", 3) is the third published version of registration 2 in boot epoch 7.
    """

    uid: str
    incarnation: str
    """Boot epoch and registration counter, as "7.2"."""
    n: int
    """1 for the first version of a registration, one more after every optimizer step."""

    @property
    def name(self) -> str:
        """The engine-wide adapter name."""
        return f"{self.uid}@{self.incarnation}.v{self.n}"

    @classmethod
    def parse(cls, name: str) -> "VersionId":
        """The inverse of `name`.

        Raises:
            ValueError: not a version name.
        """
        uid, _, rest = name.rpartition("@")
        incarnation, _, n = rest.rpartition(".v")
        if not uid or not incarnation or not n.isdigit():
            raise ValueError(f"adapter name {name!r}: expected UID@EPOCH.COUNTER.vN")
        return cls(uid, incarnation, int(n))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in a flat buffer."""

    name: str
    """PEFT key, as base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a flat adapter buffer holds; enough to write a PEFT directory from it."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    base_model: str
    dtype: Literal["float32", "bfloat16"]
    tensors: tuple[TensorEntry, ...]
    num_bytes: int
    digest: str
    """SHA-256 of the buffer, hexadecimal."""
    use_rslora: bool = False
    """The adapter is scaled by alpha / sqrt(rank) instead of alpha / rank."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; everything not named here is sent to the engine as neutral."""

    n: int
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response, as the engine returned it."""

    token_ids: tuple[int, ...]
    """[R], including the end-of-sequence token when the model produced it."""
    logprobs: tuple[float, ...]
    """[R], processed log-probabilities of the sampled tokens (after temperature and top-p), natural log."""
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One response with its reward and advantage."""

    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    reward: float
    advantage: float
    truncated: bool
    """The response hit maxTokens."""


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """A prompt and its G samples: the unit of rollout, staleness, accumulation and commit."""

    uid: str
    version: VersionId
    """The version that sampled every token of this group."""
    index: int
    """Position in the run's endless prompt stream; row = order(epoch)[index % rows]."""
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    texts: tuple[str, ...] = ()
    """Decoded responses, for people."""
    prompt: str = ""
    """The prompt as the model read it, for people."""

    @property
    def is_constant(self) -> bool:
        """All advantages are 0: counts towards the batch and the denominator, needs no forward pass."""
        return all(s.advantage == 0.0 for s in self.samples)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What opening a run's data found."""

    rows: int
    """Usable prompts."""
    skipped: int
    """Prompts longer than maxPromptTokens."""
    digest: str
    """SHA-256 over the file's bytes and the usable rows' numbers and prompt ids, in order."""


@dataclass(frozen=True, slots=True)
class RunFault:
    """A failure that belongs to one run; the pool goes on."""

    uid: str
    reason: str
    """A reason of lorafleet_api.v1alpha1.reasons."""
    message: str
    """Names the field, the value and the fix."""
    detail: str = ""
    """More for the run's own log, as a traceback."""


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A group that yielded no samples."""

    uid: str
    version: VersionId
    index: int
    reason: Literal["stale", "filtered", "aborted", "rewardError"]
    message: str = ""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Put a run into a trainer slot."""

    uid: str
    namespace: str
    name: str
    slot: int
    spec: dict[str, Any]
    """Resolved AdapterRunSpec in wire form."""
    target_step: int
    """Horizon of the learning-rate schedule."""
    data_digest: str
    checkpoint: str | None
    """Directory of the checkpoint to resume from; None starts fresh (or from initFrom)."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Which prompt groups a run has consumed: everything below `low`, and `consumed` above it."""

    low: int = 0
    consumed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of a load."""

    uid: str
    step: int
    cursor: Cursor
    incarnation: str = ""
    """Of the registration that made the last step; empty when there was none."""
    groups: int = 0
    """Groups accumulated since that step, from a checkpoint taken in between; the cursor has them too."""
    reward_sum: float = 0.0
    """Over the samples of those groups."""
    samples: int = 0
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that are damaged, and what became of them."""
    durable_step: int | None = None
    """Of the newest whole step_N that the storage has after the load; None: it has none."""
    policy: "PolicySums" = field(default_factory=lambda: PolicySums())
    """Over the response tokens of those groups."""


@dataclass(frozen=True, slots=True)
class PolicyMeans:
    """What the response tokens of one step show of its policy, per token; docs/algorithms.md has the formulas."""

    mismatch: float
    """|trainer - sampler log-probability|."""
    entropy: float
    """Nats, of the whole distribution at the sampler's temperature."""
    kl_sampler_k1: float
    kl_sampler: float
    """The k3 estimate."""
    kl_base: float | None
    """The k3 estimate, whatever klType is; None without a KL term."""
    clip_fraction: float
    """Share of tokens whose gradient the clip or the dual clip stopped."""
    tis_fraction: float
    """Share of tokens whose mismatch weight tisMode truncated or masked."""


@dataclass(frozen=True, slots=True)
class PolicySums:
    """Sums over response tokens, so they add up over passes, ranks and batches; the counts are whole numbers."""

    tokens: float = 0.0
    """Those that went through the model: none of a group that needs no pass, or that maskTruncated leaves out."""
    mismatch: float = 0.0
    entropy: float = 0.0
    kl_sampler_k1: float = 0.0
    kl_sampler: float = 0.0
    kl_base_tokens: float = 0.0
    """Those with a KL term."""
    kl_base: float = 0.0
    clipped: float = 0.0
    corrected: float = 0.0

    def __add__(self, other: "PolicySums") -> "PolicySums":
        """Of both sets of tokens."""
        return PolicySums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> PolicyMeans | None:
        """Per token; None where there was none."""
        n = self.tokens
        if not n:
            return None
        return PolicyMeans(
            mismatch=self.mismatch / n,
            entropy=self.entropy / n,
            kl_sampler_k1=self.kl_sampler_k1 / n,
            kl_sampler=self.kl_sampler / n,
            kl_base=self.kl_base / self.kl_base_tokens if self.kl_base_tokens else None,
            clip_fraction=self.clipped / n,
            tis_fraction=self.corrected / n,
        )


@dataclass(frozen=True, slots=True)
class RunBatchStats:
    """What one accumulate call did for one run."""

    uid: str
    groups: int
    samples: int
    tokens: int
    """Response tokens that count in the loss."""
    policy: PolicySums
    mismatch_max: float
    """Largest |trainer - sampler log-probability| of a token."""
    loss_sum: float
    response_tokens: int = 0
    """All response tokens of these groups, for throughput; also those that the loss leaves out."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcome of one accumulate call. A run in `faults` contributed nothing."""

    stats: tuple[RunBatchStats, ...]
    faults: tuple[RunFault, ...]
    seconds: float
    rows: int
    """Rows that went through the model (prompts shared)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step of one run."""

    uid: str
    step: int
    """The step just completed, counted from 1."""
    lr: float
    grad_norm: float
    """Before clipping."""
    unrecorded: str = ""
    """With recordSteps: why the step has no record; the step counts all the same."""
    snapshot: str = ""
    """Ticket of the state after it on its way to the node's disk; a trainer that dies before takes the step with it."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of a run stay when the next one is written."""

    keep: int
    """The newest ones."""
    keep_best: bool = False
    """The one with the best score stays too."""
    score: float | None = None
    """Of the one that is written."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A durable, PEFT-servable checkpoint."""

    path: str
    step: int
    digest: str
    """SHA-256 of adapter_model.safetensors."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine's own word on what it holds."""

    engine: str
    ready: bool
    adapters: tuple[str, ...]
    """VersionId names from the engine's live list_loras."""
    listed_at: float
    """Unix time of that listing, seconds."""
    pids: tuple[int, ...] = ()
    """The actor's process and its children; whoever restarts the engine reaps them."""
    stats: dict[str, float] = field(default_factory=dict)
