"""The trainer and the engine give the same tokens the same log-probability, version after version."""

from pathlib import Path

import ray

from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, PromptGroup, RunFault, Sample, SamplingParams, VersionId
from support.engine_actor import EngineUnderTest
from support.trainer import export, load, make_rank

TOLERANCE = 1e-4
SAMPLE = SamplingParams(n=3, temperature=1.0, top_p=1.0, max_tokens=20, seed=5)
PROMPT = tuple((11 * i + 3) % 251 for i in range(45))


def _sampled(engine: EngineUnderTest, rank: TrainerRank, uid: str, n: int) -> PromptGroup:
    """Publish the trainer's weights as version n and sample one group from it."""
    version = VersionId(uid, "1.1", n)
    manifest, buffer = export(rank, uid)
    ray.get(engine.actor.publish.remote(version, manifest, ray.put(buffer)))
    completions = engine.generate(version, PROMPT, SAMPLE)
    samples = tuple(
        Sample(c.token_ids, c.logprobs, float(i), float(i - 1), c.finish_reason == "length")
        for i, c in enumerate(completions)
    )
    return PromptGroup(uid, version, n - 1, PROMPT, samples)


def test_two_runs_agree_with_the_engine_before_and_after_a_step(engine: EngineUnderTest, tmp_path: Path) -> None:
    rank = make_rank(engine.model, tmp_path)
    load(rank, "a", slot=0, seed=1)
    load(rank, "b", slot=1, seed=2, targetModules=["q_proj", "v_proj"], alpha=16)
    digests = set()
    for n in (1, 2):
        result = rank.accumulate([_sampled(engine, rank, uid, n) for uid in ("a", "b")])
        assert not result.faults
        for stats in result.stats:
            assert stats.policy.tokens > 0
            assert stats.mismatch_max <= TOLERANCE, (stats.uid, n)
        digests |= {export(rank, uid)[0].digest for uid in ("a", "b")}
        for uid in ("a", "b"):
            assert not isinstance(rank.step(uid, Cursor()), RunFault)
    assert len(digests) == 4  # the steps moved the weights


def test_a_stale_version_shows_as_a_mismatch(engine: EngineUnderTest, tmp_path: Path) -> None:
    rank = make_rank(engine.model, tmp_path)
    load(rank, "a", seed=1)
    group = _sampled(engine, rank, "a", 1)
    rank.accumulate([group])
    assert not isinstance(rank.step("a", Cursor()), RunFault)
    [stats] = rank.accumulate([group]).stats
    assert stats.mismatch_max > 100 * TOLERANCE
