"""The demo's real model: the trainer and the engine agree on SmolLM2-135M, with a trained adapter."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from transformers import AutoTokenizer

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_local.model import ensure_model
from lorafleet_local.tasks import chat
from lorafleet_runtime.engines.actor import create_engine
from lorafleet_runtime.engines.settings import engine_config
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, PromptGroup, RunFault, Sample, SamplingParams, VersionId
from support.engine_actor import EngineUnderTest
from support.trainer import export, make_rank, make_request

SAMPLE = SamplingParams(n=4, temperature=1.0, top_p=1.0, max_tokens=12)
QUESTIONS = ["7 + 12 =", "Short sentence with the word lamp.", "JSON with keys name, age: Gus, 54"]


@pytest.fixture
def smollm2(shared_engine: EngineUnderTest, tmp_path: Path) -> Iterator[Any]:
    """An engine that serves SmolLM2, in the Ray of the shared one."""
    spec = AdapterPoolSpec.model_validate({
        "baseModel": {"path": str(ensure_model()), "dtype": "float32"},
        "slots": 2,
        "maxRank": 8,
        "engines": {"maxModelLen": 128, "maxNumSeqs": 32, "maxLoras": 4, "kvCacheBytes": 128 << 20, "numThreads": 1},
        "env": {"HF_HUB_OFFLINE": "1"},
    })  # fmt: skip
    actor = create_engine(spec, engine_config(spec, "engine-smollm2", str(tmp_path / "stage")), local=True)
    status = ray.get(actor.start.remote())
    yield actor
    ray.get(actor.shutdown.remote())
    ray.kill(actor)
    psutil.wait_procs([psutil.Process(p) for p in status.pids if psutil.pid_exists(p)], timeout=10)


def _group(actor: Any, rank: TrainerRank, n: int, index: int, prompt: tuple[int, ...]) -> PromptGroup:
    completions = ray.get(actor.generate.remote(f"r::{n}::{index}", VersionId("a", "1.1", n), prompt, SAMPLE))
    samples = tuple(
        Sample(c.token_ids, c.logprobs, float(i % 2), float(i % 2) - 0.5, c.finish_reason == "length")
        for i, c in enumerate(completions)
    )
    return PromptGroup("a", VersionId("a", "1.1", n), index, prompt, samples)


def _publish(actor: Any, rank: TrainerRank, n: int) -> None:
    manifest, buffer = export(rank, "a")
    ray.get(actor.publish.remote(VersionId("a", "1.1", n), manifest, ray.put(buffer)))


def test_trainer_and_sampler_agree_on_smollm2(smollm2: Any, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    prompts = [tuple(tokenizer.encode(chat(q), add_special_tokens=False)) for q in QUESTIONS]
    rank = make_rank(ensure_model(), tmp_path, numThreads=1)
    rank.load(make_request("a", rank=8, alpha=16, optimizer={"lr": 1e-3, "weightDecay": 0.0}))
    for n in (1, 2, 3):  # B is zero in the first version only
        _publish(smollm2, rank, n)
        [stats] = rank.accumulate([_group(smollm2, rank, n, i, p) for i, p in enumerate(prompts)]).stats
        assert stats.policy.tokens > 30
        assert stats.policy.mismatch / stats.policy.tokens <= 1e-4, n
        assert stats.mismatch_max <= 1e-3, n
        assert not isinstance(rank.step("a", Cursor()), RunFault)
