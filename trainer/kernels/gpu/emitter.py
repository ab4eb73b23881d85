"""The list of calls while it is made: element-wise functions, reductions, products, and views where those do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddlewheel.trainer.kernels.gpu.kernel_calls import (
    Call,
    Copy2D,
    Elementwise,
    FieldsLookup,
    Matmul,
    Zero,
    reduction,
)
from paddlewheel.trainer.kernels.gpu.layout import Constants
from paddlewheel.trainer.kernels.gpu.views import F32, Shape, View, temporary


@dataclass
class LookupDraft:
    """A `FieldsLookup` whose later readers still add what they want of it.

    Attributes:
        pairs: the FM pairs, [rows, 1].
        table, index: what is looked up.
        embeddings, sums: where they go, if they are wanted.
        first, first_table: the sum of first-order weights and their table, if it is wanted.
    """

    pairs: View
    table: View
    index: View
    embeddings: View | None = None
    sums: View | None = None
    first: View | None = None
    first_table: View | None = None

    def call(self) -> FieldsLookup:
        """As it stands."""
        return FieldsLookup(
            self.embeddings, self.pairs, self.first, self.sums, self.table, self.first_table, self.index
        )


class Emitter:
    """Makes calls, one after the other.

    Args:
        constants: the pool that scalars are kept in.
        tf32: whether float32 matrix products may round their inputs to TF32.
    """

    def __init__(self, constants: Constants, *, tf32: bool) -> None:
        self.constants, self._tf32 = constants, tf32
        self._calls: list[Call | LookupDraft] = []

    def add(self, call: Call | LookupDraft) -> None:
        """One more call."""
        self._calls.append(call)

    def calls(self) -> list[Call]:
        """All calls, in order."""
        return [call.call() if isinstance(call, LookupDraft) else call for call in self._calls]

    def scalar(self, value: float, kind: str = F32) -> View:
        """A constant without axes."""
        return self.constants.view(value, kind)

    def zeros(self, shape: Shape) -> View:
        """A new array of zeros."""
        out = temporary(shape)
        self.add(Zero(out))
        return out

    def map(
        self,
        function: str,
        *operands: View,
        out: View | None = None,
        p: float = 0.0,
        q: float = 0.0,
        kind: str = F32,
    ) -> View:
        """An element-wise function of operands, which broadcast; into a new array of a type unless one is given."""
        if out is None:
            out = temporary(np.broadcast_shapes(*(v.shape for v in operands)), kind)
        self.add(Elementwise(out, operands, function, p, q))
        return out

    def reduce(
        self,
        function: str,
        *operands: View,
        axes: Sequence[int],
        out: View | None = None,
        largest: bool = False,
        keep_axes: bool = False,
    ) -> View:
        """Sum (or maximum) of an element-wise function over axes, without them or with one element each."""
        shape = np.broadcast_shapes(*(v.shape for v in operands))
        whole = [v.broadcast(shape) for v in operands]
        axes = sorted({a % len(shape) for a in axes})
        kept = tuple(n for a, n in enumerate(shape) if a not in axes)
        if out is None and function == "copy" and whole[0].size == math.prod(kept) and whole[0].type == F32:
            out = self.shaped(whole[0], kept)
        else:
            out = temporary(kept) if out is None else out
            self.add(reduction(function, whole, axes, out, largest=largest))
        return self.with_axes(out, shape, axes) if keep_axes else out

    def with_axes(self, view: View, shape: Shape, axes: Sequence[int]) -> View:
        """A reduced array as one that broadcasts to the shape it was reduced from."""
        return self.shaped(view, tuple(1 if a in axes else n for a, n in enumerate(shape)))

    def reduced_to(self, shape: Shape, function: str, *operands: View) -> View:
        """The gradient of broadcasting: summed over the axes that were repeated."""
        whole = np.broadcast_shapes(*(v.shape for v in operands))
        more = len(whole) - len(shape)
        axes = [a for a in range(len(whole)) if a < more or (shape[a - more] == 1 and whole[a] != 1)]
        if not axes:
            return operands[0] if function == "copy" else self.map(function, *operands)
        return self.shaped(self.reduce(function, *operands, axes=axes), shape)

    def dense(self, view: View) -> View:
        """The array without gaps: itself, or a copy."""
        return view if view.contiguous else self.map("copy", view, kind=view.type)

    def with_dense_rows(self, view: View) -> View:
        """The matrix with its rows' elements next to each other."""
        return self.dense(view) if view.shape[1] > 1 and view.strides[1] != 1 else view

    def shaped(self, view: View, shape: Sequence[int]) -> View:
        """The same elements in another shape, copied where they lie in the way."""
        found = view.with_shape(shape)
        if found is None:
            found = self.dense(view).with_shape(shape)
        assert found is not None
        return found

    def copy_rows(self, out: View, view: View, fill: int = 0) -> None:
        """A matrix into another type or place, with columns of zeros behind it."""
        self.add(Copy2D(out, self.with_dense_rows(view), fill))

    def matmul(
        self,
        a: View,
        b: View,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        bias: View | None = None,
        relu: bool = False,
        out: View | None = None,
    ) -> View:
        """Of matrices, or of as many in both; float32 unless `out` is given."""
        k = a.shape[-2 if trans_a else -1]
        assert k == b.shape[-1 if trans_b else -2], (a.shape, b.shape)
        if out is None:
            out = temporary((*a.shape[:-2], a.shape[-1 if trans_a else -2], b.shape[-2 if trans_b else -1]))
        self.add(Matmul(out, a, b, bias, trans_a, trans_b, relu, self._tf32))
        return out
