"""Several labels over shared experts, mixed by a gate a label."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import paddle

from paddlewheel.trainer.models.base import FeatureSpec, ModelInputs, Tower, Variable, biases, linear, side_by_side
from paddlewheel.trainer.models.config import MMoEConfig
from paddlewheel.trainer.models.multitask import MultiTaskModel, mix_BH


class MMoE(MultiTaskModel):
    """Multi-gate mixture of experts (Ma et al., 2018, Modeling task relationships in multi-task learning)."""

    def __init__(self, spec: FeatureSpec, config: MMoEConfig) -> None:
        super().__init__(spec.num_labels, config.label_weights)
        tower = partial(Tower, dropout=config.dropout, norm=config.norm)
        size, labels = spec.flat_width, range(spec.num_labels)
        self.experts = paddle.nn.LayerList([tower(size, config.expert, None) for _ in range(config.experts)])
        self.gates = paddle.nn.LayerList([linear(size, config.experts) for _ in labels])
        self.towers = paddle.nn.LayerList([tower(config.expert[-1], config.tower, 1) for _ in labels])

    def forward(self, inputs: ModelInputs) -> Variable:
        flat_BX = inputs.flat_BX
        experts = [expert(flat_BX) for expert in self.experts]
        mixed = [mix_BH(gate(flat_BX), experts) for gate in self.gates]
        return side_by_side([tower(x) for tower, x in zip(self.towers, mixed, strict=True)])

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(*self.towers)
