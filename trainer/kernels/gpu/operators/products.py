"""Matrix products as NumPy's matmul, in float32, and their gradients."""

from __future__ import annotations

import math

import numpy as np

from paddlewheel.trainer.kernels.gpu.context import Context, lowers
from paddlewheel.trainer.kernels.gpu.emitter import Emitter
from paddlewheel.trainer.kernels.gpu.graph import Op
from paddlewheel.trainer.kernels.gpu.views import F32, View


@lowers("matmul_v2")
def _matmul(c: Context, op: Op) -> None:
    trans_x, trans_y = bool(op.attrs["trans_x"]), bool(op.attrs["trans_y"])
    c.write(op, "Out", _product(c.emit, c.read(op, "X"), c.read(op, "Y"), trans_x, trans_y))


@lowers("matmul_v2_grad")
def _matmul_grad(c: Context, op: Op) -> None:
    emit, x, y, dout = c.emit, c.read(op, "X"), c.read(op, "Y"), c.read(op, "Out@GRAD")
    trans_x, trans_y = bool(op.attrs["trans_x"]), bool(op.attrs["trans_y"])
    if op.out("X@GRAD") is not None:
        dx = _product(emit, y, dout, trans_y, True) if trans_x else _product(emit, dout, y, False, not trans_y)
        c.write(op, "X@GRAD", emit.reduced_to(x.shape, "copy", dx))
    if op.out("Y@GRAD") is not None:
        if len(y.shape) == 2 and len(x.shape) > 2 and not trans_x:
            x = emit.shaped(x, (math.prod(x.shape[:-1]), x.shape[-1]))
            dout = emit.shaped(dout, (x.shape[0], dout.shape[-1]))
        dy = _product(emit, dout, x, True, trans_x) if trans_y else _product(emit, x, dout, not trans_x, False)
        c.write(op, "Y@GRAD", emit.reduced_to(y.shape, "copy", dy))


def _product(emit: Emitter, x: View, y: View, trans_x: bool, trans_y: bool) -> View:
    assert len(x.shape) >= 2, "matmul of a vector"
    assert len(y.shape) >= 2, "matmul of a vector"
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    if not trans_x and len(y.shape) == 2 and len(x.shape) > 2:
        flat = matrix(emit, emit.shaped(x, (math.prod(x.shape[:-1]), x.shape[-1])))
        out = emit.matmul(flat, matrix(emit, y), trans_b=trans_y)
        return emit.shaped(out, (*x.shape[:-1], out.shape[-1]))
    x, y = (matrix(emit, _batched(emit, view, lead) if lead else view) for view in (x, y))
    out = emit.matmul(x, y, trans_a=trans_x, trans_b=trans_y)
    return emit.shaped(out, (*lead, *out.shape[-2:]))


def _batched(emit: Emitter, view: View, lead: tuple[int, ...]) -> View:
    """As many matrices as the leading axes have elements, [count, rows, columns]."""
    return emit.shaped(view.broadcast((*lead, *view.shape[-2:])), (math.prod(lead), *view.shape[-2:]))


def matrix(emit: Emitter, view: View) -> View:
    """With rows that cuBLAS can read: float32, no gaps."""
    return emit.dense(view if view.type == F32 else emit.map("copy", view))
