"""How the dense learning rate changes over a run: a pure function of the step. Importable without Paddle."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self


class ScheduleConfig(BaseModel):
    """Warm-up, then decay, as a factor on the learning rate. The default is a constant 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from nearly 0 (Goyal et al., 2017)."""

    decay: Literal["none", "linear", "cosine", "exponential"] = "none"
    """Shape of the way down. `exponential` loses the same share in every step."""

    decay_steps: int | None = Field(default=None, ge=1)
    """Steps from the end of the warm-up until `final_factor` is reached, and kept. None: the rest of the run."""

    final_factor: float = Field(default=0.0, ge=0, le=1)
    """Factor at the end of the decay."""

    @model_validator(mode="after")
    def _exponential_ends_above_zero(self) -> Self:
        if self.decay == "exponential" and self.final_factor == 0:
            raise ValueError("schedule: decay exponential never reaches 0: give final_factor, for example 0.01")
        return self


def rate_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Factor on the learning rate in step `step` (the first is 0) of a run of about `total_steps`."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.decay == "none":
        return 1.0
    length = config.decay_steps or max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / length)
    if config.decay == "exponential":
        return float(config.final_factor**done)
    shape = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.final_factor + (1 - config.final_factor) * shape
