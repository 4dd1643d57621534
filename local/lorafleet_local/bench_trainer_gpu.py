"""`make bench-trainer-gpu`: training throughput on one CUDA device, to bench/trainer_gpu.json.

    python -m lorafleet_local.bench_trainer_gpu [--out FILE] [--commit SHA] [--layers N] [--skip-peft]

The shape of Qwen3-4B with random weights, rank 32 on all projections, bfloat16, rows of 512 tokens: forward, loss and
backward over packed passes of 16,384 rows through the trainer itself, with 1, 8 and 32 active runs, beside stock PEFT
at its best batch in the same process. Rows are those that go through the model, padding left out. Needs a GPU node;
imports nothing of the local stack, so that it runs where only the runtime and PEFT are installed.
"""

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, LoadRequest, PromptGroup, Sample, VersionId

ROWS, RANK, PASS_ROWS, VOCABULARY = 512, 32, 16384, 151936
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PEFT_BATCHES = (4, 8, 16, 32)
CHUNK = 2048
"""Rows whose logits PEFT's chunked loss keeps."""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/trainer_gpu.json"))
    parser.add_argument("--commit", default="", help="of the measured code, where git cannot say")
    parser.add_argument("--layers", type=int, default=36, help="fewer for a quick look")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--skip-peft", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", options.layers)
        rows = trainer_rows(model, Path(folder), options.reps)
        if not options.skip_peft:
            torch.use_deterministic_algorithms(False)
            rows += peft_rows(model, options.reps)
            named = {row["name"]: row["value"] for row in rows}
            slots8, peft = named["trainer.tokens_per_second_slots8"], named["trainer.peft_tokens_per_second"]
            rows.append(row("trainer.ratio_to_peft", [slots8 / peft], "1"))
    write(options.out, options.commit, rows)


