"""What the generated CRDs promise: defaults, immutability, columns, strictness."""

from typing import Any

import pytest

from lorafleet_api import generate
from lorafleet_api.v1alpha1 import names
from lorafleet_api.v1alpha1.adapterrun import IMMUTABLE_FIELDS

RUN, POOL = generate.run_crd(), generate.pool_crd()


def version(crd: dict[str, Any]) -> dict[str, Any]:
    """The one version."""
    [only] = crd["spec"]["versions"]
    return dict(only)


def spec_of(crd: dict[str, Any]) -> dict[str, Any]:
    """Schema of spec."""
    return dict(version(crd)["schema"]["openAPIV3Schema"]["properties"]["spec"])


def status_of(crd: dict[str, Any]) -> dict[str, Any]:
    """Schema of status."""
    return dict(version(crd)["schema"]["openAPIV3Schema"]["properties"]["status"])


def test_only_lifecycle_fields_have_structural_defaults() -> None:
    fields = spec_of(RUN)["properties"]
    defaults = {name: field["default"] for name, field in fields.items() if "default" in field}
    assert defaults == {
        "suspend": False,
        "cancel": False,
        "deletionPolicy": "Save",
        "saveTimeoutSeconds": 300,
        "backoffLimit": 3,
    }
    assert not any("default" in field for field in spec_of(POOL)["properties"].values())


def test_other_defaults_are_told_in_the_description() -> None:
    fields = spec_of(RUN)["properties"]
    assert fields["rank"]["description"].endswith("Default: 16.")
    assert fields["optimizer"]["properties"]["lr"]["description"].endswith("Default: 1e-05.")
    assert fields["optimizer"]["properties"]["betas"]["description"].endswith("Default: [0.9, 0.98].")


@pytest.mark.parametrize("name", IMMUTABLE_FIELDS)
def test_every_immutable_field_has_a_rule_with_a_plain_message(name: str) -> None:
    [rule] = [rule for rule in spec_of(RUN)["x-kubernetes-validations"] if rule.get("fieldPath") == f".{name}"]
    assert f"self.{name} == oldSelf.{name}" in rule["rule"]
    assert rule["message"] == f"{name} cannot change after creation; create a new AdapterRun instead"


@pytest.mark.parametrize("name", sorted(set(IMMUTABLE_FIELDS) - {"poolRef", "data"}))
def test_unset_to_set_is_closed_for_optional_fields(name: str) -> None:
    [rule] = [rule for rule in spec_of(RUN)["x-kubernetes-validations"] if rule.get("fieldPath") == f".{name}"]
    assert rule["rule"].startswith(f"has(self.{name}) == has(oldSelf.{name})")


@pytest.mark.parametrize(
    ("field", "holds"),
    [
        ("optimizer", ["!has(self.lr) || !has(self.minLr)", "!has(self.lr) || !has(self.weightDecay)"]),
        ("algorithm", ["!has(self.tisFloor) || !has(self.tisCap)"]),
    ],
)
def test_rules_on_two_fields_hold_where_both_are_set(field: str, holds: list[str]) -> None:
    """What is left out may come from the pool's defaults, which the API server does not see."""
    rules = spec_of(RUN)["properties"][field]["x-kubernetes-validations"]
    assert [rule["rule"].rpartition(" || ")[0] for rule in rules] == holds


def test_the_value_that_yaml_takes_for_a_boolean_is_told_with_its_quotes() -> None:
    assert "Write 'Off' with quotes" in spec_of(RUN)["properties"]["algorithm"]["properties"]["tisMode"]["description"]


@pytest.mark.parametrize(("crd", "name"), [(POOL, "defaults"), (POOL, "ray"), (RUN, "sampleMetadata")])
def test_free_form_fields(crd: dict[str, Any], name: str) -> None:
    field = spec_of(crd)["properties"][name]
    assert (field["type"], field["x-kubernetes-preserve-unknown-fields"]) == ("object", True)


@pytest.mark.parametrize("crd", [RUN, POOL], ids=["run", "pool"])
def test_status_is_strict_and_conditions_are_a_map(crd: dict[str, Any]) -> None:
    status = status_of(crd)
    assert "x-kubernetes-preserve-unknown-fields" not in str(status)
    conditions = status["properties"]["conditions"]
    assert (conditions["x-kubernetes-list-type"], conditions["x-kubernetes-list-map-keys"]) == ("map", ["type"])
    assert version(crd)["subresources"] == {"status": {}}


def test_columns_of_runs() -> None:
    columns = version(RUN)["additionalPrinterColumns"]
    narrow = [column["name"] for column in columns if not column.get("priority")]
    wide = [column["name"] for column in columns if column.get("priority")]
    assert narrow == ["Status", "Step", "Target", "Reward", "ETA", "Age"]
    assert wide == ["Pool", "Rank", "Version", "Eval"]


@pytest.mark.parametrize("crd", [RUN, POOL], ids=["run", "pool"])
def test_every_column_shows_a_field_that_exists(crd: dict[str, Any]) -> None:
    root = version(crd)["schema"]["openAPIV3Schema"]
    for column in version(crd)["additionalPrinterColumns"]:
        if column["jsonPath"].startswith((".metadata", ".status.conditions")):
            continue
        schema = root
        for part in column["jsonPath"].strip(".").split("."):
            schema = schema["properties"][part]


def test_names_and_category() -> None:
    run, pool = RUN["spec"]["names"], POOL["spec"]["names"]
    assert (run["shortNames"], pool["shortNames"]) == ([names.RUN_SHORT], [names.POOL_SHORT])
    assert run["categories"] == pool["categories"] == ["lorafleet"]
    assert RUN["metadata"]["name"] == "adapterruns.lorafleet.dev"


@pytest.mark.parametrize("crd", [RUN, POOL], ids=["run", "pool"])
def test_every_field_is_described(crd: dict[str, Any]) -> None:
    def undescribed(schema: dict[str, Any], path: str) -> list[str]:
        found = []
        for name, field in schema.get("properties", {}).items():
            found += [] if field.get("description") else [f"{path}.{name}"]
            found += undescribed(field, f"{path}.{name}") + undescribed(field.get("items", {}), f"{path}.{name}[]")
        return found

    assert undescribed(spec_of(crd), "spec") + undescribed(status_of(crd), "status") == []
