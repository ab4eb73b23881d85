"""Every kernel's meaning in NumPy: what the self-check and the tests compare the GPU with.

Arithmetic is float64; what is stored is rounded to the array's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from paddlewheel.trainer.kernels.gpu import kernel_calls
from paddlewheel.trainer.kernels.gpu.kernel_calls import Call
from paddlewheel.trainer.kernels.gpu.views import BF16, BYTES, F16, F32, I32, Buffer, View

Array = NDArray[Any]
_STORED = {F32: np.float32, BF16: np.uint16, F16: np.float16, I32: np.int32}


class HostMemory:
    """Buffers in the host's memory, made when first touched."""

    def __init__(self) -> None:
        self._buffers: dict[Buffer, NDArray[np.uint8]] = {}

    def bytes(self, buffer: Buffer) -> NDArray[np.uint8]:
        """The buffer's memory; not zero at first, because a GPU's is not."""
        if buffer not in self._buffers:
            self._buffers[buffer] = np.full(max(16, -(-buffer.nbytes // 16) * 16), 0xFF, np.uint8)
        return self._buffers[buffer]

    def _raw(self, view: View) -> Array:
        width = BYTES[view.type]
        data = self.bytes(view.buffer)[view.offset * width :]
        data = data[: len(data) // width * width].view(_STORED[view.type])
        return as_strided(data, view.shape, [s * width for s in view.strides])

    def load(self, view: View) -> Array:
        """Values, as float64 (int32 as they are)."""
        raw = self._raw(view)
        if view.type == BF16:
            return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return raw.copy() if view.type == I32 else raw.astype(np.float64)

    def store(self, view: View, values: Array) -> None:
        """Set all elements, rounded to the view's type."""
        raw = self._raw(view)
        values = np.broadcast_to(values, view.shape)
        if view.type == BF16:
            raw[...] = to_bf16(values)
        else:
            with np.errstate(over="ignore"):
                raw[...] = values.astype(raw.dtype)


def to_bf16(values: Array) -> NDArray[np.uint16]:
    """The nearest bfloat16, as its bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def _sigmoid(x: Array) -> Array:
    result: Array = 1.0 / (1.0 + np.exp(-x))
    return result


def _function(name: str, v: Sequence[Array], p: float, q: float) -> Array:
    a, b, c = [*v, *[np.zeros(1)] * (3 - len(v))][:3]
    table: dict[str, Callable[[], Array]] = {
        "copy": lambda: a,
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "div": lambda: a / b,
        "max": lambda: np.maximum(a, b),
        "affine": lambda: a * p + q,
        "relu": lambda: np.maximum(a, 0),
        "relu_grad": lambda: np.where(b > 0, a, 0.0),
        "sigmoid": lambda: _sigmoid(a),
        "sigmoid_grad": lambda: a * b * (1 - b),
        "bce": lambda: np.maximum(a, 0) - a * b + np.log1p(np.exp(-np.abs(a))),
        "bce_grad": lambda: a * (_sigmoid(b) - c),
        "exp_diff": lambda: np.exp(a - b),
        "log": lambda: np.log(a),
        "greater": lambda: (a > b).astype(np.float64),
        "equal": lambda: (a == b).astype(np.float64),
        "where": lambda: np.where(a != 0, b, c),
        "softplus": lambda: np.where(a > 20, a, np.log1p(np.exp(np.minimum(a, 20)))),
        "softplus_grad": lambda: a * _sigmoid(b),
        "mul_add": lambda: a * b + c,
        "square_diff": lambda: (a - b) ** 2,
        "rsqrt_affine": lambda: 1.0 / np.sqrt(a * p + q),
        "div_grad": lambda: -a * b / c,
        "max_grad_first": lambda: np.where(b >= c, a, 0.0),
        "max_grad_second": lambda: np.where(b < c, a, 0.0),
        "add3": lambda: a + b + c,
        "sub_mul": lambda: (a - b) * c,
        "sqrt_affine": lambda: np.sqrt(a * p + q),
        "tanh": lambda: np.tanh(a),
        "tanh_grad": lambda: a * (1 - b * b),
        "mul_exp_diff": lambda: a * np.exp(b - c),
        "lerp": lambda: b + a * (c - b),
        "negative": lambda: -a,
    }
    with np.errstate(all="ignore"):
        return table[name]()


@singledispatch
def run(call: Call, memory: HostMemory) -> None:
    """What the kernel does, to the arrays in `memory`."""
    raise NotImplementedError(type(call))


@run.register
def _(call: kernel_calls.Elementwise, memory: HostMemory) -> None:
    memory.store(call.out, _function(call.function, [memory.load(v) for v in call.operands], call.p, call.q))


@run.register
def _(call: kernel_calls.Reduce, memory: HostMemory) -> None:
    mapped = _function(call.function, [memory.load(v) for v in call.operands], 0.0, 0.0)
    result = np.max(mapped, axis=call.axes) if call.largest else np.sum(mapped, axis=call.axes)
    memory.store(call.out, np.asarray(result).reshape(call.out.shape))


@run.register
def _(call: kernel_calls.Squares, memory: HostMemory) -> None:
    source = memory.load(call.source)
    memory.store(call.out, np.sum(source * source).reshape(call.out.shape))


@run.register
def _(call: kernel_calls.Gather, memory: HostMemory) -> None:
    memory.store(call.out, memory.load(call.table)[memory.load(call.index)].reshape(call.out.shape))


@run.register
def _(call: kernel_calls.ScatterAdd, memory: HostMemory) -> None:
    table, index = memory.load(call.table), memory.load(call.index)
    values = memory.load(call.values).reshape(len(index), table.shape[1])
    wanted = index != 0 if call.zero_is_none else np.ones(len(index), bool)
    np.add.at(table, index[wanted], values[wanted])
    memory.store(call.table, table)


def _filled(view: View, values: Array, fill: int, memory: HostMemory) -> None:
    """Store a matrix, with columns of zeros behind it."""
    rows, columns = values.shape
    whole = View(view.buffer, view.offset, (rows, columns + fill), view.strides, view.type)
    memory.store(whole, np.hstack([values, np.zeros((rows, fill))]))


@run.register
def _(call: kernel_calls.Copy2D, memory: HostMemory) -> None:
    _filled(call.out, memory.load(call.source), call.fill, memory)


@run.register
def _(call: kernel_calls.BiasGrad, memory: HostMemory) -> None:
    value = memory.load(call.dy)
    if call.y is not None:
        value = np.where(memory.load(call.y) > 0, value, 0.0)
    if call.db is not None:
        memory.store(call.db, value.sum(0))
    if call.dz is not None:
        _filled(call.dz, value, call.fill, memory)


@run.register
def _(call: kernel_calls.Skinny, memory: HostMemory) -> None:
    bias = 0.0 if call.bias is None else memory.load(call.bias)
    memory.store(call.y, memory.load(call.x) @ memory.load(call.w) + bias)


@run.register
def _(call: kernel_calls.SkinnyGrad, memory: HostMemory) -> None:
    x, w, dy = memory.load(call.x), memory.load(call.w), memory.load(call.dy)
    memory.store(call.dw, x.T @ dy)
    value = np.where(x > 0, dy @ w.T, 0.0) if call.relu_x else dy @ w.T
    if call.dx is not None:
        memory.store(call.dx, value)
    if call.db is not None:
        memory.store(call.db, value.sum(0))


def _pairs(e: Array) -> Array:
    result: Array = 0.5 * ((e.sum(1) ** 2).sum(1) - (e * e).sum((1, 2)))
    return result


@run.register
def _(call: kernel_calls.FmPairs, memory: HostMemory) -> None:
    memory.store(call.out, _pairs(memory.load(call.e)).reshape(call.out.shape))


@run.register
def _(call: kernel_calls.FmPairsGrad, memory: HostMemory) -> None:
    e = memory.load(call.e)
    value = memory.load(call.dout).reshape(-1, 1, 1) * (e.sum(1, keepdims=True) - e)
    memory.store(call.out, value + (0.0 if call.add is None else memory.load(call.add).reshape(value.shape)))


@run.register
def _(call: kernel_calls.FieldsLookup, memory: HostMemory) -> None:
    table, index, rows = memory.load(call.table), memory.load(call.index), call.pairs.size
    e = table[index].reshape(rows, -1, table.shape[1])
    memory.store(call.pairs, _pairs(e).reshape(call.pairs.shape))
    if call.e is not None:
        memory.store(call.e, e.reshape(call.e.shape))
    if call.sums is not None:
        memory.store(call.sums, e.sum(1))
    if call.first is not None:
        assert call.first_table is not None
        first = memory.load(call.first_table)[index].reshape(rows, -1).sum(1)
        memory.store(call.first, first.reshape(call.first.shape))


@run.register
def _(call: kernel_calls.FieldsGrad, memory: HostMemory) -> None:
    table, index, rows = memory.load(call.table), memory.load(call.index), call.rows
    width = table.shape[1]
    grads = np.zeros((rows, index.size // rows, width))
    if call.add is not None:
        grads = memory.load(call.add).reshape(grads.shape)
    if call.dpairs is not None:
        assert call.sums is not None
        assert call.values is not None
        others = memory.load(call.sums)[:, None] - memory.load(call.values)[index].reshape(grads.shape)
        grads = grads + memory.load(call.dpairs).reshape(-1, 1, 1) * others
    np.add.at(table, index[index != 0], grads.reshape(-1, width)[index != 0])
    memory.store(call.table, table)
    if call.first is not None:
        assert call.dfirst is not None
        first, dfirst = memory.load(call.first), memory.load(call.dfirst).reshape(rows)
        np.add.at(first, index[index != 0], np.repeat(dfirst, grads.shape[1])[index != 0][:, None])
        memory.store(call.first, first)


@run.register
def _(call: kernel_calls.DotPairs, memory: HostMemory) -> None:
    v = memory.load(call.v)
    rows, columns = np.tril_indices(v.shape[1], -1)
    memory.store(call.out, np.einsum("bpw,bpw->bp", v[:, rows], v[:, columns]))


@run.register
def _(call: kernel_calls.DotPairsGrad, memory: HostMemory) -> None:
    v = memory.load(call.v)
    rows, columns = np.tril_indices(v.shape[1], -1)
    grads = np.zeros((v.shape[0], v.shape[1], v.shape[1]))
    grads[:, rows, columns] = memory.load(call.dout)
    memory.store(call.out, (grads + grads.transpose(0, 2, 1)) @ v)


def dropout_mask(count: int, seed: int, step: int, rate: float) -> Array:
    """The mask that the kernel draws."""
    word: Any = np.uint64
    with np.errstate(over="ignore"):
        z = (word(seed) << word(32) | word(step)) * word(0x9E3779B97F4A7C15)
        z = z + np.arange(count, dtype=word) * word(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> word(30))) * word(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> word(27))) * word(0x94D049BB133111EB)
        z ^= z >> word(31)
    uniform = (z >> word(40)).astype(np.float64) / 16777216.0
    result: Array = np.where(uniform < np.float32(rate), 0.0, 1.0 / (1.0 - rate))
    return result


@run.register
def _(call: kernel_calls.Dropout, memory: HostMemory) -> None:
    values = dropout_mask(call.mask.size, call.seed, int(memory.load(call.step)[0]), call.rate)
    memory.store(call.mask, values.reshape(call.mask.shape))


@run.register
def _(call: kernel_calls.Adam, memory: HostMemory) -> None:
    s = call.settings
    rate, scale, power1, power2 = memory.load(call.scalars)[:4]
    if call.squares is not None:
        norm = np.sqrt(memory.load(call.squares)[0]) * scale
        scale *= min(1.0, s.clip_norm / norm) if norm > 0 else 1.0
    param = memory.load(call.param)
    decay = memory.bytes(call.decays.buffer)[: call.param.size] != 0
    g = memory.load(call.grad) * scale + np.where(decay, s.l2 * param, 0.0)
    param *= np.where(decay, 1.0 - rate * s.weight_decay, 1.0)
    m = s.beta1 * memory.load(call.moment1) + (1 - s.beta1) * g
    v = s.beta2 * memory.load(call.moment2) + (1 - s.beta2) * g * g
    param -= rate / (1 - power1) * (m / (np.sqrt(v) / np.sqrt(1 - power2) + s.epsilon))
    memory.store(call.moment1, m)
    memory.store(call.moment2, v)
    memory.store(call.param, param)
    _copy_low(call, memory)


@run.register
def _(call: kernel_calls.LowCopies, memory: HostMemory) -> None:
    _copy_low(call, memory)


def _copy_low(call: kernel_calls.Adam, memory: HostMemory) -> None:
    low_at, copies = memory.load(call.low_at), memory.load(call.low)
    copies[low_at[low_at >= 0]] = memory.load(call.param)[low_at >= 0]
    memory.store(call.low, copies)


@run.register
def _(call: kernel_calls.Matmul, memory: HostMemory) -> None:
    a, b = memory.load(call.a), memory.load(call.b)
    a = a.swapaxes(-1, -2) if call.trans_a else a
    b = b.swapaxes(-1, -2) if call.trans_b else b
    value = a @ b + (0.0 if call.bias is None else memory.load(call.bias))
    memory.store(call.out, np.maximum(value, 0.0) if call.relu else value)


@run.register
def _(call: kernel_calls.Zero, memory: HostMemory) -> None:
    memory.store(call.out, np.zeros(call.out.shape))


@run.register
def _(call: kernel_calls.Count, memory: HostMemory) -> None:
    memory.store(call.counter, memory.load(call.counter) + 1)
