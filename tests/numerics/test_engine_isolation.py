"""A run whose activations overflow, in the engine: what it leaves behind reaches no other run, beside it or after it.

Its weights are finite, so publishing has no reason to refuse them.
"""

import math

import numpy as np
import ray

from lorafleet_runtime.types import Completion, SamplingParams, VersionId
from support.adapters import RandomAdapter, pack
from support.engine_actor import EngineUnderTest
from support.peft_reference import reference_logprobs, sampled_logprobs

TOLERANCE = 1e-4
GREEDY = SamplingParams(n=1, temperature=0.0, top_p=1.0, max_tokens=40)
MANY = SamplingParams(n=16, temperature=1.0, top_p=1.0, max_tokens=40, seed=3)
"""Each of the samples leaves a block or two that are not full, and vLLM gives those away first."""
PROMPT = [(11 * i + 3) % 251 for i in range(70)]
"""Two full KV blocks, which the prefix cache keeps, and 6 tokens of a third."""


def _huge(engine: EngineUnderTest) -> RandomAdapter:
    tensors = {name: np.full_like(array, 1e20) for name, array in engine.adapter(seed=9).tensors.items()}
    return RandomAdapter(*pack(tensors, 8, 16), tensors)


def _finite(completion: Completion) -> bool:
    return all(map(math.isfinite, completion.logprobs))


def _overflow(engine: EngineUnderTest) -> VersionId:
    """A version that fills 16 to 32 KV blocks with values that are not finite, and lets them go."""
    version = engine.publish("diverged", 1, _huge(engine))
    assert not any(map(_finite, engine.generate(version, PROMPT, MANY)))
    return version


def _error(engine: EngineUnderTest, adapter: RandomAdapter, completion: Completion) -> float:
    expected = sampled_logprobs(
        reference_logprobs(engine.model, adapter, PROMPT, completion.token_ids), completion.token_ids
    )
    return float(np.abs(expected - np.array(completion.logprobs)).max())


def test_the_next_owners_of_its_blocks_sample_what_they_did_before(engine: EngineUnderTest) -> None:
    """vLLM's CPU kernel multiplies probability 0 with the unused slots of a block: 0 x NaN."""
    healthy = engine.publish("healthy", 1, engine.adapter(seed=1))
    engine.generate(healthy, PROMPT, GREEDY)  # fills the prompt cache, so that both runs below start alike
    before = engine.generate(healthy, PROMPT, GREEDY)
    _overflow(engine)
    assert engine.generate(healthy, PROMPT, GREEDY) == before
    fresh = engine.adapter(seed=2)
    for completion in engine.generate(engine.publish("fresh", 1, fresh), PROMPT, MANY):
        assert _error(engine, fresh, completion) <= TOLERANCE


def test_a_run_in_the_same_batches_samples_what_it_does_alone(engine: EngineUnderTest) -> None:
    adapter = engine.adapter(seed=1)
    healthy, diverged = engine.publish("healthy", 1, adapter), _overflow(engine)
    alone = engine.generate(healthy, PROMPT, GREEDY)[0]
    answers = ray.get([engine.ask(v, PROMPT, p) for v, p in ((diverged, MANY), (healthy, GREEDY), (diverged, MANY))])
    assert not any(map(_finite, answers[0] + answers[2]))
    [beside] = answers[1]
    assert beside.token_ids == alone.token_ids and _error(engine, adapter, beside) <= TOLERANCE


def test_its_next_version_gets_no_prompt_cache_of_it(engine: EngineUnderTest) -> None:
    _overflow(engine)
    adapter = engine.adapter(seed=1)
    [completion] = engine.generate(engine.publish("diverged", 2, adapter), PROMPT, GREEDY)
    assert _error(engine, adapter, completion) <= TOLERANCE
