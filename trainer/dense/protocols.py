"""What the loop, the worker and the export need of a dense part; who implements it is `backend.dense_program`'s choice.

Legend: B batch rows, U unique keys of a table, W floats of a pulled row, Y labels, N floats of the flat gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.trainer.dense.inputs import Floats
from paddlewheel.trainer.distributed.process_group import ProcessGroup
from paddlewheel.trainer.job.train import WireType


class Predictor(Protocol):
    """Scores batches."""

    def predict(self, batch: Batch, rows: Mapping[str, Floats]) -> Floats:
        """Log-odds [B, Y], without dropout. rows: pulled values [U, W] by table."""
        ...


class Gradients(Protocol):
    """What one batch asks to change."""

    @property
    def tables(self) -> Mapping[str, Floats]:
        """Per table the gradient of the summed loss for every unique key, [U, W]."""
        ...

    @property
    def logit_BY(self) -> Floats:
        """Log-odds before the step."""
        ...

    @property
    def flat_N(self) -> Floats:
        """Gradients of the summed loss for all dense parameters, then the loss summed over rows, then the summed row
        weight.
        """
        ...

    @property
    def finite(self) -> bool:
        """Whether all values are finite, and small enough for optimizers to square and add up in float32."""
        ...


class StepBuffer(Protocol):
    """What the trainers sum in a step: the flat gradient, and behind it the loss, the weight and the loop's flags."""

    @property
    def tail(self) -> Floats:
        """The floats behind the gradient: this trainer's, and after `sum` those of all."""
        ...

    def clear(self) -> None:
        """Begin a step: everything is 0, unless it is written over."""
        ...

    def take(self, gradients: Any) -> None:
        """This trainer's part, made by the same backend; its loss and weight become the first two floats of `tail`."""
        ...

    def sum(self, sync: ProcessGroup) -> None:
        """Over all trainers; `tail` holds sums then. Raises PeerLostError when a trainer is gone."""
        ...

    def apply(self, total_weight: float, *, rate_factor: float = 1.0) -> None:
        """One step of the optimizer with what was summed, divided by the summed weight of all rows."""
        ...


class DenseBackend(Predictor, Protocol):
    """A dense part that trains: parameters and optimizer state on some device. Call from one thread."""

    @property
    def output_biases(self) -> Sequence[tuple[str, int]]:
        """Parameter and place of each label's bias; empty: the model names none."""
        ...

    def buffer(self, num_more: int, wire: WireType = "float32") -> StepBuffer:
        """Where the trainers' gradients are summed, with so many floats behind them. wire: the type they travel in."""
        ...

    def gradients(self, batch: Batch, rows: Mapping[str, Floats]) -> Gradients:
        """Forward and backward over one batch; changes no parameter."""
        ...

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of all parameters and of the optimizer's state, by names that do not depend on the device."""
        ...

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Set everything that `state` names. Raises OtherDenseError when a name or shape differs from this model's."""
        ...

    def load_parameters(self, parameters: Mapping[str, NDArray[Any]]) -> None:
        """Set the parameters alone; the optimizer's state stays as it is. Raises OtherDenseError as `load_state`."""
        ...

    def read_output_biases(self) -> NDArray[np.float64]:
        """Values of `output_biases`, [Y]."""
        ...

    def set_output_biases(self, values_Y: NDArray[np.float64]) -> None:
        """Set them, [Y]; nothing else changes."""
        ...
