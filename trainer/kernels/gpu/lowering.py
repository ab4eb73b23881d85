"""From operators and shapes to kernel calls.

Three passes: where everything lies (`layout`), the calls of each operator in turn (`operators`), fewer calls
(`tidy`). Reshapes, slices, transposes, broadcasts and the gradients of sums are views: they cost nothing. What has no
kernel of its own (softmax, layer normalisation, a GRU ...) becomes a few element-wise calls, reductions and matrix
products.

Matrix products by parameters take their operands in the low type, from copies whose rows are padded to 16 bytes; the
optimizer writes the parameters' copies. All other arithmetic is float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paddlewheel.trainer.kernels.gpu.context import Context
from paddlewheel.trainer.kernels.gpu.graph import Graph
from paddlewheel.trainer.kernels.gpu.kernel_calls import Call, Count, Squares
from paddlewheel.trainer.kernels.gpu.layout import DeviceBuffers, Feeds, Layout
from paddlewheel.trainer.kernels.gpu.operators import RULES
from paddlewheel.trainer.kernels.gpu.tidy import tidied
from paddlewheel.trainer.kernels.gpu.views import I32, Buffer, Shape, View, row_major, temporary


class UnsupportedError(ValueError):
    """A program has an operator that the GPU side does not know."""


@dataclass(frozen=True)
class Lowered:
    """A program for one set of shapes.

    Attributes:
        calls: in order.
        feeds: where a batch's arrays go.
        out: everything that the host reads: see `status`, `outputs`.
        status: float32 [3 + tables]: the loss, the weight, sums of squares of the flat gradient and of each table's.
        outputs: views in `out`, by the graph's names; of the flat gradient, where it stays.
    """

    calls: Sequence[Call]
    feeds: Feeds
    out: Buffer
    status: View | None
    outputs: Mapping[str, View]


def lower(
    graph: Graph,
    buffers: DeviceBuffers,
    shapes: Mapping[str, Shape],
    *,
    tf32: bool = True,
    seed: int = 0,
    loss_scale: View | None = None,
) -> Lowered:
    """All calls of a program for one set of shapes.

    Args:
        graph: after `fusion.fused`.
        buffers: for the same graph's parameters. Their pool of constants grows.
        shapes: of the feeds.
        tf32: whether float32 matrix products may round their inputs to TF32.
        loss_scale: a float32 that the loss's gradient starts with, and its inverse behind it, in device memory;
            None: 1. The gradients of parameters come out unscaled, those of tables do not.
        seed: of dropout.

    Raises:
        UnsupportedError: an operator has no rule.
    """
    layout = Layout.of(graph, buffers, shapes)
    c = Context(graph, layout, tf32=tf32, seed=seed, loss_scale=loss_scale)
    tables = {what: name for what, name in graph.outputs.items() if what.startswith("rows/")}
    for name in tables.values():
        _sums_of_rows(c, name)
    for op in graph.ops:
        if op.type not in RULES:
            raise UnsupportedError(
                f"the model's program has the operator {op.type!r}, which has no GPU kernel here: train it with "
                "`--set train.device=cpu`"
            )
        RULES[op.type](c, op)
    out, outputs = _write_results(c, tables)
    status = None
    if "flat" in graph.outputs:
        outputs["flat"] = c.values.read(graph.outputs["flat"])
        status = View(out, 0, (3 + len(tables),), (1,))
        _write_status(c, status, outputs["flat"], [outputs[what] for what in tables])
    if c.num_dropouts:
        c.emit.add(Count(View(buffers.step, 0, (1,), (1,), I32)))
    return Lowered(tidied(c.emit.calls()), layout.feeds, out, status, outputs)


def _sums_of_rows(c: Context, name: str) -> None:
    """Zeros that a table's gradients are added to, if they are: a row more in front, and padded so that vectors behind
    a first-order weight begin at 16 bytes.
    """
    starts = {
        op.attrs["starts"] for op in c.graph.ops if op.type == "pw_scatter_rows" and op.result("Rows@GRAD") == name
    }
    if not starts:
        return
    rows, width = c.layout.feeds.views[name.removesuffix("@GRAD")].shape
    before = 3 if 1 in starts else 0
    whole = c.emit.zeros((rows + 1, -(-(before + width) // 4) * 4))
    c.values.set(name, whole.slice(1, before, before + width).slice(0, 1, rows + 1))


def _write_results(c: Context, tables: Mapping[str, str]) -> tuple[Buffer, dict[str, View]]:
    """Copies the tables' gradients and the log-odds to the buffer that the host reads, behind 256 bytes of status."""
    logit = c.graph.outputs["logit"]
    shapes = {what: c.values.peek(name).shape for what, name in {**tables, "logit": logit}.items()}
    starts, nbytes = {}, 256
    for what, shape in shapes.items():
        starts[what] = nbytes // 4
        nbytes += -(-math.prod(shape) * 4 // 256) * 256
    out = Buffer(nbytes, "out")
    outputs = {what: View(out, starts[what], shape, row_major(shape)) for what, shape in shapes.items()}
    for what, name in tables.items():
        c.emit.copy_rows(outputs[what], c.values.read(name))
    c.emit.map("copy", c.values.read(logit), out=outputs["logit"])
    return out, outputs


def _write_status(c: Context, status: View, flat: View, table_grads: Sequence[View]) -> None:
    """Loss, weight, and sums of squares, of which the host sees whether all is finite; unscales the flat gradient."""
    gradients = flat.slice(0, 0, flat.size - 2)
    c.emit.map("copy", flat.slice(0, flat.size - 2, flat.size), out=status.slice(0, 0, 2))
    if c.loss_scale is not None:
        inverse = replace(c.loss_scale, offset=c.loss_scale.offset + 1)
        c.emit.map("mul", gradients, inverse, out=gradients)
    for at, array in enumerate([gradients, *table_grads], start=2):
        partial = temporary((max(1, min(264, array.size // 2048)),))
        c.emit.add(Squares(status.slice(0, at, at + 1), partial, array))
