"""Kernel calls as plain data: what a kernel reads, writes and is told, before any address is known.

The structs mirror those of kernels.cu, field by field. `encode` fills one from a call; `reference.run` computes the
same call
in NumPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

F32, BF16, F16, I32 = "f32", "bf16", "f16", "i32"
TYPES = {F32: 0, BF16: 1, F16: 2, I32: 3}
BYTES = {F32: 4, BF16: 2, F16: 2, I32: 4}
MAX_DIMS = 6

FUNCTIONS = (
    "copy",
    "add",
    "sub",
    "mul",
    "div",
    "max",
    "affine",
    "relu",
    "relu_grad",
    "sigmoid",
    "sigmoid_grad",
    "bce",
    "bce_grad",
    "exp_diff",
    "log",
    "greater",
    "equal",
    "where",
    "softplus",
    "softplus_grad",
    "mul_add",
    "between",
    "square_diff",
    "rsqrt_affine",
    "div_grad",
    "max_grad_first",
    "max_grad_second",
    "add3",
    "sub_mul",
    "sqrt_affine",
    "tanh",
    "tanh_grad",
    "mul_exp_diff",
    "negative",
)
"""Element-wise functions by their number in kernels.cu."""


@dataclass(eq=False)
class Buffer:
    """Memory of one thing. Temporary buffers share an arena; the others have a place of their own."""

    nbytes: int
    kind: str = "temp"
    zero: bool = False


@dataclass(frozen=True)
class View:
    """An array in a buffer. Strides and offset count elements; a stride of 0 repeats."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    type: str = F32

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def contiguous(self) -> bool:
        """Whether elements lie in order without gaps."""
        return all(s == e or n == 1 for n, s, e in zip(self.shape, self.strides, row_major(self.shape), strict=True))

    def with_shape(self, shape: Sequence[int]) -> View | None:
        """The same elements in another shape; None where that needs a copy."""
        shape = tuple(shape)
        if self.contiguous:
            return View(self.buffer, self.offset, shape, row_major(shape), self.type)
        strides = _reshaped(self.shape, self.strides, shape)
        return None if strides is None else View(self.buffer, self.offset, shape, strides, self.type)

    def cut(self, axis: int, start: int, stop: int) -> View:
        """Elements start to stop of one axis."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return View(self.buffer, self.offset + start * self.strides[axis], shape, self.strides, self.type)

    def permuted(self, axes: Sequence[int]) -> View:
        """With axes in another order."""
        return View(
            self.buffer,
            self.offset,
            tuple(self.shape[a] for a in axes),
            tuple(self.strides[a] for a in axes),
            self.type,
        )

    def broadcast(self, shape: Sequence[int]) -> View:
        """Repeated along new and single-element axes, as NumPy does."""
        more = len(shape) - len(self.shape)
        strides = [0] * more
        for n, m, s in zip(self.shape, shape[more:], self.strides, strict=True):
            assert n in {m, 1}, (self.shape, shape)
            strides.append(s if n == m else 0)
        return View(self.buffer, self.offset, tuple(shape), tuple(strides), self.type)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an array without gaps."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _reshaped(old: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of the new shape over the same memory, where groups of axes can be merged and split."""
    if int(np.prod(old, dtype=np.int64)) == 0:
        return row_major(new)
    groups: list[tuple[int, int]] = []
    pairs = [(n, s) for n, s in zip(old, strides, strict=True) if n != 1]
    for n, s in pairs:
        if groups and groups[-1][1] == s * n:
            groups[-1] = (groups[-1][0] * n, s)
        else:
            groups.append((n, s))
    result: list[int] = []
    position, left = 0, groups[0][0] if groups else 1
    for n in new:
        if n == 1:
            result.append(0)
            continue
        if position >= len(groups) or left % n:
            return None
        left //= n
        result.append(left * groups[position][1])
        if left == 1:
            position += 1
            left = groups[position][0] if position < len(groups) else 1
    return tuple(result)


@dataclass(frozen=True)
class Call:
    """One kernel launch.

    Attributes:
        kernel: name of the function in kernels.cu, without `pw_`.
        outs, ins: arrays that it writes and reads; None where an optional one is absent.
        told: its numbers.
    """

    kernel: str
    outs: tuple[View | None, ...]
    ins: tuple[View | None, ...] = ()
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def views(self) -> list[View]:
        """All arrays."""
        return [v for v in (*self.outs, *self.ins) if v is not None]


