"""Rows by index: lookups in tables, gradients added to their rows, and pairs of what was looked up.

The gradients of a table's rows are added in place. Where embeddings are looked up for FM pairs, one call makes both,
with the sum of the first-order weights, and one call adds their gradients.
"""

from __future__ import annotations

from paddlewheel.trainer.kernels.gpu.context import Context, lowers
from paddlewheel.trainer.kernels.gpu.deferred import DotProducts, Lookup, PairsEmbeddings, PairsGradient
from paddlewheel.trainer.kernels.gpu.emitter import LookupDraft
from paddlewheel.trainer.kernels.gpu.graph import Op
from paddlewheel.trainer.kernels.gpu.kernel_calls import (
    FIELDS_WIDTHS,
    DotPairsGrad,
    FieldsGrad,
    FmPairs,
    Gather,
    ScatterAdd,
    tile_of,
)
from paddlewheel.trainer.kernels.gpu.views import View, temporary


@lowers("pw_padded_rows")
def _padded_rows(c: Context, op: Op) -> None:
    rows = c.read(op, "X")
    count, width = rows.shape
    c.write(op, "Out", View(rows.buffer, rows.offset - width, (count + 1, width), rows.strides))


@lowers("gather")
def _gather(c: Context, op: Op) -> None:
    table, index = c.read(op, "X"), c.read(op, "Index")
    index = c.emit.shaped(index, (index.size,))
    out = temporary((index.size, table.shape[1]))
    found = _embeddings_of_pairs(c, op, table)
    if found is None:
        c.values.set(op.result(), out, Lookup(table, index))
        return
    name, num_fields = found
    lookup = LookupDraft(temporary((index.size // num_fields, 1)), table, index)
    c.emit.add(lookup)
    c.lookups[name] = lookup
    c.values.set(op.result(), out, PairsEmbeddings(lookup))


def _embeddings_of_pairs(c: Context, op: Op, table: View) -> tuple[str, int] | None:
    """The variable that FM pairs read of this lookup, and its fields, if one call can make both."""
    shaped = [reader for reader in c.uses.readers(op.result()) if reader.type == "reshape2"]
    if len(shaped) != 1 or table.shape[1] not in FIELDS_WIDTHS:
        return None
    name, shape = shaped[0].result(), shaped[0].attrs["shape"]
    if len(shape) != 3 or not any(reader.type == "pw_fm_pairs" for reader in c.uses.readers(name)):
        return None
    return name, shape[1]


@lowers("gather_grad")
def _gather_grad(c: Context, op: Op) -> None:
    x, index, dy = c.read(op, "X"), c.read(op, "Index"), c.read(op, "Out@GRAD")
    out = c.emit.zeros(x.shape)
    dy = c.emit.dense(dy)
    c.emit.add(ScatterAdd(out, dy, c.emit.shaped(index, (index.size,))))
    c.write(op, "X@GRAD", out)


@lowers("index_select")
def _index_select(c: Context, op: Op) -> None:
    """Columns by a constant index: rows of the transpose."""
    x, index = c.read(op, "X"), c.read(op, "Index")
    assert op.attrs["dim"] == 1
    transposed = c.emit.dense(x.permuted([1, 0]))
    out = temporary((index.size, x.shape[0]))
    c.emit.add(Gather(out, transposed, index))
    c.write(op, "Out", out.permuted([1, 0]))


@lowers("index_select_grad")
def _index_select_grad(c: Context, op: Op) -> None:
    x, index, dy = c.read(op, "X"), c.read(op, "Index"), c.read(op, "Out@GRAD")
    out = c.emit.zeros((x.shape[1], x.shape[0]))
    c.emit.add(ScatterAdd(out, c.emit.dense(dy.permuted([1, 0])), index))
    c.write(op, "X@GRAD", out.permuted([1, 0]))


@lowers("pw_scatter_rows")
def _scatter_rows(c: Context, op: Op) -> None:
    grads = c.values.read(op.result("Rows@GRAD"))
    count, width = grads.shape
    whole = View(grads.buffer, grads.offset - grads.strides[0], (count + 1, width), grads.strides)
    start, stop = op.attrs["starts"], width if op.attrs["ends"] is None else min(op.attrs["ends"], width)
    index = c.read(op, "Index")
    index, table = c.emit.shaped(index, (index.size,)), whole.slice(1, start, stop)
    name = op.one("Out@GRAD")
    values = c.unshaped.get(name)
    if values is None:
        if _scatter_with_pairs(c, name, table, index):
            return
        values = c.emit.with_dense_rows(c.emit.shaped(c.values.read(name), (index.size, stop - start)))
    by_rows = _by_rows(c, values, index)
    if by_rows is not None and _fits_fields(table):
        rows = by_rows.shape[0]
        c.emit.add(FieldsGrad(table, None, None, None, None, by_rows, index, None, rows, tile_of(rows)))
    else:
        c.emit.add(ScatterAdd(table, values, index, zero_is_none=True))


def _scatter_with_pairs(c: Context, name: str, table: View, index: View) -> bool:
    """The gradient of FM pairs that a lookup made, added to the rows at once. False: it is none, or does not fit."""
    view = c.values.peek(name)
    work = c.values.deferred(view)
    if not isinstance(work, PairsGradient) or not _fits_fields(table):
        return False
    lookup = work.lookup
    if lookup is None or lookup.index != index:
        return False
    c.values.take(view)
    assert lookup.sums is None
    rows = lookup.pairs.shape[0]
    lookup.sums = temporary((rows, table.shape[1]))
    c.emit.add(
        FieldsGrad(table, None, lookup.sums, lookup.table, work.dout, work.add, index, None, rows, tile_of(rows))
    )
    return True


def _by_rows(c: Context, values: View, index: View) -> View | None:
    """Vectors by index as [rows, fields * width], where four elements at a time can be read."""
    feeds, shape = c.layout.feeds, values.shape[:-1]
    if len(shape) == 1:
        of_index = (v.shape for v in feeds.views.values() if v.offset == index.offset and v.size == index.size)
        shape = next(of_index, shape)
    if len(shape) != 2 or values.shape[-1] == 1 or index.buffer is not feeds.buffer:
        return None
    found = values.with_shape((shape[0], shape[1] * values.shape[-1]))
    return found if found is not None and _in_fours(found) and found.strides[1] == 1 else None


def _in_fours(matrix: View) -> bool:
    """Whether every row begins at a multiple of four elements."""
    return matrix.strides[0] % 4 == 0 and matrix.offset % 4 == 0


def _fits_fields(table: View) -> bool:
    return table.shape[1] in FIELDS_WIDTHS and _in_fours(table)


@lowers("pw_fm_pairs")
def _fm_pairs(c: Context, op: Op) -> None:
    lookup = c.lookups.get(op.one("E"))
    if lookup is not None:
        c.write(op, "Out", lookup.pairs)
        return
    e = c.emit.dense(c.read(op, "E"))
    out = temporary((e.shape[0], 1))
    c.emit.add(FmPairs(out, e))
    c.write(op, "Out", out)


@lowers("pw_fm_pairs_grad")
def _fm_pairs_grad(c: Context, op: Op) -> None:
    name = op.one("E")
    lookup = c.lookups.get(name)
    e = c.emit.dense(c.values.read(name)) if lookup is None else c.values.peek(name)
    dout = c.emit.dense(c.read(op, "Out@GRAD"))
    rows, fields, width = e.shape
    add = None
    if "Add" in op.ins:
        more = c.read(op, "Add")
        add = more.with_shape((rows, fields * width))
        if add is None or add.strides[1] != 1 or not _in_fours(add):
            add = c.emit.shaped(c.emit.map("copy", more, kind=more.type), (rows, fields * width))
    c.values.set(op.result("E@GRAD"), temporary(e.shape), PairsGradient(e, lookup, dout, add))


@lowers("pw_dot_pairs")
def _dot_pairs(c: Context, op: Op) -> None:
    v = c.emit.dense(c.read(op, "E"))
    out = temporary((v.shape[0], v.shape[1] * (v.shape[1] - 1) // 2))
    c.values.set(op.result(), out, DotProducts(v))


@lowers("pw_dot_pairs_grad")
def _dot_pairs_grad(c: Context, op: Op) -> None:
    v, dout = c.emit.dense(c.read(op, "E")), c.read(op, "Out@GRAD")
    out = temporary(v.shape)
    c.emit.add(DotPairsGrad(out, v, dout if dout.strides[1] == 1 else c.emit.dense(dout)))
    c.write(op, "E@GRAD", c.emit.map("add", out, c.read(op, "Add")) if "Add" in op.ins else out)
