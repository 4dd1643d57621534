"""The files of a run's step records: arrays and JSON as docs/replay.md describes them, each replaced whole.

Called by record.py. Knows no recorder and no model; errors are those of the disk.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.storage import CONFIG_FILE, WEIGHTS_FILE, sync_directory
from lorafleet_runtime.types import Cursor, PromptGroup, Sample, VersionId

FORMAT = 1
RUN_FILE = "run.json"
INITIAL = "initial"

_STEP_FILE = re.compile(r"step_(\d{8,})\.(safetensors|json)")
_PENDING_FILE = re.compile(r"pending_(\d{8,})\.(safetensors|json)")


@dataclass(frozen=True, slots=True)
class Start:
    """What a run's records begin with."""

    about: dict[str, Any]
    """Content of run.json."""
    config: dict[str, Any]
    """adapter_config.json of the initial adapter."""
    tensors: Mapping[str, Tensor]
    """Initial masters by PEFT key, in the masters' own type."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a step came to."""

    step: int
    lr: float
    grad_norm: float
    """Before clipping."""
    denominator: int
    incarnation: str
    cursor: Cursor


def describe_run(spec: AdapterRunSpec, **fields: Any) -> dict[str, Any]:
    """Content of run.json.

    Args:
        spec: of the run, resolved.
        fields: uid, namespace, name, baseModel, baseDigest, dataDigest, dtype, rank, alpha, rslora, targets and
            targetStep.
    """
    chosen = spec.model_dump(mode="json", by_alias=True)
    kept = ("optimizer", "algorithm", "rolloutBatchSize", "nSamplesPerPrompt")
    sampling = {key: chosen["sampling"][key] for key in ("temperature", "maxTokens")}
    return {"format": FORMAT, **fields, **{key: chosen[key] for key in kept}, "sampling": sampling}


def read_pair(directory: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A record's JSON and tensors.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: it is missing, damaged or of another format.
    """
    about = json.loads((directory / f"{name}.json").read_text())
    if about["format"] != FORMAT:
        raise ValueError(f"format is {about['format']}, this version reads {FORMAT}")
    path = directory / f"{name}.safetensors"
    if _sha256(path) != about["sha256"]:
        raise ValueError(f"{path.name} is not the file that {name}.json tells of")
    return about, load_file(path)


def step_name(step: int) -> str:
    """Name of a step's two files, without suffix."""
    return f"step_{step:08d}"


def pending_name(step: int) -> str:
    """Name of an unfinished step's two files, without suffix."""
    return f"pending_{step:08d}"


def recorded_steps(directory: Path) -> list[int]:
    """Steps with a record in `directory`, in order; none where it is missing."""
    found = [_STEP_FILE.fullmatch(path.name) for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match[1]) for match in found if match and match[2] == "json")


def step_json(figures: StepFigures, groups: Sequence[PromptGroup]) -> dict[str, Any]:
    """Content of a step's JSON file, without the digest."""
    rewards = [s.reward for g in groups for s in g.samples]
    return {
        "format": FORMAT,
        "step": figures.step,
        "lr": figures.lr,
        "gradNorm": figures.grad_norm,
        "denominator": figures.denominator,
        "groups": len(groups),
        "samples": len(rewards),
        "tokens": sum(len(s.token_ids) for g in groups for s in g.samples),
        "rewardMean": sum(rewards) / len(rewards) if rewards else None,
        "incarnation": figures.incarnation,
        "cursor": asdict(figures.cursor),
        "versions": [group.version.name for group in groups],
    }