_CODES: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "I": ctypes.c_int32,
    "U": ctypes.c_uint32,
    "L": ctypes.c_int64,
    "F": ctypes.c_float,
    "D": ctypes.c_int32 * MAX_DIMS,
}


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """From groups such as `P out, I3 types, L rows columns`: a type, how many (1 if not said), the fields."""
    found = []
    for group in fields.split(","):
        code, *names = group.split()
        kind = _CODES[code[0]] * int(code[1:]) if code[1:] else _CODES[code[0]]
        found += [(each, kind) for each in names]
    return type(name, (ctypes.Structure,), {"_fields_": found})


Elementwise = _struct(
    "Elementwise",
    "P out, P3 ins, I out_type, I3 in_type, I op dims, L count, D shape out_stride, D3 stride, F p q, I num_in",
)
Reduce = _struct(
    "Reduce",
    "P out partial, P3 ins, I out_type, I3 in_type, I op largest kept_dims reduced_dims, L num_out num_reduced, "
    "D kept reduced, D3 kept_stride reduced_stride, F p q, I num_in by_warp chunks",
)
Squares = _struct("Squares", "P out partial ins, L count, I blocks")
Rows = _struct(
    "Rows",
    "P out table index, I value_type width table_stride group, L count value_stride group_stride index_stride, "
    "I zero_is_none",
)
Copy2D = _struct("Copy2D", "P out ins, I out_type in_type, L rows, I columns fill, L out_stride in_stride")
BiasGrad = _struct(
    "BiasGrad",
    "P dz dy y partial db, I dz_type dy_type y_type columns fill blocks, L rows dz_stride dy_stride dy_column_stride, "
    "L y_stride",
)
Skinny = _struct(
    "Skinny",
    "P y x w bias dy partial dw db_partial db, I x_type y_type dy_type k n blocks relu_x, L rows x_stride y_stride, "
    "L dy_stride",
)
Pairs = _struct("Pairs", "P out e dout add, L rows add_stride, I fields width add_type")
Fields = _struct(
    "Fields",
    "P e pairs first sums values dpairs add dfirst table first_table index, L rows e_stride add_stride, "
    "I fields width table_stride value_stride e_type add_type tile",
)
Dots = _struct("Dots", "P out v dout, L rows out_stride dout_stride, I vectors width out_type dout_type")
Dropout = _struct("Dropout", "P mask step, L count, U seed, F rate")
Adam = _struct(
    "Adam",
    "P param moment1 moment2 grad decays low_at low scalars squares, L count, "
    "F beta1 beta2 epsilon weight_decay l2 clip_norm, I low_type",
)
Matmul = _struct(
    "Matmul",
    "P d a b bias, I a_type b_type d_type tf32 trans_a trans_b relu batch, L m n k lda ldb ldd, "
    "L a_batch_stride b_batch_stride d_batch_stride, F alpha beta",
)
Fill = _struct("Fill", "P out, L bytes")
Count = _struct("Count", "P counter")

STRUCTS = (
    Elementwise,
    Reduce,
    Squares,
    Rows,
    Copy2D,
    BiasGrad,
    Skinny,
    Pairs,
    Fields,
    Dots,
    Dropout,
    Adam,
    Matmul,
    Fill,
    Count,
)
"""In the order of `pw_struct_sizes`."""

Address = Callable[[View], int]


