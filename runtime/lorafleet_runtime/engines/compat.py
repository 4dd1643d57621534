"""Everything that depends on vLLM's version: argument names, call names, exceptions, output layout.

Only `engine.py` uses it, and only in an engine's process: importing this module imports vllm and torch, so the
environment of `settings.environment` must be set before. Written for vLLM 0.25 to 0.33.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import vllm
from vllm import SamplingParams as VllmSamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from lorafleet_runtime.engines import clean_blocks
from lorafleet_runtime.engines.backend import Adapter, EngineDead
from lorafleet_runtime.engines.settings import CPU_ENVIRONMENT, DEFAULT_CPU_KV_CACHE_BYTES, EngineConfig
from lorafleet_runtime.errors import Retryable
from lorafleet_runtime.publish.base_model import BaseModel
from lorafleet_runtime.types import Completion, SamplingParams

_SEQUENCE_FIELDS = {f.name for f in dataclasses.fields(AsyncEngineArgs)}


class VllmBackend:
    """One vLLM AsyncLLM. Make it on the event loop that will use it; that takes 10 to 170 seconds.

    Raises:
        ConfigError: vLLM did not load the plugin that keeps runs apart.
    """

    def __init__(self, config: EngineConfig, base: BaseModel) -> None:
        self._stop_token_ids = base.stop_token_ids
        self._has_tokenizer = base.has_tokenizer
        if current_platform.is_cpu():
            os.environ.update({k: v for k, v in CPU_ENVIRONMENT.items() if k not in config.env})
        arguments = AsyncEngineArgs(**engine_arguments(config, base))  # loads vLLM's plugins
        clean_blocks.check()
        self._llm = AsyncLLM.from_engine_args(arguments)

    @property
    def dead(self) -> bool:
        """The engine process is gone."""
        return bool(self._llm.errored)

    async def load(self, adapter: Adapter) -> None:
        """Load the adapter's directory into a slot and keep it there."""
        try:
            if not await self._llm.add_lora(_request(adapter)):
                raise ValueError(f"adapter {adapter.name}: vLLM did not load it; see the engine's log")
            # The engine never loads more than it has room for, so a pin costs nothing and forbids eviction.
            await self._llm.pin_lora(adapter.id)
        except EngineDeadError as error:
            raise EngineDead("engine: its vLLM process died; start a new engine") from error

    async def unload(self, adapter_id: int) -> None:
        """Free the adapter's slot."""
        try:
            await self._llm.remove_lora(adapter_id)
        except EngineDeadError as error:
            raise EngineDead("engine: its vLLM process died; start a new engine") from error

    async def loaded(self) -> set[int]:
        """The ids that vLLM holds."""
        try:
            return set(await self._llm.list_loras())
        except EngineDeadError as error:
            raise EngineDead("engine: its vLLM process died; start a new engine") from error

    async def generate(
        self, request_id: str, adapter: Adapter | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """Sample params.n completions; cancelling the call aborts the request.

        Raises:
            ValueError: vLLM refuses the prompt or the parameters.
            Retryable: the request failed inside vLLM.
            EngineDead: the engine process died.
        """
        if params.stop and not self._has_tokenizer:
            raise ValueError(f"sampling.stop {list(params.stop)}: the base model has no tokenizer; remove it")
        final = None
        try:
            async for output in self._llm.generate(
                tokens_input(list(prompt_ids)),
                sampling_arguments(params, self._stop_token_ids),
                request_id,
                lora_request=_request(adapter) if adapter else None,
            ):
                final = output
        except EngineDeadError as error:
            raise EngineDead("engine: its vLLM process died; start a new engine") from error
        except EngineGenerateError as error:
            raise Retryable(f"request {request_id}: vLLM failed it ({error.__cause__!r}); ask again") from error
        if final is None or not final.finished:
            raise Retryable(f"request {request_id}: vLLM ended it without a result; ask again")
        return [completion(c) for c in sorted(final.outputs, key=lambda c: c.index)]

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown()


def engine_arguments(config: EngineConfig, base: BaseModel) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs.

    generation_config "vllm" keeps the model's generation_config.json out of sampling; its end tokens are sent with
    each request instead. Log-probabilities are the processed ones: what the sampler drew from.
    """
    arguments: dict[str, Any] = {
        "model": str(base.directory),
        "skip_tokenizer_init": not base.has_tokenizer,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": config.seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_lora": True,
        "max_loras": config.max_loras,
        "max_cpu_loras": config.max_loras,
        "max_lora_rank": config.lora_rank,
        "lora_target_modules": list(config.target_modules),
        "fully_sharded_loras": config.fully_sharded_loras,
    }
    if current_platform.is_cpu():
        arguments |= {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,  # smallest fast one; the default 128 never shares a short prompt
            "kv_cache_memory_bytes": config.kv_cache_bytes or DEFAULT_CPU_KV_CACHE_BYTES,
        }
        if config.tensor_parallel == 1:
            arguments["distributed_executor_backend"] = "uni"
    else:
        arguments |= {
            "dtype": config.dtype,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "attention_backend": "FLASH_ATTN",
        }
    unknown = sorted(set(arguments) - _SEQUENCE_FIELDS)
    if unknown:
        raise TypeError(f"vllm {vllm.__version__}: has no engine arguments {unknown}; adapt engines/compat.py")
    return arguments


def sampling_arguments(params: SamplingParams, stop_token_ids: Sequence[int]) -> VllmSamplingParams:
    """vLLM's parameters, with every value that could bend the distribution sent as neutral.

    Raises:
        ValueError: a value is out of range.
    """
    return VllmSamplingParams(
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop=list(params.stop) or None,
        stop_token_ids=list(stop_token_ids),
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=0,  # the sampled token only
        flat_logprobs=True,
        detokenize=bool(params.stop),  # only stop strings need text
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion(output: CompletionOutput) -> Completion:
    """One of vLLM's outputs as ours.

    Raises:
        Retryable: it was aborted.
    """
    if output.finish_reason not in ("stop", "length"):
        raise Retryable(f"completion {output.index}: vLLM ended it with {output.finish_reason!r}; ask again")
    flat = output.logprobs
    # The sampled token comes first in its position.
    logprobs = tuple(flat.logprobs[start] for start in flat.start_indices)
    return Completion(tuple(output.token_ids), logprobs, output.finish_reason)


def _request(adapter: Adapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.id, adapter.path)
