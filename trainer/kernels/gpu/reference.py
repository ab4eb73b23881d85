"""Every kernel's meaning in NumPy: what the self-check and the tests compare the GPU with.

Arithmetic is float64; what is stored is rounded to the array's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from paddlewheel.trainer.kernels.gpu.kernel_calls import BF16, BYTES, F16, F32, Buffer, Call, View

Array = NDArray[Any]
_STORED = {F32: np.float32, BF16: np.uint16, F16: np.float16, "i32": np.int32}


class Memory:
    """Buffers in the host's memory, made when first touched."""

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self._buffers: dict[int, tuple[Buffer, NDArray[np.uint8]]] = {}
        self._rng = rng

    def bytes(self, buffer: Buffer) -> NDArray[np.uint8]:
        """The buffer's memory; not zero at first, because a GPU's is not."""
        if id(buffer) not in self._buffers:
            size = max(16, -(-buffer.nbytes // 16) * 16)
            self._buffers[id(buffer)] = (buffer, np.full(size, 0xFF, np.uint8))
        return self._buffers[id(buffer)][1]

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
        return raw.copy() if view.type == "i32" else raw.astype(np.float64)

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
        "between": lambda: b + a * (c - b),
        "negative": lambda: -a,
    }
    with np.errstate(all="ignore"):
        return table[name]()


def run(call: Call, memory: Memory) -> None:
    """What the kernel does, to the arrays in `memory`."""
    _KERNELS[call.kernel](call, memory)


def _loaded(call: Call, memory: Memory) -> list[Array | None]:
    return [None if v is None else memory.load(v) for v in call.ins]


def _elementwise(call: Call, memory: Memory) -> None:
    (out,) = call.outs
    assert out is not None
    told = call.told
    values = [np.asarray(v) for v in _loaded(call, memory) if v is not None]
    memory.store(out, _function(told["op"], values, told.get("p", 0.0), told.get("q", 0.0)))


def _reduce(call: Call, memory: Memory) -> None:
    out, told = call.outs[0], call.told
    assert out is not None
    values = [np.asarray(v) for v in _loaded(call, memory) if v is not None]
    mapped = _function(told["op"], values, told.get("p", 0.0), told.get("q", 0.0))
    axes = tuple(told["axes"])
    result = np.max(mapped, axis=axes) if told.get("largest") else np.sum(mapped, axis=axes)
    memory.store(out, np.asarray(result).reshape(out.shape))


def _squares(call: Call, memory: Memory) -> None:
    out, (source,) = call.outs[0], _loaded(call, memory)
    assert out is not None
    assert source is not None
    memory.store(out, np.sum(source * source).reshape(out.shape))


def _gather(call: Call, memory: Memory) -> None:
    (out,), (table, index) = call.outs, _loaded(call, memory)
    assert out is not None
    assert table is not None
    memory.store(out, table[index].reshape(out.shape))


def _scatter_add(call: Call, memory: Memory) -> None:
    (out,), (values, index) = call.outs, _loaded(call, memory)
    assert out is not None
    assert values is not None
    assert index is not None
    table = memory.load(out)
    values = values.reshape(len(index), table.shape[1])
    wanted = index != 0 if call.told.get("zero_is_none") else np.ones(len(index), bool)
    np.add.at(table, index[wanted], values[wanted])
    memory.store(out, table)


def _copy2d(call: Call, memory: Memory) -> None:
    (out,), (source,) = call.outs, _loaded(call, memory)
    assert out is not None
    assert source is not None
    rows, columns = source.shape
    width = columns + call.told["fill"]
    whole = View(out.buffer, out.offset, (rows, width), out.strides, out.type)
    memory.store(whole, np.hstack([source, np.zeros((rows, width - columns))]))


def _bias_grad(call: Call, memory: Memory) -> None:
    (dz, _, db), (dy, y) = call.outs, _loaded(call, memory)
    assert dy is not None
    value = dy if y is None else np.where(y > 0, dy, 0.0)
    if db is not None:
        memory.store(db, value.sum(0))
    if dz is not None:
        rows, columns = value.shape
        whole = View(dz.buffer, dz.offset, (rows, columns + call.told["fill"]), dz.strides, dz.type)
        memory.store(whole, np.hstack([value, np.zeros((rows, call.told["fill"]))]))


def _skinny(call: Call, memory: Memory) -> None:
    (y,), (x, w, bias) = call.outs, _loaded(call, memory)
    assert y is not None
    assert x is not None
    memory.store(y, x @ w + (0.0 if bias is None else bias))


def _skinny_grad(call: Call, memory: Memory) -> None:
    (dx, _, dw, _, db), (x, w, dy) = call.outs, _loaded(call, memory)
    assert dw is not None
    assert x is not None
    assert w is not None
    assert dy is not None
    memory.store(dw, x.T @ dy)
    value = np.where(x > 0, dy @ w.T, 0.0) if call.told.get("relu_x") else dy @ w.T
    if dx is not None:
        memory.store(dx, value)
    if db is not None:
        memory.store(db, value.sum(0))


def _fm_pairs(call: Call, memory: Memory) -> None:
    (out,), (e, _, _) = call.outs, _loaded(call, memory)
    assert out is not None
    assert e is not None
    memory.store(out, (0.5 * ((e.sum(1) ** 2).sum(1) - (e * e).sum((1, 2)))).reshape(out.shape))


def _fm_pairs_grad(call: Call, memory: Memory) -> None:
    (out,), (e, dout, add) = call.outs, _loaded(call, memory)
    assert out is not None
    assert e is not None
    assert dout is not None
    value = dout.reshape(-1, 1, 1) * (e.sum(1, keepdims=True) - e)
    memory.store(out, value + (0.0 if add is None else add.reshape(value.shape)))


def _fields_lookup(call: Call, memory: Memory) -> None:
    (e_view, pairs, first, sums), (table, first_table, index) = call.outs, _loaded(call, memory)
    assert pairs is not None
    assert table is not None
    assert index is not None
    e = table[index].reshape(pairs.size, -1, table.shape[1])
    memory.store(pairs, (0.5 * ((e.sum(1) ** 2).sum(1) - (e * e).sum((1, 2)))).reshape(pairs.shape))
    if e_view is not None:
        memory.store(e_view, e.reshape(e_view.shape))
    if sums is not None:
        memory.store(sums, e.sum(1))
    if first is not None:
        assert first_table is not None
        memory.store(first, first_table[index].reshape(pairs.size, -1).sum(1).reshape(first.shape))


def _fields_grad(call: Call, memory: Memory) -> None:
    (table_view, first_view), (sums, values, dpairs, add, index, dfirst) = call.outs, _loaded(call, memory)
    assert table_view is not None
    assert index is not None
    table = memory.load(table_view)
    width, rows = table.shape[1], call.told["rows"]
    grads = np.zeros((rows, index.size // rows, width)) if add is None else add.reshape(rows, -1, width)
    if dpairs is not None:
        assert sums is not None
        assert values is not None
        grads = grads + dpairs.reshape(-1, 1, 1) * (sums[:, None] - values[index].reshape(grads.shape))
    np.add.at(table, index[index != 0], grads.reshape(-1, width)[index != 0])
    memory.store(table_view, table)
    if first_view is not None:
        assert dfirst is not None
        first = memory.load(first_view)
        np.add.at(first, index[index != 0], np.repeat(dfirst.reshape(rows), grads.shape[1])[index != 0][:, None])
        memory.store(first_view, first)


def _dot_pairs(call: Call, memory: Memory) -> None:
    (out,), (v, _) = call.outs, _loaded(call, memory)
    assert out is not None
    assert v is not None
    rows, columns = np.tril_indices(v.shape[1], -1)
    memory.store(out, np.einsum("bpw,bpw->bp", v[:, rows], v[:, columns]))


def _dot_pairs_grad(call: Call, memory: Memory) -> None:
    (out,), (v, dout) = call.outs, _loaded(call, memory)
    assert out is not None
    assert v is not None
    assert dout is not None
    rows, columns = np.tril_indices(v.shape[1], -1)
    grads = np.zeros((v.shape[0], v.shape[1], v.shape[1]))
    grads[:, rows, columns] = dout
    memory.store(out, (grads + grads.transpose(0, 2, 1)) @ v)


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


def _dropout(call: Call, memory: Memory) -> None:
    (mask,), (step,) = call.outs, _loaded(call, memory)
    assert mask is not None
    assert step is not None
    values = dropout_mask(mask.size, call.told["seed"], int(step[0]), call.told["rate"])
    memory.store(mask, values.reshape(mask.shape))


def _adam(call: Call, memory: Memory) -> None:
    views, told = call.outs, call.told
    grad, decays, low_at, scalars, squares = call.ins
    param_view, moment1_view, moment2_view, low = views
    assert param_view is not None
    assert moment1_view is not None
    assert moment2_view is not None
    assert grad is not None
    assert decays is not None
    assert scalars is not None
    rate, scale, power1, power2 = memory.load(scalars)[:4]
    if squares is not None:
        norm = np.sqrt(memory.load(squares)[0]) * scale
        scale *= min(1.0, told["clip_norm"] / norm) if norm > 0 else 1.0
    param = memory.load(param_view)
    decay = memory.bytes(decays.buffer)[: param_view.size] != 0
    g = memory.load(grad) * scale + np.where(decay, told["l2"] * param, 0.0)
    param *= np.where(decay, 1.0 - rate * told["weight_decay"], 1.0)
    m = told["beta1"] * memory.load(moment1_view) + (1 - told["beta1"]) * g
    v = told["beta2"] * memory.load(moment2_view) + (1 - told["beta2"]) * g * g
    param -= rate / (1 - power1) * (m / (np.sqrt(v) / np.sqrt(1 - power2) + told["epsilon"]))
    memory.store(moment1_view, m)
    memory.store(moment2_view, v)
    memory.store(param_view, param)
    if low is not None and low_at is not None:
        _copy_low(call, memory)


def _copy_low(call: Call, memory: Memory) -> None:
    param, _, _, low = call.outs
    low_at = call.ins[2]
    assert param is not None
    assert low is not None
    assert low_at is not None
    places = memory.load(low_at)
    for type_view in (View(low.buffer, 0, (low.buffer.nbytes // BYTES[low.type],), (1,), low.type),):
        copies = memory.load(type_view)
        copies[places[places >= 0]] = memory.load(param)[places >= 0]
        memory.store(type_view, copies)


def _matmul(call: Call, memory: Memory) -> None:
    (out,), (a, b, bias) = call.outs, _loaded(call, memory)
    assert out is not None
    assert a is not None
    assert b is not None
    a = a.swapaxes(-1, -2) if call.told["trans_a"] else a
    b = b.swapaxes(-1, -2) if call.told["trans_b"] else b
    value = a @ b + (0.0 if bias is None else bias)
    memory.store(out, np.maximum(value, 0.0) if call.told["relu"] else value)


def _zero(call: Call, memory: Memory) -> None:
    (out,) = call.outs
    assert out is not None
    memory.store(out, np.zeros(out.shape))


def _count(call: Call, memory: Memory) -> None:
    (out,) = call.outs
    assert out is not None
    memory.store(out, memory.load(out) + 1)


_KERNELS: dict[str, Callable[[Call, Memory], None]] = {
    "elementwise": _elementwise,
    "reduce": _reduce,
    "squares": _squares,
    "gather": _gather,
    "scatter_add": _scatter_add,
    "copy2d": _copy2d,
    "bias_grad": _bias_grad,
    "skinny": _skinny,
    "skinny_grad": _skinny_grad,
    "fm_pairs": _fm_pairs,
    "fm_pairs_grad": _fm_pairs_grad,
    "fields_lookup": _fields_lookup,
    "fields_grad": _fields_grad,
    "dot_pairs": _dot_pairs,
    "dot_pairs_grad": _dot_pairs_grad,
    "dropout": _dropout,
    "adam": _adam,
    "low_copies": _copy_low,
    "matmul": _matmul,
    "zero": _zero,
    "count": _count,
}
