"""Criteo display advertising, Kaggle and 1TB layout: label, I1-I13, C1-C26, tab-separated, a missing value is empty.

The hexadecimal categories become exact int64 values; their feature keys are made from (column, value), so that a value that occurs in
two columns is two features.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from data_pipeline.errors import DataError

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
_HEX = np.full(256, 255, dtype=np.uint8)
_HEX[np.frombuffer(b"0123456789", np.uint8)] = np.arange(10)
_HEX[np.frombuffer(b"abcdef", np.uint8)] = np.arange(10, 16)
_HEX[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)
Split = Literal["random", "order", "permutation"]


def hex_to_int64(column: pa.Array) -> pa.Array:
    """Exact integers of hexadecimal text (at most 15 digits). Raises DataError for other text."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    gaps = column.is_null().to_numpy(zero_copy_only=False)
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1].astype(
        np.int64
    )
    lengths = np.diff(offsets)
    buffer = column.buffers()[2]
    data = np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)
    values = np.zeros(len(column), dtype=np.int64)
    wrong = (lengths > 15) | ((lengths == 0) & ~gaps)
    for digit in range(int(min(15, lengths.max(initial=0)))):
        rows = np.flatnonzero((lengths > digit) & ~wrong)
        nibble = _HEX[data[offsets[rows] + digit]]
        wrong[rows[nibble == 255]] = True
        values[rows] = values[rows] * 16 + nibble
    if wrong.any():
        raise DataError(f"{column[int(np.flatnonzero(wrong)[0])].as_py()!r} is not a hexadecimal category")
    return pa.array(values, mask=gaps)


def eval_mask(
    num_rows: int, *, split: Split, eval_fraction: float, seed: int, train_rows: int | None = None
) -> npt.NDArray[np.bool_]:
    """Which rows are for evaluation.

    `random`: each row by a seeded draw; `order`: the last rows; `permutation`: the first `train_rows` rows of
    `numpy.random.RandomState(seed).permutation(num_rows)` are for training, the others for evaluation.
    """
    mask = np.zeros(num_rows, dtype=bool)
    num_train = train_rows if train_rows is not None else num_rows - round(num_rows * eval_fraction)
    if not 0 < num_train < num_rows:
        raise DataError(f"{num_train} of {num_rows} rows for training leaves one part empty")
    if split == "order":
        mask[num_train:] = True
    elif split == "permutation":
        mask[np.random.RandomState(seed).permutation(num_rows)[num_train:]] = True
    else:
        mask = np.random.RandomState(seed).random_sample(num_rows) < 1 - num_train / num_rows
    return mask


def prepare(
    source: str | Path,
    directory: str | Path,
    *,
    eval_fraction: float = 0.1,
    split: Split = "random",
    seed: int = 0,
    train_rows: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Writes `train/` and `eval/` below `directory`. Returns the row counts. Raises DataError for a malformed line."""
    source, root = Path(source), Path(directory)
    names = ["label", *DENSE, *SPARSE]
    reader = pacsv.open_csv(
        source,
        read_options=pacsv.ReadOptions(column_names=names, block_size=8 << 20),
        parse_options=pacsv.ParseOptions(delimiter="\t"),
        convert_options=pacsv.ConvertOptions(
            column_types={"label": pa.int8(), **{c: pa.int64() for c in DENSE}, **{c: pa.string() for c in SPARSE}},
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    batches = []
    for batch in reader:
        arrays = [batch.column(n) if n not in SPARSE else hex_to_int64(batch.column(n)) for n in names]
        batches.append(pa.record_batch(arrays, names=names))
    table = pa.Table.from_batches(batches)
    mask = eval_mask(table.num_rows, split=split, eval_fraction=eval_fraction, seed=seed, train_rows=train_rows)
    counts = {}
    for part, rows in (("train", ~mask), ("eval", mask)):
        (root / part).mkdir(parents=True, exist_ok=True)
        temporary = root / part / ".part-00000.tmp"
        chosen = table.filter(pa.array(rows))
        pq.write_table(chosen, temporary, compression="zstd", row_group_size=1 << 16)
        temporary.rename(root / part / "part-00000.parquet")
        counts[f"{part}_rows"] = chosen.num_rows
    return counts


def data_section(directory: str | Path) -> dict[str, Any]:
    """A `data` section that does well: numbers as log1p and bucketed, a missing category is a feature of its own."""
    root = Path(directory)
    return {
        "train": str(root / "train"),
        "eval": str(root / "eval"),
        "batch_rows": 2048,
        "labels": ["label"],
        "dense": {"columns": list(DENSE), "transform": "log1p"},
        "sparse": [
            *(
                {"name": f"{c}_bucket", "column": c, "bucketize": {"kind": "log_square"}, "missing": "key"}
                for c in DENSE
            ),
            *({"name": c, "missing": "key"} for c in SPARSE),
        ],
    }
