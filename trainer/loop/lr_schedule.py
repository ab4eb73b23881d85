"""How the dense learning rate changes over a run: a pure function of the step. Importable without Paddle."""

from __future__ import annotations

import math

from paddlewheel.trainer.job.train import ScheduleConfig


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
