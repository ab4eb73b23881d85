"""The base of all sections of a job file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; unknown keys are refused; the docstring of a field is its description in the schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
