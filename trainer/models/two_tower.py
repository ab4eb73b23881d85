"""Two towers for retrieval: users and items as vectors whose dot product ranks the items."""

from __future__ import annotations

from functools import partial

import paddle

from paddlewheel.trainer.models.base import (
    FeatureSpec,
    Model,
    ModelInputs,
    Tower,
    Variable,
    logistic_loss_B1,
    side_by_side,
)
from paddlewheel.trainer.models.config import ModelError, TwoTowerConfig


class TwoTower(Model):
    """Score = cosine of the towers' outputs / temperature (Covington et al., 2016; Yi et al., 2019, sampled softmax).

    `in_batch_softmax`: a positive row's item must win against the distinct items of its trainer's batch; negative rows
    contribute their items as candidates only. An item that stands in the batch c times has log c taken off its score,
    so it counts once: no accidental hits, and popular items are not punished for standing in the batch more often.
    The score is then no log-odds: look at AUC, not at logloss or calibration.
    """

    def __init__(self, spec: FeatureSpec, config: TwoTowerConfig) -> None:
        super().__init__()
        spec.one_label("two_tower")
        spec.known(config.item, "model.item")
        if config.item[0] not in spec.single:
            raise ModelError(f"model.item: {config.item[0]!r} comes first, so it is the item's identity, and is a list")
        self.item = config.item
        self.user = [name for name in spec.fields if name not in config.item]
        num_user = sum(spec.fields[n] for n in self.user) + spec.num_dense
        if not num_user:
            raise ModelError("model.item: names every feature, so the user's tower has no input")
        num_item = sum(spec.fields[n] for n in self.item)
        tower = partial(Tower, dropout=config.dropout, norm=config.norm)
        self.user_tower = tower(num_user, config.tower, config.width)
        self.item_tower = tower(num_item, config.tower, config.width)
        self.temperature, self.softmax = config.temperature, config.loss == "in_batch_softmax"
        self._scaled: tuple[Variable, Variable] | None = None

    def forward(self, inputs: ModelInputs) -> Variable:
        user_BX = side_by_side([*map(inputs.field_BW, self.user), inputs.dense_BD])
        user_BW = paddle.nn.functional.normalize(self.user_tower(user_BX), axis=1)
        item_BX = side_by_side([inputs.field_BW(n) for n in self.item])
        item_BW = paddle.nn.functional.normalize(self.item_tower(item_BX), axis=1) / self.temperature
        self._scaled = (user_BW, item_BW)
        return paddle.sum(user_BW * item_BW, axis=1, keepdim=True)

    def loss(self, inputs: ModelInputs, logit_BY: Variable, label_BY: Variable) -> Variable:
        if not self.softmax:
            return logistic_loss_B1(logit_BY, label_BY)
        assert self._scaled is not None
        score_BB = paddle.matmul(*self._scaled, transpose_y=True)
        item_B1 = inputs.index[self.item[0]]
        present_B1 = paddle.cast(item_B1 > 0, "float32")
        same_BB = paddle.cast(item_B1 == paddle.transpose(item_B1, [1, 0]), "float32")
        count_1B = paddle.sum(same_BB, axis=0, keepdim=True)
        offset_1B = (paddle.transpose(present_B1, [1, 0]) - 1.0) * 1e9 - paddle.log(count_1B)
        total_B1 = paddle.logsumexp(score_BB + offset_1B, axis=1, keepdim=True)
        return (total_B1 - logit_BY) * label_BY * present_B1
