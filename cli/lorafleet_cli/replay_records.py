"""Reads what a run left on storage for `lorafleet replay`: its step records and its checkpoints.

Called by replay.py. Written from docs/replay.md, not from the runtime's code: an outside check must not share it. Reads
files only and never writes; replay_checks.py checks what follows from other things in a record.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lorafleet_cli.errors import CliError
from lorafleet_cli.replay_checks import Contradiction, check_identity, check_step

FORMAT = 1
SITES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Order of the projections in a checkpoint's flat tensors."""

_DAMAGE = (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError)


class Gap(Exception):
    """A step whose record is missing, damaged or contradicts itself: replay cannot go beyond it."""


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One response."""

    token_ids: Tensor
    """[R] int64."""
    sampler: Tensor
    """[R] log-probabilities under the sampler."""
    old: Tensor
    """[R] the trainer's own, or [0] where it needed none."""
    advantage: float
    reward: float
    in_loss: bool


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A prompt and its responses."""

    index: int
    prompt_ids: Tensor
    """[P] int64."""
    samples: tuple[RecordedSample, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step as the trainer recorded it."""

    number: int
    lr: float
    grad_norm: float
    denominator: int
    groups: tuple[RecordedGroup, ...]
    eps: float
    """Of the type that advantages are stored in."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A kept checkpoint."""

    step: int
    masters: dict[str, Tensor]
    """By PEFT key, at the masters' precision."""
    moments: tuple[dict[str, Tensor], dict[str, Tensor]]
    """AdamW's exp_avg and exp_avg_sq by PEFT key."""
    wrong: str
    """What contradicts itself inside the checkpoint; "" when nothing does."""


class Records:
    """A run's records.

    Args:
        directory: of the run: {storage}/{namespace}/{name}/{uid}.

    Raises:
        CliError: there are none, or run.json or the initial adapter cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._folder = directory / "records"
        path = self._folder / "run.json"
        try:
            self.run: dict[str, Any] = json.loads(path.read_text())
            version = self.run["format"]
        except FileNotFoundError as error:
            text = (
                "it holds no records/run.json; give the directory NAMESPACE/NAME/UID of a run with recordSteps: true"
                " on the pool's storage"
            )
            raise CliError("directory", directory, text) from error
        except _DAMAGE as error:
            raise CliError("run.json", path, f"cannot be read ({error}); restore the file") from error
        if version != FORMAT:
            raise CliError("format", version, f"this version reads {FORMAT}; use the lorafleet that wrote {path}")

    def initial(self) -> dict[str, Tensor]:
        """The adapter that the first step started from, by PEFT key.

        Raises:
            CliError: it cannot be read.
        """
        path = self._folder / "initial" / "adapter_model.safetensors"
        try:
            tensors: dict[str, Tensor] = load_file(path)
        except _DAMAGE as error:
            text = f"cannot be read ({error}); restore it, or start behind a kept checkpoint with --steps"
            raise CliError("initial adapter", path, text) from error
        return tensors

    def newest(self) -> int:
        """The last step that is recorded or has a checkpoint; 0 when there is none.

        A checkpoint beyond the last record is of steps whose records are missing.
        """
        found = [re.fullmatch(r"step_(\d+)\.json", path.name) for path in self._folder.iterdir()]
        return max([int(match[1]) for match in found if match] + list(self.checkpoints()), default=0)

    def checkpoints(self) -> dict[int, Path]:
        """Kept checkpoints by step, also damaged ones: they appear by rename, so one without its files lost them."""
        found = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in self.directory.iterdir()]
        return {int(match[1]): path for match, path in found if match}

    def step(self, number: int) -> Step:
        """The record of a step.

        Raises:
            Gap: it is missing, damaged, or contradicts itself, run.json or the record before it.
        """
        base = self._folder / f"step_{number:08d}"
        try:
            about = json.loads(base.with_suffix(".json").read_text())
            tensors = base.with_suffix(".safetensors")
            if _sha256(tensors) != about["sha256"]:
                raise ValueError(f"{tensors.name} is not the file that {base.name}.json tells of")
            if (about["format"], about["step"]) != (FORMAT, number):
                raise ValueError(f"format {about['format']}, step {about['step']}")
            arrays = load_file(tensors)
            groups = tuple(_groups(arrays, self.run["algorithm"]["maskTruncated"]))
            eps = torch.finfo(arrays["advantage"].dtype).eps
            step = Step(number, about["lr"], about["gradNorm"], about["denominator"], groups, eps)
            check_step(step, about, self.run, self._about(number - 1))
        except FileNotFoundError as error:
            raise Gap(f"step {number}: its record is missing ({error.filename})") from error
        except Contradiction as error:
            raise Gap(f"step {number}: its record {base} contradicts itself or run.json: {error}") from error
        except _DAMAGE as error:
            raise Gap(f"step {number}: its record {base} is damaged ({error})") from error
        return step

    def _about(self, number: int) -> dict[str, Any] | None:
        """JSON of a step's record; None where there is none, or none that can be read."""
        try:
            about: dict[str, Any] = json.loads((self._folder / f"step_{number:08d}.json").read_text())
        except (OSError, ValueError):
            return None
        return about

    def saved(self, step: int) -> Saved:
        """A kept checkpoint.

        Raises:
            CliError: it cannot be read.
        """
        path = self.checkpoints()[step]
        try:
            state = json.loads((path / "state.json").read_text())
            wrong = next(
                (f"{name} is not the file that state.json tells of" for name, about in state["files"].items()
                 if _sha256(path / name) != about["sha256"]), "",
            )  # fmt: skip
            wrong = wrong or check_identity(state, self.run)
            wrong = wrong or self._config_differs(json.loads((path / "adapter_config.json").read_text()))
            adapter = load_file(path / "adapter_model.safetensors")
            flat = load_file(path / "optimizer.safetensors")
            masters, first, second = (_named(flat[key], adapter) for key in ("master", "exp_avg", "exp_avg_sq"))
        except _DAMAGE as error:
            raise CliError("checkpoint", path, f"cannot be read ({error}); remove it or restore it") from error
        for key, tensor in adapter.items():
            if not wrong and not torch.equal(tensor, masters[key].to(tensor.dtype)):
                gap = float((tensor.double() - masters[key].double()).abs().max())
                wrong = f"{key} of adapter_model.safetensors is not its master; they differ by {gap:.1e}"
        return Saved(step, masters, (first, second), wrong)

    def _config_differs(self, config: dict[str, Any]) -> str:
        """What adapter_config.json says otherwise than run.json; an engine would serve another adapter by it."""
        run = self.run
        pairs = [
            ("r", config["r"], run["rank"]),
            ("lora_alpha", config["lora_alpha"], run["alpha"]),
            ("use_rslora", config["use_rslora"], run["rslora"]),
            ("target_modules", sorted(config["target_modules"]), sorted(run["targets"])),
        ]
        texts = (f"{name} of adapter_config.json is {found}, the run's is {told}" for name, found, told in pairs
                 if found != told)  # fmt: skip
        return next(texts, "")


