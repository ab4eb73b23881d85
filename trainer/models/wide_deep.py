"""Wide & Deep: a linear model and a tower, trained together."""

from __future__ import annotations

from paddlewheel.trainer.models.base import FeatureSpec, ModelInputs, Tower, Variable
from paddlewheel.trainer.models.config import WideDeepConfig
from paddlewheel.trainer.models.lr import LogisticRegression


class WideDeep(LogisticRegression):
    """LR + tower (Cheng et al., 2016, arXiv:1606.07792). The wide part's crosses come from `data.sparse[].cross`."""

    def __init__(self, spec: FeatureSpec, config: WideDeepConfig) -> None:
        super().__init__(spec, config)
        self.tower = Tower(spec.flat_width, config.tower, spec.num_labels, dropout=config.dropout, norm=config.norm)

    def forward(self, inputs: ModelInputs) -> Variable:
        return super().forward(inputs) + self.tower(inputs.parts)
