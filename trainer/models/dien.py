"""Deep interest evolution network: interests change along the sequence, and the candidate picks the relevant change."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle.base.layer_helper import LayerHelper

from paddlewheel.trainer.models.base import (
    FeatureSpec,
    Model,
    ModelInputs,
    SequenceInput,
    Tower,
    Variable,
    biases,
    logistic_loss_B1,
)
from paddlewheel.trainer.models.config import DIENConfig
from paddlewheel.trainer.models.din import masked_softmax_BL1, targets


class DIEN(Model):
    """GRU over the ids, attention of the candidate on its states, second GRU (Zhou et al., 2019, arXiv:1809.03672).

    The attention scales the second GRU's inputs (the paper's AIGRU): unlike the update-gate variant AUGRU it needs no
    loop over positions in the program. `auxiliary_weight` adds the paper's auxiliary loss. Its negatives are the ids at
    the same position in the row before in the batch. First-order weights are added where the tables have them.
    """

    uses_sequences = True

    def __init__(self, spec: FeatureSpec, config: DIENConfig) -> None:
        super().__init__()
        self.targets = targets(spec, config.targets)
        self.auxiliary_weight = config.auxiliary_weight
        widths = [spec.sequences[name] for name in self.targets]
        self.extraction = paddle.nn.LayerList([_GRU(width) for width in widths])
        self.evolution = paddle.nn.LayerList([_GRU(width) for width in widths])
        self.units = paddle.nn.LayerList([Tower(4 * width, config.attention, 1) for width in widths])
        self.tower = Tower(
            spec.flat_width + sum(widths), config.tower, spec.num_labels, dropout=config.dropout, norm=config.norm
        )
        self._states: list[Variable] = []

    def forward(self, inputs: ModelInputs) -> Variable:
        interests = []
        self._states = []
        for position, (name, target) in enumerate(self.targets.items()):
            past = inputs.sequences[name]
            mask_BL1 = paddle.unsqueeze(past.mask_BL, -1)
            state_BLW, _ = self.extraction[position](past)
            target_BLW = paddle.unsqueeze(inputs.field_BW(target), 1) + paddle.zeros_like(state_BLW)
            pair = [target_BLW, state_BLW, target_BLW - state_BLW, target_BLW * state_BLW]
            weight_BL1 = masked_softmax_BL1(self.units[position](paddle.concat(pair, axis=-1)), mask_BL1)
            _, final_BW = self.evolution[position](SequenceInput(weight_BL1 * state_BLW, past.mask_BL))
            interests.append(final_BW)
            self._states.append(state_BLW)
        return self.tower([*inputs.parts, *interests]) + inputs.first_order_B1

    def loss(self, inputs: ModelInputs, logit_BY: Variable, label_BY: Variable) -> Variable:
        loss_B1 = logistic_loss_B1(logit_BY, label_BY)
        if self.auxiliary_weight:
            for name, state_BLW in zip(self.targets, self._states, strict=True):
                loss_B1 = loss_B1 + self.auxiliary_weight * _auxiliary_B1(inputs.sequences[name], state_BLW)
        return loss_B1

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(self.tower)


def _auxiliary_B1(past: SequenceInput, state_BLW: Variable) -> Variable:
    """Mean over steps of -log sigmoid(h_t . e_next) - log(1 - sigmoid(h_t . e_other)), 0 without steps (eq. 7)."""
    state, following, mask = state_BLW[:, :-1], past.emb_BLW[:, 1:], past.mask_BL[:, 1:]
    other = paddle.roll(past.emb_BLW, 1, axis=0)[:, 1:]
    other_mask = paddle.roll(past.mask_BL, 1, axis=0)[:, 1:] * mask
    hit = paddle.nn.functional.softplus(-paddle.sum(state * following, axis=2))
    miss = paddle.nn.functional.softplus(paddle.sum(state * other, axis=2))
    total_B1 = paddle.sum(hit * mask + miss * other_mask, axis=1, keepdim=True)
    steps_B1 = paddle.sum(mask, axis=1, keepdim=True)
    return total_B1 / paddle.maximum(steps_B1, paddle.ones_like(steps_B1))


class _GRU(paddle.nn.Layer):  # type: ignore[misc]
    """All states [B, L, W] (zeros past a row's end) and the last one [B, W] of a GRU that starts at zero.

    Calls Paddle's `rnn` operator: `paddle.nn.GRU` would lay its parameters into one hidden buffer, where neither the
    optimizer's program nor a checkpoint would find them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        uniform = paddle.nn.initializer.Uniform(-(width**-0.5), width**-0.5)
        shapes = {"input": [3 * width, width], "state": [3 * width, width]}
        self.width = width
        self.weight_input, self.weight_state = (
            self.create_parameter(shape, default_initializer=uniform) for shape in shapes.values()
        )
        self.bias_input, self.bias_state = (self.create_parameter([3 * width], is_bias=True) for _ in shapes)

    def forward(self, sequence: SequenceInput) -> tuple[Variable, Variable]:
        # an empty row still takes one step, over zeros; its state is set to zero below
        length_B = paddle.sum(sequence.mask_BL, axis=1)
        steps_B = paddle.cast(paddle.maximum(length_B, paddle.ones_like(length_B)), "int32")
        start_1BW = paddle.unsqueeze(paddle.zeros_like(sequence.emb_BLW[:, 0]), 0)
        helper = LayerHelper("rnn")
        new = helper.create_variable_for_type_inference
        out_LBW, last_1BW, reserve, dropout = new("float32"), new("float32"), new("uint8", True), new("uint8", True)
        helper.append_op(
            type="rnn",
            inputs={
                "Input": paddle.transpose(sequence.emb_BLW, [1, 0, 2]),
                "WeightList": [self.weight_input, self.weight_state, self.bias_input, self.bias_state],
                "PreState": [start_1BW],
                "SequenceLength": steps_B,
            },
            outputs={"Out": out_LBW, "State": [last_1BW], "Reserve": reserve, "DropoutState": dropout},
            attrs={
                "dropout_prob": 0.0,
                "is_bidirec": False,
                "input_size": self.width,
                "hidden_size": self.width,
                "num_layers": 1,
                "mode": "GRU",
                "is_test": False,
            },
        )
        some_B1 = paddle.cast(paddle.unsqueeze(length_B, 1) > 0, "float32")
        states_BLW = paddle.transpose(out_LBW, [1, 0, 2]) * paddle.unsqueeze(sequence.mask_BL, -1)
        return states_BLW, paddle.squeeze(last_1BW, axis=0) * some_B1
