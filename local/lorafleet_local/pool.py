"""The demo's AdapterPool: its spec, the runtime's configuration file and the manifests that `stack` applies.

Called by `stack`. Sized for 2 cores and 24 GiB. Returns documents, writes and starts nothing.
"""

from pathlib import Path
from typing import Any

import yaml

POOL_NAME = "demo"
"""The pool that manifests/examples name in poolRef."""
NAMESPACE = "default"
TOKEN_SECRET = "demo-runtime-token"

_BASE_KINDS = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")

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
