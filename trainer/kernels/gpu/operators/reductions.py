"""Sums, and what is made of them: softmax, log-sum-exp, norms, layer normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paddlewheel.trainer.kernels.gpu.context import Context, lowers
from paddlewheel.trainer.kernels.gpu.deferred import Lookup
from paddlewheel.trainer.kernels.gpu.graph import Op
from paddlewheel.trainer.kernels.gpu.views import View, temporary


def _axes(op: Op, rank: int) -> list[int]:
    axes = [] if op.attrs.get("reduce_all") else op.attrs.get("dim") or op.attrs.get("axis") or []
    axes = axes if isinstance(axes, (list, tuple)) else [axes]
    return sorted(a % rank for a in axes) or list(range(rank))


@lowers("reduce_sum")
def _reduce_sum(c: Context, op: Op) -> None:
    x, name = c.values.peek(op.one("X")), op.result()
    axes = _axes(op, len(x.shape))
    out = _first_order_by_lookup(c, op.one("X"), axes)
    if out is None:
        c.values.compute(x)
        to_slot = name in c.layout.grad_slots and len(axes) == len(x.shape)
        out = c.emit.reduce("copy", x, axes=axes, out=c.grad_target(name, ()) if to_slot else None)
    c.write(op, "Out", c.emit.with_axes(out, x.shape, axes) if op.attrs["keep_dim"] else out)


def _first_order_by_lookup(c: Context, name: str, axes: Sequence[int]) -> View | None:
    """The sum of first-order weights over the fields, by the lookup of the same ids' embeddings."""
    x = c.values.peek(name)
    work = c.values.deferred(x)
    if not isinstance(work, Lookup) or axes != [1] or c.num_readers(name) != 1 or work.table.shape[1] != 1:
        return None
    for lookup in c.lookups.values():
        rows = lookup.pairs.shape[0]
        same = lookup.index == work.index and lookup.table.strides[0] == work.table.strides[0]
        if same and x.shape == (rows, work.index.size // max(rows, 1)) and lookup.first is None:
            lookup.first, lookup.first_table = temporary((rows,)), work.table
            c.values.take(x)
            return lookup.first
    return None


@lowers("reduce_sum_grad")
def _reduce_sum_grad(c: Context, op: Op) -> None:
    x, dy = c.read(op, "X"), c.read(op, "Out@GRAD")
    c.write(op, "X@GRAD", c.emit.with_axes(dy, x.shape, _axes(op, len(x.shape))).broadcast(x.shape))


@lowers("softmax")
def _softmax(c: Context, op: Op) -> None:
    x = c.read(op, "X")
    axes = [op.attrs["axis"] % len(x.shape)]
    top = c.emit.reduce("copy", x, axes=axes, largest=True, keep_axes=True)
    powers = c.emit.map("exp_diff", x, top)
    c.write(op, "Out", c.emit.map("div", powers, c.emit.reduce("copy", powers, axes=axes, keep_axes=True)))


@lowers("softmax_grad")
def _softmax_grad(c: Context, op: Op) -> None:
    out, dy = c.read(op, "Out"), c.read(op, "Out@GRAD")
    dot = c.emit.reduce("mul", dy, out, axes=[op.attrs["axis"]], keep_axes=True)
    c.write(op, "X@GRAD", c.emit.map("sub_mul", dy, dot, out))


@lowers("logsumexp")
def _logsumexp(c: Context, op: Op) -> None:
    x = c.read(op, "X")
    axes = _axes(op, len(x.shape))
    top = c.emit.reduce("copy", x, axes=axes, largest=True)
    total = c.emit.reduce("exp_diff", x, c.emit.with_axes(top, x.shape, axes).broadcast(x.shape), axes=axes)
    out = c.emit.map("add", c.emit.map("log", total), top)
    c.write(op, "Out", c.emit.with_axes(out, x.shape, axes) if op.attrs.get("keepdim") else out)


@lowers("logsumexp_grad")
def _logsumexp_grad(c: Context, op: Op) -> None:
    x, out, dy = c.read(op, "X"), c.read(op, "Out"), c.read(op, "Out@GRAD")
    axes = _axes(op, len(x.shape))
    dy, out = (c.emit.with_axes(view, x.shape, axes) for view in (dy, out))
    c.write(op, "X@GRAD", c.emit.map("mul_exp_diff", dy, x, out))


@lowers("p_norm")
def _p_norm(c: Context, op: Op) -> None:
    x = c.read(op, "X")
    assert op.attrs["porder"] == 2.0
    axes = [op.attrs["axis"] % len(x.shape)]
    out = c.emit.map("sqrt_affine", c.emit.reduce("mul", x, x, axes=axes), p=1.0)
    c.write(op, "Out", c.emit.with_axes(out, x.shape, axes) if op.attrs["keepdim"] else out)


@lowers("p_norm_grad")
def _p_norm_grad(c: Context, op: Op) -> None:
    x, out, dy = c.read(op, "X"), c.read(op, "Out"), c.read(op, "Out@GRAD")
    axes = [op.attrs["axis"] % len(x.shape)]
    dy, out = (c.emit.with_axes(view, x.shape, axes) for view in (dy, out))
    norm = c.emit.map("affine", out, p=1.0, q=op.attrs["epsilon"])
    c.write(op, "X@GRAD", c.emit.map("mul", x, c.emit.map("div", dy, norm)))


@dataclass(frozen=True)
class _Normalised:
    """What layer normalisation keeps: x with mean 0 and variance 1 over axes, 1 / deviation, elements averaged."""

    normal: View
    inverse: View
    axes: Sequence[int]
    count: int


@lowers("layer_norm")
def _layer_norm(c: Context, op: Op) -> None:
    emit, x, first = c.emit, c.read(op, "X"), op.attrs["begin_norm_axis"]
    axes, tail = list(range(first, len(x.shape))), x.shape[first:]
    count = math.prod(tail)
    mean = emit.map("affine", emit.reduce("copy", x, axes=axes, keep_axes=True), p=1.0 / count)
    squares = emit.reduce("square_diff", x, mean, axes=axes, keep_axes=True)
    inverse = emit.map("rsqrt_affine", squares, p=1.0 / count, q=op.attrs["epsilon"])
    out = normal = emit.map("sub_mul", x, mean, inverse)
    c.save(op.result("Mean"), _Normalised(normal, inverse, axes, count))
    if "Scale" in op.ins:
        out = emit.map("mul", out, emit.shaped(c.read(op, "Scale"), tail))
    if "Bias" in op.ins:
        out = emit.map("add", out, emit.shaped(c.read(op, "Bias"), tail))
    c.write(op, "Y", out)


@lowers("layer_norm_grad")
def _layer_norm_grad(c: Context, op: Op) -> None:
    emit, forward = c.emit, c.saved(op.one("Mean"), _Normalised)
    normal, axes, count = forward.normal, forward.axes, forward.count
    dy, shape = c.read(op, "Y@GRAD"), normal.shape
    lead = [a for a in range(len(shape)) if a not in axes]
    if op.outs.get("Bias@GRAD"):
        emit.reduce("copy", dy, axes=lead, out=c.grad_target(op.result("Bias@GRAD"), (count,)))
    if op.outs.get("Scale@GRAD"):
        emit.reduce("mul", dy, normal, axes=lead, out=c.grad_target(op.result("Scale@GRAD"), (count,)))
    if op.outs.get("X@GRAD"):
        if "Scale" in op.ins:
            dy = emit.map("mul", dy, emit.shaped(c.read(op, "Scale"), tuple(shape[a] for a in axes)))
        mean = emit.map("affine", emit.reduce("copy", dy, axes=axes, keep_axes=True), p=1.0 / count)
        dot = emit.map("affine", emit.reduce("mul", dy, normal, axes=axes, keep_axes=True), p=-1.0 / count)
        inner = emit.map("mul_add", normal, dot, emit.map("sub", dy, mean))
        c.write(op, "X@GRAD", emit.map("mul", inner, forward.inverse))
