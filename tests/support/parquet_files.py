"""Small Parquet files for tests of the data pipeline, and its batches read back row by row."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset, Slice, assign, plan_epoch
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.data_pipeline.schema import classify


def write(path: Path, columns: dict[str, Any] | pa.Table, *, row_group_rows: int | None = None, **options: Any) -> Path:
    """A Parquet file; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, row_group_size=row_group_rows, **options)
    return path


def numbered(path: Path, start: int, num_rows: int, *, row_group_rows: int | None = None, **more: Any) -> Path:
    """Rows that can be told apart: `row` counts on from `start`, `item` is an id, `click` is 0 or 1."""
    row = list(range(start, start + num_rows))
    columns = {
        "click": pa.array([r % 2 for r in row], pa.int8()),
        "row": pa.array(row, pa.float32()),
        "item": pa.array([r % 7 for r in row], pa.int64()),
    }
    return write(path, {**columns, **more}, row_group_rows=row_group_rows)


def numbered_config(**more: Any) -> DataConfig:
    """A config for `numbered` files."""
    values: dict[str, Any] = {
        "labels": "click",
        "dense": {"columns": ["row"]},
        "sparse": [{"name": "item"}],
        "batch_rows": 16,
        "threads": 0,
        **more,
    }
    return DataConfig(**values)


def load(
    dataset: Dataset,
    *,
    slices: Iterable[Slice] | None = None,
    seed: int = 0,
    epoch: int = 0,
    trainers: int = 1,
    rank: int = 0,
    **more: Any,
) -> list[Batch]:
    """All batches of one trainer."""
    if slices is None:
        slices = assign(plan_epoch(dataset, seed, epoch), trainers, rank)
    with Loader(dataset, dataset.config, slices, seed=seed, epoch=epoch, **more) as loader:
        return list(loader)


def rows_of(batches: Iterable[Batch]) -> list[int]:
    """The `row` column of `numbered` files, in order."""
    return [int(r) for batch in batches for r in batch.dense_BD[:, 0]]


def keys_by_row(batches: Iterable[Batch], feature: str) -> list[list[int]]:
    """The keys of a feature, row by row, without padding."""
    result: list[list[int]] = []
    for batch in batches:
        if not batch.num_rows:  # spans alone: all rows were bad
            continue
        table = next(t for t in batch.tables.values() if feature in t.index)
        index = table.index[feature]
        result += [[int(table.keys_U[i - 1]) for i in row if i] for row in index.reshape(batch.num_rows, -1)]
    return result


def read_columns(tmp_path: Path, columns: dict[str, Any], **config: Any) -> list[Batch]:
    """Writes one file with a click column beside `columns`, and reads it in file order."""
    num_rows = len(next(iter(columns.values())))
    write(tmp_path / "data.parquet", {"click": pa.array([i % 2 for i in range(num_rows)]), **columns})
    job = DataConfig(**{"labels": "click", "shuffle": {"enabled": False}, "threads": 0, **config})
    return load(Dataset.open(str(tmp_path / "data.parquet"), job))


def config_for(path: Path, **more: object) -> DataConfig:
    """A job that reads every column of a file that it can read as a feature; the first number is the label."""
    try:
        columns = {f.name: classify(f.type) for f in pq.read_schema(path)}
    except (OSError, pa.ArrowException):
        columns = {"x": classify(pa.int32())}
    numbers = [n for n, c in columns.items() if c.kind in ("integer", "float", "boolean") and not c.is_list]
    label = numbers[0] if numbers else "none"
    usable = ("integer", "boolean", "decimal", "timestamp", "date", "time", "string", "null")
    sparse = [{"name": n, "max_length": 8} for n, c in columns.items() if n != label and c.kind in usable]
    dense = [n for n in numbers if n != label]
    return DataConfig(
        labels=label, label_rule={"at_least": 0}, sparse=sparse or [{"name": "other", "absent_column": "missing"}],
        dense={"columns": dense, "clip": [-9, 9]} if dense else (), threads=0, batch_rows=64,
        **{"on_bad_row": "skip", **more},
    )  # fmt: skip
