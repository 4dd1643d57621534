"""The demo's three runs on plain transformers + PEFT, one after another: what the trainer's cost is compared with.

Called by bench_case.py. The same samples, loss, optimizer and first weights, nothing of the runtime's trainer, and each
of the usual ways to batch, so that the best one can be taken: whole sequences in padded batches (of two sizes), or each
prompt once through a key-value cache. B = sequences, P = longest prompt, T = longest response.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import Tensor

from lorafleet_local.bench_work import (
    BETAS,
    CLIP_GRAD,
    LEARNING_RATE,
    TIS_CAP,
    Clock,
    count_tokens,
    demo_step,
    forget_peak,
    resident_bytes,
)
from lorafleet_local.model import ensure_model
from lorafleet_runtime.types import PromptGroup, Sample


def peft(storage: Path, steps: int, way: str, budget: int) -> dict[str, Any]:
    """Train each run in turn.

    Args:
        storage: holds the first weights in start/RUN.
        steps: of each run.
        way: "padded" or "cached".
        budget: tokens, padding included, of a micro-batch.
    """
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    base = transformers.AutoModelForCausalLM.from_pretrained(ensure_model(), dtype=torch.float32).eval()
    work = [demo_step(ensure_model(), step) for step in range(steps)]
    _warm(base)
    forget_peak()
    seconds = [0.0] * steps
    norms: list[list[float]] = [[] for _ in range(steps)]
    for name in work[0]:
        start = next((storage / "start" / name).glob("step_*"))
        model = PeftModel.from_pretrained(base, start, is_trainable=True).eval()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
        for step in range(steps):
            clock = Clock()
            optimizer.zero_grad(set_to_none=True)
            _backward(model, work[step][name], way, budget)
            norms[step].append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIP_GRAD)))
            optimizer.step()
            seconds[step] += clock.read()[1]
        base = model.unload()
    tokens = [count_tokens([g for groups in step.values() for g in groups]) for step in work]
    return {
        "seconds": seconds,
        "tokens": tokens,
        "norms": [n for mine in norms for n in mine],
        "peak": resident_bytes(),
    }


def _warm(model: Any) -> None:
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.int64))


def _backward(model: Any, groups: list[PromptGroup], way: str, budget: int) -> None:
    """Add the gradient of a run's step, micro-batch by micro-batch."""
    pairs = [(group, sample) for group in groups for sample in group.samples]
    if way == "padded":
        pairs.sort(key=lambda pair: len(pair[0].prompt_ids) + len(pair[1].token_ids))
        for batch in _batches(pairs, budget):
            _loss(_padded(model, batch), batch, len(pairs)).backward()  # type: ignore[no-untyped-call]
    else:
        _loss(_cached(model, groups), pairs, len(pairs)).backward()  # type: ignore[no-untyped-call]


def _batches(pairs: list[tuple[PromptGroup, Sample]], budget: int) -> Iterator[list[tuple[PromptGroup, Sample]]]:
    """Neighbours in length, as many as the budget holds with padding."""
    chosen: list[tuple[PromptGroup, Sample]] = []
    for pair in pairs:
        grown = [*chosen, pair]
        width = max(len(g.prompt_ids) for g, _ in grown) + max(len(s.token_ids) for _, s in grown)
        if chosen and width * len(grown) > budget:
            yield chosen
            grown = [pair]
        chosen = grown
    yield chosen


def _padded(model: Any, pairs: list[tuple[PromptGroup, Sample]]) -> Tensor:
    """Logits [B, T, vocabulary] at the response's positions, whole sequences in one padded batch."""
    ids, mask = _left([g.prompt_ids for g, _ in pairs])
    replies, live = _right([s.token_ids for _, s in pairs])
    ids, mask = torch.cat([ids, replies[:, :-1]], 1), torch.cat([mask, live[:, :-1].long()], 1)
    out = model(
        input_ids=ids, attention_mask=mask, position_ids=_positions(mask), logits_to_keep=replies.shape[1],
        use_cache=False,
    )  # fmt: skip
    logits: Tensor = out.logits
    return logits


def _cached(model: Any, groups: list[PromptGroup]) -> Tensor:
    """The same with each prompt once, and the responses after it through its cached keys and values."""
    ids, mask = _left([g.prompt_ids for g in groups])
    copies = len(groups[0].samples)
    cache = transformers.DynamicCache(config=model.config)
    first = model(
        input_ids=ids, attention_mask=mask, position_ids=_positions(mask), past_key_values=cache, use_cache=True,
        logits_to_keep=1,
    ).logits  # fmt: skip
    cache.batch_repeat_interleave(copies)
    mask = mask.repeat_interleave(copies, 0)
    replies, live = _right([s.token_ids for g in groups for s in g.samples])
    rest = model(
        input_ids=replies[:, :-1], attention_mask=torch.cat([mask, live[:, :-1].long()], 1),
        position_ids=mask.sum(1)[:, None] + torch.arange(replies.shape[1] - 1), past_key_values=cache, use_cache=True,
    ).logits  # fmt: skip
    return torch.cat([first.repeat_interleave(copies, 0), rest], 1)


def _loss(logits: Tensor, pairs: list[tuple[PromptGroup, Sample]], samples: int) -> Tensor:
    """Sample-mean policy gradient with the sampler mismatch as a capped weight: the trainer's default loss."""
    replies, live = _right([s.token_ids for _, s in pairs])
    chosen = torch.log_softmax(logits[live].float(), -1).gather(1, replies[live][:, None])[:, 0]
    old = torch.tensor([x for _, s in pairs for x in s.sampler_logprobs])
    weight = torch.tensor([s.advantage / len(s.token_ids) for _, s in pairs for _ in s.token_ids])
    mismatch = (chosen.detach() - old).exp().clamp(max=TIS_CAP)
    return -(weight * mismatch * chosen).sum() / samples


def _left(rows: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """[B, P] ids padded on the left, and the mask (1 on tokens)."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def _right(rows: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """[B, T] ids padded on the right, and where tokens are (bool)."""
    width = max(map(len, rows))
    ids = torch.tensor([list(row) + [0] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)
