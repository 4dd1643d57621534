"""Pure checks of a run's spec against its pool, made before a slot is taken."""

from typing import Any

from pydantic import ValidationError

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec, resolve_spec
from lorafleet_runtime.errors import RunError

MIN_TEMPERATURE = 0.01
"""vLLM raises what is below to this, so that sampler and trainer would differ."""


class SpecProblem(Exception):
    """A spec that does not parse.

    Args:
        field: dotted camelCase path.
        value: what was received.
        fix: what to do.
    """

    def __init__(self, field: str, value: Any, fix: str) -> None:
        super().__init__(f"{field}: {value!r}: {fix}")
        self.field = field
        self.value = value
        self.fix = fix


def parse_spec(spec: dict[str, Any], pool: AdapterPoolSpec) -> AdapterRunSpec:
    """Resolve a spec as the user wrote it.

    Raises:
        SpecProblem: the first field that is unknown or out of range.
    """
    try:
        return resolve_spec(spec, pool.defaults)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "spec"
        fix = first["msg"].removeprefix("Value error, ")
        value = first.get("input")
        raise SpecProblem(field, "(object)" if isinstance(value, dict) else value, fix) from error


def check_limits(spec: AdapterRunSpec, pool: AdapterPoolSpec) -> None:
    """Refuse what this pool cannot train.

    Raises:
        RunError: with the field, the value, the limit and the fix.
    """
    if spec.rank > pool.max_rank:
        raise RunError(
            reasons.RANK_TOO_LARGE,
            f"rank: {spec.rank} is above the pool's maxRank {pool.max_rank}; use a rank of at most {pool.max_rank}",
        )
    limit = int(pool.defaults.get("maxStaleness", 3))
    if spec.max_staleness > limit:
        raise RunError(
            reasons.STALENESS_TOO_LARGE,
            f"maxStaleness: {spec.max_staleness} is above the pool's {limit}; lower it or raise the pool's"
            " defaults.maxStaleness",
        )
    missing = sorted(set(spec.target_modules or ()) - set(pool.target_modules))
    if missing:
        raise RunError(
            reasons.TARGETS_NOT_SERVED,
            f"targetModules: {', '.join(missing)} not among the pool's {', '.join(pool.target_modules)}; remove them",
        )
    if spec.sampling.max_tokens >= pool.engines.max_model_len:
        raise RunError(
            reasons.INVALID_SPEC,
            f"sampling.maxTokens: {spec.sampling.max_tokens} leaves no room for a prompt in the engines' maxModelLen"
            f" {pool.engines.max_model_len}; lower it",
        )
    check_sampling(spec)
    if spec.n_samples_per_prompt == 1 and spec.algorithm.advantage in ("grpo", "rloo"):
        raise RunError(
            reasons.INVALID_SPEC,
            f"nSamplesPerPrompt: 1 gives every sample the advantage 0 with algorithm.advantage"
            f" {spec.algorithm.advantage}; use 2 or more, or algorithm.advantage reinforce",
        )
    for field, value, fix in _unsupported(spec):
        raise RunError(reasons.INVALID_SPEC, f"{field}: {value} is not supported by this version; {fix}")


def check_sampling(spec: AdapterRunSpec) -> None:
    """Refuse sampling whose log-probabilities the trainer does not compute. The trainer asks too.

    Raises:
        RunError: InvalidSpec with the field, the value and the fix.
    """
    sampling = spec.sampling
    if sampling.top_p != 1.0:  # the engine's log-probabilities are over the nucleus, the trainer's over the vocabulary
        raise RunError(
            reasons.INVALID_SPEC, f"sampling.topP: {sampling.top_p:g} cannot be trained on; set it to 1 or remove it"
        )
    if sampling.temperature < MIN_TEMPERATURE:
        raise RunError(
            reasons.INVALID_SPEC,
            f"sampling.temperature: {sampling.temperature:g} is below {MIN_TEMPERATURE:g}, where sampling is greedy and"
            f" engines round it; use {MIN_TEMPERATURE:g} or more, for example 1",
        )


def _unsupported(spec: AdapterRunSpec) -> list[tuple[str, Any, str]]:
    """Fields that the schema has and this version refuses: nothing a user sets may be without effect."""
    found: list[tuple[str, Any, str]] = []
    if spec.evaluation is not None:
        found.append(("evaluation", "(set)", "remove it"))
    if spec.checkpoint.keep_best:
        found.append(("checkpoint.keepBest", True, "set it to false"))
    if spec.record_steps:
        found.append(("recordSteps", True, "set it to false"))
    if spec.mixed_versions:
        found.append(("mixedVersions", True, "set it to false"))
    return found
