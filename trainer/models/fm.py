"""Factorization machine: logistic regression plus all pairs of features through their embeddings."""

from __future__ import annotations

from paddlewheel.trainer.models.base import FeatureSpec, ModelInputs, Variable, pairwise_B1
from paddlewheel.trainer.models.config import FMConfig
from paddlewheel.trainer.models.lr import LogisticRegression


class FactorizationMachine(LogisticRegression):
    """Second-order FM over the sparse features; dense columns enter linearly (Rendle, 2010)."""

    def __init__(self, spec: FeatureSpec, config: FMConfig) -> None:
        super().__init__(spec, config)
        _ = spec.width  # refuses mixed widths before training

    def forward(self, inputs: ModelInputs) -> Variable:
        return super().forward(inputs) + pairwise_B1(inputs.fields_BFW)
