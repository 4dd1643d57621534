"""One measurement of the trainer, alone in its process, so that peak memory and CPU seconds are its own.

    python -m lorafleet_local.bench_case CASE JSON

Called by bench_trainer.py. Prints the figures as one line of JSON, the last of its output. CASE is a function below,
JSON its arguments.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_local.bench_peft import peft
from lorafleet_local.bench_work import (
    BETAS,
    CLIP_GRAD,
    LEARNING_RATE,
    Clock,
    count_tokens,
    demo_step,
    drawn_group,
    forget_peak,
    plain,
    resident_bytes,
)
from lorafleet_local.model import ensure_model
from lorafleet_local.tasks import TASKS
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, LoadRequest, PromptGroup, RunFault, StepResult

Figures = dict[str, Any]
_TINY = (2, 2)
"""Response lengths of a step that only makes a slot's optimizer state real."""


def make_trainer(storage: Path, threads: int, **trainer: Any) -> TrainerRank:
    """A float32 trainer on the demo's model with 32 slots."""
    torch.set_num_threads(threads)
    model = str(ensure_model())
    spec = {"baseModel": {"path": model, "dtype": "float32"}, "slots": 32, "maxRank": 64, "trainer": trainer}
    return TrainerRank(AdapterPoolSpec.model_validate(spec), model, str(storage))


def load(trainer: TrainerRank, uid: str, slot: int, rank: int) -> None:
    """A run with all seven projections and the demo's optimizer."""
    optimizer = {"lr": LEARNING_RATE, "betas": BETAS, "weightDecay": 0.0, "clipGrad": CLIP_GRAD}
    spec = {
        "poolRef": {"name": "p"}, "data": "d", "rmType": "math", "rank": rank, "alpha": 2 * rank,
        "optimizer": optimizer,
    }  # fmt: skip
    trainer.load(LoadRequest(uid, "bench", uid, slot, spec, 100, "none", None))


def step(trainer: TrainerRank, uid: str) -> StepResult:
    """One optimizer step.

    Raises:
        RuntimeError: the trainer reports a fault.
    """
    done = trainer.step(uid, Cursor())
    if isinstance(done, RunFault):
        raise RuntimeError(f"{uid}: {done.message}")
    return done


def accumulate(trainer: TrainerRank, groups: list[PromptGroup]) -> int:
    """Forward and backward. Returns the rows of its passes.

    Raises:
        RuntimeError: the trainer reports a fault.
    """
    result = trainer.accumulate(groups)
    if result.faults:
        raise RuntimeError(f"faults: {result.faults}")
    return result.rows


def fill(trainer: TrainerRank, ranks: list[int]) -> None:
    """Load a run per rank and let each make a step (untouched moments take no memory); the peak starts after it."""
    for slot, rank in enumerate(ranks):
        load(trainer, f"r{slot}", slot, rank)
    accumulate(trainer, [drawn_group(f"r{slot}", 2, _TINY, 0) for slot in range(len(ranks))])
    for slot in range(len(ranks)):
        step(trainer, f"r{slot}")
    forget_peak()


