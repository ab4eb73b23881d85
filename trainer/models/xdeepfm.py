"""xDeepFM: explicit interactions of growing degree between whole embeddings, beside a tower."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddlewheel.trainer.models.base import FeatureSpec, Model, ModelInputs, Tower, Variable, biases, linear
from paddlewheel.trainer.models.config import XDeepFMConfig


class XDeepFM(Model):
    """First order + compressed interaction network + tower (Lian et al., 2018, arXiv:1803.05170, eq. 6 to 8).

    The network's activation is the identity, which the paper found best.
    """

    def __init__(self, spec: FeatureSpec, config: XDeepFMConfig) -> None:
        super().__init__()
        self.width, num_fields = spec.width, len(spec.fields)
        maps = [num_fields, *config.cin]
        self.cin = paddle.nn.LayerList(
            [linear(before * num_fields, after, bias=False) for before, after in zip(maps, config.cin, strict=False)]
        )
        self.maps = maps
        self.output = linear(sum(config.cin), spec.num_labels)
        self.tower = Tower(spec.flat_width, config.tower, spec.num_labels, dropout=config.dropout, norm=config.norm)

    def forward(self, inputs: ModelInputs) -> Variable:
        # [B, W, F]: the width comes second, so that a linear layer over the last axis compresses the products
        first_BWF = state_BWH = paddle.transpose(inputs.fields_BFW, [0, 2, 1])
        pooled = []
        for layer, num_maps in zip(self.cin, self.maps, strict=False):
            products_BWHF = paddle.unsqueeze(state_BWH, 3) * paddle.unsqueeze(first_BWF, 2)
            state_BWH = layer(paddle.reshape(products_BWHF, [-1, self.width, num_maps * self.maps[0]]))
            pooled.append(paddle.sum(state_BWH, axis=1))
        hidden_BH = paddle.concat(pooled, axis=1) if len(pooled) > 1 else pooled[0]
        return self.output(hidden_BH) + self.tower(inputs.parts) + inputs.first_order_B1

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(self.output)
