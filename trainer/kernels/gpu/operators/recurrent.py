"""A GRU, step by step.

Gates r, z and the candidate c: r = s(x W_r + h U_r), z likewise, c = tanh(x W_c + r (h U_c + b)),
h' = c + z (h - c).

Legend: T steps, B rows, H floats of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddlewheel.trainer.kernels.gpu.context import Context, lowers
from paddlewheel.trainer.kernels.gpu.emitter import Emitter
from paddlewheel.trainer.kernels.gpu.graph import EMPTY, Op
from paddlewheel.trainer.kernels.gpu.operators.products import matrix
from paddlewheel.trainer.kernels.gpu.views import View, temporary


@dataclass(frozen=True)
class _Step:
    """What a step keeps, each [B, H]; `hidden`: h U_c + b, `alive`: 1 where the row has this step."""

    state: View
    r: View
    z: View
    candidate: View
    hidden: View
    alive: View


@dataclass(frozen=True)
class _Tape:
    """What the gradient reads: all steps, and the inputs as [T * B, width]."""

    steps: Sequence[_Step]
    inputs: View


def _parts(matrix_B3H: View) -> tuple[View, View, View]:
    """Of r, z and the candidate."""
    size = matrix_B3H.shape[1] // 3
    first, second, third = (matrix_B3H.slice(1, i * size, (i + 1) * size) for i in range(3))
    return first, second, third


@lowers("rnn")
def _rnn(c: Context, op: Op) -> None:
    """From a zero state, as Paddle computes it; a row past its end keeps its state."""
    assert op.attrs["mode"] == "GRU"
    emit, x = c.emit, c.read(op, "Input")
    weight_x, weight_h, bias_x, bias_h = (c.values.read(name) for name in op.ins["WeightList"])
    num_steps, rows, width = x.shape
    size = op.attrs["hidden_size"]
    length = emit.map("copy", c.read(op, "SequenceLength"))
    flat = matrix(emit, emit.shaped(x, (num_steps * rows, width)))
    inputs = emit.map("add", emit.matmul(flat, weight_x, trans_b=True), bias_x)
    out = temporary((num_steps, rows, size))
    state = emit.zeros((rows, size))
    steps = []
    for t in range(num_steps):
        gates_x = inputs.slice(0, t * rows, (t + 1) * rows)
        gates_h = emit.map("add", emit.matmul(state, weight_h, trans_b=True), bias_h)
        step, new = _forward(emit, gates_x, gates_h, state)
        alive = emit.shaped(emit.map("greater", length, emit.scalar(float(t))), (rows, 1)).broadcast((rows, size))
        state = emit.map("where", alive, new, state)
        emit.map("mul", alive, new, out=emit.shaped(out.slice(0, t, t + 1), (rows, size)))
        steps.append(_Step(*step, alive))
    c.save(op.result(), _Tape(steps, flat))
    c.write(op, "Out", out)
    c.write(op, "State", emit.shaped(state, (1, rows, size)))


def _forward(
    emit: Emitter, gates_x: View, gates_h: View, state: View
) -> tuple[tuple[View, View, View, View, View], View]:
    """A step's state before, r, z, candidate and hidden; and the state after it."""
    (rx, zx, cx), (rh, zh, hidden) = _parts(gates_x), _parts(gates_h)
    r = emit.map("sigmoid", emit.map("add", rx, rh))
    z = emit.map("sigmoid", emit.map("add", zx, zh))
    candidate = emit.map("tanh", emit.map("mul_add", r, hidden, cx))
    return (state, r, z, candidate, hidden), emit.map("lerp", z, candidate, state)


@lowers("rnn_grad")
def _rnn_grad(c: Context, op: Op) -> None:
    emit, tape = c.emit, c.saved(op.one("Out"), _Tape)
    wx, wh, bx, bh = op.outs["WeightList@GRAD"]
    weight_x, weight_h = (c.values.read(name) for name in op.ins["WeightList"][:2])
    num_steps, rows, size = c.read(op, "Out").shape
    dout, dlast = (_optional(c, op, slot) for slot in ("Out@GRAD", "State@GRAD"))
    dstate = emit.zeros((rows, size)) if dlast is None else emit.dense(emit.shaped(dlast, (rows, size)))
    dx_all, dh_all = temporary((num_steps * rows, 3 * size)), temporary((num_steps * rows, 3 * size))
    before = temporary((num_steps * rows, size))
    for t in reversed(range(num_steps)):
        step, of_step = tape.steps[t], (0, t * rows, (t + 1) * rows)
        emit.map("copy", step.state, out=before.slice(*of_step))
        dnew = dstate
        if dout is not None:
            dnew = emit.map("add", dstate, emit.shaped(dout.slice(0, t, t + 1), (rows, size)))
        dstate = _backward(emit, step, dnew, dstate, weight_h, dx_all.slice(*of_step), dh_all.slice(*of_step))
    emit.matmul(dx_all, tape.inputs, trans_a=True, out=c.grad_target(wx, weight_x.shape))
    emit.matmul(dh_all, before, trans_a=True, out=c.grad_target(wh, weight_h.shape))
    emit.reduce("copy", dx_all, axes=[0], out=c.grad_target(bx, (3 * size,)))
    emit.reduce("copy", dh_all, axes=[0], out=c.grad_target(bh, (3 * size,)))
    if op.outs.get("Input@GRAD"):
        dx = emit.matmul(dx_all, weight_x)
        c.write(op, "Input@GRAD", emit.shaped(dx, (num_steps, rows, weight_x.shape[1])))


def _optional(c: Context, op: Op, slot: str) -> View | None:
    name = op.ins.get(slot, (EMPTY,))[0]
    return c.values.read(name) if c.values.has(name) else None


def _backward(
    emit: Emitter, step: _Step, dnew: View, dstate: View, weight_h: View, gates_x: View, gates_h: View
) -> View:
    """The gradient of the state before a step; those of its gates go to `gates_x` and `gates_h`."""
    (dr_x, dz_x, dc_x), (dr_h, dz_h, dhidden) = _parts(gates_x), _parts(gates_h)
    dnew = emit.map("mul", dnew, step.alive)
    through_z = emit.map("sub", dnew, emit.map("mul", dnew, step.z))
    dc = emit.map("tanh_grad", through_z, step.candidate, out=dc_x)
    dr = emit.map("sigmoid_grad", emit.map("mul", dc, step.hidden), step.r, out=dr_x)
    difference = emit.map("sub", step.state, step.candidate)
    dz = emit.map("sigmoid_grad", emit.map("mul", dnew, difference), step.z, out=dz_x)
    emit.map("copy", dr, out=dr_h)
    emit.map("copy", dz, out=dz_h)
    emit.map("mul", dc, step.r, out=dhidden)
    through = emit.matmul(gates_h, weight_h)
    kept = emit.map("sub", dstate, emit.map("mul", dstate, step.alive))
    return emit.map("add3", emit.map("mul", dnew, step.z), through, kept)
