"""Dense models. One file a model; `build` finds it by the name in the job file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trainer.models.config import KINDS, ModelConfig

if TYPE_CHECKING:
    from trainer.models.base import FeatureSpec, Model

__all__ = ["KINDS", "ModelConfig", "build"]


def build(spec: FeatureSpec, config: ModelConfig) -> Model:
    """The model named by `config.kind`, its parameters created in the current static program.

    Raises:
        ValueError: the features do not fit the model.
    """
    module, name = KINDS[config.kind].split(":")
    model: Model = getattr(importlib.import_module(module), name)(spec, config)
    return model
