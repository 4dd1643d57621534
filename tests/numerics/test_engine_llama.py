"""A second engine: Llama 3's rotary scaling, untied embeddings, rank-stabilised LoRA; in trainer, engine and PEFT."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.engines.actor import create_engine
from lorafleet_runtime.engines.settings import engine_config
from lorafleet_runtime.types import Completion, PromptGroup, Sample, SamplingParams, VersionId
from support.engine_actor import EngineUnderTest
from support.peft_reference import reference_logprobs, sampled_logprobs
from support.tiny_model import LLAMA3_ROPE, make_tiny_model
from support.trainer import export, make_rank, make_request, save

TOLERANCE = 1e-4
SAMPLE = SamplingParams(n=2, temperature=1.0, top_p=1.0, max_tokens=24, seed=5)
PROMPT = [(11 * i + 3) % 251 for i in range(150)]
"""Longer than the 64 positions that the scaling starts from."""


@pytest.fixture(scope="module")
def llama3(shared_engine: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """An engine that serves a tiny Llama 3, in the Ray of the shared one."""
    folder = tmp_path_factory.mktemp("llama3")
    model = make_tiny_model(folder / "model", "llama", rope_parameters=LLAMA3_ROPE)
    spec = AdapterPoolSpec.model_validate({
        "baseModel": {"path": str(model), "dtype": "float32"},
        "slots": 2,
        "maxRank": 16,
        "engines": {"maxModelLen": 256, "maxNumSeqs": 8, "maxLoras": 2, "kvCacheBytes": 64 << 20, "numThreads": 1},
        "env": {"HF_HUB_OFFLINE": "1"},
    })  # fmt: skip
    actor = create_engine(spec, engine_config(spec, "engine-llama3", str(folder / "stage")), local=True)
    status = ray.get(actor.start.remote())
    yield EngineUnderTest(model, actor, {})
    ray.get(actor.shutdown.remote())
    ray.kill(actor)
    psutil.wait_procs([psutil.Process(p) for p in status.pids if psutil.pid_exists(p)], timeout=10)


def test_scaled_rotary_embedding_of_the_engine_agrees_with_hugging_face(llama3: EngineUnderTest) -> None:
    for completion in llama3.generate(None, PROMPT, SAMPLE):
        expected = sampled_logprobs(
            reference_logprobs(llama3.model, None, PROMPT, completion.token_ids), completion.token_ids
        )
        assert np.abs(expected - np.array(completion.logprobs)).max() <= TOLERANCE


def write_case_6(model: Path, directory: Path) -> None:
    """Rank 16, alpha 32, rank-stabilised, on q and v, with B not zero."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=16, lora_alpha=32, use_rslora=True, target_modules=["q_proj", "v_proj"])
    peft = get_peft_model(base, config)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    peft.save_pretrained(directory)


def peft_logprobs(model: Path, directory: Path, completion: Completion) -> np.ndarray:
    """[R] by PEFT from the adapter's own files."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, directory).eval()
    with torch.no_grad():
        logits = peft(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    return sampled_logprobs(logits.double().log_softmax(-1).numpy(), completion.token_ids)


def test_a_rank_stabilised_warm_start_has_one_scale_everywhere(llama3: EngineUnderTest, tmp_path: Path) -> None:
    """Case 6 (vllm-project/vllm#55545, NVIDIA/TensorRT-LLM#1668): 32 / sqrt(16) was taken for 32 / 16."""
    write_case_6(llama3.model, tmp_path / "source")
    rank = make_rank(llama3.model, tmp_path)
    rank.load(make_request("a", initFrom="source", rank=16, alpha=32, targetModules=["q_proj", "v_proj"]))
    assert rank.adapter("a").scale == 8.0
    manifest, buffer = export(rank, "a")
    assert manifest.use_rslora
    version = VersionId("a", "1.1", 1)
    ray.get(llama3.actor.publish.remote(version, manifest, ray.put(buffer)))
    completions = llama3.generate(version, PROMPT, SAMPLE)
    for completion in completions:
        expected = peft_logprobs(llama3.model, tmp_path / "source", completion)
        assert np.abs(expected - np.array(completion.logprobs)).max() <= TOLERANCE
        plain = reference_logprobs(llama3.model, None, PROMPT, completion.token_ids)
        assert np.abs(expected - sampled_logprobs(plain, completion.token_ids)).max() > 0.05  # the adapter matters
    samples = tuple(Sample(c.token_ids, c.logprobs, 0.0, i - 0.5, False) for i, c in enumerate(completions))
    [stats] = rank.accumulate([PromptGroup("a", version, 0, tuple(PROMPT), samples)]).stats
    assert stats.policy.tokens > 0 and stats.mismatch_max <= TOLERANCE
    config = json.loads((Path(save(rank).path) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (16, 32, True)
