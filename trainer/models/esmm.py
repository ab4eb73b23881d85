"""Click and conversion over the entire space: no bias from looking at clicked rows only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import paddle

from paddlewheel.trainer.models.base import FeatureSpec, ModelInputs, Tower, Variable, biases, side_by_side
from paddlewheel.trainer.models.config import ESMMConfig, ModelError
from paddlewheel.trainer.models.multitask import MultiTaskModel


class ESMM(MultiTaskModel):
    """P(click) and P(click and conversion) = P(click) P(conversion | click) (Ma et al., 2018, arXiv:1804.07931).

    Labels are [click, conversion], where a conversion implies a click. The second logit is that of the product, so
    loss, metrics and predictions are about conversions among all rows.
    """

    def __init__(self, spec: FeatureSpec, config: ESMMConfig) -> None:
        super().__init__(spec.num_labels, config.label_weights)
        if spec.num_labels != 2:
            raise ModelError(f"model esmm needs data.labels = [click, conversion], got {spec.num_labels} labels")
        tower = partial(Tower, dropout=config.dropout, norm=config.norm)
        self.click, self.conversion = (tower(spec.flat_width, config.tower, 1) for _ in range(2))

    def forward(self, inputs: ModelInputs) -> Variable:
        flat_BX = inputs.flat_BX
        click_B1, conversion_B1 = self.click(flat_BX), self.conversion(flat_BX)
        # 1/p - 1 = (1 + e^-a)(1 + e^-b) - 1 = e^-a + e^-b + e^-(a+b), which gives the product's log-odds stably
        terms_B3 = side_by_side([-click_B1, -conversion_B1, -(click_B1 + conversion_B1)])
        return side_by_side([click_B1, -paddle.logsumexp(terms_B3, axis=1, keepdim=True)])

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(self.click, self.conversion)
