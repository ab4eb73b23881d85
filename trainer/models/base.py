"""What a model sees and what it returns, and the layers that several models share.

Legend: B batch rows, F pooled sparse features, W embedding width, L ids of a sequence, D dense columns, X all floats,
Y labels, H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import paddle
from pydantic import BaseModel

from paddlewheel.trainer.kernels import cpu
from paddlewheel.trainer.models.config import ModelError

Variable = Any  # a symbolic tensor of a static program


@dataclass(frozen=True)
class FeatureSpec:
    """The shape of a job's features, known before any row is read.

    Attributes:
        num_dense: D.
        fields: pooled sparse features, name -> embedding width W, in the order of `ModelInputs.flat_BX`.
        sequences: features with `pooling: none`, name -> embedding width W.
        tables: every feature's table.
        single: names of the fields with at most one id a row.
        num_labels: targets a row.
    """

    num_dense: int
    fields: Mapping[str, int]
    sequences: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    single: Sequence[str] = ()
    num_labels: int = 1

    @property
    def width(self) -> int:
        """The one width of all fields; models with feature interactions need it.

        Raises:
            ModelError: no field, or fields of different widths.
        """
        widths = sorted(set(self.fields.values()))
        if len(widths) != 1:
            raise ModelError(
                f"this model multiplies embeddings with each other, so all features need one table width; got widths "
                f"{widths or 'none (no sparse feature)'}. Give their tables the same `width`, or take a model without "
                "such products (lr, wide_deep, dcn)."
            )
        return widths[0]

    @property
    def flat_width(self) -> int:
        """Floats a row in `ModelInputs.flat_BX`: all field embeddings and the dense columns."""
        return sum(self.fields.values()) + self.num_dense

    def known(self, names: Sequence[str], key: str) -> None:
        """Check names of pooled features that a job gives under `key`.

        Raises:
            ModelError: a name is no pooled feature.
        """
        for name in names:
            if name not in self.fields:
                raise ModelError(f"{key}: {name!r} is no pooled feature; there are {', '.join(self.fields) or 'none'}")

    def one_label(self, kind: str) -> None:
        """Refuse several labels.

        Raises:
            ModelError: the job has more than one label.
        """
        if self.num_labels != 1:
            raise ModelError(
                f"model {kind} takes one label, data.labels has {self.num_labels}. Leave one, or take a model for "
                "several (shared_bottom, mmoe, ple, esmm)."
            )


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
        names: the features of each group.
        first_order_B1: sum of the first-order weights of all features of the row; zeros where no table has them.
        sequences: features with `pooling: none`.
        index: single-valued features' positions among the batch's keys of their table, int32 [B, 1], 0 for no id. Equal
            numbers are equal ids within one batch and table, and mean nothing else.
    """

    dense_BD: Variable | None
    groups: Sequence[Variable]
    names: Sequence[Sequence[str]]
    first_order_B1: Variable
    sequences: Mapping[str, SequenceInput]
    index: Mapping[str, Variable]

    @property
    def fields_BFW(self) -> Variable:
        """All pooled embeddings; needs one width (`FeatureSpec.width`)."""
        return self.groups[0] if len(self.groups) == 1 else paddle.concat(list(self.groups), axis=1)

    @property
    def flat_BX(self) -> Variable:
        """All pooled embeddings and dense columns, side by side."""
        return side_by_side([*(paddle.flatten(g, start_axis=1) for g in self.groups), self.dense_BD])

    @property
    def parts(self) -> list[Variable]:
        """The arrays of `flat_BX` before they are put side by side, for `Tower`; [B, F, W] where ours flatten."""
        flat = list(self.groups) if cpu.fits() else [paddle.flatten(g, start_axis=1) for g in self.groups]
        return flat if self.dense_BD is None else [*flat, self.dense_BD]

    def field_BW(self, name: str) -> Variable:
        """The pooled embedding of one feature."""
        for group, names in zip(self.groups, self.names, strict=True):
            if name in names:
                return group[:, list(names).index(name)]
        raise KeyError(name)


class Model(paddle.nn.Layer):  # type: ignore[misc]
    """A dense part. Subclasses take (spec, config) and map `ModelInputs` to logits [B, num_labels].

    Every parameter must take part in the loss. Layers whose training step depends on other rows' statistics (batch
    normalisation) would differ between trainers: README.md says why there are none.
    """

    uses_sequences: ClassVar[bool] = False
    """Whether the model reads `ModelInputs.sequences`."""

    Options: ClassVar[type[BaseModel] | None] = None
    """Of a model in a user's own module: what `model.options` may hold."""

    def forward(self, inputs: ModelInputs) -> Variable:
        """Log-odds of each label, [B, num_labels]."""
        raise NotImplementedError

    def loss(self, inputs: ModelInputs, logit_BY: Variable, label_BY: Variable) -> Variable:
        """Loss of each row, [B, 1], before the row's weight. By default the logistic loss, summed over labels."""
        return logistic_loss_B1(logit_BY, label_BY)

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        """For each label in order: the bias parameter, and the place in it, that makes its log-odds larger or smaller.

        It must not move the log-odds of the labels before. Training begins with values under which predictions have
        the labels' rates as their means (`train.start_at_label_rate`). Empty: there is no such bias, or scores are no
        log-odds; nothing is set then.
        """
        return ()


