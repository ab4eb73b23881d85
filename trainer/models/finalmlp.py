"""FinalMLP: two towers with inputs of their own choice, joined by a bilinear form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
from paddlewheel.trainer.models.config import FinalMLPConfig, ModelError


class FinalMLP(Model):
    """Two streams, feature gates, bilinear fusion (Mao et al., 2023, arXiv:2304.00902, eq. 3 to 8).

    Without `gate` both streams read all inputs (the paper's DualMLP with bilinear fusion). First-order weights are
    added where the tables have them.
    """

    def __init__(self, spec: FeatureSpec, config: FinalMLPConfig) -> None:
        super().__init__()
        for key, names in (("gate_context", config.gate_context), ("second_gate_context", config.second_gate_context)):
            spec.known(names, f"model.{key}")
        heads, tower = config.heads, partial(Tower, dropout=config.dropout, norm=config.norm)
        for key, units in (("tower", config.tower), ("second_tower", config.second_tower)):
            if units[-1] % heads:
                raise ModelError(f"model.heads = {heads} does not divide the last layer of model.{key} ({units[-1]})")
        self.gates = None
        if config.gate is not None:
            contexts = (config.gate_context, config.second_gate_context)
            self.gates = paddle.nn.LayerList([_Gate(spec, names, config.gate) for names in contexts])
        self.first = tower(spec.flat_width, config.tower, None)
        self.second = tower(spec.flat_width, config.second_tower, None)
        self.linear_first = linear(config.tower[-1], spec.num_labels)
        self.linear_second = linear(config.second_tower[-1], spec.num_labels, bias=False)
        self.sizes = [config.tower[-1] // heads, config.second_tower[-1] // heads]
        self.heads, self.num_labels = heads, spec.num_labels
        self.bilinear = self.create_parameter(
            [heads, self.sizes[0], spec.num_labels * self.sizes[1]],
            default_initializer=paddle.nn.initializer.XavierNormal(fan_in=self.sizes[0], fan_out=self.sizes[1]),
        )

    def forward(self, inputs: ModelInputs) -> Variable:
        flat_BX = inputs.flat_BX
        streams = [flat_BX, flat_BX] if self.gates is None else [gate(inputs) * flat_BX for gate in self.gates]
        first_BH, second_BH = self.first(streams[0]), self.second(streams[1])
        # [heads, B, h1] x [heads, h1, Y * h2] -> products with the second stream, head by head
        first = paddle.transpose(paddle.reshape(first_BH, [-1, self.heads, self.sizes[0]]), [1, 0, 2])
        second = paddle.transpose(paddle.reshape(second_BH, [-1, self.heads, 1, self.sizes[1]]), [1, 0, 2, 3])
        mapped = paddle.reshape(paddle.matmul(first, self.bilinear), [self.heads, -1, self.num_labels, self.sizes[1]])
        fused_BY = paddle.sum(mapped * second, axis=[0, 3])
        return self.linear_first(first_BH) + self.linear_second(second_BH) + fused_BY + inputs.first_order_B1

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(self.linear_first)


class _Gate(paddle.nn.Layer):  # type: ignore[misc]
    """2 * sigmoid(tower(context)): a factor between 0 and 2 for every input float, [B, X] or [1, X]."""

    def __init__(self, spec: FeatureSpec, context: tuple[str, ...], units: tuple[int, ...]) -> None:
        super().__init__()
        self.context = context
        width = sum(spec.fields[name] for name in context)
        if not context:
            width = max(spec.fields.values(), default=spec.num_dense)
            self.learnt = self.create_parameter([1, width], default_initializer=paddle.nn.initializer.Normal(0.0, 0.1))
        self.tower = Tower(width, units, spec.flat_width)

    def forward(self, inputs: ModelInputs) -> Variable:
        context = side_by_side([inputs.field_BW(n) for n in self.context]) if self.context else self.learnt
        return 2 * paddle.nn.functional.sigmoid(self.tower(context))