def check_base(run: dict[str, Any], model: Path) -> None:
    """Refuse another base model than the run's.

    Raises:
        CliError: its files cannot be read, or are others.
    """
    try:
        index = model / "model.safetensors.index.json"
        if index.exists():
            names = set(json.loads(index.read_text())["weight_map"].values())
        else:
            names = {path.name for path in model.glob("*.safetensors")}
        files = [model / "config.json", *(model / name for name in sorted(names))]
        if not names:
            raise FileNotFoundError("there are no *.safetensors files")
        digest = hashlib.sha256(b"".join(bytes.fromhex(_sha256(path)) for path in files)).hexdigest()
    except _DAMAGE as error:
        text = f"cannot be read as a model ({error}); give the directory of {run['baseModel']}"
        raise CliError("base-model", model, text) from error
    if digest != run["baseDigest"]:
        text = (
            f"its digest is {digest[:12]}..., the run trained on {run['baseModel']} with {run['baseDigest'][:12]}...;"
            " give that one"
        )
        raise CliError("base-model", model, text)


def flat_order(keys: Iterator[str] | list[str] | dict[str, Tensor]) -> list[str]:
    """PEFT keys in the order of a checkpoint's flat tensors: by layer and site, the A of a site before its B."""
    place = {name: (site, i) for site, names in enumerate(SITES) for i, name in enumerate(names)}

    def rank(key: str) -> tuple[int, int, bool, int]:
        match = re.fullmatch(r"base_model\.model\.model\.layers\.(\d+)\.\w+\.(\w+)\.lora_([AB])\.weight", key)
        if match is None:
            raise ValueError(f"{key} is no LoRA matrix of a decoder layer")
        site, i = place[match[2]]
        return int(match[1]), site, match[3] == "B", i

    return sorted(keys, key=rank)


def _named(flat: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """A flat tensor's matrices by PEFT key, shaped as those of `like`."""
    keys = flat_order(like)
    if flat.numel() != sum(like[key].numel() for key in keys):
        raise ValueError(f"{flat.numel()} elements in optimizer.safetensors, another number in the adapter")
    parts = torch.split(flat, [like[key].numel() for key in keys])
    return {key: part.view(like[key].shape) for key, part in zip(keys, parts, strict=True)}


def _groups(t: dict[str, Tensor], mask_truncated: bool) -> Iterator[RecordedGroup]:
    def parts(name: str, offsets: str) -> list[Tensor]:
        bounds = t[offsets].tolist()
        if bounds[-1] != len(t[name]):
            raise ValueError(f"{offsets} end at {bounds[-1]}, {name} has {len(t[name])}")
        return [t[name][a:b] for a, b in pairwise(bounds)]

    tokens, sampler = parts("token_ids", "token_offsets"), parts("sampler_logprobs", "token_offsets")
    old, advantage = parts("old_logprobs", "old_offsets"), t["advantage"].tolist()
    reward = t["reward"].tolist()
    wanted = [not (mask_truncated and cut) for cut in t["truncated"].tolist()]
    in_loss = [bool(flag) for flag in t["loss_mask"].tolist()]
    if in_loss != wanted:
        raise Contradiction("loss_mask does not follow from truncated and algorithm.maskTruncated")
    samples = [
        RecordedSample(tokens[i].long(), sampler[i], old[i], advantage[i], reward[i], in_loss[i])
        for i in range(len(tokens))
    ]
    bounds, prompts = t["sample_offsets"].tolist(), parts("prompt_ids", "prompt_offsets")
    for i, index in enumerate(t["group_index"].tolist()):
        yield RecordedGroup(index, prompts[i].long(), tuple(samples[bounds[i] : bounds[i + 1]]))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
