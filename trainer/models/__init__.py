"""Dense models. One file a model; `build` finds it by the name in the job file. README.md lists them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pydantic import ValidationError

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

    module_name, class_name = config.implementation.split(":")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"model.kind {config.kind!r} cannot be had: {error}. Its module must be importable by the trainers: put it "
            "in the working directory of the command, on PYTHONPATH, or install it."
        ) from error
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
    if kind.Options is not None:
        try:
            return kind.Options(**config.options)
        except ValidationError as error:
            findings = [
                f"model.options{''.join(f'.{step}' for step in item['loc'])}: {item['msg']}" for item in error.errors()
            ]
            raise ModelError("; ".join(findings)) from error
    if config.options:
        raise ModelError(
            f"model.options: {config.kind} takes none, got {', '.join(config.options)}. A model that takes options has "
            "a pydantic model as its `Options`."
        )
    return None
