"""The one-machine edition's AdapterPool: its spec, the runtime's configuration and the manifests that `stack` applies.

Called by `stack` and, for a pool file, by `main`. Sized for 2 cores and 24 GiB. Writes and starts nothing.
"""

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.adapterrun import resolve_spec

POOL_NAME = "demo"
"""The pool that manifests/examples name in poolRef."""
NAMESPACE = "default"
TOKEN_SECRET = "demo-runtime-token"

_BASE_KINDS = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")

_FIXED = {
    "endpoint": "`make up` starts the runtime itself",
    "storage": "it is the folder `storage` in the state folder",
    "ray": "`make up` starts Ray itself",
}

Document = dict[str, Any]


def pool_spec(model: Path, storage: Path) -> Document:
    """The AdapterPool spec, in wire form, without `endpoint`.

    Args:
        model: directory of the converted base model.
        storage: checkpoints and data.
    """
    return {
        "baseModel": {"path": str(model), "dtype": "float32"},
        "slots": 4,
        "maxRank": 8,
        "trainer": {"numThreads": 1, "microBatchTokens": 1024},
        "engines": {
            "maxModelLen": 128,
            "maxNumSeqs": 128,
            "kvCacheBytes": 512 << 20,
            "numThreads": 1,
        },
        "rollout": {"globalBatchSize": 128, "workers": 1},
        "defaults": {"maxStaleness": 0},
        "storage": {"path": str(storage)},
        "rewardModules": ["lorafleet_local.rewards"],
    }


class PoolFileError(Exception):
    """The file of `make up POOL=FILE` cannot be used; the message names field, value and fix."""


def read_pool_file(path: Path, defaults: Document) -> Document:
    """The AdapterPool manifest in `path`, its spec laid over `defaults`: mappings merge, everything else replaces.

    Args:
        path: the manifest; apiVersion, kind and metadata may be left out.
        defaults: from `pool_spec`.

    Raises:
        PoolFileError: not readable, not an AdapterPool, or a value that an AdapterPool cannot have.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PoolFileError(f"POOL: {path}: {error}; name a YAML file with an AdapterPool") from error
    if not isinstance(document, dict) or not isinstance(document.get("spec"), dict):
        raise PoolFileError(f"POOL: {path}: no spec; write an AdapterPool as `kubectl apply` takes it")
    if (kind := document.get("kind", "AdapterPool")) != "AdapterPool":
        raise PoolFileError(f"POOL: {path}: kind: {kind!r}; use AdapterPool")
    metadata = document.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise PoolFileError(f"POOL: {path}: metadata: {metadata!r}; write a mapping, or leave it out")
    if (name := metadata.get("name", POOL_NAME)) != POOL_NAME:
        raise PoolFileError(f"POOL: {path}: metadata.name: {name!r}; the one pool here is {POOL_NAME!r}")
    own = document["spec"]
    for field, why in _FIXED.items():
        if field in own:
            raise PoolFileError(f"POOL: {path}: spec.{field}: {own[field]!r}; remove it: {why}")
    if isinstance(base := own.get("baseModel"), dict) and base.get("name") is not None:
        raise PoolFileError(
            f"POOL: {path}: spec.baseModel.name: {base['name']!r}; the hub is not read here: set baseModel.path"
        )
    spec = _merge(defaults, own)
    try:
        _refuse_what_does_not_run(AdapterPoolSpec.model_validate(spec))
    except ValidationError as error:
        raise PoolFileError(f"POOL: {path}: {'; '.join(_faults(error, 'spec'))}") from error
    except PoolFileError as error:
        raise PoolFileError(f"POOL: {path}: {error}") from error
    return spec


def _refuse_what_does_not_run(spec: AdapterPoolSpec) -> None:
    """What an AdapterPool may say, but no runtime of this machine, or no run, can have."""
    for name, size in (
        ("trainer.dataParallel", spec.trainer.data_parallel),
        ("trainer.tensorParallel", spec.trainer.tensor_parallel),
    ):
        if size != 1:
            raise PoolFileError(f"spec.{name}: {size}; the trainer runs on one rank: set it to 1")
    own = {"poolRef": {"name": POOL_NAME}, "data": "x"}
    if not {"rmType", "customRmPath", "reward"} & spec.defaults.keys():
        own["rmType"] = "math"  # a run must name one, the defaults need not
    try:
        resolve_spec(own, spec.defaults)
    except ValidationError as error:
        raise PoolFileError("; ".join(_faults(error, "spec.defaults"))) from error


def _faults(error: ValidationError, prefix: str) -> list[str]:
    return [f"{'.'.join([prefix, *map(str, e['loc'])])}: {e['input']!r}: {e['msg']}" for e in error.errors()]


def _merge(below: Document, above: Document) -> Document:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def runtime_config(spec: Document, port: int, folder: Path, ray_temp_dir: str) -> Document:
    """The configuration file of `lorafleet-runtime`.

    Args:
        spec: from `pool_spec`.
        port: of the HTTP API.
        folder: the state folder; holds the token and the runtime's own state file.
        ray_temp_dir: a short path.
    """
    return {
        "pool": {"namespace": NAMESPACE, "name": POOL_NAME, "spec": spec},
        "port": port,
        "tokenFile": str(folder / "token"),
        "storageRoot": spec["storage"]["path"],
        "rayTempDir": ray_temp_dir,
        "stateFile": str(folder / "runtime.json"),
        "adapterRunsApi": os.environ.get("LORAFLEET_ADAPTER_RUNS") == "1",
    }


def pool_manifest(spec: Document, url: str) -> Document:
    """The AdapterPool object that adopts the runtime at `url`."""
    return {
        "apiVersion": "lorafleet.dev/v1alpha1",
        "kind": "AdapterPool",
        "metadata": {"name": POOL_NAME, "namespace": NAMESPACE},
        "spec": {**spec, "endpoint": {"url": url, "tokenSecretRef": {"name": TOKEN_SECRET, "key": "token"}}},
    }


def token_secret(token: str) -> Document:
    """The Secret that the pool's endpoint names."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": TOKEN_SECRET, "namespace": NAMESPACE},
        "type": "Opaque",
        "stringData": {"token": token},
    }


def base_documents(files: list[Path]) -> list[Document]:
    """The objects of manifests/base that this edition needs, namespaces first.

    The operator's Deployment and what only its pod needs stay out: here the operator is a process.
    """
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text()) if document]
    wanted = [document for document in documents if document["kind"] in _BASE_KINDS]
    return sorted(wanted, key=lambda document: _BASE_KINDS.index(document["kind"]))