class Tower(paddle.nn.Layer):  # type: ignore[misc]
    """Fully connected layers with ReLU and dropout, then a linear output unless `num_outputs` is None.

    Weights start as in He et al., 2015 (fan-in normal), biases at zero.
    """

    def __init__(
        self,
        num_inputs: int,
        units: Sequence[int],
        num_outputs: int | None,
        *,
        dropout: float = 0.0,
        norm: str = "none",
    ) -> None:
        super().__init__()
        sizes = [num_inputs, *units]
        self.hidden = paddle.nn.LayerList([linear(a, b) for a, b in pairwise(sizes)])
        self.norms = paddle.nn.LayerList([paddle.nn.LayerNorm(n) for n in units]) if norm == "layer" else None
        self.output = None if num_outputs is None else linear(sizes[-1], num_outputs)
        self.dropout = paddle.nn.Dropout(dropout) if dropout else None
        self.num_outputs = sizes[-1] if num_outputs is None else num_outputs

    def forward(self, x_BX: Variable | Sequence[Variable]) -> Variable:
        """Outputs of the inputs [B, X], or of several [B, X_i] side by side."""
        several = isinstance(x_BX, (list, tuple))
        parts: list[Variable] = list(x_BX) if several else [x_BX]
        if self.norms is None and self.dropout is None and (cpu.fits() if several else cpu.fits(*parts)):
            layers = [*self.hidden, *([] if self.output is None else [self.output])]
            relu = [True] * len(self.hidden) + [False] * (self.output is not None)
            return cpu.tower(parts, [n.weight for n in layers], [n.bias for n in layers], relu=relu)
        x_BX = side_by_side([paddle.flatten(p, start_axis=1) if several and len(p.shape) > 2 else p for p in parts])
        for position, layer in enumerate(self.hidden):
            x_BX = layer(x_BX)
            if self.norms is not None:
                x_BX = self.norms[position](x_BX)
            x_BX = paddle.nn.functional.relu(x_BX)
            if self.dropout is not None:
                x_BX = self.dropout(x_BX)
        return x_BX if self.output is None else self.output(x_BX)


def biases(*layers: Any) -> list[tuple[Variable, int]]:
    """`Model.output_biases` of linear layers, or of towers' last ones, whose outputs are the labels in order."""
    last: list[Any] = [layer.output if isinstance(layer, Tower) else layer for layer in layers]
    return [(each.bias, place) for each in last for place in range(int(np.prod(each.bias.shape)))]


class Linear(paddle.nn.Linear):  # type: ignore[misc]
    """Paddle's linear layer, by our operator where it fits."""

    def forward(self, x_BX: Variable) -> Variable:
        return cpu.tower([x_BX], [self.weight], [self.bias], relu=[False]) if cpu.fits(x_BX) else super().forward(x_BX)


def linear(num_inputs: int, num_outputs: int, *, bias: bool = True) -> Linear:
    """A linear layer with fan-in normal weights and a zero bias."""
    return Linear(
        num_inputs,
        num_outputs,
        weight_attr=paddle.ParamAttr(initializer=paddle.nn.initializer.KaimingNormal(fan_in=num_inputs)),
        bias_attr=None if bias else False,
    )


def side_by_side(parts: Sequence[Variable | None]) -> Variable:
    """Arrays [B, X_i] as one [B, X]; None stands for nothing."""
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else paddle.concat(present, axis=1)


def logistic_loss_B1(logit_BY: Variable, label_BY: Variable, label_weights: Sequence[float] = ()) -> Variable:
    """Negative log-likelihood of the labels, summed over labels with their weights, [B, 1]."""
    loss_BY = paddle.nn.functional.binary_cross_entropy_with_logits(logit_BY, label_BY, reduction="none")
    if label_weights:
        loss_BY = loss_BY * paddle.assign(np.asarray([label_weights], np.float32))
    return paddle.sum(loss_BY, axis=1, keepdim=True)


def pairwise_B1(fields_BFW: Variable) -> Variable:
    """Sum over all pairs of fields of the dot product of their embeddings, [B, 1].

    By Rendle, 2010 (Factorization Machines, eq. 5): half of the square of the sum minus the sum of the squares.
    """
    if cpu.fits():
        return cpu.pairwise(fields_BFW)
    sum_BW = paddle.sum(fields_BFW, axis=1)
    squares_B1 = paddle.sum(fields_BFW * fields_BFW, axis=[1, 2], keepdim=False).reshape([-1, 1])
    return 0.5 * (paddle.sum(sum_BW * sum_BW, axis=1, keepdim=True) - squares_B1)