def _address(view: View | None, address: Address) -> int | None:
    return None if view is None else address(view)


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Fewest axes that describe the same elements of all arrays."""
    dims: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d, n in enumerate(shape):
        if n == 1:
            continue
        if dims and all(k[-1] == s[d] * n for k, s in zip(kept, strides, strict=True)):
            dims[-1] *= n
            for k, s in zip(kept, strides, strict=True):
                k[-1] = s[d]
        else:
            dims.append(n)
            for k, s in zip(kept, strides, strict=True):
                k.append(s[d])
    return dims, kept


def _set(array: Any, values: Sequence[int]) -> None:
    assert len(values) <= MAX_DIMS, "more axes than the kernels take"
    for i, v in enumerate(values):
        array[i] = v


def _elementwise(call: Call, address: Address) -> Any:
    (out,) = call.outs
    assert out is not None
    ins = [v.broadcast(out.shape) for v in call.ins if v is not None]
    e = Elementwise(
        op=FUNCTIONS.index(call.told["op"]), count=out.size, p=call.told.get("p", 0.0), q=call.told.get("q", 0.0)
    )
    assert out.size < 2**32
    e.out, e.out_type, e.num_in = address(out), TYPES[out.type], len(ins)
    shape, strides = _merged(out.shape, [out.strides, *(v.strides for v in ins)])
    e.dims = len(shape)
    _set(e.shape, shape)
    _set(e.out_stride, strides[0])
    for k, view in enumerate(ins):
        e.ins[k], e.in_type[k] = address(view), TYPES[view.type]
        _set(e.stride[k], strides[k + 1])
    return e


def _picked(values: Sequence[int], places: Sequence[int]) -> list[int]:
    return [values[d] for d in places]


def _reduce(call: Call, address: Address) -> Any:
    out, partial = call.outs
    assert out is not None
    assert out.contiguous
    ins = [v for v in call.ins if v is not None]
    axes = call.told["axes"]
    kept_axes = [d for d in range(len(ins[0].shape)) if d not in axes]
    kept, kept_strides = _merged(_picked(ins[0].shape, kept_axes), [_picked(v.strides, kept_axes) for v in ins])
    reduced, reduced_strides = _merged(_picked(ins[0].shape, axes), [_picked(v.strides, axes) for v in ins])
    r = Reduce(op=FUNCTIONS.index(call.told["op"]), largest=call.told.get("largest", 0), p=call.told.get("p", 0.0))
    r.q, r.by_warp, r.chunks = call.told.get("q", 0.0), call.told["by_warp"], call.told["chunks"]
    r.out, r.partial, r.out_type, r.num_in = address(out), _address(partial, address), TYPES[out.type], len(ins)
    r.kept_dims, r.reduced_dims, r.num_out = len(kept), len(reduced), out.size
    r.num_reduced = int(np.prod(reduced, dtype=np.int64))
    assert max(r.num_out, r.num_reduced) < 2**32
    _set(r.kept, kept)
    _set(r.reduced, reduced)
    for k, view in enumerate(ins):
        r.ins[k], r.in_type[k] = address(view), TYPES[view.type]
        _set(r.kept_stride[k], kept_strides[k])
        _set(r.reduced_stride[k], reduced_strides[k])
    return r


def how_to_reduce(view: View, axes: Sequence[int]) -> dict[str, int]:
    """Whether a warp or a thread makes an output, and in how many parts the long way is cut."""
    num_reduced = int(np.prod([view.shape[d] for d in axes], dtype=np.int64))
    num_out = view.size // max(num_reduced, 1)
    last = max((d for d in axes if view.shape[d] > 1), default=0)
    by_warp = int(num_reduced >= 16 and (view.strides[last] == 1 or num_out < 32))
    threads = max(1, num_out * (32 if by_warp else 1))
    chunks = max(1, min(131_072 // threads, num_reduced // (256 if by_warp else 64), 1024))
    return {"by_warp": by_warp, "chunks": chunks}


def _squares(call: Call, address: Address) -> Any:
    (out, partial), (source,) = call.outs, call.ins
    assert out is not None
    assert partial is not None
    assert source is not None
    assert source.contiguous
    return Squares(
        out=address(out), partial=address(partial), ins=address(source), count=source.size, blocks=partial.size
    )


def _rows(call: Call, address: Address) -> Any:
    """The values are [count, width], or [groups, group, width], or for single floats [groups, group]."""
    (out,) = call.outs
    first, index = call.ins
    assert out is not None
    assert first is not None
    assert index is not None
    values, table = (out, first) if call.kernel == "gather" else (first, out)
    assert table.type == F32
    width = table.shape[1]
    assert table.strides[1] == 1 or width == 1
    rank = len(values.shape) - (0 if width == 1 and values.shape[-1] != 1 else 1)
    lead, strides = values.shape[:rank], values.strides[:rank]
    assert rank in {1, 2}, values.shape
    assert rank == len(values.shape) or width == 1 or values.strides[-1] == 1
    assert int(np.prod(lead)) == index.size
    assert index.size * width < 2**32
    return Rows(
        out=address(out),
        table=address(first),
        index=address(index),
        value_type=TYPES[values.type],
        width=width,
        table_stride=table.strides[0],
        count=index.size,
        group=lead[1] if rank == 2 else max(index.size, 1),
        value_stride=strides[-1],
        group_stride=strides[0] if rank == 2 else 0,
        index_stride=index.strides[0],
        zero_is_none=call.told.get("zero_is_none", 0),
    )


def _copy2d(call: Call, address: Address) -> Any:
    (out,), (source,) = call.outs, call.ins
    assert out is not None
    assert source is not None
    return Copy2D(
        out=address(out),
        ins=address(source),
        out_type=TYPES[out.type],
        in_type=TYPES[source.type],
        rows=source.shape[0],
        columns=source.shape[1],
        fill=call.told["fill"],
        out_stride=out.strides[0],
        in_stride=source.strides[0],
    )


def _bias_grad(call: Call, address: Address) -> Any:
    dz, partial, db = call.outs
    dy, y = call.ins
    assert dy is not None
    b = BiasGrad(columns=dy.shape[1], fill=call.told["fill"], blocks=call.told["blocks"], rows=dy.shape[0])
    b.dz, b.dy, b.y = _address(dz, address), address(dy), _address(y, address)
    b.partial, b.db = _address(partial, address), _address(db, address)
    b.dy_type, b.dy_stride, b.dy_column_stride = TYPES[dy.type], dy.strides[0], dy.strides[1]
    if dz is not None:
        b.dz_type, b.dz_stride = TYPES[dz.type], dz.strides[0]
    if y is not None:
        b.y_type, b.y_stride = TYPES[y.type], y.strides[0]
    return b


def _skinny(call: Call, address: Address) -> Any:
    if call.kernel == "skinny":
        (y,), (x, w, bias), dy, partial, dw, db_partial, db = call.outs, call.ins, None, None, None, None, None
    else:
        (y, partial, dw, db_partial, db), (x, w, dy), bias = call.outs, call.ins, None
    assert x is not None
    assert w is not None
    s = Skinny(k=w.shape[0], n=w.shape[1], blocks=call.told.get("blocks", 1), relu_x=call.told.get("relu_x", 0))
    s.rows, s.x, s.w, s.bias = x.shape[0], address(x), address(w), _address(bias, address)
    s.y, s.dy, s.partial, s.dw, s.db_partial, s.db = (
        _address(v, address) for v in (y, dy, partial, dw, db_partial, db)
    )
    s.x_type, s.x_stride = TYPES[x.type], x.strides[0]
    if y is not None:
        s.y_type, s.y_stride = TYPES[y.type], y.strides[0]
    if dy is not None:
        s.dy_type, s.dy_stride = TYPES[dy.type], dy.strides[0]
    return s


def _pairs(call: Call, address: Address) -> Any:
    (out,), (e, dout, add) = call.outs, call.ins
    assert out is not None
    assert e is not None
    rows, fields, width = e.shape
    p = Pairs(out=address(out), e=address(e), rows=rows, fields=fields, width=width)
    p.dout, p.add = _address(dout, address), _address(add, address)
    if add is not None:
        p.add_stride, p.add_type = add.strides[0], TYPES[add.type]
    return p


FIELDS_WIDTHS = frozenset({4, 8, 16, 32, 64, 128})
"""Widths of an embedding that the kernels over fields take."""


TILES = (256, 512)
"""Rows of a field that a block of `fields_grad` adds up: the larger when there are enough rows for all of the GPU."""


def tile_of(rows: int) -> int:
    """The tile for so many rows."""
    return TILES[rows >= 16_384]


def _fields(call: Call, address: Address) -> Any:
    if call.kernel == "fields_lookup":
        (e, pairs, first, sums), (table, first_table, index) = call.outs, call.ins
        assert pairs is not None
        p = Fields(rows=pairs.size, pairs=address(pairs), first=_address(first, address), e=_address(e, address))
        if e is not None:
            p.e_stride, p.e_type = e.strides[0], TYPES[e.type]
    else:
        (table, first_table), (sums, values, dpairs, add, index, dfirst) = call.outs, call.ins
        p = Fields(rows=call.told["rows"], tile=call.told["tile"], add=_address(add, address))
        p.values, p.dpairs, p.dfirst = (_address(v, address) for v in (values, dpairs, dfirst))
        if values is not None:
            p.value_stride = values.strides[0]
        if add is not None:
            p.add_stride, p.add_type = add.strides[0], TYPES[add.type]
    assert table is not None
    assert index is not None
    p.width, p.fields = table.shape[1], index.size // max(p.rows, 1)
    assert p.width in FIELDS_WIDTHS
    p.sums, p.table, p.first_table = (_address(v, address) for v in (sums, table, first_table))
    p.index, p.table_stride = address(index), table.strides[0]
    return p


def _dots(call: Call, address: Address) -> Any:
    (out,), (v, dout) = call.outs, call.ins
    assert out is not None
    assert v is not None
    rows, vectors, width = v.shape
    d = Dots(out=address(out), v=address(v), rows=rows, vectors=vectors, width=width, out_stride=out.strides[0])
    d.out_type, d.dout = TYPES[out.type], _address(dout, address)
    if dout is not None:
        d.dout_stride, d.dout_type = dout.strides[0], TYPES[dout.type]
    return d


def _dropout(call: Call, address: Address) -> Any:
    (mask,), (step,) = call.outs, call.ins
    assert mask is not None
    assert step is not None
    return Dropout(
        mask=address(mask), step=address(step), count=mask.size, seed=call.told["seed"], rate=call.told["rate"]
    )


def _adam(call: Call, address: Address) -> Any:
    param, moment1, moment2, low = call.outs
    grad, decays, low_at, scalars, squares = call.ins
    assert param is not None
    a = Adam(param=address(param), count=param.size, **{k: v for k, v in call.told.items() if k != "low_type"})
    a.moment1, a.moment2, a.low = (_address(v, address) for v in (moment1, moment2, low))
    a.grad, a.decays, a.low_at, a.scalars, a.squares = (
        _address(v, address) for v in (grad, decays, low_at, scalars, squares)
    )
    a.low_type = TYPES[call.told["low_type"]]
    return a


def _matmul(call: Call, address: Address) -> Any:
    (d,), (a, b, bias) = call.outs, call.ins
    assert d is not None
    assert a is not None
    assert b is not None
    batch = d.shape[0] if len(d.shape) == 3 else 1
    told = call.told
    m = Matmul(d=address(d), a=address(a), b=address(b), bias=_address(bias, address), batch=batch, alpha=1.0)
    m.a_type, m.b_type, m.d_type = TYPES[a.type], TYPES[b.type], TYPES[d.type]
    m.tf32, m.trans_a, m.trans_b, m.relu = told["tf32"], told["trans_a"], told["trans_b"], told["relu"]
    m.m, m.n, m.k = told["m"], told["n"], told["k"]
    m.lda, m.ldb, m.ldd = told["lda"], told["ldb"], told["ldd"]
    if len(d.shape) == 3:
        m.a_batch_stride, m.b_batch_stride, m.d_batch_stride = a.strides[0], b.strides[0], d.strides[0]
    return m


def _fill(call: Call, address: Address) -> Any:
    (out,) = call.outs
    assert out is not None
    return Fill(out=address(out), bytes=out.size * BYTES[out.type])


def _count(call: Call, address: Address) -> Any:
    (out,) = call.outs
    assert out is not None
    return Count(counter=address(out))


ENCODERS: dict[str, Callable[[Call, Address], Any]] = {
    "elementwise": _elementwise,
    "reduce": _reduce,
    "squares": _squares,
    "gather": _rows,
    "scatter_add": _rows,
    "copy2d": _copy2d,
    "bias_grad": _bias_grad,
    "skinny": _skinny,
    "skinny_grad": _skinny,
    "fm_pairs": _pairs,
    "fm_pairs_grad": _pairs,
    "fields_lookup": _fields,
    "fields_grad": _fields,
    "dot_pairs": _dots,
    "dot_pairs_grad": _dots,
    "dropout": _dropout,
    "adam": _adam,
    "low_copies": _adam,
    "matmul": _matmul,
    "zero": _fill,
    "count": _count,
}
"""Every kernel of kernels.cu that takes part in a step."""


def encode(call: Call, address: Address) -> Any:
    """The struct that the kernel takes, with the addresses of its arrays."""
    return ENCODERS[call.kernel](call, address)
