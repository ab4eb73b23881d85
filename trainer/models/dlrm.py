"""DLRM: dense columns become one more embedding; all pairs of embeddings meet in dot products below a tower."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import paddle

from paddlewheel.trainer.models.base import FeatureSpec, Model, ModelInputs, Tower, Variable, biases
from paddlewheel.trainer.models.config import DLRMConfig


class DLRM(Model):
    """Bottom tower, dot interaction, top tower (Naumov et al., 2019, arXiv:1906.00091).

    First-order weights are added where the tables have them.
    """

    def __init__(self, spec: FeatureSpec, config: DLRMConfig) -> None:
        super().__init__()
        width = spec.width
        tower = partial(Tower, dropout=config.dropout, norm=config.norm)
        self.bottom = tower(spec.num_dense, (*config.bottom, width), None) if spec.num_dense else None
        num_vectors = len(spec.fields) + (self.bottom is not None)
        rows, columns = np.tril_indices(num_vectors, -1)
        self.pairs = (rows * num_vectors + columns).astype(np.int32)
        self.num_vectors = num_vectors
        num_inputs = len(self.pairs) + (0 if self.bottom is None else width)
        self.top = tower(num_inputs, config.tower, spec.num_labels)

    def forward(self, inputs: ModelInputs) -> Variable:
        vectors_BFW, dense_BW = inputs.fields_BFW, None
        if self.bottom is not None:
            dense_BW = self.bottom(inputs.dense_BD)
            vectors_BFW = paddle.concat([paddle.unsqueeze(dense_BW, 1), vectors_BFW], axis=1)
        dots_BFF = paddle.matmul(vectors_BFW, vectors_BFW, transpose_y=True)
        dots_BX = paddle.reshape(dots_BFF, [-1, self.num_vectors * self.num_vectors])
        dots_BP = paddle.index_select(dots_BX, paddle.assign(self.pairs), axis=1)
        return self.top([dense_BW, dots_BP]) + inputs.first_order_B1

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(self.top)
