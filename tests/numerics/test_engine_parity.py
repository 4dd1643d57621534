"""vLLM in our engine against Hugging Face PEFT in float32, one adapter or many in a batch.

The model's generation_config.json asks for temperature 0.6, top_k 20, top_p 0.8 and a repetition penalty; none of it
may show in any of these tests.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import ray

from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.types import Completion, SamplingParams, VersionId
from support.adapters import RandomAdapter, pack
from support.engine_actor import MAX_LORAS, EngineUnderTest
from support.peft_reference import reference_logprobs, sampled_logprobs
from support.tiny_model import EOS_ID

TOLERANCE = 1e-4
SAMPLE = SamplingParams(n=2, temperature=1.0, top_p=1.0, max_tokens=24, seed=5)
GREEDY = SamplingParams(n=1, temperature=0.0, top_p=1.0, max_tokens=16)
PROMPT = [(11 * i + 3) % 251 for i in range(70)]
"""Two full KV blocks and a bit, so that the prefix cache takes part."""


def _error(engine: EngineUnderTest, adapter: RandomAdapter | None, prompt: Sequence[int], c: Completion) -> float:
    """Largest difference of a completion's log-probabilities from the reference."""
    expected = sampled_logprobs(reference_logprobs(engine.model, adapter, prompt, c.token_ids), c.token_ids)
    return float(np.abs(expected - np.array(c.logprobs)).max())


def test_the_base_model_agrees_with_hugging_face(engine: EngineUnderTest) -> None:
    for completion in engine.generate(None, PROMPT, SAMPLE):
        assert _error(engine, None, PROMPT, completion) <= TOLERANCE


def test_an_adapter_agrees_with_peft(engine: EngineUnderTest) -> None:
    adapter = engine.adapter(seed=1)
    version = engine.publish("a", 1, adapter)
    for completion in engine.generate(version, PROMPT, SAMPLE):
        assert _error(engine, adapter, PROMPT, completion) <= TOLERANCE
        assert _error(engine, None, PROMPT, completion) > 0.05  # the adapter matters


def test_a_small_rank_with_other_alpha_and_fewer_projections_agrees_with_peft(engine: EngineUnderTest) -> None:
    adapter = engine.adapter(seed=2, rank=4, alpha=32, modules=("q_proj", "down_proj"))
    version = engine.publish("a", 1, adapter)
    for completion in engine.generate(version, PROMPT, SAMPLE):
        assert _error(engine, adapter, PROMPT, completion) <= TOLERANCE


def test_rank_stabilised_scaling_agrees_with_peft(engine: EngineUnderTest) -> None:
    """Case 6 (vllm-project/vllm#55545): the scale is alpha / sqrt(rank), twice the plain one at rank 4."""
    plain = engine.adapter(seed=2, rank=4, alpha=8)
    stabilised = RandomAdapter(*pack(plain.tensors, 4, 8, plain.manifest.target_modules, rslora=True), plain.tensors)
    version = engine.publish("a", 1, stabilised)
    for completion in engine.generate(version, PROMPT, SAMPLE):
        assert _error(engine, stabilised, PROMPT, completion) <= TOLERANCE
        assert _error(engine, plain, PROMPT, completion) > 0.01


def test_a_mixed_batch_agrees_with_each_model_alone(engine: EngineUnderTest) -> None:
    adapters = [None, engine.adapter(seed=1), engine.adapter(seed=2, rank=4, modules=("v_proj", "o_proj", "up_proj"))]
    versions = [None if a is None else engine.publish(f"u{i}", 1, a) for i, a in enumerate(adapters)]
    prompts = [PROMPT, PROMPT[:41], PROMPT[5:38]]
    references = [engine.ask(v, p, SAMPLE) for v, p in zip(versions, prompts, strict=True)]
    for adapter, prompt, completions in zip(adapters, prompts, ray.get(references), strict=True):
        for completion in completions:
            assert _error(engine, adapter, prompt, completion) <= TOLERANCE


def test_adapters_in_the_batch_do_not_reach_the_base_model(engine: EngineUnderTest) -> None:
    """With every slot filled: vLLM's own CPU path gives base requests the adapter in the last slot."""
    versions = [engine.publish(f"u{i}", 1, engine.adapter(seed=i)) for i in range(MAX_LORAS)]
    alone = engine.generate(None, PROMPT, GREEDY)[0]
    mixed = ray.get([engine.ask(v, PROMPT, GREEDY) for v in [*versions, None]])[-1][0]
    assert mixed.token_ids == alone.token_ids
    assert np.abs(np.array(mixed.logprobs) - np.array(alone.logprobs)).max() <= 1e-5


def test_the_next_version_never_serves_old_weights_or_an_old_prompt_cache(engine: EngineUnderTest) -> None:
    old, new = engine.adapter(seed=1), engine.adapter(seed=2)
    first = engine.publish("a", 1, old)
    engine.generate(first, PROMPT, GREEDY)
    second = engine.publish("a", 2, new)
    for version, adapter in ((second, new), (first, old)):
        assert _error(engine, adapter, PROMPT, engine.generate(version, PROMPT, GREEDY)[0]) <= TOLERANCE
    engine.retire_everything()
    again = engine.publish("a", 1, new)  # even a name that comes back, which the runtime never does
    assert _error(engine, new, PROMPT, engine.generate(again, PROMPT, GREEDY)[0]) <= TOLERANCE


