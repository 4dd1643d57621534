"""Checks of a PEFT adapter directory that a run starts from (initFrom), from its config and tensor headers alone.

Called by the rollout worker before a slot is taken, and by the trainer before it reads the values. Imports no torch and
reads no tensor data.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.storage import CONFIG_FILE, WEIGHTS_FILE, inside, newest_step, read_regular
from lorafleet_runtime.trainer.layout import FlatTensor, flat_layout
from lorafleet_runtime.trainer.shape import read_shape

_HARMLESS = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "megatron_core", "qalora_group_size",
    "runtime_config",
})  # fmt: skip
"""adapter_config.json fields of any value: checked on their own, or without effect on the weights' meaning."""

_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),
}
"""Fields with plain values other than unset ones. The other init_lora_weights (pissa, olora, loftq, corda, ...) change
the base weights, so that the file alone says less than the adapter does."""

_UNSET: tuple[Any, ...] = (None, False, [], {})
"""What every other field must be, known to this version or not."""

_CONFIG_BYTES = 1 << 20
"""Of an adapter_config.json, what is read; a longer one is no JSON then."""

_FLOATS = ("F64", "F32", "F16", "BF16")


def check_warm_start(spec: AdapterRunSpec, targets: Sequence[str], storage_root: Path, model_path: Path) -> None:
    """Check a run's initFrom as far as it can be without reading values; does nothing without one.

    Args:
        spec: the run's resolved spec.
        targets: its targetModules, or the pool's.
        storage_root: root of the pool's storage.
        model_path: directory with the base model's config.json.

    Raises:
        RunError: InitError; the message names the field, its value and the fix.
        ConfigError: the base model's config.json is unusable.
    """
    if spec.init_from is None:
        return
    directory = init_directory(spec.init_from, storage_root)
    read_peft_config(directory, spec.rank, spec.lora_alpha)
    check_tensors(directory, flat_layout(read_shape(model_path), spec.rank, targets))


def init_directory(init_from: str, storage_root: Path) -> Path:
    """The adapter's directory on the pool's storage.

    Raises:
        RunError: InitError; it lies outside the storage.
    """
    try:
        directory = inside(storage_root, init_from)
        for name in (CONFIG_FILE, WEIGHTS_FILE):  # each may be a link, as in a hub cache
            inside(storage_root, directory / name)
    except ValueError as error:
        raise init_error(f"{init_from!r} {error}") from error
    return directory


def read_peft_config(directory: Path, rank: int, alpha: int) -> bool:
    """Check that initFrom is a plain LoRA with the run's rank and alpha.

    Returns:
        Whether it is scaled by alpha / sqrt(rank) (rsLoRA).

    Raises:
        RunError: InitError; the message names the field of adapter_config.json, its value and the fix.
    """
    path = directory / CONFIG_FILE
    try:
        config = json.loads(read_regular(path, _CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise init_error(f"{path} cannot be read ({_why(error)}); {_instead(directory)}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise init_error(f"{path}: peft_type is no LORA; only plain LoRA adapters can be trained further")
    for field in sorted(config.keys() - _HARMLESS):
        if config[field] not in _PLAIN.get(field, _UNSET):
            raise init_error(
                f"{path}: {field} is {config[field]!r:.200}; give an adapter without it, or merge that one into a base"
                " model; only plain, uniform LoRA can be trained further"
            )
    for field, name, wanted in (("r", "rank", rank), ("lora_alpha", "alpha", alpha)):
        if config.get(field) != wanted:
            raise init_error(
                f"{path}: {field} is {config.get(field)!r}, the run's {name} {wanted}; set {name} to match"
            )
    return bool(config.get("use_rslora", False))


def _why(error: Exception) -> str:
    """An error without the path, which the message has already."""
    return str(getattr(error, "strerror", None) or error)


def _instead(directory: Path) -> str:
    """What to give instead of a directory without a config: of a run's, its newest checkpoint."""
    newest = newest_step(directory)
    if newest is not None:
        return f"this is a run's directory: give one of its checkpoints, for example {newest.name}"
    return "give a PEFT adapter directory, relative to the pool's storage; of a run NAMESPACE/NAME/UID/step_N"


def check_tensors(directory: Path, layout: Sequence[FlatTensor]) -> None:
    """Check the weight file's length, keys, shapes and types.

    Args:
        directory: of the adapter.
        layout: of the run's adapter.

    Raises:
        RunError: InitError; the file is cut short or damaged, or holds other tensors than the run's.
    """
    path = directory / WEIGHTS_FILE
    try:
        read_regular(path, 0)  # safe_open would wait for ever on a named pipe
        with safe_open(path, framework="np") as stored:
            slices = {key: stored.get_slice(key) for key in stored.keys()}  # noqa: SIM118 - safe_open is no mapping
            found = {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise init_error(f"{path} cannot be read ({_why(error)}); save the adapter again") from error
    expected = {entry.key: entry.shape for entry in layout}
    for what, keys in (("lacks", expected.keys() - found.keys()), ("has", found.keys() - expected.keys())):
        if keys:
            raise init_error(f"{path} {what} {min(keys)!r} ({len(keys)} such); set targetModules to the adapter's own")
    for key, wanted in expected.items():
        shape, dtype = found[key]
        if shape != wanted:
            raise init_error(f"{path}: {key} has shape {shape}; rank and base model ask for {wanted}")
        if dtype not in _FLOATS:
            raise init_error(f"{path}: {key} has type {dtype}; save the adapter as one of {', '.join(_FLOATS)}")


def init_error(text: str) -> RunError:
    """InitError about initFrom."""
    return RunError(reasons.INIT_ERROR, f"initFrom: {text}")
