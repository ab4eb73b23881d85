"""Constants, shapes, and operators that are views: reshapes, transposes, slices."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paddlewheel.trainer.kernels.gpu.context import Context, lowers
from paddlewheel.trainer.kernels.gpu.deferred import PairsGradient, planned
from paddlewheel.trainer.kernels.gpu.fusion import values_of
from paddlewheel.trainer.kernels.gpu.graph import Op
from paddlewheel.trainer.kernels.gpu.views import F32, I32, Shape, View

_INTEGERS = {2, 3}
"""int32 and int64, as Paddle numbers types."""


@lowers("fill_constant")
def _fill_constant(c: Context, op: Op) -> None:
    shape, kind = tuple(op.attrs["shape"]), I32 if op.attrs["dtype"] in _INTEGERS else F32
    if kind == I32 and shape == (1,):
        c.host[op.result()] = [int(op.attrs["value"])]
    c.write(op, "Out", c.emit.scalar(op.attrs["value"], kind).broadcast(shape))


@lowers("fill_any_like")
def _fill_any_like(c: Context, op: Op) -> None:
    starts_gradients = op.result().endswith("@GRAD") and op.attrs["value"] == 1.0
    value = c.loss_scale if starts_gradients else None
    if value is None:
        value = c.emit.scalar(op.attrs["value"])
    c.write(op, "Out", value.broadcast(c.read(op, "X").shape))


@lowers("assign_value")
def _assign_value(c: Context, op: Op) -> None:
    values = values_of(op)
    c.write(op, "Out", c.emit.constants.view(values, I32 if values.dtype == "int32" else F32))


@lowers("shape")
def _shape(c: Context, op: Op) -> None:
    c.host[op.result()] = list(c.read(op, "Input").shape)


@lowers("reshape2")
def _reshape2(c: Context, op: Op) -> None:
    x = c.values.peek(op.one("X"))
    wanted = list(op.attrs["shape"])
    if "ShapeTensor" in op.ins:
        wanted = [c.host[name][0] for name in op.ins["ShapeTensor"]]
    shape = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    if -1 in shape:
        rest = math.prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = x.size // rest if rest else 0
    _reshape(c, op, tuple(shape))


@lowers("flatten_contiguous_range")
def _flatten(c: Context, op: Op) -> None:
    shape = c.values.peek(op.one("X")).shape
    start, stop = op.attrs["start_axis"] % len(shape), op.attrs["stop_axis"] % len(shape)
    _reshape(c, op, (*shape[:start], math.prod(shape[start : stop + 1]), *shape[stop + 1 :]))


@lowers("unsqueeze2")
def _unsqueeze2(c: Context, op: Op) -> None:
    shape = list(c.read(op, "X").shape)
    for axis in op.attrs["axes"]:
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 1)
    _reshape(c, op, tuple(shape))


@lowers("squeeze2")
def _squeeze2(c: Context, op: Op) -> None:
    shape = c.read(op, "X").shape
    axes = {a % len(shape) for a in op.attrs["axes"]}
    _reshape(c, op, tuple(n for a, n in enumerate(shape) if not (a in axes and n == 1)))


def _reshape(c: Context, op: Op, shape: Shape) -> None:
    """Of an array that may not be computed yet: it stays so where its new shape alone is read."""
    name, x = op.one("X"), c.values.peek(op.one("X"))
    if c.values.deferred(x) is not None and (not x.contiguous or c.num_readers(name) > 1):
        c.values.compute(x)
    if name in c.layout.grad_slots and c.uses.feeds_only(op.result(), "concat"):
        c.write(op, "Out", c.values.read(name))  # on its way to the flat gradient
    else:
        c.write(op, "Out", c.emit.shaped(x, shape))
    for before in op.outs.get("XShape", ()):
        c.shapes[before] = x.shape


@lowers("reshape2_grad", "flatten_contiguous_range_grad", "unsqueeze2_grad", "squeeze2_grad")
def _reshape_grad(c: Context, op: Op) -> None:
    dy, shape, name = c.values.peek(op.one("Out@GRAD")), c.shapes[op.one("XShape")], op.out("X@GRAD")
    scattered = name is not None and c.uses.only(name, "pw_scatter_rows")
    work = c.values.deferred(dy)
    by_lookup = isinstance(work, PairsGradient) and work.lookup is not None
    if by_lookup and scattered and len(c.uses.readers(op.one("Out@GRAD"))) == 1:
        c.write(op, "X@GRAD", planned(dy, shape))
        return
    c.values.compute(dy)
    if name is not None and scattered and dy.with_shape(shape) is None and _can_be_scattered(dy, shape):
        c.unshaped[name] = dy
    else:
        c.write(op, "X@GRAD", c.emit.shaped(dy, shape))


def _can_be_scattered(dy: View, shape: Shape) -> bool:
    """Whether a scatter can read rows of a shape from an array as it lies."""
    if len(shape) != 2:
        return False
    if len(dy.shape) == 2:
        return shape[1] == 1
    return len(dy.shape) == 3 and dy.shape[2] == shape[1] and (shape[1] == 1 or dy.strides[2] == 1)


@lowers("transpose2")
def _transpose2(c: Context, op: Op) -> None:
    c.write(op, "Out", c.read(op, "X").permuted(op.attrs["axis"]))


@lowers("transpose2_grad")
def _transpose2_grad(c: Context, op: Op) -> None:
    axes = op.attrs["axis"]
    c.write(op, "X@GRAD", c.read(op, "Out@GRAD").permuted([axes.index(a) for a in range(len(axes))]))


def _ranges(op: Op, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """Axis, start and stop of each range of a slice."""
    for axis, start, stop in zip(op.attrs["axes"], op.attrs["starts"], op.attrs["ends"], strict=True):
        n = shape[axis]
        begin = max(start + n, 0) if start < 0 else min(start, n)
        end = max(stop + n, 0) if stop < 0 else min(stop, n)
        yield axis, begin, max(begin, end)


@lowers("slice")
def _slice(c: Context, op: Op) -> None:
    name = op.one("Input")
    if name in c.host:
        c.host[op.result()] = c.host[name][op.attrs["starts"][0] : op.attrs["ends"][0]]
        return
    view = c.values.read(name)
    for axis, begin, end in _ranges(op, view.shape):
        view = view.slice(axis, begin, end)
    for axis in sorted(set(op.attrs.get("decrease_axis") or ()), reverse=True):
        view = view.without(axis)
    c.write(op, "Out", view)


@lowers("slice_grad")
def _slice_grad(c: Context, op: Op) -> None:
    x, dy = c.read(op, "Input"), c.read(op, "Out@GRAD")
    part = out = c.emit.zeros(x.shape)
    for axis, begin, end in _ranges(op, x.shape):
        part = part.slice(axis, begin, end)
    c.emit.map("copy", c.emit.shaped(dy, part.shape), out=part)
    c.write(op, "Input@GRAD", out)
