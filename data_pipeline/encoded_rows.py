"""Rows after encoding: keys, list offsets, numbers and labels."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paddlewheel.data_pipeline.arrow_arrays import Bool
from paddlewheel.data_pipeline.batch import UInt64
from paddlewheel.data_pipeline.config import DataConfig


@dataclass
class Lists:
    """Ids of a multi-valued feature: row i holds `keys[offsets[i]:offsets[i + 1]]`."""

    keys: UInt64
    offsets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None
    num_truncated: int = 0
    """Ids left out because a list was longer than `max_length`."""


_NO_LISTS = Lists(np.zeros(0, dtype=np.uint64), np.zeros(1, dtype=np.int64), None)


@dataclass
class Rows:
    """Encoded rows, in the order in which they were read. Filled block by block; see `Encoder.encode`."""

    labels_NL: npt.NDArray[np.float32]
    dense_ND: npt.NDArray[np.float32]
    singles: dict[str, UInt64]
    """Per table: keys [N, F1]; 0 = no feature."""
    lists: dict[str, list[Lists]]
    """Per multi-valued feature: one entry per block."""
    weight_N: npt.NDArray[np.float32] | None
    group_N: UInt64 | None
    bad_N: Bool
    slice_metrics_by: dict[str, npt.NDArray[np.object_]] = field(default_factory=dict)
    """Per column of `data.slice_metrics_by`: values as text, None for null."""

    @classmethod
    def empty(cls, config: DataConfig, num_rows: int, num_blocks: int = 1) -> Rows:
        """Room for `num_rows` rows that come in `num_blocks` blocks."""
        return cls(
            labels_NL=np.empty((num_rows, len(config.labels)), dtype=np.float32),
            dense_ND=np.empty((num_rows, len(config.dense_columns)), dtype=np.float32),
            singles={
                t: np.empty(
                    (num_rows, sum(f.table == t and not f.multi_valued for f in config.sparse)), dtype=np.uint64
                )
                for t in config.tables
            },
            lists={f.name: [_NO_LISTS] * num_blocks for f in config.sparse if f.multi_valued},
            weight_N=None if config.sample_weight is None else np.empty(num_rows, dtype=np.float32),
            group_N=None if config.group is None else np.empty(num_rows, dtype=np.uint64),
            bad_N=np.zeros(num_rows, dtype=bool),
            slice_metrics_by={c: np.empty(num_rows, dtype=object) for c in config.slice_metrics_by},
        )
