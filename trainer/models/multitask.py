"""What models for several labels share: a loss with a weight a label.

They add no first-order weights: a key has one such weight, and labels differ. Give their tables `first_order: false`.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddlewheel.trainer.models.base import Model, ModelInputs, Variable, logistic_loss_B1
from paddlewheel.trainer.models.config import ModelError


class MultiTaskModel(Model):
    """Logistic loss of every label, times its weight."""

    def __init__(self, num_labels: int, label_weights: Sequence[float]) -> None:
        super().__init__()
        if label_weights and len(label_weights) != num_labels:
            raise ModelError(
                f"model.label_weights has {len(label_weights)} numbers for {num_labels} labels: give one a label"
            )
        self.label_weights = tuple(label_weights)

    def loss(self, inputs: ModelInputs, logit_BY: Variable, label_BY: Variable) -> Variable:
        return logistic_loss_B1(logit_BY, label_BY, self.label_weights)


def mix_BH(gate_BE: Variable, experts: Sequence[Variable]) -> Variable:
    """Experts' outputs, each [B, H], weighted by the softmax of a gate's scores [B, E]."""
    experts_BEH = paddle.stack(list(experts), axis=1)
    weight_BE1 = paddle.unsqueeze(paddle.nn.functional.softmax(gate_BE, axis=1), -1)
    return paddle.sum(experts_BEH * weight_BE1, axis=1)
