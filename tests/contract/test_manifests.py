"""Every YAML under manifests/ parses, and every LoraFleet object in it validates against the Python types."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lorafleet_api.v1alpha1 import names
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.meta import ApiModel

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
FILES = sorted(MANIFESTS.rglob("*.yaml"))
SPECS: dict[str, type[ApiModel]] = {names.RUN_KIND: AdapterRunSpec, names.POOL_KIND: AdapterPoolSpec}


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def name_of(path: Path) -> str:
    """Path below manifests/."""
    return str(path.relative_to(MANIFESTS))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_manifest_is_made_of_objects(path: Path) -> None:
    objects = documents(path)
    assert objects
    for obj in objects:
        assert obj["apiVersion"]
        assert obj["kind"]


OURS = [(p, obj) for p in FILES for obj in documents(p) if obj.get("apiVersion") == names.API_VERSION]


@pytest.mark.parametrize(("path", "obj"), OURS, ids=[f"{name_of(p)}:{obj['kind']}" for p, obj in OURS])
def test_objects_validate_against_the_types(path: Path, obj: dict[str, Any]) -> None:
    SPECS[obj["kind"]].model_validate(obj["spec"])


@pytest.mark.parametrize(("name", "rank", "steps"), [("addition", 4, 15), ("json", 8, 8), ("sentence", 8, 18)])
def test_example_runs_are_what_the_demo_expects(name: str, rank: int, steps: int) -> None:
    [obj] = documents(MANIFESTS / "examples" / f"{name}.yaml")
    spec = AdapterRunSpec.model_validate(obj["spec"])
    assert (obj["metadata"]["name"], spec.pool_ref.name) == (name, "demo")
    assert (spec.rank, spec.lora_alpha / spec.rank, spec.num_step, spec.max_staleness) == (rank, 2.0, steps, 0)
    assert spec.data == f"tasks/{name}/train.jsonl"


def rules() -> list[dict[str, Any]]:
    """The operator's rules."""
    objects = documents(MANIFESTS / "base" / "rbac.yaml")
    [role] = [obj for obj in objects if obj["kind"] == "ClusterRole"]
    return list(role["rules"])


def test_operator_has_no_wildcard_and_cannot_list_secrets() -> None:
    for rule in rules():
        assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
        if "secrets" in rule["resources"]:
            assert rule["verbs"] == ["get"]


def test_operator_rules_could_all_stand_in_a_role() -> None:
    cluster_scoped = {"namespaces", "customresourcedefinitions", "clusterkopfpeerings", "nodes", "persistentvolumes"}
    assert not {resource for rule in rules() for resource in rule["resources"]} & cluster_scoped


def test_leases_are_the_operator_s_in_its_own_namespace_alone() -> None:
    assert "leases" not in [resource for rule in rules() for resource in rule["resources"]]
    objects = {obj["kind"]: obj for obj in documents(MANIFESTS / "base" / "rbac.yaml")}
    role, binding = objects["Role"], objects["RoleBinding"]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "lorafleet-system"
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", role["metadata"]["name"])
    verbs = {(verb, tuple(rule.get("resourceNames", ()))) for rule in role["rules"] for verb in rule["verbs"]}
    assert verbs == {("get", ("lorafleet-operator",)), ("patch", ("lorafleet-operator",)), ("create", ())}


def test_kustomization_names_every_file_of_the_base() -> None:
    [base] = documents(MANIFESTS / "base" / "kustomization.yaml")
    files = {str(p.relative_to(MANIFESTS / "base")) for p in (MANIFESTS / "base").rglob("*.yaml")}
    assert set(base["resources"]) == files - {"kustomization.yaml"}
