"""`lorafleet convert FILE`: an AdapterRun from miles' adapter.yaml. Every key that is not taken over is named."""

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.names import API_VERSION, RUN_KIND
from lorafleet_cli.errors import CliError

_RENAMED = {"metadata": "sampleMetadata"}
_EXPLAINED = {
    "save": "checkpoints go to the pool's storage, under NAMESPACE/NAME/UID",
    "load": "a run resumes from its own checkpoints; to start from another adapter set initFrom",
    "rm_url": "remote rewards are not in this version; use rmType or customRmPath",
    "dropout": "adapters train without dropout",
    "advantage_estimator": "write it as advantage under algorithm",
    "kl_loss_coef": "write it as kl_coef under algorithm",
    "rollout_max_response_len": "write it as max_tokens under sampling",
}
_GROUPS = ("Optimizer", "Algorithm", "Sampling", "Checkpoint", "Scheduling")
_REWARDS = frozenset({"rmType", "customRmPath", "reward"})


class Unusable(CliError):
    """The file cannot become an AdapterRun at all."""


def convert(path: Path, name: str | None, pool: str) -> tuple[str, list[str]]:
    """The manifest as YAML, and a warning for each key that was left out and for what a user may have forgotten.

    Args:
        path: miles' adapter.yaml.
        name: of the AdapterRun; from the file (its `name`, else its own name) when None.
        pool: name of the AdapterPool.

    Raises:
        Unusable: no mapping, or values that no AdapterRun can have.
    """
    given = _read(path)
    warnings: list[str] = []
    spec: dict[str, Any] = {"poolRef": {"name": pool}}
    fields = {to_camel(field) for field in AdapterRunSpec.model_fields}
    chosen = name or str(given.pop("name", None) or path.stem)
    given.pop("name", None)
    for key, value in given.items():
        field = _RENAMED.get(key) or to_camel(key)
        if field not in fields or field == "poolRef":
            why = _EXPLAINED.get(key) or _belongs(key)
            warnings.append(f"warning: {key}: {value}: not taken over: {why}")
        elif value is not None:
            spec[field] = _camel(value) if field not in ("sampleMetadata", "data") else value
    if "numStep" in spec and spec.pop("numEpoch", None) is not None:
        warnings.append("warning: num_epoch: not taken over: num_step wins, as in miles")
    _check(path, spec)
    warnings += _missing(spec)
    usable = _kubernetes_name(chosen)
    if usable != chosen:
        warnings.append(f"warning: name: {chosen}: no Kubernetes name, so it is {usable}")
    manifest = {"apiVersion": API_VERSION, "kind": RUN_KIND, "metadata": {"name": usable}, "spec": spec}
    return yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True), [" ".join(w.split()) for w in warnings]


def _belongs(key: str) -> str:
    """Where a key belongs that stands at the top: `lr` under `optimizer`."""
    schema = AdapterRunSpec.model_json_schema()["$defs"]
    for group in _GROUPS:
        if to_camel(key) in schema[group]["properties"]:
            return f"write it under {group.lower()}"
    return "an AdapterRun has no such field"


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Unusable("file", path, f"it cannot be read ({error}); give a miles adapter.yaml") from error
    if not isinstance(loaded, dict):
        raise Unusable("file", path, "it holds no mapping; give a miles adapter.yaml, with keys as data and rank")
    return {str(key): value for key, value in loaded.items()}


def _missing(spec: dict[str, Any]) -> list[str]:
    """What an AdapterRun may leave to the pool's defaults, but a user may just have forgotten."""
    warnings = []
    if not _REWARDS & spec.keys():
        text = "unless the pool's defaults set a reward, the run fails; set rmType or customRmPath"
        warnings.append(f"warning: rm_type: missing: {text}")
    if not {"numStep", "numEpoch"} & spec.keys():
        text = "unless the pool's defaults set a length, the run ends after 1 epoch; set numStep or numEpoch"
        warnings.append(f"warning: num_step: missing: {text}")
    return warnings


def _check(path: Path, spec: dict[str, Any]) -> None:
    # a reward may come from the pool's defaults, which are not known here
    whole = spec if _REWARDS & spec.keys() else spec | {"rmType": "math"}
    try:
        AdapterRunSpec.model_validate(whole)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "rm_type, custom_rm_path"
        value = "missing" if first["type"] == "missing" else first["input"]
        shown = path if not first["loc"] else value
        raise Unusable(field, shown, f"{first['msg']}; correct it in {path}") from error


def _camel(value: Any) -> Any:
    return {to_camel(str(k)): _camel(v) for k, v in value.items()} if isinstance(value, dict) else value


def _kubernetes_name(text: str) -> str:
    """The nearest DNS subdomain: labels of a-z, 0-9 and, not at their ends, "-"; at most 253 characters."""
    labels = [re.sub(r"[^a-z0-9-]+", "-", label).strip("-") for label in text.lower().split(".")]
    return ".".join(filter(None, labels))[:253].rstrip("-.") or "run"
