"""The documents that the stack applies and writes fit the types that will read them."""

from pathlib import Path

import pytest
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


def pool_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_a_pool_file_is_laid_over_the_defaults(tmp_path: Path) -> None:
    text = "kind: AdapterPool\nspec:\n  slots: 2\n  engines: {maxModelLen: 256}\n  rewardModules: [mine]\n"
    merged = pool.read_pool_file(pool_file(tmp_path, text), spec(tmp_path))
    assert merged["slots"] == 2
    assert (merged["engines"]["maxModelLen"], merged["engines"]["numThreads"]) == (256, 1)
    assert merged["rewardModules"] == ["mine"]
    assert merged["storage"] == spec(tmp_path)["storage"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spec: {slots: many}", r"spec\.slots: 'many': .*integer"),
        ("spec: {slots: 0}", r"spec\.slots: 0: "),
        ("spec: {slotz: 3}", r"spec\.slotz: 3: "),
        ("spec: {engines: {maxModelLen: -1}}", r"spec\.engines\.maxModelLen: -1"),
        ("spec: {storage: {path: /data}}", r"spec\.storage: .*remove it"),
        ("spec: {endpoint: {url: x}}", r"spec\.endpoint: .*remove it"),
        ("kind: AdapterRun\nspec: {rank: 4}", r"kind: 'AdapterRun'; use AdapterPool"),
        ("metadata: {name: mine}\nspec: {slots: 2}", r"metadata\.name: 'mine'; the one pool here is 'demo'"),
        ("spec: {baseModel: {name: org/model}}", r"spec\.baseModel\.name: 'org/model'; .*set baseModel\.path"),
        ("metadata: [1]\nspec: {slots: 2}", r"metadata: \[1\]; write a mapping"),
        ("spec: {trainer: {dataParallel: 2}}", r"spec\.trainer\.dataParallel: 2; .*set it to 1"),
        ("spec: {trainer: {tensorParallel: 4}}", r"spec\.trainer\.tensorParallel: 4; .*set it to 1"),
        ("spec: {defaults: {rank: -3}}", r"spec\.defaults\.rank: -3: .*greater"),
        ("spec: {defaults: {rnak: 3}}", r"spec\.defaults\.rnak: 3"),
        ("slots: 2", "no spec"),
        ("- a\n- b", "no spec"),
        ("spec: {", "mine.yaml"),
    ],
)
def test_a_bad_pool_file_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(pool.PoolFileError, match=words):
        pool.read_pool_file(pool_file(tmp_path, text), spec(tmp_path))


def test_a_missing_pool_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(pool.PoolFileError, match=r"nowhere\.yaml"):
        pool.read_pool_file(tmp_path / "nowhere.yaml", spec(tmp_path))


@pytest.mark.parametrize("defaults", ["{rank: 4}", "{customRmPath: mine.reward}", "{optimizer: {lr: 0.1}}"])
def test_defaults_need_not_make_a_whole_run(tmp_path: Path, defaults: str) -> None:
    merged = pool.read_pool_file(pool_file(tmp_path, f"spec: {{defaults: {defaults}}}"), spec(tmp_path))
    assert merged["defaults"] == {"maxStaleness": 0} | yaml.safe_load(defaults)


def test_a_base_model_of_ones_own_is_a_path(tmp_path: Path) -> None:
    merged = pool.read_pool_file(pool_file(tmp_path, "spec: {baseModel: {path: /m}}"), spec(tmp_path))
    assert merged["baseModel"] == {"path": "/m", "dtype": "float32"}
