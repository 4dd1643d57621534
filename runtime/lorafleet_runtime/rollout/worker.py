"""The rollout worker: one prompt row and one engine in, one scored prompt group out.

    open(uid, spec)   data file ─▶ PromptSource;  initFrom ─▶ checked;  reward ─▶ a child process of the run
    run_group(...)    row(index) ─▶ engine.generate ─▶ decode ─▶ reward per sample ─▶ advantages ─▶ PromptGroup

Called by the loop through `actor.RolloutActor` (tests call it directly). Keeps nothing that a restart loses: indexes
and cursors are the loop's. A fault of one run is raised for that run alone; the worker goes on with the others.
"""

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.reasons import NON_FINITE, REWARD_ERROR
from lorafleet_runtime.data.prompts import PromptRow, PromptSource, open_source
from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.rewards.process import RewardFailure, RewardProcess
from lorafleet_runtime.rewards.resolve import resolve_reward, reward_field
from lorafleet_runtime.rollout.advantages import group_advantages
from lorafleet_runtime.rollout.text import Decoder
from lorafleet_runtime.storage import has_checkpoint
from lorafleet_runtime.trainer.warm_start import check_warm_start
from lorafleet_runtime.types import (
    Completion,
    DatasetInfo,
    DroppedGroup,
    PromptGroup,
    Sample,
    SamplingParams,
    VersionId,
)


class GeneratingEngine(Protocol):
    """What the worker needs of an engine; `engines.Engine`, and `actor.RemoteEngine` for a Ray handle."""

    async def generate(
        self, request_id: str, version: VersionId | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """Sample `params.n` completions; raises Retryable when the engine or the version is not there."""
        ...


@dataclass(slots=True)
class _OpenRun:
    spec: AdapterRunSpec
    source: PromptSource
    reward: RewardProcess
    groups: int = 0
    """Under way; with the last of a replaced run its reward ends."""
    replaced: bool = False
    closed: bool = False


class RolloutWorker:
    """Serves the prompt groups of any number of runs.

    Args:
        pool_spec: for engines.maxModelLen and rewardModules; a spec or its wire form.
        model_path: directory with the base model's tokenizer, config.json and generation_config.json.
        storage_root: root of the pool's storage.
    """

    def __init__(
        self, pool_spec: AdapterPoolSpec | Mapping[str, Any], model_path: str | Path, storage_root: str | Path
    ) -> None:
        self._pool = AdapterPoolSpec.model_validate(pool_spec)
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(model_path))
        self._decoder = Decoder(self._tokenizer, Path(model_path))
        self._storage_root = Path(storage_root)
        self._model_path = Path(model_path)
        self._runs: dict[str, _OpenRun] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One for each run that is being opened or closed: after a restart all its groups ask for open at once."""

    async def open(self, uid: str, spec: AdapterRunSpec | Mapping[str, Any], started: bool = False) -> DatasetInfo:
        """Read the run's data, check its initFrom and start its reward. Idempotent.

        Another spec replaces what was open; groups under way finish with what they began with.

        Args:
            uid: the run.
            spec: resolved AdapterRunSpec, or its wire form.
            started: the run was registered before; it resumes and needs its initFrom no more.

        Raises:
            RunError: DataError, RewardError, InitError or InvalidSpec, naming the field, the value and the fix.
        """
        resolved = AdapterRunSpec.model_validate(spec)
        async with self._lock(uid):
            known = self._runs.get(uid)
            if known is not None and known.spec == resolved:
                return known.source.info
            made = await self._make(uid, resolved, started)
            self._runs[uid] = made
            if known is not None:
                known.replaced = True
                await _end_replaced(known)
        return made.source.info

    async def _make(self, uid: str, spec: AdapterRunSpec, started: bool) -> _OpenRun:
        target = resolve_reward(spec, self._pool.reward_modules)
        if not started:
            await asyncio.to_thread(self._check_start, uid, spec)
        source = await asyncio.to_thread(  # a big file takes seconds, and other runs' groups must not wait for it
            open_source, spec, self._tokenizer, self._storage_root, self._pool.engines.max_model_len
        )
        reward = RewardProcess(target, spec.reward_timeout_seconds, self._pool.rollout.reward_memory_bytes)
        try:
            await reward.start()
        except RewardFailure as failure:
            fix = "correct the path or the module, or name its folder in env.PYTHONPATH of the pool"
            text = f"{reward_field(spec)} cannot be loaded: {failure}; {fix}"
            raise RunError(REWARD_ERROR, text, failure.traceback) from failure
        return _OpenRun(spec, source, reward)

    def _check_start(self, uid: str, spec: AdapterRunSpec) -> None:
        targets = spec.target_modules or self._pool.target_modules
        try:
            check_warm_start(spec, targets, self._storage_root, self._model_path)
        except RunError:
            if not has_checkpoint(self._storage_root, uid):  # a run that resumes needs its initFrom no more
                raise

    def _lock(self, uid: str) -> asyncio.Lock:
        return self._locks.setdefault(uid, asyncio.Lock())

    async def run_group(
        self, uid: str, index: int, version: VersionId, engine: GeneratingEngine
    ) -> PromptGroup | DroppedGroup:
        """Sample and score the group at one position of the run's prompt stream.

        Args:
            uid: an open run.
            index: position in the endless stream, 0 or more.
            version: samples every token of the group.
            engine: anything with an async `generate`.

        Raises:
            RunError: RewardError under rewardFailurePolicy Fail; NonFinite for a policy that has diverged; or the
                engine's word on this run.
            Retryable: the run is not open here, or the engine is away.
        """
        run = self._runs.get(uid)
        if run is None:
            raise Retryable(f"run {uid} is not open in this rollout worker; open it again")
        run.groups += 1
        try:
            return await self._sample(uid, run, index, version, engine)
        finally:
            run.groups -= 1
            await _end_replaced(run)

    async def _sample(
        self, uid: str, run: _OpenRun, index: int, version: VersionId, engine: GeneratingEngine
    ) -> PromptGroup | DroppedGroup:
        row = run.source.row(index)
        # The prefix is the run's and then the version's, so that abort by prefix finds either's requests; the suffix is
        # fresh, because a group asked for again may meet its first request still running.
        request_id = f"{uid}::{version.incarnation}::v{version.n}::{index}-{uuid.uuid4().hex[:8]}"
        params = sampling_params(run.spec)
        completions = await engine.generate(request_id, version, row.prompt_ids, params)
        if len(completions) != params.n or not all(c.token_ids for c in completions):
            complete = sum(bool(c.token_ids) for c in completions)
            return DroppedGroup(uid, version, index, "aborted", f"{complete} of {params.n} completions came back")
        # Before the reward: what it would say of such a text hides the cause.
        if not all(map(math.isfinite, (logprob for c in completions for logprob in c.logprobs))):
            raise RunError(NON_FINITE, _diverged(run.spec, version))
        texts = tuple(self._decoder.text(c) for c in completions)
        rewards: list[float] = []
        for completion, text in zip(completions, texts, strict=True):
            try:
                rewards.append(await _score(run, row, text, completion.finish_reason == "length"))
            except RewardFailure as failure:
                if run.closed:
                    raise Retryable(f"run {uid} was closed in this rollout worker during a group") from failure
                if run.spec.reward_failure_policy == "Drop":
                    return DroppedGroup(uid, version, index, "rewardError", str(failure))
                if run.spec.reward_failure_policy == "Fail":
                    raise _reward_error(run.spec, index, failure) from failure
                rewards.append(0.0)
        samples = _samples(run.spec, completions, rewards)
        return PromptGroup(uid, version, index, row.prompt_ids, samples, texts, self._decoder.prompt(row.prompt_ids))

    async def close(self, uid: str) -> None:
        """Forget a run and end its reward process; does nothing for an unknown one."""
        async with self._lock(uid):
            run = self._runs.pop(uid, None)
            if run is not None:
                run.closed = True
                await run.reward.close()

    async def shutdown(self) -> None:
        """Close every run."""
        for uid in list(self._runs):
            await self.close(uid)


def sampling_params(spec: AdapterRunSpec) -> SamplingParams:
    """The engine's parameters of one group; no seed, so that the same prompt gives other samples each epoch."""
    sampling = spec.sampling
    return SamplingParams(
        n=spec.n_samples_per_prompt,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop=tuple(sampling.stop),
    )


