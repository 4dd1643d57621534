"""Statistics of runs that share a pass, against the whole softmax of PEFT on the Hugging Face model."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet_runtime.types import PolicySums, PromptGroup, Sample
from support.trainer import load, make_groups, make_rank, peft_model

TEMPERATURE = 0.7
SPECS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": {"tisMode": "Off", "dualClip": 2.0, "klCoef": 0.1, "klType": "k2"}},
    "mask": {"algorithm": {"tisMode": "Mask", "tisFloor": 0.6, "tisCap": 1.5, "klCoef": 0.1}},
    "plain": {"algorithm": {"tisCap": 1.2}},
}


def logits(model: Any, group: PromptGroup, sample: Sample) -> Tensor:
    ids = torch.tensor([*group.prompt_ids, *sample.token_ids])
    scaled: Tensor = model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1] / TEMPERATURE
    return scaled


def expected(model: Any, uid: str, groups: list[PromptGroup]) -> PolicySums:
    """Token by token, with the numbers of SPECS and of the defaults written out."""
    total = PolicySums()
    for group, sample in [(g, s) for g in groups for s in g.samples]:
        with torch.no_grad():
            policy = torch.distributions.Categorical(logits=logits(model, group, sample))
            with model.disable_adapter():
                base = torch.distributions.Categorical(logits=logits(model, group, sample))
        labels = torch.tensor(sample.token_ids)
        rows = zip(
            policy.log_prob(labels).tolist(), sample.sampler_logprobs, base.log_prob(labels).tolist(),
            policy.entropy().tolist(), strict=True,
        )  # fmt: skip
        for p, q, b, entropy in rows:
            ratio = math.exp(p - q)
            good = sample.advantage > 0
            total += PolicySums(
                tokens=1,
                mismatch=abs(p - q),
                entropy=entropy,
                kl_sampler_k1=q - p,
                kl_sampler=ratio - 1 - (p - q),
                kl_base_tokens=uid != "plain",
                kl_base=math.exp(b - p) - 1 - (b - p) if uid != "plain" else 0.0,
                clipped=uid == "ppo" and (ratio > 1.28 if good else not 0.8 <= ratio <= 2.0),
                corrected={"ppo": False, "mask": not 0.6 <= ratio <= 1.5, "plain": ratio > 1.2}[uid],
            )
    return total


@pytest.mark.parametrize("deterministic", [False, True])
def test_statistics_equal_those_of_the_whole_softmax(qwen3: Path, tmp_path: Path, deterministic: bool) -> None:
    rank = make_rank(qwen3, tmp_path, deterministic=deterministic)
    groups = {uid: make_groups(uid, seed=slot) for slot, uid in enumerate(SPECS)}
    for slot, (uid, spec) in enumerate(SPECS.items()):
        load(rank, uid, slot=slot, seed=slot, sampling={"temperature": TEMPERATURE}, **spec)
    result = rank.accumulate([group for own in groups.values() for group in own])
    assert not result.faults and len(result.stats) == 3
    for stats in result.stats:
        wanted = expected(peft_model(qwen3, rank, stats.uid, tmp_path / stats.uid), stats.uid, groups[stats.uid])
        assert asdict(stats.policy) == pytest.approx(asdict(wanted), rel=2e-5, abs=1e-5), stats.uid
        means = stats.policy.means()
        assert means is not None
        assert 0 < means.clip_fraction < 1 if stats.uid == "ppo" else 0 < means.tis_fraction < 1
