"""How a run's token losses become one number: the weight of a token, and what the step divides by.

Called by policy.py, batch.py and slot.py. Pure. The trainer adds up weight x loss over any number of passes and ranks
and divides once, at the step, so neither the size of a pass nor a neighbour changes a gradient.

    lossReduction   weight of a token           the step divides by
    sampleMean      1 / tokens of its response  responses           (the mean over responses of the mean of each)
    tokenMean       1                           response tokens     (DAPO, Yu et al. 2025)
    constant        1 / sampling.maxTokens      responses           (Dr. GRPO, Liu et al. 2025: no length bias)
"""

from collections.abc import Sequence

from lorafleet_runtime.types import Sample


def token_weight(reduction: str, response_tokens: int, max_tokens: int) -> float:
    """Weight of each token of a response with `response_tokens` tokens."""
    if reduction == "sampleMean":
        return 1.0 / response_tokens
    return 1.0 if reduction == "tokenMean" else 1.0 / max_tokens


def kept(samples: Sequence[Sample], mask_truncated: bool) -> list[Sample]:
    """The samples that count: with maskTruncated those that ended by themselves (numerator and denominator)."""
    return [s for s in samples if not (mask_truncated and s.truncated)]


def denominator(reduction: str, samples: Sequence[Sample]) -> int:
    """What kept samples add to the number that the step divides by; 0 for none."""
    return sum(len(s.token_ids) for s in samples) if reduction == "tokenMean" else len(samples)
