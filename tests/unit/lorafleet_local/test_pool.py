"""The documents that the stack applies and writes fit the types that will read them."""

from pathlib import Path

import yaml

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_local import pool
from lorafleet_runtime.config.config import load_config


def spec(tmp_path: Path) -> pool.Document:
    return pool.pool_spec(tmp_path / "model", tmp_path / "storage")


def test_the_pool_is_a_valid_adapter_pool(tmp_path: Path) -> None:
    manifest = pool.pool_manifest(spec(tmp_path), "http://127.0.0.1:1")
    parsed = AdapterPoolSpec.model_validate(manifest["spec"])
    assert parsed.endpoint is not None
    assert parsed.endpoint.token_secret_ref.name == pool.token_secret("t")["metadata"]["name"]
    assert (parsed.trainer.num_threads, parsed.engines.num_threads) == (1, 1)  # a core each on two
    assert parsed.defaults == {"maxStaleness": 0}


def test_the_runtime_reads_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    path = tmp_path / "runtime.yaml"
    path.write_text(yaml.safe_dump(pool.runtime_config(spec(tmp_path), 1234, tmp_path, "/tmp/lf-x")))
    config = load_config(path)
    assert (config.token, config.port, str(config.ray_temp_dir)) == ("secret", 1234, "/tmp/lf-x")
    assert config.storage_root == tmp_path / "storage"


def test_base_objects_come_namespace_first_and_without_the_deployment(tmp_path: Path) -> None:
    kinds = ["Deployment", "ClusterRoleBinding", "ServiceAccount", "Namespace", "Service", "ClusterRole"]
    (tmp_path / "a.yaml").write_text("---\n".join(f"kind: {kind}\n" for kind in kinds) + "---\n")
    (tmp_path / "kustomization.yaml").write_text("kind: Kustomization\n")
    found = [document["kind"] for document in pool.base_documents(sorted(tmp_path.glob("*.yaml")))]
    assert found == ["Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"]
