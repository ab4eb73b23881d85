"""Deep interest network: how much a past id counts depends on the candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from paddlewheel.trainer.models.base import FeatureSpec, Model, ModelInputs, SequenceInput, Tower, Variable, biases
from paddlewheel.trainer.models.config import DINConfig, ModelError


class DIN(Model):
    """Attention over each sequence by its target, then a tower (Zhou et al., 2018, arXiv:1706.06978).

    The attention unit sees the candidate, the past id, their difference and their product. ReLU stands in for Dice,
    whose batch statistics would differ between trainers. First-order weights are added where the tables have them.
    """

    uses_sequences = True

    def __init__(self, spec: FeatureSpec, config: DINConfig) -> None:
        super().__init__()
        self.targets = targets(spec, config.targets)
        self.softmax = config.softmax
        self.units = paddle.nn.LayerList(
            [Tower(4 * spec.sequences[name], config.attention, 1) for name in self.targets]
        )
        num_inputs = spec.flat_width + sum(spec.sequences[name] for name in self.targets)
        self.tower = Tower(num_inputs, config.tower, spec.num_labels, dropout=config.dropout, norm=config.norm)

    def forward(self, inputs: ModelInputs) -> Variable:
        interests = [
            self._interest_BW(unit, inputs.sequences[name], inputs.field_BW(target))
            for unit, (name, target) in zip(self.units, self.targets.items(), strict=True)
        ]
        return self.tower([*inputs.parts, *interests]) + inputs.first_order_B1

    def _interest_BW(self, unit: Tower, past: SequenceInput, target_BW: Variable) -> Variable:
        emb_BLW = past.emb_BLW
        target_BLW = paddle.unsqueeze(target_BW, 1) + paddle.zeros_like(emb_BLW)
        score_BL1 = unit(paddle.concat([target_BLW, emb_BLW, target_BLW - emb_BLW, target_BLW * emb_BLW], axis=-1))
        mask_BL1 = paddle.unsqueeze(past.mask_BL, -1)
        if self.softmax:
            score_BL1 = masked_softmax_BL1(score_BL1, mask_BL1)
        return paddle.sum(score_BL1 * mask_BL1 * emb_BLW, axis=1)

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(self.tower)


def masked_softmax_BL1(score_BL1: Variable, mask_BL1: Variable) -> Variable:
    """Softmax over the positions whose mask is 1; all zeros where none is."""
    return paddle.nn.functional.softmax(score_BL1 + (mask_BL1 - 1.0) * 1e9, axis=1) * mask_BL1


def targets(spec: FeatureSpec, given: Mapping[str, str]) -> dict[str, str]:
    """Each sequence's candidate feature: the one given, or the one single-valued feature of the sequence's table.

    Raises:
        ModelError: no sequence, an unknown name, or no single answer.
    """
    if not spec.sequences:
        raise ModelError("this model attends to sequences, and no feature has `pooling: none`")
    for name in given:
        if name not in spec.sequences:
            raise ModelError(f"model.targets: {name!r} is no sequence; there are {', '.join(spec.sequences)}")
    spec.known(list(given.values()), "model.targets")
    result = {}
    for name, width in spec.sequences.items():
        choices = [f for f in spec.single if spec.tables[f] == spec.tables[name]]
        if name not in given and len(choices) != 1:
            raise ModelError(
                f"model.targets: name the candidate of sequence {name!r}, as in `targets: {{{name}: FEATURE}}`; its "
                f"table {spec.tables[name]!r} has {len(choices)} single-valued features{': ' * bool(choices)}"
                f"{', '.join(choices)}"
            )
        result[name] = given.get(name) or choices[0]
        if spec.fields[result[name]] != width:
            raise ModelError(
                f"model.targets: {result[name]!r} has width {spec.fields[result[name]]}, its sequence {name!r} {width}"
            )
    return result
