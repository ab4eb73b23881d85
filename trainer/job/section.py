"""The base of all sections of a job file."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; unknown keys are refused; the docstring of a field is its description in the schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def without_defaults(section: BaseModel) -> dict[str, Any]:
    """A section as plain data without the keys that have their defaults. What tells the members of a union apart
    (`kind`, `rule`) stays: its default is that of one member, not of the union.
    """
    kept: dict[str, Any] = {}
    whole = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        names_member = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if (
            field.is_required()
            or names_member
            or value != field.get_default(call_default_factory=True, validated_data=vars(section))
        ):
            kept[name] = _without_defaults(value, whole[name])
    return kept


def _without_defaults(value: Any, plain: Any) -> Any:
    if isinstance(value, BaseModel):
        return without_defaults(value)
    if isinstance(value, dict):
        return {key: _without_defaults(inner, plain[key]) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_without_defaults(inner, other) for inner, other in zip(value, plain, strict=True)]
    return plain
