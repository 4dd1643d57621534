"""Three runs of 100 steps whose inputs are the same on every machine: model, adapters, samples and rewards come from
Python's own random numbers. Read by the golden-curve test and by the script that made the curves; holds no answers.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

STEPS = 100
VOCABULARY = 48
GROUPS, SAMPLES = 2, 3
"""Per step."""
_DISTINCT = 5
"""Steps until the same prompts and responses come again, with other rewards and sampler log-probabilities."""

SPECS: dict[str, dict[str, Any]] = {
    "grpo": {
        "rank": 4,
        "alpha": 8,
        "targetModules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "sampling": {"temperature": 0.7, "maxTokens": 8},
        "optimizer": {
            "lr": 0.02, "schedule": "cosine", "warmupSteps": 10, "minLr": 0.002, "weightDecay": 0.0,
            "betas": [0.9, 0.98], "eps": 1e-8, "clipGrad": 1.0,
        },
        "algorithm": {"advantage": "grpo", "lossReduction": "sampleMean", "tisMode": "Clip", "tisFloor": 0.6,
                      "tisCap": 1.5},
    },
    "rloo": {
        "rank": 8,
        "alpha": 4,
        "targetModules": ["q_proj", "v_proj", "gate_proj", "down_proj"],
        "sampling": {"temperature": 1.0, "maxTokens": 8},
        "optimizer": {
            "lr": 0.03, "schedule": "linear", "warmupSteps": 0, "minLr": 0.0, "weightDecay": 0.1,
            "betas": [0.9, 0.95], "eps": 1e-6, "clipGrad": 0.05,
        },
        "algorithm": {"advantage": "rloo", "lossReduction": "tokenMean", "tisMode": "Mask", "tisFloor": 0.5,
                      "tisCap": 2.0, "klCoef": 0.1, "klType": "k3", "maskTruncated": True},
    },
    "reinforce": {
        "rank": 2,
        "alpha": 2,
        "targetModules": ["k_proj", "o_proj", "up_proj"],
        "sampling": {"temperature": 1.3, "maxTokens": 8},
        "optimizer": {
            "lr": 0.01, "schedule": "constant", "warmupSteps": 5, "weightDecay": 0.3,
            "betas": [0.8, 0.99], "eps": 1e-4, "clipGrad": 0.0,
        },
        "algorithm": {"advantage": "reinforce", "lossReduction": "constant", "tisMode": "Off", "clipLow": 0.2,
                      "clipHigh": 0.4, "dualClip": 1.3},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Response:
    """One response of a recorded step."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    place: tuple[int, int, int]
    """(step modulo the distinct ones, group, sample): whose log-probabilities the sampler had."""
    noise: tuple[float, ...]
    """What the sampler's log-probabilities are off by, per token."""
    reward: float
    truncated: bool


def recorded(name: str, step: int) -> list[list[Response]]:
    """The groups of a step, counted from 0."""
    content, chance = random.Random(f"{name}:{step % _DISTINCT}"), random.Random(f"{name}/{step}")
    groups = []
    for g in range(GROUPS):
        prompt = tuple(content.randrange(VOCABULARY) for _ in range(content.randint(1, 6)))
        equal = chance.random() < 0.2
        group = []
        for s in range(SAMPLES):
            tokens = tuple(content.randrange(VOCABULARY) for _ in range(content.randint(1, 8)))
            noise = tuple(chance.gauss(0.0, 0.35) for _ in tokens)
            reward = 1.0 if equal else chance.choice([0.0, 0.25, 1.0, -0.5])
            group.append(Response(prompt, tokens, (step % _DISTINCT, g, s), noise, reward, chance.random() < 0.2))
        groups.append(group)
    return groups


def distinct_steps() -> range:
    """Steps that hold every prompt and response once."""
    return range(_DISTINCT)


def write_model(directory: Path) -> Path:
    """A Qwen3 of 8 thousand parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for name, parameter in sorted(model.named_parameters()):
        mean, deviation = (1.0, 0.1) if "norm" in name else (0.0, 0.3)
        _fill(parameter, name, mean, deviation)
    model.save_pretrained(directory)
    return directory


def write_adapter(model: Path, name: str, directory: Path) -> Path:
    """The adapter that a run starts from, as a PEFT directory with A and B of some size."""
    spec = SPECS[name]
    config = LoraConfig(
        r=spec["rank"], lora_alpha=spec["alpha"], target_modules=spec["targetModules"], task_type="CAUSAL_LM"
    )
    peft = get_peft_model(Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    for key, parameter in sorted(peft.named_parameters()):
        if "lora_" in key:
            _fill(parameter, f"{name}:{key}", 0.0, 0.1)
    peft.save_pretrained(directory)
    return directory


def _fill(parameter: torch.nn.Parameter, name: str, mean: float, deviation: float) -> None:
    rng = random.Random(name)
    values = [rng.gauss(mean, deviation) for _ in range(parameter.numel())]
    parameter.data.copy_(torch.tensor(values).view(parameter.shape))


def read_curve(path: Path) -> dict[str, Any]:
    """`sampler` by place, and `steps` of {"loss", "gradNorm", "lr"}."""
    curve: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return curve
