"""Field-weighted factorization machine: an FM that learns how much each pair of features matters."""

from __future__ import annotations

import numpy as np
import paddle

from paddlewheel.trainer.models.base import FeatureSpec, ModelInputs, Variable
from paddlewheel.trainer.models.config import FwFMConfig
from paddlewheel.trainer.models.lr import LogisticRegression


class FieldWeightedFM(LogisticRegression):
    """LR + sum over i < j of r_ij <v_i, v_j> (Pan et al., 2018, arXiv:1806.03514, eq. 8).

    A field-aware FM (one embedding a pair) needs F times the memory for about the same accuracy, says that paper. r
    starts at 1, which is an FM. Only its part above the diagonal counts.
    """

    def __init__(self, spec: FeatureSpec, config: FwFMConfig) -> None:
        super().__init__(spec, config)
        _ = spec.width  # refuses mixed widths before training
        num_fields = len(spec.fields)
        self.pairs = self.create_parameter(
            [num_fields, num_fields], default_initializer=paddle.nn.initializer.Constant(1.0)
        )
        self.above_FF = np.triu(np.ones((num_fields, num_fields), np.float32), 1)

    def forward(self, inputs: ModelInputs) -> Variable:
        fields_BFW = inputs.fields_BFW
        dots_BFF = paddle.matmul(fields_BFW, fields_BFW, transpose_y=True)
        weighted_B = paddle.sum(dots_BFF * (self.pairs * paddle.assign(self.above_FF)), axis=[1, 2])
        return super().forward(inputs) + paddle.reshape(weighted_B, [-1, 1])
