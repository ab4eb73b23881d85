"""Several labels over one shared network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import paddle

from paddlewheel.trainer.models.base import FeatureSpec, ModelInputs, Tower, Variable, biases, side_by_side
from paddlewheel.trainer.models.config import SharedBottomConfig
from paddlewheel.trainer.models.multitask import MultiTaskModel


class SharedBottom(MultiTaskModel):
    """A shared network, then a tower for each label (Caruana, 1997, Multitask learning)."""

    def __init__(self, spec: FeatureSpec, config: SharedBottomConfig) -> None:
        super().__init__(spec.num_labels, config.label_weights)
        tower = partial(Tower, dropout=config.dropout, norm=config.norm)
        self.bottom = tower(spec.flat_width, config.bottom, None)
        self.towers = paddle.nn.LayerList([tower(config.bottom[-1], config.tower, 1) for _ in range(spec.num_labels)])

    def forward(self, inputs: ModelInputs) -> Variable:
        shared_BH = self.bottom(inputs.parts)
        return side_by_side([tower(shared_BH) for tower in self.towers])

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(*self.towers)