def resident(storage: Path, slots: int, rows: int, reps: int) -> Figures:
    """One run trains while `slots` - 1 others only hold their slots."""
    trainer = make_trainer(storage, 1)
    fill(trainer, [16] * slots)
    held = resident_bytes("VmRSS")
    passes, optimizer = [], []
    for rep in range(reps):
        clock = Clock()
        accumulate(trainer, [drawn_group("r0", 24, (rows // 4 - 5,) * 4, rep)])
        passes.append(clock.read()[1])
        clock = Clock()
        step(trainer, "r0")
        optimizer.append(clock.read()[1])
    return {"held": held, "peak": resident_bytes(), "passes": passes, "optimizer": optimizer}


def ranks(storage: Path, ranks: list[int]) -> Figures:
    """Memory of resident runs of these ranks: of the process, and of their masters, sums and moments by their sizes."""
    trainer = make_trainer(storage, 1)
    load(trainer, "warm", 31, 1)
    accumulate(trainer, [drawn_group("warm", 2, _TINY, slot) for slot in range(max(len(ranks), 1))])
    step(trainer, "warm")
    before = resident_bytes("VmRSS")
    fill(trainer, ranks)
    elements = sum(e.shape[0] * e.shape[1] for slot in range(len(ranks)) for e in trainer.adapter(f"r{slot}").layout)
    return {"grown": resident_bytes("VmRSS") - before, "expected": 16 * elements}


def active(storage: Path, slots: int, rows: int, together: bool, reps: int) -> Figures:
    """`slots` runs train the same amount, in one batch or one after another."""
    trainer = make_trainer(storage, 1)
    fill(trainer, [16] * slots)
    seconds = []
    for rep in range(reps):
        groups = [drawn_group(f"r{slot}", 24, (rows // 4 - 5,) * 4, rep) for slot in range(slots)]
        clock = Clock()
        for batch in [groups] if together else [[group] for group in groups]:
            accumulate(trainer, batch)
            for group in batch:
                step(trainer, group.uid)
        seconds.append(clock.read()[1])
    return {"seconds": seconds, "peak": resident_bytes()}


def prefix(storage: Path, prompt: int, response: int, samples: int, shared: bool) -> Figures:
    """One prompt with n responses, the prompt computed once or once per response."""
    trainer = make_trainer(storage, 1)
    fill(trainer, [16])
    groups = [drawn_group("r0", prompt, (response,) * samples, 1)]
    clock = Clock()
    rows = accumulate(trainer, groups if shared else plain(groups))
    seconds = clock.read()[1]
    return {"seconds": seconds, "rows": rows, "peak": resident_bytes(), "grad_norm": step(trainer, "r0").grad_norm}


def memory(storage: Path, rows: int, recompute: bool, threads: int) -> Figures:
    """Peak memory of one pass of `rows` rows, in groups of 128."""
    trainer = make_trainer(storage, threads, recompute=recompute, microBatchTokens=rows)
    fill(trainer, [16])
    held = resident_bytes("VmRSS")
    # 32 + 8 * 12 rows: the last token of a response is no row
    groups = [drawn_group("r0", 32, (13,) * 8, i) for i in range(rows // 128)]
    clock = Clock()
    accumulate(trainer, groups)
    wall, cpu = clock.read()
    return {"held": held, "peak": resident_bytes(), "wall": wall, "cpu": cpu}


def trainer(storage: Path, steps: int) -> Figures:
    """The demo's three runs together, step by step; their first weights go to `storage` for PEFT to start from."""
    rank = make_trainer(storage, 1)
    for slot, task in enumerate(TASKS.values()):
        load(rank, task.name, slot, task.rank)
        rank.checkpoint(task.name, f"start/{task.name}", Cursor())
    load(rank, "warm", 31, 1)
    accumulate(rank, [drawn_group("warm", 16, (4, 4), 0)])
    forget_peak()
    seconds, tokens, norms = [], [], []
    for index in range(steps):
        groups = [group for mine in demo_step(ensure_model(), index).values() for group in mine]
        clock = Clock()
        accumulate(rank, groups)
        done = [step(rank, name) for name in TASKS]
        seconds.append(clock.read()[1])
        tokens.append(count_tokens(groups))
        norms += [result.grad_norm for result in done]
    return {"seconds": seconds, "tokens": tokens, "norms": norms, "peak": resident_bytes()}


CASES: dict[str, Callable[..., Figures]] = {
    "resident": resident, "ranks": ranks, "active": active, "prefix": prefix, "memory": memory, "trainer": trainer,
    "peft": peft,
}  # fmt: skip


if __name__ == "__main__":
    case, arguments = sys.argv[1], json.loads(sys.argv[2])
    figures = CASES[case](storage=Path(arguments.pop("storage")), **arguments)
    print(json.dumps(figures))