def test_bad_adapters_leave_a_request_in_flight_bit_identical(engine: EngineUnderTest) -> None:
    """Case 7 (vllm-project/vllm#4879): one adapter that cannot be loaded failed every request."""
    good = engine.publish("good", 1, engine.adapter(seed=1))
    # One sequence: those of n > 1 may enter the batch in different steps and then differ in the last bit anyway.
    long = SamplingParams(n=1, temperature=0.0, top_p=1.0, max_tokens=400)
    engine.generate(good, PROMPT, long)  # fills the prompt cache, so that both runs below start alike
    alone = engine.generate(good, PROMPT, long)
    request = engine.ask(good, PROMPT, long)
    too_large = engine.adapter(seed=2, rank=16)
    broken = engine.adapter(seed=3, rank=4)
    tensors = {name: array.copy() for name, array in broken.tensors.items()}
    next(iter(tensors.values()))[0, 0] = np.nan
    poisoned = RandomAdapter(*pack(tensors, 4, 16), tensors)
    truncated = RandomAdapter(broken.manifest, broken.buffer[:-64], broken.tensors)
    for adapter, word in ((too_large, "rank 16"), (truncated, "buffer of bytes"), (poisoned, "NaN")):
        with pytest.raises(RunError, match=word) as caught:
            engine.publish("bad", 1, adapter)
        assert caught.value.reason == "PublishError"
    assert not ray.wait([request], timeout=0)[0], "the request ended before the bad adapters came; make it longer"
    assert ray.get(request) == alone
    status = engine.status()
    assert (status.ready, status.adapters) == (True, ("good@1.1.v1",))


def test_generation_config_does_not_bend_sampling(engine: EngineUnderTest) -> None:
    """Case 8 (NVIDIA-NeMo/RL#3497): unset fields came from the model's generation_config.json.

    An on-policy sampler draws from the whole distribution and reports its probabilities.
    """
    params = SamplingParams(n=64, temperature=1.0, top_p=1.0, max_tokens=1, seed=3)
    completions = engine.generate(None, PROMPT, params)
    logprobs = reference_logprobs(engine.model, None, PROMPT, [0])[0]
    ranks = []
    for completion in completions:
        token = completion.token_ids[0]
        assert abs(completion.logprobs[0] - logprobs[token]) <= TOLERANCE
        ranks.append(int((logprobs > logprobs[token]).sum()))
    assert max(ranks) >= 20  # top_k 20 would forbid it


def test_temperature_and_top_p_show_in_the_logprobs(engine: EngineUnderTest) -> None:
    params = SamplingParams(n=16, temperature=0.7, top_p=0.5, max_tokens=1, seed=3)
    logprobs = reference_logprobs(engine.model, None, PROMPT, [0], temperature=0.7)[0]
    order = np.argsort(-logprobs)
    mass = np.cumsum(np.exp(logprobs[order]))
    kept = order[: int(np.searchsorted(mass, 0.5)) + 1]
    total = np.log(np.exp(logprobs[kept]).sum())
    for completion in engine.generate(None, PROMPT, params):
        token = completion.token_ids[0]
        assert token in kept
        assert abs(completion.logprobs[0] - (logprobs[token] - total)) <= TOLERANCE


def test_the_end_token_ends_and_is_part_of_the_response(engine: EngineUnderTest) -> None:
    params = SamplingParams(n=64, temperature=1.0, top_p=1.0, max_tokens=64, seed=1)
    completions = engine.generate(None, PROMPT, params)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        ended = completion.finish_reason == "stop"
        assert (completion.token_ids[-1] == EOS_ID) is ended
        assert EOS_ID not in completion.token_ids[:-1]
        assert ended or len(completion.token_ids) == 64
        assert len(completion.logprobs) == len(completion.token_ids)


def test_a_stop_string_ends_a_response(engine: EngineUnderTest) -> None:
    """The tiny tokenizer names its filler ids <259> to <511>: wait for any of them."""
    params = SamplingParams(n=8, temperature=1.0, top_p=1.0, max_tokens=64, stop=(">",), seed=1)
    for completion in engine.generate(None, PROMPT, params):
        assert completion.finish_reason == "stop"
        assert all(t < 259 for t in completion.token_ids[:-1])


def test_the_samples_of_a_prompt_differ_and_a_seed_repeats_them(engine: EngineUnderTest) -> None:
    first, second = engine.generate(None, PROMPT, SAMPLE)
    assert first.token_ids != second.token_ids
    assert [c.token_ids for c in engine.generate(None, PROMPT, SAMPLE)] == [first.token_ids, second.token_ids]


def test_a_version_that_is_not_resident_is_never_loaded(engine: EngineUnderTest) -> None:
    with pytest.raises(Retryable, match="not resident"):
        engine.generate(VersionId("a", "1.1", 1), PROMPT, GREEDY)


def test_abort_frees_the_version(engine: EngineUnderTest) -> None:
    version = engine.publish("a", 1, engine.adapter(seed=1))
    endless = SamplingParams(n=2, temperature=1.0, top_p=1.0, max_tokens=400, seed=2)
    request = engine.ask(version, PROMPT, endless, name="a")
    while engine.status().stats["requests_in_flight"] == 0:
        pass
    assert ray.get(engine.actor.abort.remote("a::")) == 1
    with pytest.raises(Retryable, match="aborted"):
        ray.get(request)
    ray.get(engine.actor.retire.remote(version), timeout=30)
    assert engine.status().adapters == ()


def test_a_full_engine_refuses_and_keeps_serving(engine: EngineUnderTest) -> None:
    versions = [engine.publish("a", n, engine.adapter(seed=n)) for n in range(1, MAX_LORAS + 1)]
    with pytest.raises(Retryable, match="engine full"):
        engine.publish("a", MAX_LORAS + 1, engine.adapter(seed=9))
    assert engine.status().adapters == tuple(v.name for v in versions)
    assert _error(engine, engine.adapter(seed=1), PROMPT, engine.generate(versions[0], PROMPT, GREEDY)[0]) <= TOLERANCE
