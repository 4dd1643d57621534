"""Reads base-model weights from *.safetensors files, one tensor at a time, and fingerprints them.

Called by model.py with a destination for every expected key. Knows files and keys only, no model class.
"""

import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from lorafleet_runtime.errors import ConfigError
from lorafleet_runtime.trainer.parallel import Ranks

INDEX = "model.safetensors.index.json"
_digests: dict[tuple[tuple[str, int, int], ...], str] = {}


def weight_files(directory: str | Path) -> list[Path]:
    """The model's safetensors files, sorted by name: those of the index, or every one in the directory.

    Raises:
        ConfigError: there is none, or the index names a file that is missing.
    """
    root = Path(directory)
    index = root / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = sorted(root / name for name in names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"baseModel: {index} is malformed ({error!r}); fetch the model again") from error
    else:
        files = sorted(root.glob("*.safetensors"))
    missing = [str(file) for file in files if not file.exists()]
    if missing or not files:
        raise ConfigError(f"baseModel: no weights at {', '.join(missing) or root}; expected *.safetensors files")
    return files


def base_digest(directory: str | Path) -> str:
    """SHA-256 over config.json and every safetensors file, in name order; remembered while the files are unchanged."""
    files = [Path(directory) / "config.json", *weight_files(directory)]
    key = tuple((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    if key not in _digests:
        total = hashlib.sha256()
        for path in files:
            with path.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
        _digests[key] = total.hexdigest()
    return _digests[key]


def common_digest(model_path: str, ranks: Ranks) -> str:
    """Fingerprint of the base model, read once per host.

    Raises:
        ConfigError: the hosts have different files; their ranks would compute different gradients.
    """
    hosts = ranks.gather(socket.gethostname())
    reads = hosts.index(hosts[ranks.rank]) == ranks.rank
    found = ranks.gather(base_digest(model_path) if reads else "")
    by_host = {host: digest for host, digest in zip(hosts, found, strict=True) if digest}
    if len(set(by_host.values())) > 1:
        text = ", ".join(f"{digest[:12]} on {host}" for host, digest in sorted(by_host.items()))
        raise ConfigError(
            f"baseModel: {model_path} has other files on other hosts ({text}); give all the same revision"
        )
    digest: str = found[0]
    return digest


class Target(NamedTuple):
    """Where one checkpoint tensor goes."""

    tensor: torch.Tensor
    """A view of the model's parameter with the elements in the checkpoint's row-major order."""
    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    share: tuple[int, int] | None = None
    """(dimension, part): of that dimension's equal parts, as many as fit, which one this tensor-parallel rank has."""


def load_weights(directory: str | Path, targets: Mapping[str, Target], tied: bool) -> None:
    """Copy every tensor of the checkpoint into its target; the dtype is converted.

    Args:
        directory: of the safetensors files.
        targets: by HF key.
        tied: a separate lm_head.weight is accepted when it equals the embedding.

    Raises:
        ConfigError: a key is missing, surplus or twice there, a shape or type does not fit, or a file cannot be read.
    """
    seen: set[str] = set()
    spare_head: torch.Tensor | None = None
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as stored:
                for key in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                    if key.endswith("rotary_emb.inv_freq"):  # a buffer of old exports; derived from the config
                        continue
                    if key == "lm_head.weight" and tied:
                        spare_head = stored.get_tensor(key)
                        continue
                    if key in seen:
                        raise ConfigError(f"baseModel: {path} holds {key!r} again; leave one file with it, or an index")
                    _place(key, stored.get_tensor(key), targets)
                    seen.add(key)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"baseModel: {path} cannot be read ({error})") from error
    missing = sorted(targets.keys() - seen)
    if missing:
        raise ConfigError(f"baseModel: the checkpoint lacks {', '.join(missing[:5])} ({len(missing)} keys in all)")
    if spare_head is not None:
        target = targets["model.embed_tokens.weight"]
        if not torch.equal(_cut(spare_head, target).to(target.tensor), target.tensor):
            raise ConfigError("baseModel: lm_head.weight differs from the embedding, but tie_word_embeddings is true")


def _place(key: str, tensor: torch.Tensor, targets: Mapping[str, Target]) -> None:
    if key not in targets:
        raise ConfigError(f"baseModel: the checkpoint has {key!r}, which this architecture does not use")
    target = targets[key]
    if tuple(tensor.shape) != target.shape:
        raise ConfigError(f"baseModel: {key!r} has shape {tuple(tensor.shape)}; config.json asks for {target.shape}")
    if not tensor.is_floating_point():
        raise ConfigError(f"baseModel: {key!r} has type {tensor.dtype}; use a model that is not quantized")
    with torch.no_grad():
        target.tensor.copy_(_cut(tensor, target).reshape(target.tensor.shape))


def _cut(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """This rank's share of a checkpoint tensor."""
    if target.share is None:
        return tensor
    dimension, part = target.share
    width = target.tensor.numel() * tensor.shape[dimension] // tensor.numel()
    return tensor.narrow(dimension, part * width, width)
