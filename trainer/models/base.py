"""What a model sees and what it returns.

Legend: B batch rows, F pooled sparse features, W embedding width, L ids of a sequence, D dense columns, X all floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import paddle

Variable = Any  # a symbolic tensor of a static program


@dataclass(frozen=True)
class FeatureSpec:
    """The shape of a job's features, known before any row is read.

    Attributes:
        num_dense: D.
        fields: pooled sparse features in the job's order, name -> embedding width W.
        sequences: features with `pooling: none`, name -> embedding width W.
        first_order: names of the fields whose table keeps a first-order weight.
        num_labels: targets a row.
    """

    num_dense: int
    fields: Mapping[str, int]
    sequences: Mapping[str, int] = field(default_factory=dict)
    first_order: Sequence[str] = ()
    num_labels: int = 1

    @property
    def width(self) -> int:
        """The one width of all fields; models with feature interactions need it.

        Raises:
            ValueError: no field, or fields of different widths.
        """
        widths = sorted(set(self.fields.values()))
        if len(widths) != 1:
            raise ValueError(
                f"this model multiplies embeddings with each other, so all features need one table width; got widths "
                f"{widths or 'none (no sparse feature)'}. Give their tables the same `width`, or take a model without "
                "interactions (lr)."
            )
        return widths[0]

    @property
    def flat_width(self) -> int:
        """Floats a row in `ModelInputs.flat_BX`: all field embeddings and the dense columns."""
        return sum(self.fields.values()) + self.num_dense


@dataclass(frozen=True)
class SequenceInput:
    """Ids of one list feature in order. Positions past a row's length hold zeros in `emb_BLW` and 0 in `mask_BL`."""

    emb_BLW: Variable
    mask_BL: Variable


@dataclass(frozen=True)
class ModelInputs:
    """One batch inside the program.

    Attributes:
        dense_BD: transformed dense columns, None when the job has none.
        groups: pooled embeddings as arrays [B, F_i, W_i]; features of one table and kind lie together.
        first_order_B1: sum of the first-order weights of all features of the row; zeros where no table has them.
        sequences: features with `pooling: none`.
    """

    dense_BD: Variable | None
    groups: Sequence[Variable]
    first_order_B1: Variable
    sequences: Mapping[str, SequenceInput]

    @property
    def fields_BFW(self) -> Variable:
        """All pooled embeddings; needs one width (`FeatureSpec.width`)."""
        return self.groups[0] if len(self.groups) == 1 else paddle.concat(list(self.groups), axis=1)

    @property
    def flat_BX(self) -> Variable:
        """All pooled embeddings and dense columns, side by side."""
        parts = [paddle.flatten(g, start_axis=1) for g in self.groups]
        if self.dense_BD is not None:
            parts.append(self.dense_BD)
        return parts[0] if len(parts) == 1 else paddle.concat(parts, axis=1)


class Model(paddle.nn.Layer):  # type: ignore[misc]
    """A dense part. Subclasses take (spec, config) and map `ModelInputs` to logits [B, num_labels]."""

    def forward(self, inputs: ModelInputs) -> Variable:
        """Log-odds of each label, [B, num_labels]."""
        raise NotImplementedError


class Tower(paddle.nn.Layer):  # type: ignore[misc]
    """Fully connected layers with ReLU and dropout, then a linear output.

    Weights start as in He et al., 2015 (fan-in normal), biases at zero.
    """

    def __init__(self, num_inputs: int, units: Sequence[int], num_outputs: int, dropout: float) -> None:
        super().__init__()
        sizes = [num_inputs, *units]
        self.hidden = paddle.nn.LayerList([linear(a, b) for a, b in pairwise(sizes)])
        self.output = linear(sizes[-1], num_outputs)
        self.dropout = paddle.nn.Dropout(dropout) if dropout else None

    def forward(self, x_BX: Variable) -> Variable:
        for layer in self.hidden:
            x_BX = paddle.nn.functional.relu(layer(x_BX))
            if self.dropout is not None:
                x_BX = self.dropout(x_BX)
        return self.output(x_BX)


def linear(num_inputs: int, num_outputs: int) -> paddle.nn.Linear:
    """A linear layer with fan-in normal weights and a zero bias."""
    return paddle.nn.Linear(
        num_inputs,
        num_outputs,
        weight_attr=paddle.ParamAttr(initializer=paddle.nn.initializer.KaimingNormal(fan_in=num_inputs)),
    )


def pairwise_B1(fields_BFW: Variable) -> Variable:
    """Sum over all pairs of fields of the dot product of their embeddings, [B, 1].

    By Rendle, 2010 (Factorization Machines, eq. 5): half of the square of the sum minus the sum of the squares.
    """
    sum_BW = paddle.sum(fields_BFW, axis=1)
    squares_B1 = paddle.sum(fields_BFW * fields_BFW, axis=[1, 2], keepdim=False).reshape([-1, 1])
    return 0.5 * (paddle.sum(sum_BW * sum_BW, axis=1, keepdim=True) - squares_B1)
