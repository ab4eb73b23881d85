"""Logistic regression: a weight per key, a weight per dense column, a bias."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddlewheel.trainer.models.base import FeatureSpec, Model, ModelInputs, Variable
from paddlewheel.trainer.models.config import ModelConfig


class LogisticRegression(Model):
    """Logit = bias + sum of first-order weights + dense . w (Richardson et al., 2007, Predicting clicks)."""

    def __init__(self, spec: FeatureSpec, config: ModelConfig) -> None:
        super().__init__()
        self.bias = self.create_parameter([spec.num_labels], is_bias=True)
        self.dense = paddle.nn.Linear(spec.num_dense, spec.num_labels, bias_attr=False) if spec.num_dense else None

    def forward(self, inputs: ModelInputs) -> Variable:
        logit_BY = inputs.first_order_B1 + self.bias
        return logit_BY if self.dense is None else logit_BY + self.dense(inputs.dense_BD)

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return [(self.bias, label) for label in range(self.bias.shape[0])]
