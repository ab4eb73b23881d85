"""Dense models. One file a model; `build` finds it by the name in the job file. README.md lists them."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from paddlewheel.trainer.models import own_module
from paddlewheel.trainer.models.config import KINDS, CustomModelConfig, ModelConfig, ModelError, parse_model

if TYPE_CHECKING:
    from paddlewheel.trainer.models.base import FeatureSpec, Model

__all__ = ["KINDS", "ModelConfig", "ModelError", "build", "parse_model"]


def build(spec: FeatureSpec, config: ModelConfig) -> Model:
    """The model named by `config.kind`, its parameters created in the current static program.

    Raises:
        ModelError: the features do not fit the model, or the user's own model cannot be had.
    """
    from paddlewheel.trainer.models.base import Model

    if isinstance(config, CustomModelConfig):
        kind = own_module.load(config)
    else:
        module_name, class_name = config.implementation.split(":")
        kind = getattr(importlib.import_module(module_name), class_name)
    if not (isinstance(kind, type) and issubclass(kind, Model)):
        raise ModelError(f"model.kind {config.kind!r} is {kind!r}, not a subclass of trainer.models.base.Model")
    if spec.sequences and not kind.uses_sequences:
        raise ModelError(
            f"model {config.kind} reads no sequences, but {', '.join(spec.sequences)} has `pooling: none`. Pool it "
            "(`sum` or `mean`), or take a model with attention over sequences (din, dien)."
        )
    model: Model = kind(spec, _options(kind, config) if isinstance(config, CustomModelConfig) else config)
    return model


def _options(kind: type[Model], config: CustomModelConfig) -> object:
    if kind.Options is None:
        if config.options:
            raise ModelError(
                f"model.options: {config.kind} takes none, got {', '.join(config.options)}. A model that takes options "
                "has a pydantic model as its `Options`."
            )
        return None
    options, findings = None, [*_unknown(kind.Options, config.options, "model.options")]
    try:
        options = kind.Options(**config.options)
    except ValidationError as error:
        findings += [f"{'.'.join(map(str, ('model.options', *item['loc'])))}: {item['msg']}" for item in error.errors()]
    if findings:
        raise ModelError("; ".join(findings))
    return options


def _unknown(options: type[BaseModel], given: Mapping[str, Any], path: str) -> Iterator[str]:
    """Keys that pydantic would ignore, because nothing says that other keys are wanted."""
    known = {**options.model_fields, **{f.alias: f for f in options.model_fields.values() if f.alias is not None}}
    for key, value in given.items():
        if key in known:
            yield from _unknown_inside(known[key].annotation, value, f"{path}.{key}")
        elif options.model_config.get("extra") is None:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else "."
            yield f"{path}.{key}: unknown key{hint} Allowed in {path}: {', '.join(known)}"


def _unknown_inside(annotation: Any, value: Any, path: str) -> Iterator[str]:
    """The same in a value that may hold models. Where several could be meant, nothing is said."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if isinstance(value, Mapping):
            yield from _unknown(annotation, value, path)
    elif origin is Annotated:
        yield from _unknown_inside(arguments[0], value, path)
    elif origin in {Union, UnionType}:
        holding = [member for member in arguments if member is not NoneType]
        if len(holding) == 1:
            yield from _unknown_inside(holding[0], value, path)
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _unknown_inside(arguments[-1], inner, f"{path}.{key}")
    elif isinstance(origin, type) and issubclass(origin, Sequence) and isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _unknown_inside(arguments[0], inner, f"{path}.{place}")
