"""From pydantic types to structural schemas."""

from typing import Any, Literal

import pytest
from pydantic import Field

from lorafleet_api.schema import structural_schema
from lorafleet_api.v1alpha1.meta import ApiModel


class Inner(ApiModel):
    """An inner thing."""

    size: int = Field(default=3, ge=1)
    """How big."""


class Outer(ApiModel):
    """An outer thing."""

    inner: Inner = Inner()
    """The inner one."""
    maybe: Inner | None = None
    """Perhaps one."""
    pair: tuple[float, float] = (0.9, 0.95)
    """Two numbers."""
    rate: float = Field(default=1e-5, gt=0.0, le=1.0)
    """A rate."""
    kind: Literal["only"] = "only"
    """One word."""
    free: dict[str, Any] = Field(default_factory=dict)
    """Anything."""
    names: dict[str, str] = Field(default_factory=dict)
    """Words by words."""
    stop: bool = False
    """Whether to stop."""
    need: str
    """Must be given."""


SCHEMA = structural_schema(Outer, frozenset({"stop"}))
FIELDS = SCHEMA["properties"]


def walk(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema and all below it."""
    below = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    return [schema] + [inner for part in below if isinstance(part, dict) for inner in walk(part)]


def test_references_are_resolved_and_the_fields_own_words_win() -> None:
    assert FIELDS["inner"]["description"] == "The inner one."
    assert FIELDS["inner"]["properties"]["size"] == {
        "description": "How big. Default: 3.",
        "type": "integer",
        "minimum": 1,
    }


def test_optional_object_is_that_object() -> None:
    assert FIELDS["maybe"]["type"] == "object"
    assert "size" in FIELDS["maybe"]["properties"]


def test_tuple_is_an_array_of_fixed_length() -> None:
    pair = FIELDS["pair"]
    assert (pair["type"], pair["items"], pair["minItems"], pair["maxItems"]) == ("array", {"type": "number"}, 2, 2)
    assert pair["description"] == "Two numbers. Default: [0.9, 0.95]."


def test_exclusive_bound_is_the_flag_of_openapi_3_0() -> None:
    rate = FIELDS["rate"]
    assert (rate["minimum"], rate["exclusiveMinimum"], rate["maximum"]) == (0.0, True, 1.0)
    assert "exclusiveMaximum" not in rate


def test_constant_is_an_enum_of_one() -> None:
    assert FIELDS["kind"]["enum"] == ["only"]


def test_free_object_keeps_unknown_fields_and_typed_map_does_not() -> None:
    assert FIELDS["free"]["x-kubernetes-preserve-unknown-fields"] is True
    assert FIELDS["names"]["additionalProperties"] == {"type": "string"}


def test_only_the_named_fields_keep_a_default() -> None:
    assert [name for name, field in FIELDS.items() if "default" in field] == ["stop"]
    assert FIELDS["stop"]["default"] is False


def test_required_fields() -> None:
    assert SCHEMA["required"] == ["need"]


def test_nothing_that_a_structural_schema_forbids_is_left() -> None:
    for schema in walk(SCHEMA):
        assert "type" in schema
        assert not {"$ref", "anyOf", "title", "prefixItems", "const"} & schema.keys()
        assert not ("properties" in schema and "additionalProperties" in schema)


def test_field_of_two_types_is_refused() -> None:
    class Bad(ApiModel):
        """Two types."""

        field: int | str = 1
        """Either."""

    with pytest.raises(ValueError, match="one type"):
        structural_schema(Bad)
