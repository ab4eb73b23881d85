"""The structs that kernels take: mirrors of those in kernels.cu, field by field, and how a call fills them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import numpy as np

from paddlewheel.trainer.kernels.gpu import kernel_calls
from paddlewheel.trainer.kernels.gpu.kernel_calls import FIELDS_WIDTHS, FUNCTIONS, Call
from paddlewheel.trainer.kernels.gpu.views import BF16, BYTES, F16, F32, I32, View

TYPES = {F32: 0, BF16: 1, F16: 2, I32: 3}
MAX_DIMS = 6

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


def _optional(view: View | None, address: Address) -> int | None:
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


@singledispatch
def encode(call: Call, address: Address) -> Any:
    """The struct that the kernel takes, with the addresses of its arrays."""
    raise NotImplementedError(type(call))


@encode.register
def _(call: kernel_calls.Elementwise, address: Address) -> Any:
    out = call.out
    ins = [view.broadcast(out.shape) for view in call.operands]
    assert out.size < 2**32
    e = Elementwise(op=FUNCTIONS.index(call.function), count=out.size, p=call.p, q=call.q)
    e.out, e.out_type, e.num_in = address(out), TYPES[out.type], len(ins)
    shape, strides = _merged(out.shape, [out.strides, *(v.strides for v in ins)])
    e.dims = len(shape)
    _set(e.shape, shape)
    _set(e.out_stride, strides[0])
    for k, view in enumerate(ins):
        e.ins[k], e.in_type[k] = address(view), TYPES[view.type]
        _set(e.stride[k], strides[k + 1])
    return e


def _chosen(values: Sequence[int], axes: Sequence[int]) -> list[int]:
    return [values[d] for d in axes]


@encode.register
def _(call: kernel_calls.Reduce, address: Address) -> Any:
    out, ins = call.out, call.operands
    assert out.contiguous
    shape = ins[0].shape
    kept_axes = [d for d in range(len(shape)) if d not in call.axes]
    kept, kept_strides = _merged(_chosen(shape, kept_axes), [_chosen(v.strides, kept_axes) for v in ins])
    reduced, reduced_strides = _merged(_chosen(shape, call.axes), [_chosen(v.strides, call.axes) for v in ins])
    r = Reduce(op=FUNCTIONS.index(call.function), largest=call.largest)
    r.by_warp, r.chunks = call.by_warp, call.chunks
    r.out, r.partial, r.out_type = address(out), _optional(call.partial, address), TYPES[out.type]
    r.kept_dims, r.reduced_dims, r.num_out, r.num_in = len(kept), len(reduced), out.size, len(ins)
    r.num_reduced = int(np.prod(reduced, dtype=np.int64))
    assert max(r.num_out, r.num_reduced) < 2**32
    _set(r.kept, kept)
    _set(r.reduced, reduced)
    for k, view in enumerate(ins):
        r.ins[k], r.in_type[k] = address(view), TYPES[view.type]
        _set(r.kept_stride[k], kept_strides[k])
        _set(r.reduced_stride[k], reduced_strides[k])
    return r


@encode.register
def _(call: kernel_calls.Squares, address: Address) -> Any:
    source, partial = call.source, call.partial
    assert source.contiguous
    return Squares(
        out=address(call.out), partial=address(partial), ins=address(source), count=source.size, blocks=partial.size
    )


def _rows(out: View, source: View, index: View, table: View, values: View, address: Address) -> Any:
    """The values are [count, width], or [groups, group, width], or for single floats [groups, group]."""
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
        table=address(source),
        index=address(index),
        value_type=TYPES[values.type],
        width=width,
        table_stride=table.strides[0],
        count=index.size,
        group=lead[1] if rank == 2 else max(index.size, 1),
        value_stride=strides[-1],
        group_stride=strides[0] if rank == 2 else 0,
        index_stride=index.strides[0],
    )


@encode.register
def _(call: kernel_calls.Gather, address: Address) -> Any:
    return _rows(call.out, call.table, call.index, call.table, call.out, address)


@encode.register
def _(call: kernel_calls.ScatterAdd, address: Address) -> Any:
    r = _rows(call.table, call.values, call.index, call.table, call.values, address)
    r.zero_is_none = call.zero_is_none
    return r


@encode.register
def _(call: kernel_calls.Copy2D, address: Address) -> Any:
    out, source = call.out, call.source
    return Copy2D(
        out=address(out),
        ins=address(source),
        out_type=TYPES[out.type],
        in_type=TYPES[source.type],
        rows=source.shape[0],
        columns=source.shape[1],
        fill=call.fill,
        out_stride=out.strides[0],
        in_stride=source.strides[0],
    )


@encode.register
def _(call: kernel_calls.BiasGrad, address: Address) -> Any:
    dz, dy, y = call.dz, call.dy, call.y
    b = BiasGrad(columns=dy.shape[1], fill=call.fill, blocks=call.blocks, rows=dy.shape[0])
    b.dz, b.dy, b.y = _optional(dz, address), address(dy), _optional(y, address)
    b.partial, b.db = _optional(call.partial, address), _optional(call.db, address)
    b.dy_type, b.dy_stride, b.dy_column_stride = TYPES[dy.type], dy.strides[0], dy.strides[1]
    if dz is not None:
        b.dz_type, b.dz_stride = TYPES[dz.type], dz.strides[0]
    if y is not None:
        b.y_type, b.y_stride = TYPES[y.type], y.strides[0]
    return b


def _skinny(x: View, w: View, y: View | None, address: Address) -> Any:
    s = Skinny(k=w.shape[0], n=w.shape[1], blocks=1, rows=x.shape[0], x=address(x), w=address(w))
    s.x_type, s.x_stride = TYPES[x.type], x.strides[0]
    if y is not None:
        s.y, s.y_type, s.y_stride = address(y), TYPES[y.type], y.strides[0]
    return s


@encode.register
def _(call: kernel_calls.Skinny, address: Address) -> Any:
    s = _skinny(call.x, call.w, call.y, address)
    s.bias = _optional(call.bias, address)
    return s


@encode.register
def _(call: kernel_calls.SkinnyGrad, address: Address) -> Any:
    s = _skinny(call.x, call.w, call.dx, address)
    s.blocks, s.relu_x = call.blocks, call.relu_x
    s.dy, s.dy_type, s.dy_stride = address(call.dy), TYPES[call.dy.type], call.dy.strides[0]
    s.partial, s.dw = address(call.dw_partial), address(call.dw)
    s.db_partial, s.db = _optional(call.db_partial, address), _optional(call.db, address)
    return s


def _pairs(out: View, e: View, address: Address) -> Any:
    rows, fields, width = e.shape
    return Pairs(out=address(out), e=address(e), rows=rows, fields=fields, width=width)


@encode.register
def _(call: kernel_calls.FmPairs, address: Address) -> Any:
    return _pairs(call.out, call.e, address)


@encode.register
def _(call: kernel_calls.FmPairsGrad, address: Address) -> Any:
    p = _pairs(call.out, call.e, address)
    p.dout = address(call.dout)
    if call.add is not None:
        p.add, p.add_stride, p.add_type = address(call.add), call.add.strides[0], TYPES[call.add.type]
    return p


def _fields(call: kernel_calls.FieldsLookup | kernel_calls.FieldsGrad, rows: int, address: Address) -> Any:
    table, index = call.table, call.index
    width = table.shape[1]
    assert width in FIELDS_WIDTHS
    return Fields(
        rows=rows,
        width=width,
        fields=index.size // max(rows, 1),
        sums=_optional(call.sums, address),
        table=address(table),
        table_stride=table.strides[0],
        index=address(index),
    )


@encode.register
def _(call: kernel_calls.FieldsLookup, address: Address) -> Any:
    p = _fields(call, call.pairs.size, address)
    p.pairs, p.first, p.first_table = (_optional(v, address) for v in (call.pairs, call.first, call.first_table))
    if call.e is not None:
        p.e, p.e_stride, p.e_type = address(call.e), call.e.strides[0], TYPES[call.e.type]
    return p


@encode.register
def _(call: kernel_calls.FieldsGrad, address: Address) -> Any:
    p = _fields(call, call.rows, address)
    p.tile, p.first_table = call.tile, _optional(call.first, address)
    p.dpairs, p.dfirst = _optional(call.dpairs, address), _optional(call.dfirst, address)
    if call.values is not None:
        p.values, p.value_stride = address(call.values), call.values.strides[0]
    if call.add is not None:
        p.add, p.add_stride, p.add_type = address(call.add), call.add.strides[0], TYPES[call.add.type]
    return p


def _dots(out: View, v: View, address: Address) -> Any:
    rows, vectors, width = v.shape
    d = Dots(out=address(out), v=address(v), rows=rows, vectors=vectors, width=width, out_stride=out.strides[0])
    d.out_type = TYPES[out.type]
    return d


@encode.register
def _(call: kernel_calls.DotPairs, address: Address) -> Any:
    return _dots(call.out, call.v, address)


@encode.register
def _(call: kernel_calls.DotPairsGrad, address: Address) -> Any:
    d = _dots(call.out, call.v, address)
    d.dout, d.dout_stride, d.dout_type = address(call.dout), call.dout.strides[0], TYPES[call.dout.type]
    return d


@encode.register
def _(call: kernel_calls.Dropout, address: Address) -> Any:
    return Dropout(
        mask=address(call.mask), step=address(call.step), count=call.mask.size, seed=call.seed, rate=call.rate
    )


@encode.register
def _(call: kernel_calls.Adam, address: Address) -> Any:
    a = Adam(param=address(call.param), count=call.param.size, **vars(call.settings))
    a.moment1, a.moment2, a.low = address(call.moment1), address(call.moment2), address(call.low)
    a.grad, a.decays, a.low_at, a.scalars = (address(v) for v in (call.grad, call.decays, call.low_at, call.scalars))
    a.squares, a.low_type = _optional(call.squares, address), TYPES[call.low.type]
    return a


@encode.register
def _(call: kernel_calls.Matmul, address: Address) -> Any:
    d, a, b = call.out, call.a, call.b
    m = Matmul(d=address(d), a=address(a), b=address(b), bias=_optional(call.bias, address), batch=1, alpha=1.0)
    m.a_type, m.b_type, m.d_type = TYPES[a.type], TYPES[b.type], TYPES[d.type]
    m.tf32, m.trans_a, m.trans_b, m.relu = call.tf32, call.trans_a, call.trans_b, call.relu
    m.m, m.n, m.k = call.sizes
    m.lda, m.ldb, m.ldd = a.strides[-2], b.strides[-2], d.strides[-2]
    if len(d.shape) == 3:
        m.batch = d.shape[0]
        m.a_batch_stride, m.b_batch_stride, m.d_batch_stride = a.strides[0], b.strides[0], d.strides[0]
    return m


@encode.register
def _(call: kernel_calls.Zero, address: Address) -> Any:
    return Fill(out=address(call.out), bytes=call.out.size * BYTES[call.out.type])


@encode.register
def _(call: kernel_calls.Count, address: Address) -> Any:
    return Count(counter=address(call.counter))
