"""From operators and shapes to kernel calls.

Reshapes, slices, transposes, broadcasts and the gradients of sums are views: they cost nothing. What has no kernel
of its own
(softmax, layer normalisation, a GRU ...) becomes a few element-wise calls, reductions and matrix products.

Matrix products by parameters take their operands in the low type, from copies whose rows are padded to 16 bytes; the
optimizer
writes the parameters' copies. All other arithmetic is float32.

Legend: M rows, K inputs, N outputs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.trainer.kernels.gpu import fusion
from paddlewheel.trainer.kernels.gpu.graph import EMPTY, Graph, Op
from paddlewheel.trainer.kernels.gpu.kernel_calls import (
    BYTES,
    F32,
    FIELDS_WIDTHS,
    I32,
    Buffer,
    Call,
    View,
    how_to_reduce,
    row_major,
    tile_of,
)

Shape = tuple[int, ...]

TAIL = 16
"""Floats behind the flat gradient: the summed loss, the summed weight, and what a step adds to them."""


class UnsupportedError(ValueError):
    """A program has an operator that the GPU side does not know."""


def padded(count: int, kind: str) -> int:
    """Elements of a row in the low type, padded to 16 bytes."""
    step = 16 // BYTES[kind]
    return -(-count // step) * step


@dataclass(frozen=True)
class Feeds:
    """Where the inputs of a batch lie in one buffer. A table's rows follow a row of zeros."""

    buffer: Buffer
    views: Mapping[str, View]

    @classmethod
    def layout(cls, kinds: Mapping[str, str], shapes: Mapping[str, Shape]) -> Feeds:
        """One after the other, each on a border of 256 bytes; the scalars of the optimizer come first."""
        buffer, views, at = Buffer(0, "feed"), {}, 256
        for name, kind in kinds.items():
            shape = tuple(shapes[name])
            before = shape[1] if name.endswith("/rows") else 0
            views[name] = View(buffer, at // 4 + before, shape, row_major(shape), kind)
            at += -(-(before + int(np.prod(shape, dtype=np.int64))) * 4 // 256) * 256
        buffer.nbytes = at
        return cls(buffer, views)


@dataclass
class Memory:
    """The buffers that outlive a step: parameters, their copies in the low type, gradients, constants, the step's
    number.
    """

    graph: Graph
    low: str
    param: Buffer = field(init=False)
    copies: Buffer = field(init=False)
    grad: Buffer = field(init=False)
    const: Buffer = field(init=False)
    step: Buffer = field(init=False)
    constants: list[np.ndarray[Any, Any]] = field(default_factory=list)
    low_views: dict[str, View] = field(default_factory=dict)
    at: dict[str, int] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        size, self.at = 0, {}
        for p in self.graph.parameters:  # each on a border of 32 bytes, as matrix products like it
            self.at[p.variable] = size
            size += -(-p.size // 8) * 8
        self.size = size
        self.param, self.grad = Buffer(4 * size, "param"), Buffer(4 * (size + TAIL), "grad")
        self.copies, self.const, self.step = Buffer(0, "low"), Buffer(1 << 20, "const"), Buffer(4, "step")
        at = 0
        for p in self.graph.parameters:
            if len(p.shape) > 2:
                continue
            rows, columns = (1, p.shape[0]) if len(p.shape) == 1 else p.shape
            width = padded(columns, self.low)
            shape, strides = ((columns,), (1,)) if len(p.shape) == 1 else ((rows, columns), (width, 1))
            self.low_views[p.variable] = View(self.copies, at, shape, strides, self.low)
            at += padded(rows, self.low) * width if len(p.shape) > 1 else -(-width // 8) * 8
        self.copies.nbytes = at * BYTES[self.low]

    def parameter(self, variable: str) -> View:
        """The float32 parameter."""
        p = next(p for p in self.graph.parameters if p.variable == variable)
        return View(self.param, self.at[variable], p.shape, row_major(p.shape))

    def low_places(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Where each float of the flat parameters has its copy."""
        places = np.full(self.size, -1, np.int32)
        for p in self.graph.parameters:
            view = self.low_views.get(p.variable)
            if view is not None:
                grid = np.full(p.shape, view.offset)
                for axis, stride in enumerate(view.strides):
                    grid += (np.arange(p.shape[axis]) * stride).reshape(
                        [-1 if a == axis else 1 for a in range(len(p.shape))]
                    )
                start = self.at[p.variable]
                places[start : start + p.size] = grid.ravel()
        return places

    def spread(self, flat_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """From the flat array of the interface to the one in the GPU's memory, where gaps hold zeros."""
        found = np.zeros(self.size, np.float32)
        for p in self.graph.parameters:
            found[self.at[p.variable] : self.at[p.variable] + p.size] = flat_N[p.offset : p.offset + p.size]
        return found

    def joined(self, spread: NDArray[np.float32]) -> NDArray[np.float32]:
        """The way back; what follows the parameters (loss, weight) stays at the end."""
        parts = [spread[self.at[p.variable] : self.at[p.variable] + p.size] for p in self.graph.parameters]
        return np.concatenate([*parts, spread[self.size :]])

    def constant(self, values: Any, kind: str) -> View:
        """A constant array, in the buffer of constants."""
        array = np.asarray(values, np.int32 if kind == I32 else np.float32)
        at = 0
        for known in self.constants:
            if known.dtype == array.dtype and known.shape == array.shape and np.array_equal(known, array):
                break
            at += -(-known.nbytes // 16) * 16
        else:
            assert at + array.nbytes <= self.const.nbytes, "constants"
            self.constants.append(array)
        return View(self.const, at // 4, array.shape, row_major(array.shape), kind)


@dataclass(frozen=True)
class Lowered:
    """A program for one set of shapes.

    Attributes:
        calls: in order.
        feeds: where a batch's arrays go.
        out: everything that the host reads: see `status`, `outputs`.
        status: float32 [2 + tables]: sums of squares of the flat gradient and of each table's gradient.
        outputs: views in `out`, by the graph's names.
    """

    calls: Sequence[Call]
    feeds: Feeds
    out: Buffer
    status: View | None
    outputs: Mapping[str, View]


class _Environment(dict[str, View]):
    """Variables' arrays. One that was not computed yet, because its reader may have a place for it, is computed when
    read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, Callable[[View], None]] = {}

    def __getitem__(self, name: str) -> View:
        view = super().__getitem__(name)
        self.compute(view)
        return view

    def unread(self, name: str) -> View:
        """The array as planned; it may be that nobody computes it."""
        return super().__getitem__(name)

    def compute(self, view: View) -> None:
        """Into the array itself."""
        make = self.waiting.pop(id(view.buffer), None)
        if make is not None:
            make(view)


@dataclass(frozen=True)
class _Pairs:
    """FM pairs that a lookup makes, [rows, 1], and what it looks up."""

    out: View
    table: View
    index: View


class Lowering:
    """Makes a `Lowered`. One for each set of shapes.

    Args:
        graph: after `fuse.fused`.
        memory: of the same graph's parameters.
        shapes: of the feeds.
        tf32: whether float32 matrix products may round their inputs to TF32.
        loss_scale: a float32 that the loss's gradient starts with, and its inverse behind it, in device memory;
        None: 1.
            The gradients of parameters come out unscaled, those of tables do not.
        seed: of dropout.
    """

    def __init__(
        self,
        graph: Graph,
        memory: Memory,
        shapes: Mapping[str, Shape],
        *,
        tf32: bool = True,
        seed: int = 0,
        loss_scale: View | None = None,
    ) -> None:
        self.graph, self.memory, self.tf32, self.seed = graph, memory, tf32, seed
        self.low = memory.low
        self.loss_scale = loss_scale
        self.feeds = Feeds.layout(graph.feeds, shapes)
        self.env = _Environment()
        self.env.update(self.feeds.views)
        self.env.update({p.variable: memory.parameter(p.variable) for p in graph.parameters})
        self.host: dict[str, list[int]] = {}
        self.shapes: dict[str, Shape] = {}
        self.calls: list[Call] = []
        self.readers = graph.consumers()
        self.lows: dict[tuple[Any, ...], View] = {}
        self.homes: dict[str, View] = {}
        self.unshaped: dict[str, View] = {}
        self.lookups: dict[int, tuple[View, View]] = {}  # table and index of rows that may never be written
        self.pairs: dict[str, _Pairs] = {}  # by the embeddings: what their lookup made already
        self.pairs_grads: dict[int, tuple[_Pairs, View, View | None]] = {}  # by the buffer that may never be written
        self.clean: set[int] = set()  # buffers of matrices whose padding is zero
        self.masked: dict[str, View | None] = {}  # gradients that passed the ReLU before them, with their sums
        self.dropouts = 0

    # ------------------------------------------------------------------------------------------------------- the whole

    def run(self) -> Lowered:
        """All calls of the program."""
        tables = [(what, name) for what, name in self.graph.outputs.items() if what.startswith("rows/")]
        logit = self.graph.outputs["logit"]
        self.out, outputs = Buffer(256, "out"), {}
        for what, name in tables:
            feed = self.feeds.views[name.removesuffix("@GRAD")]
            outputs[what] = self._reserve(feed.shape)
            if any(op.type == "pw_scatter_rows" and op.outs["Rows@GRAD"] == (name,) for op in self.graph.ops):
                self._sums_of_rows(name, feed.shape)
        self._home_gradients()
        for op in self.graph.ops:
            handler: Callable[[Op], None] | None = getattr(self, f"op_{op.type}", None)
            if handler is None:
                raise UnsupportedError(
                    f"the model's program has the operator {op.type!r}, which has no GPU kernel here: train it with "
                    "`--set train.device=cpu`"
                )
            handler(op)
        for what, name in tables:
            self._copy_into(outputs[what], self.env[name])
        logits = self.env[logit]
        kept = self._reserve(logits.shape)
        self._map("copy", [logits], kept)
        outputs["logit"] = kept
        status = None
        if "flat" in self.graph.outputs:
            flat = self.env[self.graph.outputs["flat"]]
            outputs["flat"] = flat
            status = View(self.out, 0, (3 + len(tables),), (1,))
            self._map("copy", [flat.cut(0, flat.size - 2, flat.size)], status.cut(0, 0, 2))
            if self.loss_scale is not None:
                inverse = replace(self.loss_scale, offset=self.loss_scale.offset + 1)
                self._map("mul", [flat.cut(0, 0, flat.size - 2), inverse], flat.cut(0, 0, flat.size - 2))
            arrays = [flat.cut(0, 0, flat.size - 2), *(outputs[what] for what, _ in tables)]
            for at, array in enumerate(arrays):
                partial = self._new((max(1, min(264, array.size // 2048)),))
                self.calls.append(Call("squares", (status.cut(0, 2 + at, 3 + at), partial), (array,)))
        return Lowered(self.calls, self.feeds, self.out, status, outputs)

    def _sums_of_rows(self, name: str, shape: Shape) -> None:
        """Zeros that rows' gradients are added to: padded so that vectors behind a first-order weight begin at 16
        bytes.
        """
        starts = {
            op.attrs["starts"]
            for op in self.graph.ops
            if op.type == "pw_scatter_rows" and op.outs["Rows@GRAD"] == (name,)
        }
        before = 3 if 1 in starts else 0
        width = -(-(before + shape[1]) // 4) * 4
        whole = self._zeros((shape[0] + 1, width))
        self.env[name] = whole.cut(1, before, before + shape[1]).cut(0, 1, shape[0] + 1)

    def _reserve(self, shape: Shape) -> View:
        """An array in the buffer that the host reads."""
        view = View(self.out, self.out.nbytes // 4, shape, row_major(shape))
        self.out.nbytes += -(-view.size * 4 // 256) * 256
        return view

    def _home_gradients(self) -> None:
        """Gradients of parameters are written where the flat array has them."""
        if "flat" not in self.graph.outputs:
            return
        flat = self.graph.outputs["flat"]
        size = self.memory.grad.nbytes // 4 - TAIL + 2
        whole = View(self.memory.grad, 0, (size,), (1,))
        makers = {op.outs["Out"][0]: op for op in self.graph.ops if op.type in {"concat", "reshape2"}}
        homes = [(self.memory.at[p.variable], p.size) for p in self.graph.parameters] + [(size - 2, 1), (size - 1, 1)]
        for name, (at, count) in zip(makers[flat].ins["X"], homes, strict=True):
            source = makers[name].one("X") if name in makers and makers[name].type == "reshape2" else name
            self.homes[source] = whole.cut(0, at, at + count)
        self.flat, self.whole = flat, whole

    # ------------------------------------------------------------------------------------------------------- the pieces

    def _new(self, shape: Sequence[int], kind: str = F32) -> View:
        shape = tuple(shape)
        return View(Buffer(int(np.prod(shape, dtype=np.int64)) * BYTES[kind]), 0, shape, row_major(shape), kind)

    def _map(
        self, op: str, ins: Sequence[View], out: View | None = None, *, p: float = 0.0, q: float = 0.0, kind: str = F32
    ) -> View:
        if out is None:
            out = self._new(np.broadcast_shapes(*(v.shape for v in ins)), kind)
        self.calls.append(Call("elementwise", (out,), tuple(ins), {"op": op, "p": p, "q": q}))
        return out

    def _reduce(
        self,
        op: str,
        ins: Sequence[View],
        axes: Sequence[int],
        out: View | None = None,
        *,
        largest: bool = False,
        p: float = 0.0,
        q: float = 0.0,
    ) -> View:
        """Sum (or maximum) of an element-wise function over axes, without them."""
        shape = np.broadcast_shapes(*(v.shape for v in ins))
        ins = [v.broadcast(shape) for v in ins]
        axes = sorted({a % len(shape) for a in axes})
        kept = tuple(n for a, n in enumerate(shape) if a not in axes)
        if out is None:
            if op == "copy" and ins[0].size == math.prod(kept) and ins[0].type == F32:
                return self._shaped(ins[0], kept)
            out = self._new(kept)
        how = how_to_reduce(ins[0], axes)
        partial = self._new((how["chunks"], max(1, out.size))) if how["chunks"] > 1 else None
        told = {"op": op, "axes": axes, "largest": int(largest), "p": p, "q": q, **how}
        self.calls.append(Call("reduce", (out.with_shape((out.size,)), partial), tuple(ins), told))
        return out

    def _reduced_to(self, shape: Shape, op: str, ins: Sequence[View], *, p: float = 0.0) -> View:
        """The gradient of broadcasting: summed over the axes that were repeated."""
        whole = np.broadcast_shapes(*(v.shape for v in ins))
        more = len(whole) - len(shape)
        axes = [a for a in range(len(whole)) if a < more or (shape[a - more] == 1 and whole[a] != 1)]
        if not axes:
            return ins[0] if op == "copy" else self._map(op, ins, p=p)
        return self._shaped(self._reduce(op, ins, axes, p=p), shape)

    def _dense(self, view: View) -> View:
        return view if view.contiguous else self._map("copy", [view], kind=view.type)

    def _shaped(self, view: View, shape: Sequence[int]) -> View:
        found = view.with_shape(shape)
        if found is None:
            found = self._dense(view).with_shape(shape)
        assert found is not None
        return found

    def _scalar(self, value: float, kind: str = F32) -> View:
        return self.memory.constant(value, kind)

    def _set(self, op: Op, slot: str, view: View) -> None:
        name = op.out(slot)
        if name is not None:
            self.env[name] = view

    def _in(self, op: Op, slot: str) -> View:
        return self.env[op.one(slot)]

    def _as_low(self, view: View) -> View:
        """A matrix with its rows padded, in the low type."""
        step = 16 // BYTES[self.low]
        if view.type == self.low and view.strides[1] == 1 and view.strides[0] % step == view.offset % step == 0:
            return view
        key = (id(view.buffer), view.offset, view.shape, view.strides)
        if key not in self.lows:
            self.lows[key] = self._low_matrix(view.shape[0], view.shape[1])
            self._copy_into(self.lows[key], view, fill=self.lows[key].strides[0] - view.shape[1])
            self.clean.add(id(self.lows[key].buffer))
        return self.lows[key]

    def _padded(self, view: View) -> View:
        """A matrix in the low type with its columns of padding, where they are zeros."""
        width = padded(view.shape[1], self.low)
        if width == view.strides[0] and (id(view.buffer) in self.clean or view.buffer is self.memory.copies):
            return replace(view, shape=(view.shape[0], width))
        return view

    def _low_matrix(self, rows: int, columns: int) -> View:
        width = padded(columns, self.low)
        return replace(self._new((rows, width), self.low), shape=(rows, columns))

    def _copy_into(self, out: View, view: View, fill: int = 0) -> None:
        if view.shape[1] > 1 and view.strides[1] != 1:
            view = self._dense(view)
        self.calls.append(Call("copy2d", (out,), (view,), {"fill": fill}))

    def _matmul(
        self,
        a: View,
        b: View,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        bias: View | None = None,
        relu: bool = False,
        out: View | None = None,
        kind: str = F32,
    ) -> View:
        """Of matrices, or of as many in both."""
        m, k = a.shape[-2:][::-1] if trans_a else a.shape[-2:]
        k2, n = b.shape[-2:][::-1] if trans_b else b.shape[-2:]
        assert k == k2, (a.shape, b.shape)
        if out is None:
            out = self._new((*a.shape[:-2], m, n), kind)
        told = {
            "m": m,
            "n": n,
            "k": k,
            "trans_a": int(trans_a),
            "trans_b": int(trans_b),
            "relu": int(relu),
            "tf32": int(self.tf32),
            "lda": a.strides[-2],
            "ldb": b.strides[-2],
            "ldd": out.strides[-2],
        }
        self.calls.append(Call("matmul", (out,), (a, b, bias), told))
        return out

    def _feeds_only(self, name: str | None, *kinds: str) -> bool:
        """Whether the variable is read by these operators (and gradients) alone."""
        if name is None or name in self.graph.outputs.values():
            return False
        readers = [self.graph.ops[at] for at in self.readers.get(name, [])]
        return bool(readers) and all(op.type in kinds or op.type.endswith("_grad") for op in readers)

    def _reshaped_unread(self, view: View, shape: Shape) -> View:
        found = view.with_shape(shape)
        assert found is not None, "an array that was not computed yet has no gaps"
        return found

    def _only_scattered(self, name: str) -> bool:
        return all(self.graph.ops[at].type == "pw_scatter_rows" for at in self.readers.get(name, []))

    # ------------------------------------------------------------------------------------------------ operators of ours

    def op_pw_padded_rows(self, op: Op) -> None:
        rows = self._in(op, "X")
        count, width = rows.shape
        self.env[op.outs["Out"][0]] = View(rows.buffer, rows.offset - width, (count + 1, width), rows.strides)

    def op_pw_scatter_rows(self, op: Op) -> None:
        grads = self.env[op.outs["Rows@GRAD"][0]]
        count, width = grads.shape
        table = View(grads.buffer, grads.offset - grads.strides[0], (count + 1, width), grads.strides)
        stop = width if op.attrs["ends"] is None else min(op.attrs["ends"], width)
        name, index = op.one("Out@GRAD"), self._in(op, "Index")
        index = self._shaped(index, (index.size,))
        values = self.unshaped.get(name)
        part = table.cut(1, op.attrs["starts"], stop)
        if values is None and self._scatter_with_pairs(name, part, index):
            return
        if values is None:
            values = self._shaped(self.env[name], (index.size, stop - op.attrs["starts"]))
            if values.shape[1] > 1 and values.strides[1] != 1:
                values = self._dense(values)
        by_rows = self._by_rows(values, index)
        if by_rows is not None and self._fits_fields(part):
            self._add_fields(part, index, add=by_rows)
            return
        self.calls.append(Call("scatter_add", (part,), (values, index), {"zero_is_none": 1}))

    def _by_rows(self, values: View, index: View) -> View | None:
        """Vectors by index as [rows, fields * width], where four elements at a time can be read."""
        shape = values.shape[:-1]
        if len(shape) == 1:
            feeds = self.feeds.views.values()
            shape = next((v.shape for v in feeds if v.offset == index.offset and v.size == index.size), shape)
        if len(shape) != 2 or values.shape[-1] == 1 or index.buffer is not self.feeds.buffer:
            return None
        found = values.with_shape((shape[0], shape[1] * values.shape[-1]))
        if found is None or found.strides[0] % 4 or found.offset % 4 or found.strides[1] != 1:
            return None
        return found

    def _fits_fields(self, table: View) -> bool:
        return table.shape[1] in FIELDS_WIDTHS and table.strides[0] % 4 == 0 and table.offset % 4 == 0

    def _scatter_with_pairs(self, name: str, table: View, index: View) -> bool:
        """The gradient of FM pairs, added to the rows at once, with that of the same ids' first-order weights."""
        waiting = self.env.unread(name).buffer
        found = self.pairs_grads.get(id(waiting))
        if found is None or id(waiting) not in self.env.waiting or not self._fits_fields(table):
            return False
        pairs, dpairs, add = found
        if pairs.index != index:
            return False
        del self.env.waiting[id(waiting)]
        sums = self._new((pairs.out.shape[0], table.shape[1]))
        self._lookup_makes(pairs, sums=sums)
        self._add_fields(table, index, (sums, pairs.table, dpairs), add)
        return True

    def _add_fields(
        self,
        table: View,
        index: View,
        pairs: tuple[View | None, View | None, View | None] = (None, None, None),
        add: View | None = None,
    ) -> None:
        """Gradients of a row's embeddings, with those of first-order weights by the same index if they come before."""
        dpairs = pairs[2]
        rows = dpairs.shape[0] if dpairs is not None else add.shape[0] if add is not None else 0
        first = dfirst = None
        for at in reversed(range(len(self.calls))):
            call = self.calls[at]
            if call.kernel != "scatter_add" or call.ins[1] != index or call.outs[0] is None:
                continue
            values = call.ins[0]
            assert values is not None
            same = call.outs[0].buffer is table.buffer and call.outs[0].shape[1] == 1
            by_row = values.shape == (rows, index.size // max(rows, 1)) and values.strides == (1, 0)
            if same and by_row and values.type == F32:
                first, dfirst = call.outs[0], View(values.buffer, values.offset, (rows,), (1,))
                del self.calls[at]
                break
        told = {"rows": rows, "tile": tile_of(rows)}
        self.calls.append(Call("fields_grad", (table, first), (*pairs, add, index, dfirst), told))

    def op_pw_linear(self, op: Op) -> None:
        x, weight = self._in(op, "X"), op.one("W")
        out = op.outs["Out"][0]
        lead, (k, n) = x.shape[:-1], self.env[weight].shape
        bias = op.one("B") if "B" in op.ins else None
        x = self._shaped(x, (math.prod(lead), k))
        if n <= 4 and not op.attrs["relu"]:
            if x.shape[1] > 1 and x.strides[1] != 1:
                x = self._dense(x)
            y = self._new((x.shape[0], n))
            self.calls.append(Call("skinny", (y,), (x, self.env[weight], None if bias is None else self.env[bias])))
        else:
            low = self._feeds_only(out, "pw_linear")
            y = self._low_matrix(x.shape[0], n) if low else self._padded_rows(x.shape[0], n)
            low_bias = None if bias is None else self.memory.low_views[bias]
            # cuBLAS wants the bias in the type of the result
            if bias is not None and y.type != self.low:
                low_bias = self.env[bias]
            x, w = self._padded(self._as_low(x)), self.memory.low_views[weight]
            # cuBLAS is fast where rows begin at 16 bytes: what pads weights and biases is zero
            width = y.strides[0]
            w = replace(w, shape=(x.shape[1], width))
            low_bias = None if low_bias is None else replace(low_bias, shape=(width,))
            self._matmul(x, w, bias=low_bias, relu=op.attrs["relu"], out=replace(y, shape=(x.shape[0], width)))
        self.env[out] = self._shaped(y, (*lead, n))

    def op_pw_linear_grad(self, op: Op) -> None:
        x, weight, dy = self._in(op, "X"), op.one("W"), self._in(op, "Out@GRAD")
        lead, (k, n) = x.shape[:-1], self.env[weight].shape
        rows = math.prod(lead)
        x2, dy = self._shaped(x, (rows, k)), self._shaped(dy.broadcast((*lead, n)), (rows, n))
        relu = op.attrs["relu"]
        y = self._shaped(self._in(op, "Out"), (rows, n)) if relu else None
        dx_name, dw_name, db_name = (
            op.out("X@GRAD"),
            op.out("W@GRAD"),
            op.out("B@GRAD") if "B@GRAD" in op.outs else None,
        )
        db = None if db_name is None else self._home(db_name, (n,))
        dw = None if dw_name is None else self._home(dw_name, (k, n))
        blocks = max(1, min(512, rows // 64))
        if n <= 4 and not relu:
            if x2.shape[1] > 1 and x2.strides[1] != 1:
                x2 = self._dense(x2)
            dy = self._dense(dy)
            dx, sums, through = None, None, False
            if dx_name is not None:
                dx = self._low_matrix(rows, k) if x2.type == self.low else self._new((rows, k))
                below = self._below(op.one("X"), dx_name)
                through = below is not None
                if below is not None and "B@GRAD" in below.outs:
                    sums = self._home(below.outs["B@GRAD"][0], (k,))
            assert dw is not None
            outs = (dx, self._new((blocks, k, n)), dw, None if sums is None else self._new((blocks, k)), sums)
            self.calls.append(
                Call("skinny_grad", outs, (x2, self.env[weight], dy), {"blocks": blocks, "relu_x": int(through)})
            )
            if through and dx_name is not None:
                self.masked[dx_name] = sums
            if db is not None:
                self._reduce("copy", [dy], [0], db)
        else:
            if op.one("Out@GRAD") in self.masked:
                relu, y = False, None
                if self.masked[op.one("Out@GRAD")] is not None:
                    db = None
            ready = (
                dy.type == self.low and dy.strides[1] == 1 and not relu and dy.strides[0] % (16 // BYTES[self.low]) == 0
            )
            dz = dy if ready else self._low_matrix(rows, n)
            if not ready:
                self.clean.add(id(dz.buffer))
            if not ready or db is not None:
                fill = 0 if ready else dz.strides[0] - n
                partial = self._new((blocks, n)) if db is not None else None
                self.calls.append(
                    Call("bias_grad", (None if ready else dz, partial, db), (dy, y), {"blocks": blocks, "fill": fill})
                )
            if dw is not None:
                self._weight_gradient(self._as_low(x2), dz, dw)
            dx = None
            if dx_name is not None:
                dx = self._low_matrix(rows, k)
                w = replace(self.memory.low_views[weight], shape=(dx.strides[0], n))
                self._matmul(dz, w, trans_b=True, out=replace(dx, shape=(rows, dx.strides[0])))
                self.clean.add(id(dx.buffer))
        if dx_name is not None:
            assert dx is not None
            shaped = dx.with_shape((*lead, k))
            self.env[dx_name] = self._shaped(dx, (*lead, k)) if shaped is None else shaped

    def _weight_gradient(self, x: View, dz: View, dw: View) -> None:
        """Of a layer: x' dz, by way of a padded array where the padding makes the product's sizes what cuBLAS is fast
        with: with 432 rows it takes two thirds of the time that it takes with 429.
        """
        (k, n), x = dw.shape, self._padded(x)
        if n % 4 and id(dz.buffer) in self.clean:
            dz = self._padded(dz)
        if (x.shape[1], dz.shape[1]) == (k, n):
            self._matmul(x, dz, trans_a=True, out=dw)
            return
        whole = self._new((x.shape[1], dz.shape[1]))
        self._matmul(x, dz, trans_a=True, out=whole)
        self._copy_into(dw, whole.cut(0, 0, k).cut(1, 0, n))

    def _padded_rows(self, rows: int, columns: int) -> View:
        """A float32 matrix whose rows begin at 16 bytes, as wide as a weight's copy."""
        width = padded(columns, self.low)
        return replace(self._new((rows, width)), shape=(rows, columns))

    def _below(self, x: str, dx: str) -> Op | None:
        """The gradient of the layer with a ReLU that made x, when dx is all that it takes."""
        readers = [self.graph.ops[at] for at in self.readers.get(dx, [])]
        if len(readers) == 1 and readers[0].type == "pw_linear_grad" and readers[0].attrs["relu"]:
            below = readers[0]
            if below.ins["Out"] == (x,) and below.ins["Out@GRAD"] == (dx,):
                return below
        return None

    def _home(self, name: str, shape: Shape) -> View:
        view = self.homes[name].with_shape(shape) if name in self.homes else self._new(shape)
        assert view is not None
        self.env[name] = view
        return view

    def op_pw_fm_pairs(self, op: Op) -> None:
        if op.one("E") in self.pairs:
            self.env[op.outs["Out"][0]] = self.pairs[op.one("E")].out
            return
        e = self._dense(self._in(op, "E"))
        out = self._new((e.shape[0], 1))
        self.calls.append(Call("fm_pairs", (out,), (e, None, None)))
        self.env[op.outs["Out"][0]] = out

    def op_pw_fm_pairs_grad(self, op: Op) -> None:
        known = self.pairs.get(op.one("E"))
        e = self._dense(self._in(op, "E")) if known is None else self.env.unread(op.one("E"))
        dout = self._dense(self._in(op, "Out@GRAD"))
        rows, fields, width = e.shape
        add = None
        if "Add" in op.ins:
            more = self._in(op, "Add")
            add = more.with_shape((rows, fields * width))
            if add is None or add.strides[1] != 1 or add.strides[0] % 4 or add.offset % 4:
                add = self._shaped(self._map("copy", [more], kind=more.type), (rows, fields * width))
        out = self._new(e.shape)

        def make(target: View) -> None:
            embeddings = e
            if known is not None:  # the lookup may have put them elsewhere, in the low type
                embeddings = self._new(e.shape)
                self._gather(self._reshaped_unread(embeddings, (rows * fields, width)), known.table, known.index)
            ins = (embeddings, dout, add)
            self.calls.append(Call("fm_pairs_grad", (self._reshaped_unread(target, e.shape),), ins))

        if known is not None:
            self.pairs_grads[id(out.buffer)] = (known, dout, add)
        self.env.waiting[id(out.buffer)] = make
        self.env[op.outs["E@GRAD"][0]] = out

    def op_pw_dot_pairs(self, op: Op) -> None:
        v = self._dense(self._in(op, "E"))
        out = self._new((v.shape[0], v.shape[1] * (v.shape[1] - 1) // 2))
        self.env.waiting[id(out.buffer)] = lambda target: self.calls.append(Call("dot_pairs", (target,), (v, None)))
        self.env[op.outs["Out"][0]] = out

    def op_pw_dot_pairs_grad(self, op: Op) -> None:
        v, dout = self._dense(self._in(op, "E")), self._in(op, "Out@GRAD")
        if dout.strides[1] != 1:
            dout = self._dense(dout)
        out = self._new(v.shape)
        self.calls.append(Call("dot_pairs_grad", (out,), (v, dout)))
        self.env[op.outs["E@GRAD"][0]] = out
        if "Add" in op.ins:
            self.env[op.outs["E@GRAD"][0]] = self._map("add", [out, self._in(op, "Add")])

    # -------------------------------------------------------------------------------------------- constants and shapes

    def op_fill_constant(self, op: Op) -> None:
        shape, kind = tuple(op.attrs["shape"]), I32 if op.attrs["dtype"] in {2, 3} else F32
        if kind == I32 and shape == (1,):
            self.host[op.outs["Out"][0]] = [int(op.attrs["value"])]
        self.env[op.outs["Out"][0]] = self._scalar(op.attrs["value"], kind).broadcast(shape)

    def op_fill_any_like(self, op: Op) -> None:
        name = op.outs["Out"][0]
        if name.endswith("@GRAD") and op.attrs["value"] == 1.0 and self.loss_scale is not None:
            self.env[name] = self.loss_scale.broadcast(self._in(op, "X").shape)
            return
        self.env[name] = self._scalar(op.attrs["value"]).broadcast(self._in(op, "X").shape)

    def op_assign_value(self, op: Op) -> None:
        values = fusion.values_of(op)
        self.env[op.outs["Out"][0]] = self.memory.constant(values, I32 if values.dtype == np.int32 else F32)

    def op_shape(self, op: Op) -> None:
        self.host[op.outs["Out"][0]] = list(self._in(op, "Input").shape)

    def _num_readers(self, name: str) -> int:
        types = [self.graph.ops[at].type for at in self.readers.get(name, [])]
        return sum(not (t.endswith("_grad") or (t == "pw_fm_pairs" and name in self.pairs)) for t in types)

    def op_reshape2(self, op: Op) -> None:
        x = self.env.unread(op.one("X"))
        shape = (
            [self.host[name][0] for name in op.ins["ShapeTensor"]]
            if "ShapeTensor" in op.ins
            else list(op.attrs["shape"])
        )
        shape = [x.shape[i] if n == 0 else n for i, n in enumerate(shape)]
        if -1 in shape:
            rest = math.prod(n for n in shape if n != -1)
            shape[shape.index(-1)] = x.size // rest if rest else 0
        self._reshape(op, tuple(shape))

    def _reshape(self, op: Op, shape: Shape) -> None:
        x = self.env.unread(op.one("X"))
        out = op.outs["Out"][0]
        if id(x.buffer) in self.env.waiting and (not x.contiguous or self._num_readers(op.one("X")) > 1):
            self.env.compute(x)
        if op.one("X") in self.homes and self._feeds_only(out, "concat"):
            self.env[out] = self.env[op.one("X")]  # on its way to the flat gradient
        else:
            self.env[out] = self._shaped(x, shape)
        for name in op.outs.get("XShape", ()):
            self.shapes[name] = x.shape

    def op_flatten_contiguous_range(self, op: Op) -> None:
        x = self.env.unread(op.one("X"))
        start, stop = op.attrs["start_axis"] % len(x.shape), op.attrs["stop_axis"] % len(x.shape)
        self._reshape(op, (*x.shape[:start], math.prod(x.shape[start : stop + 1]), *x.shape[stop + 1 :]))

    def op_unsqueeze2(self, op: Op) -> None:
        shape = list(self._in(op, "X").shape)
        for axis in op.attrs["axes"]:
            shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 1)
        self._reshape(op, tuple(shape))

    def op_squeeze2(self, op: Op) -> None:
        x = self._in(op, "X")
        axes = {a % len(x.shape) for a in op.attrs["axes"]}
        self._reshape(op, tuple(n for a, n in enumerate(x.shape) if not (a in axes and n == 1)))

    def _reshape_grad(self, op: Op) -> None:
        dy, shape = self.env.unread(op.one("Out@GRAD")), self.shapes[op.one("XShape")]
        name = op.out("X@GRAD")
        alone = len(self.readers.get(op.one("Out@GRAD"), [])) == 1
        lazy = id(dy.buffer) in self.pairs_grads and id(dy.buffer) in self.env.waiting
        if lazy and alone and name is not None and self._only_scattered(name):
            self.env[name] = self._reshaped_unread(dy, shape)
            return
        self.env.compute(dy)
        if name is not None and dy.with_shape(shape) is None and len(shape) == 2 and self._only_scattered(name):
            single = len(dy.shape) == 2 and shape[1] == 1
            if single or (len(dy.shape) == 3 and dy.shape[2] == shape[1] and (shape[1] == 1 or dy.strides[2] == 1)):
                self.unshaped[name] = dy  # the scatter reads it as it lies
                return
        self._set(op, "X@GRAD", self._shaped(self._in(op, "Out@GRAD"), self.shapes[op.one("XShape")]))

    op_reshape2_grad = op_flatten_contiguous_range_grad = op_unsqueeze2_grad = op_squeeze2_grad = _reshape_grad

    def op_transpose2(self, op: Op) -> None:
        self.env[op.outs["Out"][0]] = self._in(op, "X").permuted(op.attrs["axis"])

    def op_transpose2_grad(self, op: Op) -> None:
        axes = op.attrs["axis"]
        self._set(op, "X@GRAD", self._in(op, "Out@GRAD").permuted([axes.index(a) for a in range(len(axes))]))

    def _ranges(self, op: Op, shape: Shape) -> list[tuple[int, int, int]]:
        found = []
        for axis, start, stop in zip(op.attrs["axes"], op.attrs["starts"], op.attrs["ends"], strict=True):
            n = shape[axis]
            begin = max(start + n, 0) if start < 0 else min(start, n)
            end = max(stop + n, 0) if stop < 0 else min(stop, n)
            found.append((axis, begin, max(begin, end)))
        return found

    def op_slice(self, op: Op) -> None:
        name = op.one("Input")
        if name in self.host:
            self.host[op.outs["Out"][0]] = self.host[name][op.attrs["starts"][0] : op.attrs["ends"][0]]
            return
        view = self.env[name]
        for axis, begin, end in self._ranges(op, view.shape):
            view = view.cut(axis, begin, end)
        gone = set(op.attrs.get("decrease_axis") or ())
        kept = [a for a in range(len(view.shape)) if a not in gone]
        self.env[op.outs["Out"][0]] = View(
            view.buffer,
            view.offset,
            tuple(view.shape[a] for a in kept),
            tuple(view.strides[a] for a in kept),
            view.type,
        )

    def op_slice_grad(self, op: Op) -> None:
        x, dy = self._in(op, "Input"), self._in(op, "Out@GRAD")
        out = self._zeros(x.shape)
        part = out
        for axis, begin, end in self._ranges(op, x.shape):
            part = part.cut(axis, begin, end)
        self._map("copy", [self._shaped(dy, part.shape)], part)
        self._set(op, "Input@GRAD", out)

    def _zeros(self, shape: Shape) -> View:
        out = self._new(shape)
        self.calls.append(Call("zero", (out,)))
        return out

    # ------------------------------------------------------------------------------------------- joining and splitting

    def op_concat(self, op: Op) -> None:
        out = op.outs["Out"][0]
        parts = [self.env.unread(name) for name in op.ins["X"]]
        if out == getattr(self, "flat", None):
            for name, part in zip(op.ins["X"], parts, strict=True):
                home = self.homes.get(name) or next(
                    self.homes[o.one("X")]
                    for o in self.graph.ops
                    if o.outs.get("Out") == (name,) and o.type == "reshape2"
                )
                if part.buffer is not self.memory.grad:
                    self._map("copy", [self._shaped(part, (part.size,))], home)
            self.env[out] = self.whole
            return
        axis = op.attrs["axis"] % len(parts[0].shape)
        shape = list(parts[0].shape)
        shape[axis] = sum(p.shape[axis] for p in parts)
        low = len(shape) == 2 and axis == 1 and self._feeds_only(out, "pw_linear") and self._wide(out)
        whole = self._low_matrix(shape[0], shape[1]) if low else self._new(shape)
        if low:
            self.clean.add(id(whole.buffer))
        at = 0
        for i, part in enumerate(parts):
            target = whole.cut(axis, at, at + part.shape[axis])
            at += part.shape[axis]
            make = self.env.waiting.get(id(part.buffer))
            if make is not None and self._num_readers(op.ins["X"][i]) == 1 and axis == len(shape) - len(part.shape) + 1:
                del self.env.waiting[id(part.buffer)]
                make(target)
                rest = whole.strides[0] - shape[1] if low and i == len(parts) - 1 else 0
                if rest:
                    gap = View(whole.buffer, whole.offset + shape[1], (shape[0], rest), whole.strides, whole.type)
                    self._map("copy", [self._scalar(0.0).broadcast(gap.shape)], gap)
                continue
            self.env.compute(part)
            if len(shape) == 2 and axis == 1:
                self._copy_into(target, part, fill=whole.strides[0] - shape[1] if low and i == len(parts) - 1 else 0)
            else:
                self._map("copy", [part], target)
        self.env[out] = whole

    def _wide(self, name: str) -> bool:
        """Whether a layer with more than a few outputs reads the variable."""
        layers = [self.graph.ops[at] for at in self.readers[name]]
        return any(o.type == "pw_linear" and self.env[o.one("W")].shape[1] > 4 for o in layers)

    def op_concat_grad(self, op: Op) -> None:
        dy, at = self._in(op, "Out@GRAD"), 0
        axis = op.attrs["axis"] % len(dy.shape)
        for name, grad in zip(op.ins["X"], op.outs["X@GRAD"], strict=True):
            size = self.env[name].shape[axis]
            if grad != EMPTY:
                self.env[grad] = dy.cut(axis, at, at + size)
            at += size

    def op_stack(self, op: Op) -> None:
        names = op.ins["X"]
        first = self.env[names[0]].shape
        axis = op.attrs["axis"] % (len(first) + 1)
        out = self._new((*first[:axis], len(names), *first[axis:]))
        for i, name in enumerate(names):
            part = out.cut(axis, i, i + 1)
            self._map("copy", [self._shaped(self.env[name], part.shape)], part)
        self.env[op.outs["Y"][0]] = out

    def op_stack_grad(self, op: Op) -> None:
        dy = self._in(op, "Y@GRAD")
        axis = op.attrs["axis"] % len(dy.shape)
        for i, grad in enumerate(op.outs["X@GRAD"]):
            if grad != EMPTY:
                part = dy.cut(axis, i, i + 1)
                self.env[grad] = View(
                    part.buffer,
                    part.offset,
                    (*part.shape[:axis], *part.shape[axis + 1 :]),
                    (*part.strides[:axis], *part.strides[axis + 1 :]),
                    part.type,
                )

    def op_gather(self, op: Op) -> None:
        table, index = self._in(op, "X"), self._in(op, "Index")
        index = self._shaped(index, (index.size,))
        out = self._new((index.size, table.shape[1]))
        self.env[op.outs["Out"][0]] = out
        if self._lookup_with_pairs(op, out, table, index):
            return
        self.lookups[id(out.buffer)] = (table, index)
        self.env.waiting[id(out.buffer)] = lambda target: self._gather(target, table, index)

    def _lookup_with_pairs(self, op: Op, out: View, table: View, index: View) -> bool:
        """Lookup, FM pairs and the sum of the first-order weights in one call, where these follow."""
        readers = [self.graph.ops[at] for at in self.readers.get(op.outs["Out"][0], [])]
        shaped = [o for o in readers if o.type == "reshape2"]
        if len(shaped) != 1 or table.shape[1] not in FIELDS_WIDTHS:
            return False
        name, shape = shaped[0].outs["Out"][0], shaped[0].attrs["shape"]
        if len(shape) != 3 or not any(self.graph.ops[at].type == "pw_fm_pairs" for at in self.readers.get(name, [])):
            return False
        found = _Pairs(self._new((index.size // shape[1], 1)), table, index)
        self.calls.append(Call("fields_lookup", (None, found.out, None, None), (table, None, index)))
        self.pairs[name] = found
        self.env.waiting[id(out.buffer)] = lambda target: self._embeddings(found, target)
        return True

    def _embeddings(self, pairs: _Pairs, target: View) -> None:
        """Those that a lookup with pairs finds, in their place."""
        rows = pairs.out.shape[0]
        flat = self._reshaped_unread(target, (rows, target.size // rows)) if rows else target
        if flat.strides[0] % 4 == flat.offset % 4 == 0:
            self._lookup_makes(pairs, e=flat)
        else:
            e = self._new(flat.shape)
            self._lookup_makes(pairs, e=e)
            self._copy_into(flat, e)

    def _lookup_makes(
        self,
        pairs: _Pairs,
        *,
        e: View | None = None,
        first: tuple[View, View] | None = None,
        sums: View | None = None,
    ) -> bool:
        """One thing more from the lookup that makes these pairs. False: it makes another one already."""
        at = next(
            at for at, call in enumerate(self.calls) if call.kernel == "fields_lookup" and call.outs[1] is pairs.out
        )
        (old_e, out, old_first, old_sums), (table, first_table, index) = self.calls[at].outs, self.calls[at].ins
        if first is not None and old_first is not None:
            return False
        assert e is None or old_e is None
        assert sums is None or old_sums is None
        if first is not None:
            old_first, first_table = first
        self.calls[at] = Call(
            "fields_lookup", (e or old_e, out, old_first, sums or old_sums), (table, first_table, index)
        )
        return True

    def _first_order_with_pairs(self, name: str, axes: Sequence[int]) -> View | None:
        """The sum of first-order weights over the fields, by the lookup of the same ids' embeddings."""
        x = self.env.unread(name)
        found = self.lookups.get(id(x.buffer))
        if found is None or id(x.buffer) not in self.env.waiting or axes != [1] or self._num_readers(name) != 1:
            return None
        table, index = found
        for pairs in self.pairs.values():
            rows = pairs.out.shape[0]
            same = pairs.index == index and pairs.table.strides[0] == table.strides[0]
            if same and table.shape[1] == 1 and x.shape == (rows, index.size // max(rows, 1)):
                first = self._new((rows,))
                if self._lookup_makes(pairs, first=(first, table)):
                    del self.env.waiting[id(x.buffer)]
                    return first
        return None

    def _gather(self, target: View, table: View, index: View) -> None:
        if target.size == 0:
            return
        if len(target.shape) == 2 and target.shape[0] != index.size:  # [groups, group * width]
            group = index.size // target.shape[0]
            target = self._split(target, group)
        self.calls.append(Call("gather", (target,), (table, index)))

    def _split(self, view: View, group: int) -> View:
        width = view.shape[1] // group
        return View(view.buffer, view.offset, (view.shape[0], group, width), (view.strides[0], width, 1), view.type)

    def op_gather_grad(self, op: Op) -> None:
        x, index, dy = self._in(op, "X"), self._in(op, "Index"), self._in(op, "Out@GRAD")
        out = self._zeros(x.shape)
        dy = self._dense(dy)
        self.calls.append(Call("scatter_add", (out,), (dy, self._shaped(index, (index.size,))), {"zero_is_none": 0}))
        self._set(op, "X@GRAD", out)

    def op_index_select(self, op: Op) -> None:
        """Columns by a constant index: rows of the transpose."""
        x, index = self._in(op, "X"), self._in(op, "Index")
        assert op.attrs["dim"] == 1
        flat = self._dense(x.permuted([1, 0]))
        out = self._new((index.size, x.shape[0]))
        self.calls.append(Call("gather", (out,), (flat, index)))
        self.env[op.outs["Out"][0]] = out.permuted([1, 0])

    def op_index_select_grad(self, op: Op) -> None:
        x, index, dy = self._in(op, "X"), self._in(op, "Index"), self._in(op, "Out@GRAD")
        out = self._zeros((x.shape[1], x.shape[0]))
        values = self._dense(dy.permuted([1, 0]))
        self.calls.append(Call("scatter_add", (out,), (values, index), {"zero_is_none": 0}))
        self._set(op, "X@GRAD", out.permuted([1, 0]))

    def _roll(self, view: View, shifts: Sequence[int], axes: Sequence[int]) -> View:
        for shift, axis in zip(shifts, axes, strict=True):
            n = view.shape[axis]
            k = shift % n if n else 0
            out = self._new(view.shape)
            if n - k:
                self._map("copy", [view.cut(axis, 0, n - k)], out.cut(axis, k, n))
            if k:
                self._map("copy", [view.cut(axis, n - k, n)], out.cut(axis, 0, k))
            view = out
        return view

    def op_roll(self, op: Op) -> None:
        self.env[op.outs["Out"][0]] = self._roll(self._in(op, "X"), op.attrs["shifts"], op.attrs["axis"])

    def op_roll_grad(self, op: Op) -> None:
        self._set(
            op, "X@GRAD", self._roll(self._in(op, "Out@GRAD"), [-s for s in op.attrs["shifts"]], op.attrs["axis"])
        )

    # ----------------------------------------------------------------------------------------------------- element-wise

    def _binary(self, op: Op, function: str) -> None:
        assert op.attrs.get("axis", -1) == -1, "elementwise with an axis"
        x, y = self._in(op, "X"), self._in(op, "Y")
        last = self.calls[-1] if self.calls else None
        alone = self._feeds_only(op.one("X"), op.type) and self._num_readers(op.one("X")) == 1
        if function == "add" and last is not None and last.told.get("op") == "add" and last.outs == (x,) and alone:
            self.calls.pop()  # a sum of three in one call
            self.env[op.outs["Out"][0]] = self._map("add3", [*last.ins, y])  # type: ignore[list-item]
            return
        self.env[op.outs["Out"][0]] = self._map(function, [x, y])

    def op_elementwise_add(self, op: Op) -> None:
        self._binary(op, "add")

    def op_elementwise_sub(self, op: Op) -> None:
        self._binary(op, "sub")

    def op_elementwise_mul(self, op: Op) -> None:
        self._binary(op, "mul")

    def op_elementwise_div(self, op: Op) -> None:
        self._binary(op, "div")

    def op_elementwise_max(self, op: Op) -> None:
        self._binary(op, "max")

    def op_greater_than(self, op: Op) -> None:
        self._binary(op, "greater")

    def op_equal(self, op: Op) -> None:
        self._binary(op, "equal")

    def _grads(self, op: Op, x_grad: tuple[str, Sequence[View]], y_grad: tuple[str, Sequence[View]]) -> None:
        for slot, (function, ins) in (("X", x_grad), ("Y", y_grad)):
            if op.outs.get(f"{slot}@GRAD") and op.out(f"{slot}@GRAD"):
                self._set(op, f"{slot}@GRAD", self._reduced_to(self._in(op, slot).shape, function, ins))

    def op_elementwise_add_grad(self, op: Op) -> None:
        dy = self._in(op, "Out@GRAD")
        self._grads(op, ("copy", [dy]), ("copy", [dy]))

    def op_elementwise_sub_grad(self, op: Op) -> None:
        dy = self._in(op, "Out@GRAD")
        self._grads(op, ("copy", [dy]), ("negative", [dy]))

    def op_elementwise_mul_grad(self, op: Op) -> None:
        dy = self._in(op, "Out@GRAD")
        self._grads(op, ("mul", [dy, self._in(op, "Y")]), ("mul", [dy, self._in(op, "X")]))

    def op_elementwise_div_grad(self, op: Op) -> None:
        dy, y, out = self._in(op, "Out@GRAD"), self._in(op, "Y"), self._in(op, "Out")
        self._grads(op, ("div", [dy, y]), ("div_grad", [dy, out, y]))

    def op_elementwise_max_grad(self, op: Op) -> None:
        dy, x, y = self._in(op, "Out@GRAD"), self._in(op, "X"), self._in(op, "Y")
        self._grads(op, ("max_grad_first", [dy, x, y]), ("max_grad_second", [dy, x, y]))

    def op_sum(self, op: Op) -> None:
        views = [self.env[name] for name in op.ins["X"]]
        while len(views) > 1:
            views = [self._map("add3" if len(views) > 2 else "add", views[:3]), *views[3:]]
        self.env[op.outs["Out"][0]] = views[0]

    def op_scale(self, op: Op) -> None:
        x, scale, bias = self._in(op, "X"), op.attrs["scale"], op.attrs["bias"]
        if not op.attrs.get("bias_after_scale", True):
            bias *= scale
        self.env[op.outs["Out"][0]] = x if (scale, bias) == (1.0, 0.0) else self._map("affine", [x], p=scale, q=bias)

    def op_cast(self, op: Op) -> None:
        x = self._in(op, "X")
        kind = I32 if op.attrs["out_dtype"] in {2, 3} else F32
        self.env[op.outs["Out"][0]] = x if x.type == kind else self._map("copy", [x], kind=kind)

    def op_where(self, op: Op) -> None:
        views = [self._in(op, slot) for slot in ("Condition", "X", "Y")]
        self.env[op.outs["Out"][0]] = self._map("where", views)

    def _unary(self, op: Op, function: str) -> None:
        self.env[op.outs["Out"][0]] = self._map(function, [self._in(op, "X")])

    def op_relu(self, op: Op) -> None:
        self._unary(op, "relu")

    def op_sigmoid(self, op: Op) -> None:
        self._unary(op, "sigmoid")

    def op_log(self, op: Op) -> None:
        self._unary(op, "log")

    def op_softplus(self, op: Op) -> None:
        self._unary(op, "softplus")

    def op_relu_grad(self, op: Op) -> None:
        self._set(op, "X@GRAD", self._map("relu_grad", [self._in(op, "Out@GRAD"), self._in(op, "Out")]))

    def op_sigmoid_grad(self, op: Op) -> None:
        self._set(op, "X@GRAD", self._map("sigmoid_grad", [self._in(op, "Out@GRAD"), self._in(op, "Out")]))

    def op_softplus_grad(self, op: Op) -> None:
        self._set(op, "X@GRAD", self._map("softplus_grad", [self._in(op, "Out@GRAD"), self._in(op, "X")]))

    def op_log_grad(self, op: Op) -> None:
        self._set(op, "X@GRAD", self._map("div", [self._in(op, "Out@GRAD"), self._in(op, "X")]))

    def op_sigmoid_cross_entropy_with_logits(self, op: Op) -> None:
        self.env[op.outs["Out"][0]] = self._map("bce", [self._in(op, "X"), self._in(op, "Label")])

    def op_sigmoid_cross_entropy_with_logits_grad(self, op: Op) -> None:
        ins = [self._in(op, slot) for slot in ("Out@GRAD", "X", "Label")]
        self._set(op, "X@GRAD", self._map("bce_grad", ins))

    def op_dropout(self, op: Op) -> None:
        x, rate = self._in(op, "X"), op.attrs["dropout_prob"]
        if op.attrs.get("is_test"):
            self.env[op.outs["Out"][0]] = x
            return
        assert op.attrs["dropout_implementation"] == "upscale_in_train"
        mask = self._new(x.shape)
        self.dropouts += 1
        step = View(self.memory.step, 0, (1,), (1,), I32)
        seed = (self.seed * 1_000_003 + self.dropouts * 7919) % 2**32
        self.calls.append(Call("dropout", (mask,), (step,), {"seed": seed, "rate": rate}))
        self.env[op.outs["Mask"][0]] = mask
        self.env[op.outs["Out"][0]] = self._map("mul", [x, mask])

    def op_dropout_grad(self, op: Op) -> None:
        self._set(op, "X@GRAD", self._map("mul", [self._in(op, "Out@GRAD"), self._in(op, "Mask")]))

    # ------------------------------------------------------------------------------------------ reductions and what
    # uses them

    def _axes(self, op: Op, rank: int) -> list[int]:
        axes = [] if op.attrs.get("reduce_all") else op.attrs.get("dim") or op.attrs.get("axis") or []
        axes = axes if isinstance(axes, (list, tuple)) else [axes]
        return sorted(a % rank for a in axes) or list(range(rank))

    def op_reduce_sum(self, op: Op) -> None:
        x = self.env.unread(op.one("X"))
        axes = self._axes(op, len(x.shape))
        out = self._first_order_with_pairs(op.one("X"), axes)
        if out is None:
            self.env.compute(x)
            name = op.outs["Out"][0]
            out = self._reduce(
                "copy", [x], axes, self._home(name, ()) if name in self.homes and len(axes) == len(x.shape) else None
            )
        if op.attrs["keep_dim"]:
            out = self._shaped(out, tuple(1 if a in axes else n for a, n in enumerate(x.shape)))
        self.env[op.outs["Out"][0]] = out

    def _kept(self, view: View, shape: Shape, axes: Sequence[int]) -> View:
        """A reduced array as one that broadcasts to the shape it was reduced from."""
        return self._shaped(view, tuple(1 if a in axes else n for a, n in enumerate(shape)))

    def op_reduce_sum_grad(self, op: Op) -> None:
        x, dy = self._in(op, "X"), self._in(op, "Out@GRAD")
        self._set(op, "X@GRAD", self._kept(dy, x.shape, self._axes(op, len(x.shape))).broadcast(x.shape))

    def op_softmax(self, op: Op) -> None:
        x = self._in(op, "X")
        axes = [op.attrs["axis"] % len(x.shape)]
        top = self._kept(self._reduce("copy", [x], axes, largest=True), x.shape, axes)
        powers = self._map("exp_diff", [x, top])
        self.env[op.outs["Out"][0]] = self._map(
            "div", [powers, self._kept(self._reduce("copy", [powers], axes), x.shape, axes)]
        )

    def op_softmax_grad(self, op: Op) -> None:
        out, dy = self._in(op, "Out"), self._in(op, "Out@GRAD")
        axes = [op.attrs["axis"] % len(out.shape)]
        dot = self._kept(self._reduce("mul", [dy, out], axes), out.shape, axes)
        self._set(op, "X@GRAD", self._map("sub_mul", [dy, dot, out]))

    def op_logsumexp(self, op: Op) -> None:
        x = self._in(op, "X")
        axes = self._axes(op, len(x.shape))
        top = self._reduce("copy", [x], axes, largest=True)
        total = self._reduce("exp_diff", [x, self._kept(top, x.shape, axes).broadcast(x.shape)], axes)
        out = self._map("add", [self._map("log", [total]), top])
        self.env[op.outs["Out"][0]] = self._kept(out, x.shape, axes) if op.attrs.get("keepdim") else out

    def op_logsumexp_grad(self, op: Op) -> None:
        x, out, dy = self._in(op, "X"), self._in(op, "Out"), self._in(op, "Out@GRAD")
        axes = self._axes(op, len(x.shape))
        self._set(
            op, "X@GRAD", self._map("mul_exp_diff", [self._kept(dy, x.shape, axes), x, self._kept(out, x.shape, axes)])
        )

    def op_p_norm(self, op: Op) -> None:
        x = self._in(op, "X")
        assert op.attrs["porder"] == 2.0
        axes = [op.attrs["axis"] % len(x.shape)]
        out = self._map("sqrt_affine", [self._reduce("mul", [x, x], axes)], p=1.0)
        self.env[op.outs["Out"][0]] = self._kept(out, x.shape, axes) if op.attrs["keepdim"] else out

    def op_p_norm_grad(self, op: Op) -> None:
        x, out, dy = self._in(op, "X"), self._in(op, "Out"), self._in(op, "Out@GRAD")
        axes = [op.attrs["axis"] % len(x.shape)]
        norm = self._map("affine", [self._kept(out, x.shape, axes)], p=1.0, q=op.attrs["epsilon"])
        self._set(op, "X@GRAD", self._map("mul", [x, self._map("div", [self._kept(dy, x.shape, axes), norm])]))

    def op_layer_norm(self, op: Op) -> None:
        x = self._in(op, "X")
        axes = list(range(op.attrs["begin_norm_axis"], len(x.shape)))
        count = math.prod(x.shape[a] for a in axes)
        mean = self._map("affine", [self._kept(self._reduce("copy", [x], axes), x.shape, axes)], p=1.0 / count)
        squares = self._kept(self._reduce("square_diff", [x, mean], axes), x.shape, axes)
        inverse = self._map("rsqrt_affine", [squares], p=1.0 / count, q=op.attrs["epsilon"])
        normal = self._map("sub_mul", [x, mean, inverse])
        self._norms = getattr(self, "_norms", {})
        self._norms[op.outs["Y"][0]] = self._norms[op.outs["Mean"][0]] = (normal, inverse, axes, count)
        tail = x.shape[op.attrs["begin_norm_axis"] :]
        out = self._map("mul", [normal, self._shaped(self._in(op, "Scale"), tail)]) if "Scale" in op.ins else normal
        self.env[op.outs["Y"][0]] = (
            self._map("add", [out, self._shaped(self._in(op, "Bias"), tail)]) if "Bias" in op.ins else out
        )

    def op_layer_norm_grad(self, op: Op) -> None:
        normal, inverse, axes, count = self._norms[op.one("Mean")]
        dy, shape = self._in(op, "Y@GRAD"), normal.shape
        lead = [a for a in range(len(shape)) if a not in axes]
        if op.outs.get("Bias@GRAD"):
            self._reduce("copy", [dy], lead, self._home(op.outs["Bias@GRAD"][0], (count,)))
        if op.outs.get("Scale@GRAD"):
            self._reduce("mul", [dy, normal], lead, self._home(op.outs["Scale@GRAD"][0], (count,)))
        if op.outs.get("X@GRAD"):
            if "Scale" in op.ins:
                dy = self._map("mul", [dy, self._shaped(self._in(op, "Scale"), tuple(shape[a] for a in axes))])
            mean = self._map("affine", [self._kept(self._reduce("copy", [dy], axes), shape, axes)], p=1.0 / count)
            dot = self._map(
                "affine", [self._kept(self._reduce("mul", [dy, normal], axes), shape, axes)], p=-1.0 / count
            )
            inner = self._map("mul_add", [normal, dot, self._map("sub", [dy, mean])])
            self._set(op, "X@GRAD", self._map("mul", [inner, inverse]))

    # --------------------------------------------------------------------------------------------------- matrix
    # products

    def op_matmul_v2(self, op: Op) -> None:
        self.env[op.outs["Out"][0]] = self._product(
            self._in(op, "X"), self._in(op, "Y"), bool(op.attrs["trans_x"]), bool(op.attrs["trans_y"])
        )

    def _product(self, x: View, y: View, trans_x: bool = False, trans_y: bool = False) -> View:
        """As NumPy's matmul."""
        assert len(x.shape) >= 2, "matmul of a vector"
        assert len(y.shape) >= 2, "matmul of a vector"
        lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        if not trans_x and len(y.shape) == 2 and len(x.shape) > 2:
            flat = self._matrix(self._shaped(x, (math.prod(x.shape[:-1]), x.shape[-1])))
            out = self._matmul(flat, self._matrix(y), trans_b=trans_y)
            return self._shaped(out, (*x.shape[:-1], out.shape[-1]))
        if lead:
            x = self._matrix(self._shaped(x.broadcast((*lead, *x.shape[-2:])), (math.prod(lead), *x.shape[-2:])))
            y = self._matrix(self._shaped(y.broadcast((*lead, *y.shape[-2:])), (math.prod(lead), *y.shape[-2:])))
        else:
            x, y = self._matrix(x), self._matrix(y)
        out = self._matmul(x, y, trans_a=trans_x, trans_b=trans_y)
        return self._shaped(out, (*lead, *out.shape[-2:]))

    def _matrix(self, view: View) -> View:
        """With rows that cuBLAS can read: float32, no gaps."""
        return self._dense(view if view.type == F32 else self._map("copy", [view]))

    def op_matmul_v2_grad(self, op: Op) -> None:
        x, y, dout = self._in(op, "X"), self._in(op, "Y"), self._in(op, "Out@GRAD")
        tx, ty = bool(op.attrs["trans_x"]), bool(op.attrs["trans_y"])
        if op.outs.get("X@GRAD") and op.out("X@GRAD"):
            dx = self._product(y, dout, ty, True) if tx else self._product(dout, y, False, not ty)
            self._set(op, "X@GRAD", self._reduced_to(x.shape, "copy", [dx]))
        if op.outs.get("Y@GRAD") and op.out("Y@GRAD"):
            if len(y.shape) == 2 and len(x.shape) > 2 and not tx:
                x = self._shaped(x, (math.prod(x.shape[:-1]), x.shape[-1]))
                dout = self._shaped(dout, (x.shape[0], dout.shape[-1]))
            dy = self._product(dout, x, True, tx) if ty else self._product(x, dout, not tx, False)
            self._set(op, "Y@GRAD", self._reduced_to(y.shape, "copy", [dy]))

    # ---------------------------------------------------------------------------------------------------------------
    # GRU

    def op_rnn(self, op: Op) -> None:
        """A GRU from a zero state, as Paddle computes it; a row past its end keeps its state.

        Gates r, z and the candidate c: r = s(x W_r + h U_r), z likewise, c = tanh(x W_c + r (h U_c + b)), h' = c + z
        (h - c).
        """
        assert op.attrs["mode"] == "GRU"
        x = self._in(op, "Input")
        weight_x, weight_h, bias_x, bias_h = (self.env[name] for name in op.ins["WeightList"])
        steps, rows, width = x.shape
        size = op.attrs["hidden_size"]
        length = self._map("copy", [self._in(op, "SequenceLength")])
        flat = self._matrix(self._shaped(x, (steps * rows, width)))
        inputs = self._map("add", [self._matmul(flat, weight_x, trans_b=True), bias_x])
        out = self._new((steps, rows, size))
        state = self._zeros((rows, size))
        tape = []
        for t in range(steps):
            gx = inputs.cut(0, t * rows, (t + 1) * rows)
            gh = self._map("add", [self._matmul(state, weight_h, trans_b=True), bias_h])
            r = self._map("sigmoid", [self._map("add", [gx.cut(1, 0, size), gh.cut(1, 0, size)])])
            z = self._map("sigmoid", [self._map("add", [gx.cut(1, size, 2 * size), gh.cut(1, size, 2 * size)])])
            hidden = gh.cut(1, 2 * size, 3 * size)
            c = self._map("tanh", [self._map("mul_add", [r, hidden, gx.cut(1, 2 * size, 3 * size)])])
            new = self._map("between", [z, c, state])
            alive = self._map("greater", [length, self._scalar(float(t))])
            alive = self._shaped(alive, (rows, 1)).broadcast((rows, size))
            after = self._map("where", [alive, new, state])
            self._map("mul", [alive, new], self._shaped(out.cut(0, t, t + 1), (rows, size)))
            tape.append((state, r, z, c, hidden, alive))
            state = after
        self._tapes = getattr(self, "_tapes", {})
        self._tapes[op.outs["Out"][0]] = (tape, flat, state)
        self.env[op.outs["Out"][0]] = out
        self.env[op.outs["State"][0]] = self._shaped(state, (1, rows, size))

    def op_rnn_grad(self, op: Op) -> None:
        tape, flat, _ = self._tapes[op.one("Out")]
        names = dict(zip(("wx", "wh", "bx", "bh"), op.outs["WeightList@GRAD"], strict=True))
        weight_x, weight_h = (self.env[name] for name in op.ins["WeightList"][:2])
        steps, rows, size = self._in(op, "Out").shape
        dout = self.env.get(op.ins.get("Out@GRAD", (EMPTY,))[0])
        dlast = self.env.get(op.ins.get("State@GRAD", (EMPTY,))[0])
        dstate = self._zeros((rows, size)) if dlast is None else self._dense(self._shaped(dlast, (rows, size)))
        dx_all, dh_all = self._new((steps * rows, 3 * size)), self._new((steps * rows, 3 * size))
        before = self._new((steps * rows, size))
        for t in reversed(range(steps)):
            state, r, z, c, hidden, alive = tape[t]
            self._map("copy", [state], before.cut(0, t * rows, (t + 1) * rows))
            dnew = dstate
            if dout is not None:
                dnew = self._map("add", [dstate, self._shaped(dout.cut(0, t, t + 1), (rows, size))])
            dnew = self._map("mul", [dnew, alive])
            gx, gh = dx_all.cut(0, t * rows, (t + 1) * rows), dh_all.cut(0, t * rows, (t + 1) * rows)
            dc = self._map(
                "tanh_grad", [self._map("sub", [dnew, self._map("mul", [dnew, z])]), c], gx.cut(1, 2 * size, 3 * size)
            )
            dr = self._map("sigmoid_grad", [self._map("mul", [dc, hidden]), r], gx.cut(1, 0, size))
            dz = self._map(
                "sigmoid_grad", [self._map("mul", [dnew, self._map("sub", [state, c])]), z], gx.cut(1, size, 2 * size)
            )
            self._map("copy", [dr], gh.cut(1, 0, size))
            self._map("copy", [dz], gh.cut(1, size, 2 * size))
            self._map("mul", [dc, r], gh.cut(1, 2 * size, 3 * size))
            through = self._matmul(gh, weight_h)
            kept = self._map("sub", [dstate, self._map("mul", [dstate, alive])])
            dstate = self._map("add3", [self._map("mul", [dnew, z]), through, kept])
        self._matmul(dx_all, flat, trans_a=True, out=self._home(names["wx"], weight_x.shape))
        self._matmul(dh_all, before, trans_a=True, out=self._home(names["wh"], weight_h.shape))
        self._reduce("copy", [dx_all], [0], self._home(names["bx"], (3 * size,)))
        self._reduce("copy", [dh_all], [0], self._home(names["bh"], (3 * size,)))
        if op.outs.get("Input@GRAD"):
            dx = self._matmul(dx_all, weight_x)
            self._set(op, "Input@GRAD", self._shaped(dx, (steps, rows, weight_x.shape[1])))
