"""Arrays put together and taken apart: concat, stack, roll."""

from __future__ import annotations

from collections.abc import Sequence

from paddlewheel.trainer.kernels.gpu.context import Context, lowers
from paddlewheel.trainer.kernels.gpu.graph import EMPTY, Op
from paddlewheel.trainer.kernels.gpu.layout import padded_matrix
from paddlewheel.trainer.kernels.gpu.views import View, temporary


@lowers("concat")
def _concat(c: Context, op: Op) -> None:
    out = op.result()
    if c.layout.grad_slots and out == c.graph.outputs["flat"]:
        _flat_gradient(c, op)
        return
    parts = [c.values.peek(name) for name in op.ins["X"]]
    axis = op.attrs["axis"] % len(parts[0].shape)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    columns = len(shape) == 2 and axis == 1
    low = columns and c.uses.feeds_only(out, "pw_linear") and _feeds_a_wide_layer(c, out)
    whole = padded_matrix(shape[0], shape[1], c.low, c.low, zero_padded=True) if low else temporary(shape)
    padding = whole.strides[0] - shape[1] if low else 0
    at = 0
    for i, (name, part) in enumerate(zip(op.ins["X"], parts, strict=True)):
        target = whole.slice(axis, at, at + part.shape[axis])
        at += part.shape[axis]
        fill = padding if i == len(parts) - 1 else 0
        in_place = c.num_readers(name) == 1 and axis == len(shape) - len(part.shape) + 1
        work = c.values.take(part) if in_place else None
        if work is not None:
            work.write(c.emit, target)
            if fill:
                gap = View(whole.buffer, whole.offset + shape[1], (shape[0], fill), whole.strides, whole.type)
                c.emit.map("copy", c.emit.scalar(0.0).broadcast(gap.shape), out=gap)
            continue
        c.values.compute(part)
        if columns:
            c.emit.copy_rows(target, part, fill)
        else:
            c.emit.map("copy", part, out=target)
    c.write(op, "Out", whole)


def _flat_gradient(c: Context, op: Op) -> None:
    """Gradients of parameters that are not in their places yet are copied there."""
    for name in op.ins["X"]:
        part, slot = c.values.peek(name), c.layout.grad_slots.get(name)
        if part.buffer is c.buffers.grad:
            continue
        if slot is None:
            (reshaped,) = (o for o in c.graph.ops if o.type == "reshape2" and o.outs.get("Out") == (name,))
            slot = c.layout.grad_slots[reshaped.one("X")]
        c.emit.map("copy", c.emit.shaped(part, (part.size,)), out=slot)
    c.write(op, "Out", c.buffers.flat_gradient)


def _feeds_a_wide_layer(c: Context, name: str) -> bool:
    """Whether a layer with more than a few outputs reads the variable."""
    layers = [op for op in c.uses.readers(name) if op.type == "pw_linear"]
    return any(c.values.read(layer.one("W")).shape[1] > 4 for layer in layers)


@lowers("concat_grad")
def _concat_grad(c: Context, op: Op) -> None:
    dy, at = c.read(op, "Out@GRAD"), 0
    axis = op.attrs["axis"] % len(dy.shape)
    for name, grad in zip(op.ins["X"], op.outs["X@GRAD"], strict=True):
        size = c.values.read(name).shape[axis]
        if grad != EMPTY:
            c.values.set(grad, dy.slice(axis, at, at + size))
        at += size


@lowers("stack")
def _stack(c: Context, op: Op) -> None:
    names = op.ins["X"]
    first = c.values.read(names[0]).shape
    axis = op.attrs["axis"] % (len(first) + 1)
    out = temporary((*first[:axis], len(names), *first[axis:]))
    for i, name in enumerate(names):
        part = out.slice(axis, i, i + 1)
        c.emit.map("copy", c.emit.shaped(c.values.read(name), part.shape), out=part)
    c.write(op, "Y", out)


@lowers("stack_grad")
def _stack_grad(c: Context, op: Op) -> None:
    dy = c.read(op, "Y@GRAD")
    axis = op.attrs["axis"] % len(dy.shape)
    for i, grad in enumerate(op.outs["X@GRAD"]):
        if grad != EMPTY:
            c.values.set(grad, dy.slice(axis, i, i + 1).without(axis))


def _rolled(c: Context, view: View, shifts: Sequence[int], axes: Sequence[int]) -> View:
    for shift, axis in zip(shifts, axes, strict=True):
        n = view.shape[axis]
        k = shift % n if n else 0
        out = temporary(view.shape)
        if n - k:
            c.emit.map("copy", view.slice(axis, 0, n - k), out=out.slice(axis, k, n))
        if k:
            c.emit.map("copy", view.slice(axis, n - k, n), out=out.slice(axis, 0, k))
        view = out
    return view


@lowers("roll")
def _roll(c: Context, op: Op) -> None:
    c.write(op, "Out", _rolled(c, c.read(op, "X"), op.attrs["shifts"], op.attrs["axis"]))


@lowers("roll_grad")
def _roll_grad(c: Context, op: Op) -> None:
    back = [-shift for shift in op.attrs["shifts"]]
    c.write(op, "X@GRAD", _rolled(c, c.read(op, "Out@GRAD"), back, op.attrs["axis"]))