def flatten(
    groups: Sequence[PromptGroup], logprobs: Mapping[int, tuple[Tensor, ...]], dtype: torch.dtype, mask_truncated: bool
) -> dict[str, Tensor]:
    """The step's arrays; X_offsets [n + 1] say where each of n parts lies in X."""
    samples = [s for group in groups for s in group.samples]
    old = [t for i, group in enumerate(groups) for t in logprobs.get(i, (torch.empty(0),) * len(group.samples))]

    def floats(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def ids(parts: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([i for part in parts for i in part], dtype=torch.int32)

    def flags(values: Sequence[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.uint8)

    return {
        "group_index": torch.tensor([group.index for group in groups], dtype=torch.int64),
        "prompt_ids": ids([group.prompt_ids for group in groups]),
        "prompt_offsets": _offsets([len(group.prompt_ids) for group in groups]),
        "sample_offsets": _offsets([len(group.samples) for group in groups]),
        "token_ids": ids([s.token_ids for s in samples]),
        "token_offsets": _offsets([len(s.token_ids) for s in samples]),
        "sampler_logprobs": floats([p for s in samples for p in s.sampler_logprobs]),
        "old_logprobs": torch.cat([t.to(dtype) for t in old]) if old else torch.empty(0, dtype=dtype),
        "old_offsets": _offsets([len(t) for t in old]),
        "advantage": floats([s.advantage for s in samples]),
        "reward": torch.tensor([s.reward for s in samples], dtype=torch.float64),
        "truncated": flags([s.truncated for s in samples]),
        "loss_mask": flags([not (mask_truncated and s.truncated) for s in samples]),
    }


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def unflatten(
    uid: str, versions: Sequence[str], tensors: Mapping[str, Tensor]
) -> tuple[list[PromptGroup], dict[int, tuple[Tensor, ...]]]:
    """The inverse of `flatten`, for the first groups as many as `versions` are given."""

    def parts(name: str, offsets: str) -> list[Tensor]:
        bounds = tensors[offsets].tolist()
        return [tensors[name][a:b] for a, b in pairwise(bounds)]

    tokens, sampler = parts("token_ids", "token_offsets"), parts("sampler_logprobs", "token_offsets")
    old, prompts = parts("old_logprobs", "old_offsets"), parts("prompt_ids", "prompt_offsets")
    reward, advantage = tensors["reward"].tolist(), tensors["advantage"].tolist()
    truncated = tensors["truncated"].tolist()
    samples = [
        Sample(tuple(tokens[i].tolist()), tuple(sampler[i].tolist()), reward[i], advantage[i], bool(truncated[i]))
        for i in range(len(tokens))
    ]
    bounds, indices = tensors["sample_offsets"].tolist(), tensors["group_index"].tolist()
    groups, logprobs = [], {}
    for i, version in enumerate(versions):
        chosen = slice(bounds[i], bounds[i + 1])
        prompt = tuple(prompts[i].tolist())
        groups.append(PromptGroup(uid, VersionId.parse(version), indices[i], prompt, tuple(samples[chosen])))
        logprobs[i] = tuple(old[chosen])
    return groups, logprobs


def write_start(directory: Path, start: Start, durable: bool = True) -> None:
    """initial/ first and run.json last: with run.json there, all of it is. Without `durable` nothing is synced."""

    def fill(folder: Path) -> None:
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in start.tensors.items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(start.config, indent=2) + "\n")

    _put_start(directory, fill, json.dumps(start.about, indent=2) + "\n", durable)


def move_start(source: Path, directory: Path) -> None:
    """Bring run.json and initial/ to storage, durably."""

    def fill(folder: Path) -> None:
        for path in (source / INITIAL).iterdir():
            shutil.copyfile(path, folder / path.name)

    _put_start(directory, fill, (source / RUN_FILE).read_text(), durable=True)
    (source / RUN_FILE).unlink()
    shutil.rmtree(source / INITIAL, ignore_errors=True)


def _put_start(directory: Path, fill: Callable[[Path], None], about: str, durable: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".tmp-{INITIAL}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    fill(temporary)
    for path in temporary.iterdir() if durable else ():
        _sync(path)
    final = directory / INITIAL
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    _put(directory / RUN_FILE, lambda path: path.write_text(about), durable)
    if durable:
        sync_directory(directory)


def write_pair(
    directory: Path, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], durable: bool = True
) -> None:
    """NAME.safetensors, then NAME.json with its digest: of a pair that was replaced halfway, the digest differs."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.safetensors"
    _put(path, lambda temporary: save_file(dict(tensors), temporary), durable)
    text = json.dumps({**about, "sha256": _sha256(path)}, indent=2) + "\n"
    _put(directory / f"{name}.json", lambda temporary: temporary.write_text(text), durable)
    if durable:
        sync_directory(directory)


def move_pair(source: Path, directory: Path, name: str) -> None:
    """Bring a record to storage, durably; one that is no longer in `source` is fine.

    Raises:
        OSError: storage refuses it; it stays in `source`.
        ValueError: it is damaged there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        text, arrays = (source / f"{name}.json").read_text(), (source / f"{name}.safetensors").read_bytes()
    except FileNotFoundError:
        return
    if hashlib.sha256(arrays).hexdigest() != json.loads(text).get("sha256"):
        raise ValueError(f"{name}.safetensors is not the file that {name}.json tells of")
    _put(directory / f"{name}.safetensors", lambda path: path.write_bytes(arrays), durable=True)
    _put(directory / f"{name}.json", lambda path: path.write_text(text), durable=True)
    sync_directory(directory)
    remove_pair(source, name)


def _put(path: Path, write: Callable[[Path], object], durable: bool) -> None:
    """Replace a file whole."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write(temporary)
        if durable:
            _sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def remove_pair(directory: Path, name: str) -> None:
    """Remove a record; one that is not there is fine."""
    for suffix in ("json", "safetensors"):
        (directory / f"{name}.{suffix}").unlink(missing_ok=True)


def trim(directory: Path, step: int, fresh: bool) -> None:
    """Remove records of steps after `step`, and what interrupted writes left; with `fresh` also unfinished steps."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        match = _STEP_FILE.fullmatch(path.name)
        if (match is not None and int(match[1]) > step) or (fresh and _PENDING_FILE.fullmatch(path.name)):
            path.unlink()
        elif path.name.startswith(".tmp-"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    clean_pending(directory)


def clean_pending(directory: Path) -> None:
    """Remove unfinished steps that have their record and whose checkpoint, the step before, is no longer kept.

    Args:
        directory: of the run's records; the checkpoints are beside it.
    """
    for path in directory.glob("pending_*.json"):
        match = _PENDING_FILE.fullmatch(path.name)
        if match is None:
            continue
        step = int(match[1])
        if (directory / f"{step_name(step)}.json").exists() and not (directory.parent / f"step_{step - 1}").exists():
            remove_pair(directory, pending_name(step))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
