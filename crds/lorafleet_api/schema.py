"""Turns a pydantic type into the structural OpenAPI v3 schema of a CRD. Pure; `generate` is the only caller.

Kubernetes wants a structural schema: no $ref, no anyOf with null, no tuples, no boolean-free exclusive bounds, and
`default` only where the API server itself must apply one.
"""

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_KEPT = ("type", "enum", "format", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")


def structural_schema(model: type[BaseModel], keep_defaults: frozenset[str] = frozenset()) -> Schema:
    """The structural schema of `model`.

    Args:
        model: a type whose wire names are its aliases.
        keep_defaults: top-level fields whose default the API server applies; every other default goes into the
            description as "Default: X.".
    """
    raw = model.model_json_schema(by_alias=True)
    definitions = raw.pop("$defs", {})
    return _convert(raw, definitions, keep_defaults)


def _convert(raw: Schema, definitions: Schema, keep_defaults: frozenset[str] = frozenset()) -> Schema:
    raw = _flatten(raw, definitions)
    out: Schema = {}
    description = raw.get("description")
    if description:
        out["description"] = " ".join(str(description).split())
    if "const" in raw:
        out["enum"] = [raw["const"]]
    out |= {key: raw[key] for key in _KEPT if key in raw}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in raw:
            out[bound] = raw[exclusive]
            out[exclusive] = True
    if raw.get("type") == "object":
        _convert_object(raw, definitions, keep_defaults, out)
    elif raw.get("type") == "array":
        out["items"] = _convert(_item(raw), definitions)
    return out


def _flatten(raw: Schema, definitions: Schema) -> Schema:
    """Follows $ref and drops the null branch of an optional; keys beside them (description, default) win."""
    beside = {key: value for key, value in raw.items() if key not in ("$ref", "anyOf", "allOf")}
    if "$ref" in raw:
        target = definitions[raw["$ref"].removeprefix("#/$defs/")]
        return _flatten({**target, **beside}, definitions)
    if "anyOf" in raw:
        branches = [branch for branch in raw["anyOf"] if branch.get("type") != "null"]
        if len(branches) != 1:
            raise ValueError(f"anyOf {raw['anyOf']}: a CRD field has one type; use a single type or None")
        return _flatten({**branches[0], **beside}, definitions)
    return raw


def _item(raw: Schema) -> Schema:
    if "prefixItems" not in raw:
        return dict(raw["items"])
    first: Schema = raw["prefixItems"][0]
    if any(item != first for item in raw["prefixItems"]):
        raise ValueError(f"prefixItems {raw['prefixItems']}: a CRD list has one item type")
    return first


def _convert_object(raw: Schema, definitions: Schema, keep_defaults: frozenset[str], out: Schema) -> None:
    if "properties" not in raw:
        values = raw.get("additionalProperties")
        if isinstance(values, dict):
            out["additionalProperties"] = _convert(values, definitions)
        else:
            out["x-kubernetes-preserve-unknown-fields"] = True
        return
    out["properties"] = {
        name: _field(name, _flatten(field, definitions), definitions, keep_defaults)
        for name, field in raw["properties"].items()
    }
    if raw.get("required"):
        out["required"] = list(raw["required"])


def _field(name: str, field: Schema, definitions: Schema, keep_defaults: frozenset[str]) -> Schema:
    out = _convert(field, definitions)
    default = field.get("default")
    if name in keep_defaults:
        out["default"] = default
    elif default is not None and not isinstance(default, dict) and default != []:
        out["description"] = f"{out.get('description', '')} Default: {_plain(default)}.".strip()
    return out


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
