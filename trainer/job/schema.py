"""The JSON schema of a job file, for editors and validators: it takes what `JobConfig.load` takes."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.models.config import DEFAULT_KIND


def job_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a job file, with the meaning and unit of every key.

    It cannot say what must fit together across sections; `paddlewheel job check` can.
    """
    schema = JobConfig.model_json_schema(schema_generator=_Generator)
    return {"$schema": _Generator.schema_dialect, **schema}


class _Generator(GenerateJsonSchema):
    """Pydantic's schema, with what it leaves out."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """A member of a union is told by its `kind` or `rule`, which therefore must be there."""
        made = super().model_schema(schema)
        for name, key in made.get("properties", {}).items():
            if "const" in key and key["const"] != DEFAULT_KIND:
                made["required"] = [*made.get("required", ()), name]
        return made

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Names that do not have the form that is asked for are refused, not merely left alone."""
        made = super().dict_schema(schema)
        for pattern, value in made.pop("patternProperties", {}).items():
            made |= {"propertyNames": {"pattern": pattern}, "additionalProperties": value}
        return made
