"""Whether an evaluation is the best so far, and whether to go on: a pure state machine. Importable without Paddle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddlewheel.trainer.job.train import HIGHER_IS_BETTER, NEEDS, EvaluationConfig


@dataclass(frozen=True)
class Verdict:
    """What one evaluation means.

    Attributes:
        best: it is the best so far.
        stop: there were `patience` evaluations without improvement.
    """

    best: bool
    stop: bool


class EarlyStopping:
    """Sees evaluations in order. An undefined value (one class only) is never an improvement."""

    def __init__(self, config: EvaluationConfig) -> None:
        self._config = config
        self.value: float | None = None
        self.step: int | None = None
        self.without_improvement = 0

    def observe(self, step: int, report: Mapping[str, Any]) -> Verdict:
        """Evaluator the evaluation after `step`.

        Raises:
            ValueError: the report lacks the metric.
        """
        if self._config.metric not in report:
            raise ValueError(
                f"train.evaluation.metric is {self._config.metric}, which this evaluation does not have"
                + next((f": give {key}" for start, key in NEEDS.items() if self._config.metric.startswith(start)), "")
            )
        value = report[self._config.metric]
        best = value is not None and math.isfinite(value) and self._improves(float(value))
        if best:
            self.value, self.step, self.without_improvement = float(value), step, 0
        else:
            self.without_improvement += 1
        return Verdict(best=best, stop=self.exhausted)

    @property
    def exhausted(self) -> bool:
        """Whether there were `patience` evaluations without improvement."""
        limit = self._config.patience
        return limit is not None and self.without_improvement >= limit

    def _improves(self, value: float) -> bool:
        if self.value is None:
            return True
        gain = value - self.value if self._config.metric in HIGHER_IS_BETTER else self.value - value
        return gain > self._config.min_delta

    def state(self) -> dict[str, Any]:
        """For a checkpoint's cursor; JSON values."""
        return {"value": self.value, "step": self.step, "without_improvement": self.without_improvement}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.value, self.step = state["value"], state["step"]
        self.without_improvement = state["without_improvement"]


def due(config: EvaluationConfig, step: int) -> bool:
    """Whether an evaluation follows step `step` (the first is 1) within an epoch."""
    return config.every_steps is not None and step % config.every_steps == 0


def due_after_epoch(config: EvaluationConfig, epoch: int, epochs: int) -> bool:
    """Whether an evaluation follows epoch `epoch` (the first is 0). The last one has the final evaluation anyway."""
    return config.every_epochs is not None and (epoch + 1) % config.every_epochs == 0 and epoch + 1 < epochs
