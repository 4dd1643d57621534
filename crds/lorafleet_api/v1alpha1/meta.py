"""The base classes of every spec and status type. Imports nothing but pydantic."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A frozen type: snake_case in Python, camelCase on the wire, unknown keys refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    def to_wire(self) -> dict[str, Any]:
        """The camelCase JSON form, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class SpecModel(ApiModel):
    """What a user writes: also refuses NaN and infinity, which YAML can say."""

    model_config = ConfigDict(allow_inf_nan=False)
