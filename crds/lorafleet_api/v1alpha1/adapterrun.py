"""AdapterRun: one LoRA reinforcement-learning experiment. Field names are those of miles' adapter.yaml in camelCase."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lorafleet_api.v1alpha1.meta import SpecModel

TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The seven linear projections of a decoder layer that LoRA may adapt (HF names)."""


class PoolRef(SpecModel):
    """The AdapterPool that trains this run."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the AdapterPool."""
    namespace: str | None = None
    """Namespace of the AdapterPool; unset means the run's own. Another namespace needs the pool's allowedNamespaces."""


class Sampling(SpecModel):
    """How completions are sampled. Values not listed here (top-k, penalties) are always sent as neutral."""

    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    """Softmax temperature. Training needs at least 0.01; 0 is greedy, for evaluation."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling mass. Training needs 1: the trainer does not renormalise over the nucleus."""
    max_tokens: int = Field(default=1024, ge=1, le=1_048_576)
    """Upper bound on completion length, in tokens."""
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list, max_length=16)
    """Strings that end a completion; the model's end-of-sequence token always does."""


class Optimizer(SpecModel):
    """AdamW with its own step count, learning-rate schedule and gradient clip for this run."""

    lr: float = Field(default=1e-5, gt=0.0, le=1.0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling along a line or half a cosine towards minLr, which the step
    after targetStep would have. Steps that a grown numStep adds run at minLr."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up: step s of them runs at lr * s / warmupSteps. Fewer than the run has steps, or
    lr is never reached."""
    min_lr: float = Field(default=0.0, ge=0.0)
    """Learning rate that a linear or cosine schedule falls to; at most lr. Without effect with schedule constant."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled weight decay: a step multiplies each weight by 1 - lr * weightDecay first, so the product with lr must
    be below 1."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the square root of the second moment."""
    clip_grad: float = Field(default=1.0, ge=0.0)
    """Largest global gradient norm of this run's adapter; 0 turns clipping off."""

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        for beta in self.betas:
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas: {beta} is not in [0, 1); use for example [0.9, 0.98]")
        if self.min_lr > self.lr:
            raise ValueError(f"minLr: {self.min_lr} is above lr {self.lr}; lower minLr or raise lr")
        if self.lr * self.weight_decay >= 1.0:
            raise ValueError(
                f"weightDecay: {self.weight_decay} times lr {self.lr} is {self.lr * self.weight_decay:g}: each step"
                " multiplies weights by 1 minus that, so it must be below 1; lower weightDecay, for example to 0.1"
            )
        return self


class Algorithm(SpecModel):
    """The policy-gradient estimator and loss of this run."""

    advantage: Literal["grpo", "rloo", "reinforce"] = "grpo"
    """Advantage of a sample. grpo: reward minus its group's mean; rloo: reward minus the mean of the group's others;
    reinforce: reward minus the mean of the step's whole batch (REINFORCE++)."""
    std_norm: bool = True
    """Divide by the unbiased standard deviation plus 1e-6: of the group with grpo, of the step's batch with reinforce.
    rloo never divides."""
    loss_reduction: Literal["sampleMean", "tokenMean", "constant"] = "sampleMean"
    """Mean over samples of token means; mean over all tokens; or sum over tokens / maxTokens per sample (Dr.GRPO)."""
    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """Lower clip of the probability ratio: 1 - clipLow. Only with tisMode 'Off'; elsewhere the ratio is 1."""
    clip_high: float = Field(default=0.28, ge=0.0)
    """Upper clip of the probability ratio: 1 + clipHigh. Only with tisMode 'Off'; elsewhere the ratio is 1."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound on the loss of negative advantages (dual-clip PPO): at most -A * dualClip. Only with tisMode 'Off', as
    clipLow and clipHigh; unset is off."""
    tis_mode: Literal["Clip", "Mask", "Off"] = "Clip"
    """Importance weight of trainer against sampler probability: Clip bounds it by tisFloor and tisCap (TIS), Mask drops
    tokens outside of them (IcePop), Off leaves it out and clips the ratio to the sampler as PPO does. Write 'Off' with
    quotes: YAML takes a bare Off for the boolean false."""
    tis_floor: float = Field(default=0.0, ge=0.0)
    """Least importance weight, at most tisCap; Mask drops tokens below it."""
    tis_cap: float = Field(default=2.0, gt=0.0)
    """Largest importance weight; Mask drops tokens above it."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL term to the base model; 0 is off."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator (Schulman): k1, k2 or low-variance k3."""
    mask_truncated: bool = False
    """Leave completions cut at maxTokens out of the loss, numerator and denominator."""

    @model_validator(mode="after")
    def _check(self) -> "Algorithm":
        if self.tis_floor > self.tis_cap:
            raise ValueError(
                f"tisFloor: {self.tis_floor} is above tisCap {self.tis_cap}; lower tisFloor or raise tisCap"
            )
        return self


class Evaluation(SpecModel):
    """Periodic greedy evaluation on held-out prompts."""

    data: str = Field(min_length=1, max_length=4096)
    """JSONL or parquet file with the same keys as the training data."""
    interval_steps: int = Field(default=20, ge=1)
    """Optimizer steps between evaluations."""
    before_training: bool = True
    """Also evaluate the untrained adapter, as the baseline."""
    max_prompts: int = Field(default=64, ge=1)
    """At most this many prompts, from the top of the file."""
    sampling: Sampling = Sampling(temperature=0.0)
    """Sampling of evaluation completions."""


class Checkpoint(SpecModel):
    """When checkpoints are written and how many stay."""

    interval_steps: int = Field(default=20, ge=1)
    """Optimizer steps between checkpoints; the final step always has one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    keep_best: bool = False
    """Also keep the best checkpoint: that with the highest mean reward over the steps since the one before it; of equal
    ones the newer."""


class Scheduling(SpecModel):
    """This run's share of the pool."""

    weight: int = Field(default=1, ge=1, le=100)
    """Turns per round in batch collection."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Queued runs of higher priority take a free slot first."""
    max_in_flight_groups: int | None = Field(default=None, ge=1)
    """Prompt groups generating at once; unset means what staleness allows."""


class RemoteReward(SpecModel):
    """A reward served over HTTP."""

    url: str = Field(min_length=1, max_length=2048)
    """Endpoint that scores one sample per POST."""
    secret_ref: str | None = None
    """Secret with the bearer token."""


class Reward(SpecModel):
    """A reward that is neither a built-in nor a function on the Python path."""

    remote: RemoteReward | None = None
    """Score by HTTP."""
    config_map_ref: str | None = None
    """ConfigMap with the reward's source."""


class AdapterRunSpec(SpecModel):
    """What the user wants trained. Unset fields come from the pool's defaults, then from the values given here."""

    pool_ref: PoolRef
    """The pool that trains this run."""
    rank: int = Field(default=16, ge=1, le=512)
    """LoRA rank; at most the pool's maxRank."""
    alpha: int | None = Field(default=None, ge=1, le=65_536)
    """LoRA alpha; the adapter is scaled by alpha / rank. Unset means equal to rank."""
    target_modules: list[TargetModule] | None = Field(default=None, min_length=1, max_length=7)
    """Projections to adapt, each once; unset means the pool's."""
    init_scheme: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial A as in PEFT: kaiming is uniform within 1 / sqrt(inputs), gaussian has standard deviation 1 / rank. B is
    zero with both."""
    init_seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Seed of the initial A matrices."""
    init_from: str | None = Field(default=None, min_length=1, max_length=4096)
    """PEFT adapter directory to start from, relative to the pool's storage; of a run its step_N. initScheme and
    initSeed are then without effect."""

    data: str = Field(min_length=1, max_length=4096)
    """JSONL or parquet file of prompts, on the pool's storage."""
    input_key: str = Field(default="text", min_length=1, max_length=256)
    """Column with the prompt: a string, or a list of chat messages."""
    label_key: str | None = Field(default=None, min_length=1, max_length=256)
    """Column with the answer that the reward compares against."""
    metadata_key: str | None = Field(default=None, min_length=1, max_length=256)
    """Column with an object handed to the reward."""
    sample_metadata: dict[str, Any] | None = None
    """Metadata under each row's own."""
    shuffle_seed: int | None = Field(default=None, ge=0)
    """Shuffle each epoch with seed + epoch; unset keeps file order."""
    apply_chat_template: bool | None = None
    """Render the prompt with the model's chat template; unset means true for messages, false for strings."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are skipped and counted; unset means what the engine's length leaves."""

    rm_type: str | None = Field(default=None, min_length=1, max_length=256)
    """Built-in reward: math, 1 when the last answer in the response (boxed, after ####, or the last number) equals the
    label, else 0."""
    custom_rm_path: str | None = Field(default=None, min_length=1, max_length=1024)
    """Dotted path of a reward function; its module must be on the pool's rewardModules list."""
    reward: Reward | None = None
    """Remote or ConfigMap reward. Refused by this version."""
    reward_failure_policy: Literal["Fail", "Zero", "Drop"] = "Fail"
    """A reward that raises, hangs or is not finite: fail the run, score 0, or drop the group."""
    reward_timeout_seconds: float = Field(default=30.0, gt=0.0, le=3600.0)
    """Time one reward call may take."""

    rollout_batch_size: int = Field(default=8, ge=1, le=65_536)
    """Prompt groups per optimizer step."""
    n_samples_per_prompt: int = Field(default=8, ge=1, le=1024)
    """Completions per prompt group."""
    sampling: Sampling = Sampling()
    """How completions are sampled."""
    optimizer: Optimizer = Optimizer()
    """This run's AdamW."""
    algorithm: Algorithm = Algorithm()
    """This run's loss."""
    max_staleness: int = Field(default=3, ge=0, le=64)
    """Published versions a sample may be behind when it trains; 0 is strictly on-policy."""
    mixed_versions: bool = False
    """Let a group span versions. Refused by this version."""
    evaluation: Evaluation | None = None
    """Held-out evaluation. Refused by this version."""

    num_step: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Optimizer steps; wins over numEpoch."""
    num_epoch: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Passes over the data when numStep is unset; 1 when both are."""
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    """Fail the run this long after its first registration."""
    registration_deadline_seconds: int | None = Field(default=None, ge=1)
    """Fail the run if it is not registered this long after creation."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoint policy."""
    record_steps: bool = False
    """Keep a record of each optimizer step beside the checkpoints, for `lorafleet replay`."""

    suspend: bool = False
    """Checkpoint, free the slot and wait; false again resumes from there."""
    cancel: bool = False
    """Stop for good and keep the record; cannot be unset."""
    scheduling: Scheduling = Scheduling()
    """Share of the pool."""
    backoff_limit: int = Field(default=3, ge=0)
    """Trainer crashes by this run's batches, loads or saves before it is failed."""
    deletion_policy: Literal["Save", "Discard"] = "Save"
    """On deletion: write a last checkpoint, or not."""
    save_timeout_seconds: int = Field(default=300, ge=1)
    """Time that the last checkpoint of an ending run may take while storage refuses it or is slow."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)
    """Delete the object this long after it finished; its files stay."""

    @model_validator(mode="after")
    def _check(self) -> "AdapterRunSpec":
        rewards = [self.rm_type, self.custom_rm_path, self.reward]
        if sum(r is not None for r in rewards) != 1:
            raise ValueError("rmType, customRmPath, reward: exactly one must be set; for example rmType: math")
        twice = sorted({name for name in self.target_modules or () if (self.target_modules or []).count(name) > 1})
        if twice:
            raise ValueError(f"targetModules: {', '.join(twice)} is there more than once; list each projection once")
        return self

    @property
    def lora_alpha(self) -> int:
        """alpha, or rank where alpha is unset."""
        return self.rank if self.alpha is None else self.alpha


LIFECYCLE_FIELDS = frozenset(
    {"poolRef", "data", "suspend", "cancel", "deletionPolicy", "saveTimeoutSeconds", "backoffLimit"}
)
"""Fields that a pool's defaults cannot set; the CRD schema itself carries their defaults."""

IMMUTABLE_FIELDS = (
    "poolRef", "rank", "alpha", "targetModules", "initScheme", "initSeed", "initFrom",
    "data", "inputKey", "labelKey", "metadataKey", "sampleMetadata", "shuffleSeed", "applyChatTemplate",
    "maxPromptTokens", "rmType", "customRmPath", "reward", "rewardFailurePolicy", "rewardTimeoutSeconds",
    "rolloutBatchSize", "nSamplesPerPrompt", "sampling", "optimizer", "algorithm", "maxStaleness",
    "recordSteps",
)  # fmt: skip
"""Fields that cannot change after creation, also not from unset to set (CEL in the CRD)."""


def resolve_spec(spec: dict[str, Any], pool_defaults: dict[str, Any]) -> AdapterRunSpec:
    """The run's spec over the pool's defaults over the built-in values, validated.

    Args:
        spec: camelCase spec as written by the user.
        pool_defaults: camelCase `spec.defaults` of the pool; objects merge key by key.

    Raises:
        pydantic.ValidationError: a field is unknown or out of range.
    """
    usable = {k: v for k, v in pool_defaults.items() if k not in LIFECYCLE_FIELDS}
    if any(spec.get(k) is not None for k in ("rmType", "customRmPath", "reward")):
        usable = {k: v for k, v in usable.items() if k not in ("rmType", "customRmPath", "reward")}
    return AdapterRunSpec.model_validate(_merge(usable, spec))


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged
