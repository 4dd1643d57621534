"""Pure checks of a run's spec against its pool, made before a slot is taken."""

from typing import Any

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec, Algorithm, resolve_spec
from lorafleet_runtime.errors import RunError

MIN_TEMPERATURE = 0.01
"""vLLM raises what is below to this, so that sampler and trainer would differ."""


class SpecProblem(Exception):
    """A spec that does not parse.

    Args:
        field: dotted camelCase path.
        value: what was received; None where the message needs none.
        fix: what is wrong, and what to do.
    """

    def __init__(self, field: str, value: Any, fix: str) -> None:
        super().__init__(f"{field}: {fix}" if value is None else f"{field}: {value!r:.200}: {fix}")
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
        raise _problem(error, spec, pool) from error


def _problem(error: ValidationError, spec: dict[str, Any], pool: AdapterPoolSpec) -> SpecProblem:
    """The first error of a spec, by the field that the user wrote or left to the pool."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    fix, value = first["msg"], first.get("input")
    if first["type"] == "value_error":  # of our own: "field: what is wrong; what to do"
        name, _, fix = fix.removeprefix("Value error, ").partition(": ")
        path, value = [*path, name], None
    elif first["type"] == "missing":
        value = None  # pydantic shows the object around it
    elif first["type"] == "extra_forbidden":
        fix = "unknown field; remove it or correct its name"
    if path and path[0] in pool.defaults and path[0] not in spec:
        fix += " (from the pool's defaults: its owner must correct them)"
    return SpecProblem(".".join(path), "an object" if isinstance(value, dict) else value, fix)


def check_edit(old: AdapterRunSpec, spec: AdapterRunSpec, pool: AdapterPoolSpec, target_step: int | None) -> None:
    """Refuse an edit of a known run that this pool cannot train, or that would end it before its target.

    Args:
        old: the spec that holds, resolved.
        spec: the edited one, resolved.
        pool: of the run.
        target_step: of the run, or None before its data was opened.

    Raises:
        SpecProblem: with the field and the fix; the run goes on as it was.
    """
    try:
        check_limits(spec, pool)
    except RunError as error:
        field, _, rest = error.message.partition(": ")
        raise SpecProblem(field, None, rest) from error
    wanted = spec.num_step
    if wanted is not None and wanted != old.num_step and target_step is not None and wanted < target_step:
        text = f"is below the run's target step {target_step} and may only grow; cancel the run to end it earlier"
        raise SpecProblem("numStep", wanted, text)


def check_limits(spec: AdapterRunSpec, pool: AdapterPoolSpec) -> None:
    """Refuse what this pool cannot train.

    Raises:
        RunError: with the field, the value, the limit and the fix.
    """
    if spec.rank > pool.max_rank:
        raise RunError(
            reasons.RANK_TOO_LARGE,
            f"rank: {spec.rank} is above the pool's maxRank {pool.max_rank}; use a rank of at most {pool.max_rank}"
            " (16 is the default)",
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
            f" {pool.engines.max_model_len}; set a lower one (1024 is the default)",
        )
    check_sampling(spec)
    if spec.n_samples_per_prompt == 1 and spec.algorithm.advantage in ("grpo", "rloo"):
        raise RunError(
            reasons.INVALID_SPEC,
            f"nSamplesPerPrompt: 1 gives every sample the advantage 0 with algorithm.advantage"
            f" {spec.algorithm.advantage}; use 2 or more, or algorithm.advantage reinforce",
        )
    if spec.n_samples_per_prompt * spec.rollout_batch_size == 1:
        raise RunError(
            reasons.INVALID_SPEC,
            "rolloutBatchSize: 1 with nSamplesPerPrompt 1 gives every sample the advantage 0; use more of either",
        )
    for field, value, fix in _unsupported(spec):
        raise RunError(reasons.INVALID_SPEC, f"{field}: {value} is not supported by this version; {fix}")


def without_effect(spec: AdapterRunSpec, target_step: int | None) -> list[str]:
    """Settings that are right by themselves and change nothing beside the others, for the run's message.

    Only values other than the default count: whether a default was written or left out makes no difference.

    Args:
        spec: of the run, resolved.
        target_step: of the run; None before its data was opened.

    Returns:
        "FIELD VALUE has no effect: WHY" of each; of a warm-up that is as long as the run, that.
    """
    default, algorithm, optimizer = Algorithm(), spec.algorithm, spec.optimizer
    found: list[tuple[str, Any, str]] = []
    if optimizer.schedule == "constant" and optimizer.min_lr > 0:
        found.append(("optimizer.minLr", optimizer.min_lr, "schedule is constant"))
    names = ("tis_floor", "tis_cap") if algorithm.tis_mode == "Off" else ("clip_low", "clip_high", "dual_clip")
    for name in names:
        if (value := getattr(algorithm, name)) != getattr(default, name):
            found.append((f"algorithm.{to_camel(name)}", value, f"tisMode is {algorithm.tis_mode}"))
    if algorithm.kl_coef == 0 and algorithm.kl_type != default.kl_type:
        found.append(("algorithm.klType", algorithm.kl_type, "klCoef is 0"))
    if spec.init_from is not None:
        for field, value, plain in (("initScheme", spec.init_scheme, "kaiming"), ("initSeed", spec.init_seed, 0)):
            if value != plain:
                found.append((field, value, "initFrom has the matrices"))
    if spec.num_step is not None and spec.num_epoch is not None:
        found.append(("numEpoch", spec.num_epoch, "numStep wins"))
    texts = [f"{field} {value} has no effect: {why}" for field, value, why in found]
    warmup = optimizer.warmup_steps
    if target_step is not None and (
        warmup > target_step or (warmup == target_step and optimizer.schedule != "constant")
    ):
        what = "lr is never reached" if warmup > target_step else f"{optimizer.schedule} never begins"
        texts.insert(0, f"optimizer.warmupSteps {warmup} is as long as the run of {target_step} steps: {what}")
    return texts


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
    """Fields that the schema has and this version refuses: nothing a user sets may be silently without effect."""
    found: list[tuple[str, Any, str]] = []
    if spec.evaluation is not None:
        found.append(("evaluation", "(set)", "remove it"))
    if spec.mixed_versions:
        found.append(("mixedVersions", True, "set it to false"))
    return found
