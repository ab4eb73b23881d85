"""Layers: a product by a parameter, bias, ReLU, and their gradients.

Factors are in the low type, with rows padded to 16 bytes and sizes that take the padding in where it is zero: cuBLAS
is fast with these. Layers with few outputs have kernels of their own.

Legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paddlewheel.trainer.kernels.gpu.context import Context, lowers
from paddlewheel.trainer.kernels.gpu.graph import Op
from paddlewheel.trainer.kernels.gpu.kernel_calls import BiasGrad, Skinny, SkinnyGrad
from paddlewheel.trainer.kernels.gpu.layout import padded, padded_matrix
from paddlewheel.trainer.kernels.gpu.views import BYTES, F32, Shape, View, temporary

_FEW = 4
"""Outputs that a layer without ReLU has at most to be computed by the kernels for few."""


def _is_skinny(num_outputs: int, op: Op) -> bool:
    return num_outputs <= _FEW and not op.attrs["relu"]


@lowers("pw_linear")
def _linear(c: Context, op: Op) -> None:
    x, weight = c.read(op, "X"), c.read(op, "W")
    lead, (k, n) = x.shape[:-1], weight.shape
    x_MK = c.emit.shaped(x, (math.prod(lead), k))
    if _is_skinny(n, op):
        bias = c.read(op, "B") if "B" in op.ins else None
        x_MK = c.emit.with_dense_rows(x_MK)
        y_MN = temporary((x_MK.shape[0], n))
        c.emit.add(Skinny(y_MN, x_MK, weight, bias))
    else:
        y_MN = _wide_layer(c, op, x_MK, n)
    c.values.set(op.result(), c.emit.shaped(y_MN, (*lead, n)))


def _wide_layer(c: Context, op: Op, x_MK: View, n: int) -> View:
    kind = c.low if c.uses.feeds_only(op.result(), "pw_linear") else F32
    y_MN = padded_matrix(x_MK.shape[0], n, c.low, kind)
    bias = None
    if "B" in op.ins:  # cuBLAS wants it in the type of the result
        bias = c.buffers.low_views[op.one("B")] if kind == c.low else c.read(op, "B")
    x = _with_padding(c, _in_low(c, x_MK))
    width = y_MN.strides[0]  # what pads weights and biases is zero
    weight = replace(c.buffers.low_views[op.one("W")], shape=(x.shape[1], width))
    bias = None if bias is None else replace(bias, shape=(width,))
    whole = replace(y_MN, shape=(x.shape[0], width))
    c.emit.matmul(x, weight, bias=bias, relu=op.attrs["relu"], out=whole)
    return y_MN


@dataclass(frozen=True)
class _Gradient:
    """What the gradient of a layer reads, and where it writes; None: not wanted."""

    op: Op
    x: View
    y: View | None
    dy: View
    wants_dx: bool
    dw: View | None
    db: View | None

    @property
    def blocks(self) -> int:
        """Parts that sums over rows are cut into."""
        return max(1, min(512, self.x.shape[0] // 64))


@lowers("pw_linear_grad")
def _linear_grad(c: Context, op: Op) -> None:
    x, weight, dy = c.read(op, "X"), c.read(op, "W"), c.read(op, "Out@GRAD")
    lead, (k, n) = x.shape[:-1], weight.shape
    rows = math.prod(lead)
    x_MK, dy_MN = c.emit.shaped(x, (rows, k)), c.emit.shaped(dy.broadcast((*lead, n)), (rows, n))
    y_MN = c.emit.shaped(c.read(op, "Out"), (rows, n)) if op.attrs["relu"] else None
    db, dw, dx = _target(c, op, "B@GRAD", (n,)), _target(c, op, "W@GRAD", (k, n)), op.out("X@GRAD")
    gradient = _Gradient(op, x_MK, y_MN, dy_MN, dx is not None, dw, db)
    dx_MK = _skinny_gradient(c, gradient) if _is_skinny(n, op) else _wide_gradient(c, gradient)
    if dx is not None:
        assert dx_MK is not None
        c.values.set(dx, c.emit.shaped(dx_MK, (*lead, k)))


def _target(c: Context, op: Op, slot: str, shape: Shape) -> View | None:
    name = op.out(slot)
    return None if name is None else c.grad_target(name, shape)


def _skinny_gradient(c: Context, g: _Gradient) -> View | None:
    """`dx`, which is masked at once, and summed by columns, where a layer with a ReLU is below."""
    x, dy = c.emit.with_dense_rows(g.x), c.emit.dense(g.dy)
    (rows, k), n = x.shape, dy.shape[1]
    dx, below, sums = None, None, None
    dx_name = g.op.out("X@GRAD")
    if dx_name is not None:
        dx = padded_matrix(rows, k, c.low, c.low) if x.type == c.low else temporary((rows, k))
        below = _layer_below(c, g.op.one("X"), dx_name)
        if below is not None:
            sums = _target(c, below, "B@GRAD", (k,))
            c.masked[dx_name] = sums
    assert g.dw is not None
    dw_partial = temporary((g.blocks, k, n))
    db_partial = None if sums is None else temporary((g.blocks, k))
    weight = c.read(g.op, "W")
    c.emit.add(SkinnyGrad(dx, dw_partial, g.dw, db_partial, sums, x, weight, dy, g.blocks, relu_x=below is not None))
    if g.db is not None:
        c.emit.reduce("copy", dy, axes=[0], out=g.db)
    return dx


def _layer_below(c: Context, x: str, dx: str) -> Op | None:
    """The gradient of the layer with a ReLU that made x, when dx is all that it takes."""
    readers = c.uses.readers(dx)
    if len(readers) == 1 and readers[0].type == "pw_linear_grad" and readers[0].attrs["relu"]:
        below = readers[0]
        if below.ins["Out"] == (x,) and below.ins["Out@GRAD"] == (dx,):
            return below
    return None


def _wide_gradient(c: Context, g: _Gradient) -> View | None:
    dz = _through_relu(c, g)
    if g.dw is not None:
        _weight_gradient(c, _in_low(c, g.x), dz, g.dw)
    if not g.wants_dx:
        return None
    (rows, k), n = g.x.shape, dz.shape[1]
    dx = padded_matrix(rows, k, c.low, c.low, zero_padded=True)
    weight = replace(c.buffers.low_views[g.op.one("W")], shape=(dx.strides[0], n))
    c.emit.matmul(dz, weight, trans_b=True, out=replace(dx, shape=(rows, dx.strides[0])))
    return dx


def _through_relu(c: Context, g: _Gradient) -> View:
    """The gradient before the ReLU, in the low type; its columns' sums go to the bias. It may be ready."""
    dy, y, db = g.dy, g.y, g.db
    name = g.op.one("Out@GRAD")
    if name in c.masked:
        y = None
        db = db if c.masked[name] is None else None
    rows, n = dy.shape
    ready = y is None and dy.type == c.low and dy.strides[1] == 1 and dy.strides[0] % _step(c) == 0
    dz = None if ready else padded_matrix(rows, n, c.low, c.low, zero_padded=True)
    if dz is not None or db is not None:
        partial = temporary((g.blocks, n)) if db is not None else None
        c.emit.add(BiasGrad(dz, partial, db, dy, y, g.blocks, 0 if dz is None else dz.strides[0] - n))
    return dy if dz is None else dz


