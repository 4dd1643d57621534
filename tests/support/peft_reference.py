"""Log-probabilities by Hugging Face PEFT in float32: the reference for trainer and engines.

It never reads what the product wrote: the adapter's weights are set from the test's own arrays.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from support.adapters import RandomAdapter


def reference_logprobs(
    model: Path,
    adapter: RandomAdapter | None,
    prompt: Sequence[int],
    response: Sequence[int],
    temperature: float = 1.0,
) -> np.ndarray:
    """Log-probabilities [R, V] of every token at the response's positions: PEFT on Hugging Face in float32."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        m = adapter.manifest
        config = LoraConfig(
            r=m.rank, lora_alpha=m.alpha, use_rslora=m.use_rslora, target_modules=list(m.target_modules)
        )
        net = get_peft_model(net, config)
        state = {name: torch.from_numpy(array) for name, array in adapter.tensors.items()}
        outcome = set_peft_model_state_dict(net, state)
        assert not outcome.unexpected_keys
        assert not [k for k in outcome.missing_keys if "lora_" in k]
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = net.eval()(ids).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, dim=-1).numpy()


def sampled_logprobs(logprobs: np.ndarray, response: Sequence[int]) -> np.ndarray:
    """[R]: each sampled token's entry."""
    found: np.ndarray = logprobs[np.arange(len(response)), np.asarray(response)]
    return found
