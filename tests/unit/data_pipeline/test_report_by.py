"""Columns that evaluation reports by: their values as text, beside their own rows."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset, plan_epoch
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.loader import Loader

ROWS = 50


def write(path) -> None:
    numbers = np.arange(ROWS)
    table = pa.table(
        {
            "click": pa.array(numbers % 2, pa.int8()),
            "user": pa.array(numbers, pa.int64()),
            "city": pa.array([None if i % 7 == 0 else f"城{i % 3}" for i in range(ROWS)]).dictionary_encode(),
            "hour": pa.array([None if i % 5 == 0 else i for i in range(ROWS)], pa.int16()),
            "price": pa.array(numbers / 2, pa.float64()),
            "tags": pa.array([[1]] * ROWS),
        }
    )
    pq.write_table(table, path, row_group_size=20)


def config(**fields) -> DataConfig:
    return DataConfig(labels="click", sparse=[{"name": "user"}], batch_rows=16, threads=0, **fields)


@pytest.mark.parametrize("training", [True, False])
def test_values_stay_with_their_rows(tmp_path, training: bool) -> None:
    write(tmp_path / "a.parquet")
    data = config(slice_metrics_by=["city", "hour", "price"], dense={"columns": ["price"]})
    dataset = Dataset.open(str(tmp_path), data)
    seen = []
    with Loader(dataset, data, plan_epoch(dataset, 1, 0), seed=1, epoch=0, training=training) as loader:
        for batch in loader:
            for place, price in enumerate(batch.dense_BD[:, 0].tolist()):  # which says what row it was
                i = int(2 * price)
                assert batch.slice_metrics_by["city"][place] == (None if i % 7 == 0 else f"城{i % 3}")
                assert batch.slice_metrics_by["hour"][place] == (None if i % 5 == 0 else str(i))
                assert float(batch.slice_metrics_by["price"][place]) == i / 2
                seen.append(i)
    assert sorted(seen) == list(range(ROWS))


def test_a_list_column_or_a_missing_one_is_refused(tmp_path) -> None:
    write(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"'tags' of data\.slice_metrics_by.*a value a row is needed"):
        Dataset.open(str(tmp_path), config(slice_metrics_by="tags"))
    with pytest.raises(DataError, match="no column 'citi'; the nearest are 'city'"):
        Dataset.open(str(tmp_path), config(slice_metrics_by="citi"))


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        ([pa.array([1_500_000 * n], pa.timestamp(u)) for u, n in (("us", 1), ("ns", 1000))], ["1970-01-01 00:00:01.5"]),
        ([pa.array([3_723_000], pa.time32("ms")), pa.array([3_723_000_000_000], pa.time64("ns"))], ["01:02:03"]),
        ([pa.array([Decimal("1.50")]), pa.array([Decimal("1.5")]), pa.array([Decimal("1.500")])], ["1.5"]),
        ([pa.array([0.1], pa.float32()), pa.array([0.1])], ["0.1"]),
        ([pa.array([b"K\xf6ln"]), pa.array([b"K\xf6ln"]).view(pa.string())], ["K\\xf6ln"]),
        ([pa.array(["a"], pa.string_view()), pa.array(["a"]).dictionary_encode()], ["a"]),
        ([pa.array([4_000_000], pa.int32()).cast(pa.date32())], ["1970-01-01 +4000000 days"]),
        ([pa.array([True])], ["true"]),
    ],
    ids=["timestamps", "times", "decimals", "floats", "no UTF-8", "texts", "far dates", "booleans"],
)  # fmt: skip
def test_a_value_has_one_text_in_every_type(tmp_path, columns, texts) -> None:
    for number, column in enumerate(columns):
        pq.write_table(pa.table({"click": [0], "user": [1], "by": column}), tmp_path / f"{number}.parquet")
    data = config(slice_metrics_by=["by"])
    dataset = Dataset.open(str(tmp_path), data)
    with Loader(dataset, data, plan_epoch(dataset, 1, 0), seed=1, epoch=0) as loader:
        assert {text for batch in loader for text in batch.slice_metrics_by["by"]} == set(texts)