def write(out: Path, commit: str, rows: list[dict[str, Any]]) -> None:
    """The document that all of bench/ shares."""
    properties = torch.cuda.get_device_properties(0)
    hardware = f"{properties.name}, {properties.total_memory >> 30} GiB, torch {torch.__version__}"
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    document = {
        "hardware": hardware,
        "commit": commit or subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "command": "make bench-trainer-gpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "results": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=2) + "\n")


def row(name: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """A result: the median of the values."""
    result = {"name": name, "value": statistics.median(values), "unit": unit, "n": len(values)}
    result |= {"min": min(values), "max": max(values)}
    print(json.dumps(result), flush=True)
    return result


def write_model(directory: Path, layers: int) -> Path:
    """Random weights in Hugging Face's files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def seconds_of(work: Callable[[], Any], reps: int) -> list[float]:
    """Wall seconds of each call, after two that do not count."""
    found = []
    for rep in range(reps + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if rep >= 2:
            found.append(time.perf_counter() - began)
    return found


def make_group(uid: str, index: int, prompt: int, response: int, samples: int) -> PromptGroup:
    """Random tokens; half of the samples are rewarded."""

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (count,)).tolist())

    made = [Sample(ids(response), (-12.0,) * response, 0.0, 1.0 if i % 2 else -1.0, False) for i in range(samples)]
    return PromptGroup(uid, VersionId(uid, "1.1", 1), index, ids(prompt), tuple(made))


def trainer_rows(model: Path, storage: Path, reps: int) -> list[dict[str, Any]]:
    """Throughput with runs coming in; each figure with all that came before resident."""
    pool = {"baseModel": {"path": str(model), "dtype": "bfloat16"}, "slots": 32, "maxRank": 64,
            "trainer": {"microBatchTokens": PASS_ROWS}}  # fmt: skip
    trainer = TrainerRank(AdapterPoolSpec.model_validate(pool), str(model), str(storage), snapshots=storage / "snaps")
    spec = {"poolRef": {"name": "bench"}, "data": "bench.jsonl", "rmType": "math", "rank": RANK, "alpha": RANK}
    names = [f"run{i:02}" for i in range(32)]
    rows: list[dict[str, Any]] = []

    def load(first: int, end: int) -> None:
        for slot in range(first, end):
            trainer.load(LoadRequest(names[slot], "bench", names[slot], slot, spec, 100, "", None))

    def measure(name: str, groups: list[PromptGroup]) -> None:
        torch.cuda.reset_peak_memory_stats()
        count = trainer.accumulate(groups).rows
        found = seconds_of(lambda: trainer.accumulate(groups), reps)
        rows.append(row(f"trainer.tokens_per_second_{name}", [count / s for s in found], "1/s"))
        rows.append(row(f"trainer.peak_bytes_{name}", [torch.cuda.max_memory_allocated()], "bytes"))

    def rounds(active: int, length: int = ROWS, total: int = 4 * PASS_ROWS) -> list[PromptGroup]:
        return [make_group(names[i % active], i, 1, length, 1) for i in range(total // length)]

    load(0, 1)
    measure("slots1", rounds(1))
    load(1, 8)
    measure("slots8", rounds(8))
    load(8, 32)
    measure("slots32", rounds(32))
    measure("slots1_resident32", rounds(1))
    measure("slots8_seq2048", rounds(8, 2048))
    measure("slots8_groups", [make_group(names[i], i, 200, 650, 8) for i in range(8)])
    return rows + step_rows(trainer, names[0], reps)


def step_rows(trainer: TrainerRank, uid: str, reps: int) -> list[dict[str, Any]]:
    """Seconds of one run's step: the optimizer with the copy for the snapshot, and until that is on disk."""
    returned, stored, exported = [], [], []
    for rep in range(reps + 1):
        trainer.accumulate([make_group(uid, rep, 1, ROWS, 2)])
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = trainer.step(uid, Cursor())
        torch.cuda.synchronize()
        returned.append(time.perf_counter() - began)
        trainer.snapshotted(getattr(result, "snapshot", ""))
        stored.append(time.perf_counter() - began)
        began = time.perf_counter()
        trainer.export(uid)
        exported.append(time.perf_counter() - began)
    named = {"step_seconds": returned, "step_stored_seconds": stored, "export_seconds": exported}
    return [row(f"trainer.{name}", found[1:], "s") for name, found in named.items()]


def peft_rows(model: Path, reps: int) -> list[dict[str, Any]]:
    """Stock PEFT on Hugging Face's model, one run, at each batch size that fits; and with a loss in chunks."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    gc.collect()
    torch.cuda.empty_cache()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
    adapted = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=PROJECTIONS))
    adapted.train()
    rows = []
    for name, loss in (("peft", _full_loss), ("peft_chunked", _chunked_loss)):
        best: list[float] = []
        for batch in PEFT_BATCHES:
            ids = torch.randint(0, VOCABULARY, (batch, ROWS), device="cuda")
            try:
                found = [batch * ROWS / s for s in seconds_of(partial(_train, adapted, loss, ids), reps)]
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                continue
            print(name, batch, statistics.median(found), flush=True)
            best = max(best, found, key=lambda f: statistics.median(f) if f else 0.0)
        rows.append(row(f"trainer.{name}_tokens_per_second", best, "1/s"))
    return rows


def _train(model: Any, loss: Callable[[Any, Tensor], Tensor], ids: Tensor) -> None:
    torch.autograd.backward(loss(model, ids))


def _full_loss(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _chunked_loss(model: Any, ids: Tensor) -> Tensor:
    hidden = model.base_model.model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    head, labels = model.base_model.model.lm_head, ids[:, 1:].flatten()

    def part(h: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(head(h).float(), y, reduction="sum")

    pairs = zip(torch.split(hidden, CHUNK), torch.split(labels, CHUNK), strict=True)
    parts = [torch.utils.checkpoint.checkpoint(part, h, y, use_reentrant=False) for h, y in pairs]
    return torch.stack(parts).sum() / len(labels)


if __name__ == "__main__":
    main()
