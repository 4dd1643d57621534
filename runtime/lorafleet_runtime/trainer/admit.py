"""What the trainer accepts: load requests against the pool, and prompt groups against the model.

Called by rank.py and passes.py before it changes anything.
"""

import math

from pydantic import ValidationError

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.registry.admission import check_sampling
from lorafleet_runtime.trainer.shape import ModelShape
from lorafleet_runtime.types import LoadRequest, PromptGroup


def check_load(request: LoadRequest, pool: AdapterPoolSpec, slots: dict[int, str]) -> AdapterRunSpec:
    """The run's spec, once everything in the request fits this pool.

    Args:
        request: what to load.
        pool: whose trainer this is.
        slots: live slots, number to uid.

    Raises:
        RunError: InvalidSpec, RankTooLarge or TargetsNotServed; InternalError for a slot that cannot be had.
    """
    try:
        spec = AdapterRunSpec.model_validate(request.spec)
    except ValidationError as error:
        raise RunError(reasons.INVALID_SPEC, f"spec of run {request.uid}: {error}") from error
    if spec.rank > pool.max_rank:
        raise RunError(
            reasons.RANK_TOO_LARGE, f"rank: {spec.rank} is above the pool's maxRank {pool.max_rank}; lower it"
        )
    extra = sorted(set(spec.target_modules or ()) - set(pool.target_modules))
    if extra:
        text = f"targetModules: {', '.join(extra)} not in the pool's {', '.join(pool.target_modules)}; leave them out"
        raise RunError(reasons.TARGETS_NOT_SERVED, text)
    check_sampling(spec)
    if request.target_step < 1:
        raise RunError(reasons.INTERNAL_ERROR, f"target_step: {request.target_step} is below 1")
    holder = slots.get(request.slot, request.uid)
    if not 0 <= request.slot < pool.slots or holder != request.uid:
        raise RunError(reasons.INTERNAL_ERROR, f"slot {request.slot} of {pool.slots}: out of range or held by {holder}")
    return spec


def check_group(group: PromptGroup, shape: ModelShape) -> None:
    """Refuse a group that the model cannot compute.

    Raises:
        RunError: NonFinite for a bad number, InternalError for bad lengths or token ids; both name the group.
    """
    where = f"group {group.index} of run {group.uid}"
    if not group.prompt_ids:
        raise RunError(reasons.INTERNAL_ERROR, f"{where}: prompt_ids is empty")
    if not group.samples:
        raise RunError(reasons.INTERNAL_ERROR, f"{where}: samples is empty")
    _check_ids(group.prompt_ids, shape.vocab_size, f"{where}: prompt_ids")
    for i, sample in enumerate(group.samples):
        tokens, logprobs = len(sample.token_ids), len(sample.sampler_logprobs)
        if tokens != logprobs:
            text = f"{where}: sample {i} has {tokens} token_ids but {logprobs} sampler_logprobs"
            raise RunError(reasons.INTERNAL_ERROR, text)
        if len(group.prompt_ids) + tokens > shape.max_positions:
            length = len(group.prompt_ids) + tokens
            text = f"{where}: sample {i} ends at token {length}, the model at {shape.max_positions}"
            raise RunError(reasons.INTERNAL_ERROR, text)
        _check_ids(sample.token_ids, shape.vocab_size, f"{where}: token_ids of sample {i}")
        if not math.isfinite(sample.advantage):
            raise RunError(reasons.NON_FINITE, f"{where}: advantage of sample {i} is {sample.advantage}")
        if not all(map(math.isfinite, sample.sampler_logprobs)):
            text = (
                f"{where}: its policy has diverged: a sampler_logprob of sample {i} is not finite; lower optimizer.lr"
            )
            raise RunError(reasons.NON_FINITE, text)


def _check_ids(ids: tuple[int, ...], vocab_size: int, what: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise RunError(reasons.INTERNAL_ERROR, f"{what}: {min(ids)} to {max(ids)} is outside 0 to {vocab_size - 1}")