async def _end_replaced(run: _OpenRun) -> None:
    if run.replaced and run.groups == 0:
        await run.reward.close()


async def _score(run: _OpenRun, row: PromptRow, text: str, truncated: bool) -> float:
    return await run.reward.score(
        prompt=row.prompt, response=text, label=row.label, metadata=row.metadata, truncated=truncated
    )


def _samples(spec: AdapterRunSpec, completions: Sequence[Completion], rewards: Sequence[float]) -> tuple[Sample, ...]:
    advantages = group_advantages(rewards, spec.algorithm.advantage, spec.algorithm.std_norm)
    return tuple(
        Sample(c.token_ids, c.logprobs, reward, advantage, c.finish_reason == "length")
        for c, reward, advantage in zip(completions, rewards, advantages, strict=True)
    )


def _diverged(spec: AdapterRunSpec, version: VersionId) -> str:
    optimizer = spec.optimizer
    fixes = ["lower optimizer.lr"]
    if optimizer.clip_grad == 0:
        fixes.append("set clipGrad, which is 0")
    if spec.init_from is not None:
        fixes.insert(0 if version.n == 1 else len(fixes), f"check the weights of initFrom {spec.init_from}")
    return (
        f"its policy has diverged: log-probabilities of its version {version.n} are not finite, with optimizer.lr"
        f" {optimizer.lr:g} and weightDecay {optimizer.weight_decay:g}; {', or '.join(fixes)}"
    )


def _reward_error(spec: AdapterRunSpec, index: int, failure: RewardFailure) -> RunError:
    return RunError(
        REWARD_ERROR,
        f"{reward_field(spec)} failed on prompt {index}: {failure}; "
        "correct the function, or set rewardFailurePolicy to Zero or Drop",
        failure.traceback,
    )
