"""DCN-v2: explicit products of the inputs, layer by layer, beside or below a tower."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddlewheel.trainer.models.base import (
    FeatureSpec,
    Model,
    ModelInputs,
    Tower,
    Variable,
    biases,
    linear,
    side_by_side,
)
from paddlewheel.trainer.models.config import DCNConfig


class DCNv2(Model):
    """Cross network x_{l+1} = x_0 * (W_l x_l + b_l) + x_l and a tower (Wang et al., 2021, arXiv:2008.13535).

    With `rank` W_l is a product U_l V_l. First-order weights are added where the tables have them.
    """

    def __init__(self, spec: FeatureSpec, config: DCNConfig) -> None:
        super().__init__()
        size, rank = spec.flat_width, config.rank
        self.cross = paddle.nn.LayerList(
            [
                linear(size, size)
                if rank is None
                else paddle.nn.Sequential(linear(size, rank, bias=False), linear(rank, size))
                for _ in range(config.cross_layers)
            ]
        )
        self.stacked = config.structure == "stacked"
        self.tower = Tower(size, config.tower, None, dropout=config.dropout, norm=config.norm)
        self.output = linear(self.tower.num_outputs + (0 if self.stacked else size), spec.num_labels)

    def forward(self, inputs: ModelInputs) -> Variable:
        first_BX = crossed_BX = inputs.flat_BX
        for layer in self.cross:
            crossed_BX = first_BX * layer(crossed_BX) + crossed_BX
        hidden_BH = self.tower(crossed_BX) if self.stacked else side_by_side([crossed_BX, self.tower(first_BX)])
        return self.output(hidden_BH) + inputs.first_order_B1

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(self.output)