def _weight_gradient(c: Context, x: View, dz: View, dw: View) -> None:
    """Of a layer: x' dz, by way of a padded array where the padding makes the product's sizes what cuBLAS is fast
    with: with 432 rows it takes two thirds of the time that it takes with 429.
    """
    (k, n), x = dw.shape, _with_padding(c, x)
    if n % 4 and dz.buffer.zero_padded:
        dz = _with_padding(c, dz)
    if (x.shape[1], dz.shape[1]) == (k, n):
        c.emit.matmul(x, dz, trans_a=True, out=dw)
        return
    whole = temporary((x.shape[1], dz.shape[1]))
    c.emit.matmul(x, dz, trans_a=True, out=whole)
    c.emit.copy_rows(dw, whole.slice(0, 0, k).slice(1, 0, n))


def _step(c: Context) -> int:
    """Elements of the low type in 16 bytes."""
    return 16 // BYTES[c.low]


def _in_low(c: Context, view: View) -> View:
    """A matrix with its rows padded, in the low type: itself, or a copy, made once."""
    if view.type == c.low and view.strides[1] == 1 and view.strides[0] % _step(c) == view.offset % _step(c) == 0:
        return view
    if view not in c.low_copies:
        rows, columns = view.shape
        copy = padded_matrix(rows, columns, c.low, c.low, zero_padded=True)
        c.low_copies[view] = copy
        c.emit.copy_rows(copy, view, fill=copy.strides[0] - columns)
    return c.low_copies[view]


def _with_padding(c: Context, view: View) -> View:
    """A matrix in the low type with its columns of padding, where they are zeros."""
    width = padded(view.shape[1], c.low)
    if width == view.strides[0] and view.buffer.zero_padded:
        return replace(view, shape=(view.shape[0], width))
    return view
