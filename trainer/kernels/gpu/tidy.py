"""Calls to fewer calls: passes over the list that lowering made, which see what it could not know yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from paddlewheel.trainer.kernels.gpu.kernel_calls import Call, Elementwise, FieldsGrad, ScatterAdd
from paddlewheel.trainer.kernels.gpu.views import F32, Buffer, View


def tidied(calls: Sequence[Call]) -> list[Call]:
    """Calls with the same results."""
    return sums_of_three(first_order_with_fields(calls))


def first_order_with_fields(calls: Sequence[Call]) -> list[Call]:
    """A row's gradients of first-order weights, added with those of its embeddings by the same index."""
    kept: list[Call] = []
    for call in calls:
        if isinstance(call, FieldsGrad):
            at = next((at for at in reversed(range(len(kept))) if _is_first_order_of(kept[at], call)), None)
            if at is not None:
                scatter = kept.pop(at)
                assert isinstance(scatter, ScatterAdd)
                values = scatter.values
                dfirst = View(values.buffer, values.offset, (call.rows,), (1,))
                call = replace(call, first=scatter.table, dfirst=dfirst)  # noqa: PLW2901
        kept.append(call)
    return kept


def _is_first_order_of(call: Call, fields: FieldsGrad) -> bool:
    if not isinstance(call, ScatterAdd) or call.index != fields.index:
        return False
    values, rows = call.values, fields.rows
    return (
        call.table.buffer is fields.table.buffer
        and call.table.shape[1] == 1
        and values.shape == (rows, fields.index.size // max(rows, 1))
        and values.strides == (1, 0)
        and values.type == F32
    )


def sums_of_three(calls: Sequence[Call]) -> list[Call]:
    """`(a + b) + c` in one call, where nothing else reads `a + b`."""
    reads: Counter[Buffer] = Counter(view.buffer for call in calls for view in call.ins if view is not None)
    kept: list[Call] = []
    for call in calls:
        last = kept[-1] if kept else None
        if (
            isinstance(call, Elementwise)
            and isinstance(last, Elementwise)
            and call.function == last.function == "add"
            and call.operands[0] == last.out
            and last.out.buffer.kind == "temp"
            and reads[last.out.buffer] == 1
        ):
            kept[-1] = replace(call, function="add3", operands=(*last.operands, *call.operands[1:]))
        else:
            kept.append(call)
    return kept
