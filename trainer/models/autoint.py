"""AutoInt: self-attention over the features, dense columns among them."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddlewheel.trainer.models.base import FeatureSpec, Model, ModelInputs, Tower, Variable, biases, linear
from paddlewheel.trainer.models.config import AutoIntConfig


class AutoInt(Model):
    """Multi-head self-attention over feature embeddings (Song et al., 2019, arXiv:1810.11921, eq. 4 to 9).

    A dense column is its value times a learnt vector. With a tower this is the paper's AutoInt+. First-order weights
    are added where the tables have them.
    """

    def __init__(self, spec: FeatureSpec, config: AutoIntConfig) -> None:
        super().__init__()
        width = spec.width
        self.dense_DW = None
        if spec.num_dense:
            self.dense_DW = self.create_parameter(
                [spec.num_dense, width], default_initializer=paddle.nn.initializer.Normal(0.0, 0.01)
            )
        self.num_fields = len(spec.fields) + spec.num_dense
        size = config.heads * config.head_width
        self.attention = paddle.nn.LayerList(
            [
                _SelfAttention(self.num_fields, width if layer == 0 else size, config.heads, config.head_width)
                for layer in range(config.attention_layers)
            ]
        )
        self.num_hidden = self.num_fields * size
        self.output = linear(self.num_hidden, spec.num_labels)
        self.tower = None
        if config.tower:
            self.tower = Tower(spec.flat_width, config.tower, spec.num_labels, dropout=config.dropout, norm=config.norm)

    def forward(self, inputs: ModelInputs) -> Variable:
        state_BFX = inputs.fields_BFW
        if self.dense_DW is not None:
            dense_BDW = paddle.unsqueeze(inputs.dense_BD, 2) * self.dense_DW
            state_BFX = paddle.concat([state_BFX, dense_BDW], axis=1)
        for layer in self.attention:
            state_BFX = layer(state_BFX)
        logit_BY = self.output(paddle.reshape(state_BFX, [-1, self.num_hidden])) + inputs.first_order_B1
        return logit_BY if self.tower is None else logit_BY + self.tower(inputs.parts)

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(self.output)


class _SelfAttention(paddle.nn.Layer):  # type: ignore[misc]
    """ReLU(heads side by side + residual), [B, F, X] -> [B, F, heads * head_width]."""

    def __init__(self, num_fields: int, num_inputs: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.split = [-1, num_fields, heads, head_width]
        size = heads * head_width
        self.query = linear(num_inputs, size, bias=False)
        self.key = linear(num_inputs, size, bias=False)
        self.value = linear(num_inputs, size, bias=False)
        self.residual = linear(num_inputs, size, bias=False)

    def forward(self, x_BFX: Variable) -> Variable:
        query, key, value = (
            paddle.transpose(paddle.reshape(layer(x_BFX), self.split), [0, 2, 1, 3])  # [B, heads, F, head_width]
            for layer in (self.query, self.key, self.value)
        )
        weight = paddle.nn.functional.softmax(paddle.matmul(query, key, transpose_y=True), axis=-1)
        mixed = paddle.transpose(paddle.matmul(weight, value), [0, 2, 1, 3])
        joined_BFX = paddle.reshape(mixed, [-1, self.split[1], self.split[2] * self.split[3]])
        return paddle.nn.functional.relu(joined_BFX + self.residual(x_BFX))
