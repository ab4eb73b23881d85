"""What the trainer sees of the data.

Shapes: B rows, D dense columns, L labels or list length, U unique keys, F1 single-valued features of a table.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class Span(NamedTuple):
    """Rows `row_start` to `row_start + num_rows` of a slice, in the slice's own (permuted) order."""

    slice_index: int
    row_start: int
    num_rows: int


@dataclass(frozen=True)
class TableKeys:
    """The keys that a batch needs from one table, and who needs them.

    A batch of three rows with the single-valued feature `item` and the multi-valued `tags` in one key space::

        row   item   tags            keys_U = [k(4), k(7), k(9)]
        0     7      [9, 7]          single_BF    = [[2], [1], [0]]      (single_names = ("item",))
        1     4      []              index["tags"] = [[3, 2], [0, 0], [3, 0]]
        2     null   [9]

    Positions are 1-based: 0 means "no id here", so row 0 of a gathered matrix can hold zeros.
    """

    keys_U: UInt64
    """Unique keys, none of them 0, ordered by where each is used last (all features one after the other)."""
    index: dict[str, Int32]
    """Per feature, in declared order: int32 [B] (single-valued) or [B, L] (multi-valued, left-aligned)."""
    single_BF: Int32
    """All single-valued features together, C-contiguous."""
    single_names: tuple[str, ...]
    """Names of the columns of `single_BF`."""
    weights: dict[str, Float32] = field(default_factory=dict)
    """Per-id weights [B, L] of the features that have them; 0 where there is no id."""


@dataclass(frozen=True)
class Batch:
    """Rows ready for a step."""

    num_rows: int
    dense_BD: Float32
    labels_BL: Float32
    tables: dict[str, TableKeys]
    spans: tuple[Span, ...]
    """Where the rows come from. Skipped bad rows are inside the spans but not in the batch."""
    sample_weight_B: Float32 | None = None
    group_B: UInt64 | None = None
    num_skipped_rows: int = 0
    slice_metrics_by: dict[str, npt.NDArray[np.object_]] = field(default_factory=dict)
    """Per column of `data.slice_metrics_by`: values as text [B], None for null."""
