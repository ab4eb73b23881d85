"""What a dense program is fed with: the layout of its tables, and a batch as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.pserver.config import Tables
from paddlewheel.trainer.models.base import FeatureSpec


def layouts(data: DataConfig, tables: Tables) -> list[TableLayout]:
    """How the job's features enter the dense program, table by table in the order of first use."""
    result = []
    for name in data.tables:
        features = [f for f in data.sparse if f.table == name]
        result.append(
            TableLayout(
                name,
                tables[name].pull_width,
                tables[name].first_order,
                [f.name for f in features if not f.multi_valued],
                [ListFeature(f.name, f.pooling, f.weights is not None) for f in features if f.multi_valued],
            )
        )
    return result


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ListFeature:
    """A feature whose rows hold any number of ids."""

    name: str
    pooling: str  # sum, mean or none
    weighted: bool = False


@dataclass(frozen=True)
class TableLayout:
    """How one table's features enter the program.

    Attributes:
        name: the table.
        pull_width: floats of a pulled row, the first-order weight included.
        first_order: whether column 0 of a pulled row is a first-order weight.
        single: features with at most one id a row; they share one index array.
        lists: the other features, an index array each.
    """

    name: str
    pull_width: int
    first_order: bool
    single: Sequence[str]
    lists: Sequence[ListFeature] = ()

    @property
    def width(self) -> int:
        """Floats of an embedding."""
        return self.pull_width - self.first_order

    @property
    def input_names(self) -> list[str]:
        """Names of the arrays that `batch_feed` makes for this table."""
        names = [f"{self.name}/rows", *([f"{self.name}/single"] if self.single else [])]
        for feature in self.lists:
            names.append(f"{self.name}/list/{feature.name}")
            names += [f"{self.name}/weight/{feature.name}"] if feature.weighted else []
        return names


def feature_spec(layouts: Sequence[TableLayout], num_dense: int, num_labels: int) -> FeatureSpec:
    """What a model may know of the features."""
    fields: dict[str, int] = {}
    sequences: dict[str, int] = {}
    tables: dict[str, str] = {}
    single: list[str] = []
    for layout in layouts:
        single += layout.single
        fields.update(dict.fromkeys(layout.single, layout.width))
        for feature in layout.lists:
            (sequences if feature.pooling == "none" else fields)[feature.name] = layout.width
        tables.update(dict.fromkeys([*layout.single, *(f.name for f in layout.lists)], layout.name))
    return FeatureSpec(num_dense, fields, sequences, tables, single, num_labels)


def batch_feed(layouts: Sequence[TableLayout], batch: Batch, rows: Mapping[str, Floats]) -> dict[str, NDArray[Any]]:
    """The arrays of a batch by the programs' input names. `rows` holds each table's pulled values [U, W]."""
    feed: dict[str, NDArray[Any]] = {}
    for layout in layouts:
        keys = batch.tables[layout.name]
        # operators that meet an empty array lose its type: a batch without any id gets a row that nothing points to
        values = rows[layout.name]
        feed[f"{layout.name}/rows"] = values if len(values) else np.zeros((1, layout.pull_width), np.float32)
        if layout.single:
            feed[f"{layout.name}/single"] = keys.single_BF
        for feature in layout.lists:
            feed[f"{layout.name}/list/{feature.name}"] = keys.index[feature.name]
            if feature.weighted:
                feed[f"{layout.name}/weight/{feature.name}"] = keys.weights[feature.name]
    feed["dense"] = batch.dense_BD
    return feed
