"""AdapterPool: the long-lived trainer and engines that many AdapterRuns share."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from lorafleet_api.v1alpha1.adapterrun import TargetModule
from lorafleet_api.v1alpha1.meta import SpecModel

ALL_LINEAR: list[TargetModule] = [
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
]  # fmt: skip


class BaseModelRef(SpecModel):
    """The frozen base model; give exactly one of name and path."""

    name: str | None = None
    """Hub name."""
    path: str | None = None
    """Directory with HF files (config.json, *.safetensors, tokenizer)."""
    revision: str | None = None
    """Hub revision."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type of base and adapters; masters and moments are always float32."""

    @model_validator(mode="after")
    def _check(self) -> "BaseModelRef":
        if (self.name is None) == (self.path is None):
            raise ValueError("baseModel: set exactly one of name and path")
        return self


class TrainerSpec(SpecModel):
    """The Megatron-core trainer."""

    data_parallel: int = Field(default=1, ge=1)
    """Data-parallel ranks: each trains its share of the prompt groups and holds its share of masters and moments."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each matrix. The trainer has dataParallel x tensorParallel ranks, one GPU each."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Pipeline-parallel ranks; this version refuses more than 1."""
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Token budget of one forward pass; groups of several runs share it."""
    recompute: bool = False
    """Recompute activations in the backward pass."""
    deterministic: bool = False
    """One prompt group per forward pass, so that a run's updates do not depend on its neighbours bit for bit."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of a trainer rank; unset shares its node's cores among the ranks there."""
    resources: dict[str, Any] = Field(default_factory=dict)
    """Pod resources of a trainer rank."""

    @field_validator("pipeline_parallel")
    @classmethod
    def _check_pipeline(cls, value: int) -> int:
        if value != 1:
            raise ValueError(
                f"pipelineParallel: {value} is not supported; use tensorParallel for a model that is too large for one "
                "rank, and set it to 1"
            )
        return value


class EnginesSpec(SpecModel):
    """The vLLM engines; every adapter is resident on every engine."""

    replicas: int = Field(default=1, ge=1)
    """Number of engines."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Tensor-parallel size of one engine."""
    max_model_len: int = Field(default=4096, ge=16)
    """Longest prompt plus completion, in tokens."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences decoding at once."""
    max_loras: int | None = Field(default=None, ge=1)
    """Adapter versions resident at once; unset means slots x (defaults.maxStaleness + 2) + 1."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of GPU memory for weights and KV cache."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """KV cache size on CPU."""
    fully_sharded_loras: bool = False
    """Shard LoRA compute fully over tensor-parallel ranks."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of an engine; unset leaves torch's choice."""
    resources: dict[str, Any] = Field(default_factory=dict)
    """Pod resources of an engine."""


class RolloutSpec(SpecModel):
    """How batches are collected."""

    global_batch_size: int = Field(default=256, ge=1)
    """Samples that ship a training batch at once."""
    max_coalesce_wait_seconds: float = Field(default=0.5, ge=0.0)
    """A batch that is not full ships after this long without a new group."""
    max_empty_wait_seconds: float = Field(default=30.0, gt=0.0)
    """An empty wait this long is logged with what each run waits for."""
    max_in_flight_groups: int = Field(default=256, ge=1)
    """Prompt groups generating at once over all runs."""
    workers: int = Field(default=1, ge=1)
    """Rollout worker processes."""
    reward_memory_bytes: int = Field(default=4 << 30, ge=256 << 20)
    """Memory that a run's reward process may allocate."""


class WeightSync(SpecModel):
    """How new adapter versions reach the engines."""

    strategy: Literal["ObjectStore"] = "ObjectStore"
    """One flat buffer per version through Ray's object store."""
    bucket_bytes: int = Field(default=512 << 20, ge=1 << 20)
    """Largest buffer sent at once."""


class Storage(SpecModel):
    """Shared storage for checkpoints and data; give exactly one of path and pvc."""

    path: str | None = None
    """Directory that every node sees."""
    pvc: str | None = None
    """ReadWriteMany claim."""


class SecretRef(SpecModel):
    """One key of a Secret."""

    name: str = Field(min_length=1)
    """Name of the Secret."""
    key: str = "token"
    """Key inside it."""


class Endpoint(SpecModel):
    """A running runtime to adopt instead of making a RayCluster."""

    url: str = Field(min_length=1, max_length=2048)
    """Base URL of the runtime."""
    token_secret_ref: SecretRef
    """Secret with the runtime's bearer token."""


class AdapterPoolSpec(SpecModel):
    """One base model, one trainer with a slot per adapter, and the engines that serve all adapters."""

    base_model: BaseModelRef
    """The frozen base model."""
    slots: int = Field(default=8, ge=1, le=512)
    """Runs that train at once."""
    max_rank: int = Field(default=32, ge=1, le=512)
    """Largest LoRA rank of a run."""
    target_modules: list[TargetModule] = Field(default=ALL_LINEAR, min_length=1, max_length=7)
    """Projections that runs may adapt."""
    placement: Literal["Colocated", "Disaggregated"] = "Disaggregated"
    """Trainer and engines on the same or on different accelerators."""
    trainer: TrainerSpec = TrainerSpec()
    """The trainer."""
    engines: EnginesSpec = EnginesSpec()
    """The engines."""
    rollout: RolloutSpec = RolloutSpec()
    """Batch collection."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Values for run fields that a run leaves unset."""
    weight_sync: WeightSync = WeightSync()
    """Publishing."""
    storage: Storage = Storage()
    """Checkpoints and data."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of runtime processes."""
    secret_refs: list[SecretRef] = Field(default_factory=list)
    """Secrets put into the environment."""
    allowed_namespaces: list[str] = Field(default_factory=list)
    """Other namespaces whose runs may use this pool."""
    reward_modules: list[str] = Field(default_factory=list)
    """Python modules whose functions customRmPath may name."""
    suspend: bool = False
    """Stop the trainer and engines; runs wait."""
    idle_timeout_seconds: int | None = Field(default=None, ge=1)
    """Stop them when no run was live for this long; unset keeps them warm."""
    ray: dict[str, Any] | None = None
    """Image, Ray version and template overrides of the RayCluster."""
    endpoint: Endpoint | None = None
    """Adopt this runtime."""

    @property
    def engine_max_loras(self) -> int:
        """Adapter versions an engine keeps resident."""
        if self.engines.max_loras is not None:
            return self.engines.max_loras
        return self.slots * (int(self.defaults.get("maxStaleness", 3)) + 2) + 1
