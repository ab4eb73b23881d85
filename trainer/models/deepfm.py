"""DeepFM: a factorization machine and a tower that share their embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from paddlewheel.trainer.models.base import FeatureSpec, Model, ModelInputs, Tower, Variable, biases, pairwise_B1
from paddlewheel.trainer.models.config import DeepFMConfig


class DeepFM(Model):
    """First order + FM + tower on embeddings and dense columns (Guo et al., 2017, arXiv:1703.04247)."""

    def __init__(self, spec: FeatureSpec, config: DeepFMConfig) -> None:
        super().__init__()
        _ = spec.width  # refuses mixed widths before training
        self.tower = Tower(spec.flat_width, config.tower, spec.num_labels, dropout=config.dropout, norm=config.norm)

    def forward(self, inputs: ModelInputs) -> Variable:
        return self.tower(inputs.parts) + inputs.first_order_B1 + pairwise_B1(inputs.fields_BFW)

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(self.tower)
