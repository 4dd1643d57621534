"""How one engine is started, and the environment that its process needs.

Made by the runtime from the AdapterPool and sent to the engine's actor. Imports no torch and no vllm, because the
environment must be set before either is imported.
"""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.errors import ConfigError

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes slots for."""

DEFAULT_CPU_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: its model, its room for adapters, its room for sequences."""

    name: str
    """Name of the engine and of its actor."""
    model: str
    """Model directory or hub name."""
    revision: str | None
    dtype: str
    """float32 or bfloat16. vLLM on CPU always runs float32: bfloat16 is about 95 times slower there."""
    max_loras: int
    """Adapter versions resident at once."""
    max_rank: int
    target_modules: tuple[str, ...]
    max_model_len: int
    max_num_seqs: int
    stage_root: str
    """Folder on this node for adapter directories; the engine makes one of its own below it."""
    kv_cache_bytes: int | None = None
    """KV cache on CPU; unset means 1 GiB."""
    gpu_memory_utilization: float = 0.9
    tensor_parallel: int = 1
    fully_sharded_loras: bool = False
    num_threads: int | None = None
    """OpenMP threads; unset means one per CPU of this process."""
    seed: int = 0
    env: dict[str, str] = field(default_factory=dict)
    """Wins over everything that this module sets."""

    @property
    def lora_rank(self) -> int:
        """The smallest rank of vLLM's that covers max_rank; every slot is padded to it."""
        return rank_cover(self.max_rank)


def rank_cover(rank: int) -> int:
    """The smallest of LORA_RANKS that holds `rank`.

    Raises:
        ConfigError: the rank is larger than vLLM allows.
    """
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigError(f"maxRank {rank}: vLLM serves at most {LORA_RANKS[-1]}; lower it")


def engine_config(spec: AdapterPoolSpec, name: str, stage_root: str | None = None) -> EngineConfig:
    """The config of one engine of a pool.

    Args:
        spec: the pool.
        name: of this engine; unique in the Ray cluster.
        stage_root: folder for adapter directories; unset means a folder in the system's temporary one.

    Raises:
        ConfigError: maxRank is larger than vLLM allows.
    """
    base, engines = spec.base_model, spec.engines
    config = EngineConfig(
        name=name,
        model=base.path or base.name or "",
        revision=base.revision,
        dtype=base.dtype,
        max_loras=spec.engine_max_loras,
        max_rank=spec.max_rank,
        target_modules=tuple(spec.target_modules),
        max_model_len=engines.max_model_len,
        max_num_seqs=engines.max_num_seqs,
        stage_root=stage_root or str(Path(tempfile.gettempdir()) / f"lorafleet-engines-{os.getuid()}"),
        kv_cache_bytes=engines.kv_cache_bytes,
        gpu_memory_utilization=engines.gpu_memory_utilization,
        tensor_parallel=engines.tensor_parallel,
        fully_sharded_loras=engines.fully_sharded_loras,
        num_threads=engines.num_threads,
        env=dict(spec.env),
    )
    rank_cover(config.max_rank)
    return config


def environment(config: EngineConfig) -> dict[str, str]:
    """Environment variables of the engine's process, to be set before torch and vllm are imported.

    Ray sets OMP_NUM_THREADS=1 in its workers and children inherit it, so the thread count is always explicit. OpenMP
    threads wait passively: spinning ones starve the trainer on a small machine. Engine processes are spawned: a fork
    after any torch work deadlocks.
    """
    threads = config.num_threads or len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at start, and needs nvcc for it
        **config.env,
    }


CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
"""Also set where vLLM runs on CPU.

The first lets the worker live in the engine process (start 36 s -> 20 s, 1 GB less). The second keeps the sampler's
one compiled function from needing a C++ compiler and 5 to 20 s in the first request.
"""
