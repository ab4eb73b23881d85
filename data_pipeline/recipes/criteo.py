"""Criteo display advertising, Kaggle and 1TB layout: label, I1-I13, C1-C26, tab-separated, a missing value is empty.

The hexadecimal categories become exact int64 values; their feature keys are made from (column, value), so that a
value that occurs in two columns is two features.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from paddlewheel.data_pipeline.recipes import delimited, preparation
from paddlewheel.data_pipeline.recipes.delimited import BadLine, Format, Notes
from paddlewheel.data_pipeline.recipes.preparation import Advance, Progress, Split

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
_TYPES = {"label": pa.int8(), **dict.fromkeys(DENSE, pa.int64()), **dict.fromkeys(SPARSE, pa.string())}


def prepare(
    sources: Iterable[str | Path],
    directory: str | Path,
    split: Split,
    *,
    on_bad_line: BadLine = "fail",
    threads: int = 2,
    notes: Notes | None = None,
    on_progress: Progress | None = None,
) -> dict[str, int]:
    """Writes `train/` and `eval/` below `directory`, one part per source (a day file, or all). Returns row counts."""
    settings = {"recipe": "criteo", "version": 1, "on_bad_line": on_bad_line}
    form = Format(delimiter="\t", header=False, quoted=False, on_bad_line=on_bad_line)
    convert = partial(_convert, form=form, notes=notes)
    return preparation.prepare(
        sources, directory, convert, split, settings=settings, threads=threads, on_progress=on_progress
    )


def _convert(source: Path, advance: Advance, *, form: Format, notes: Notes | None) -> Iterator[pa.RecordBatch]:
    for batch in delimited.read(source, advance, types=_TYPES, form=form, notes=notes, hint=_hint):
        arrays = [
            delimited.hex_to_int64(batch.column(n), f"{source}, column {n}") if n in SPARSE else batch.column(n)
            for n in _TYPES
        ]
        yield pa.record_batch(arrays, names=list(_TYPES))


def _hint(num_fields: int) -> str:
    return ". Criteo's test files, which have no label, have 39 fields" if num_fields == len(_TYPES) - 1 else ""


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
                {"name": f"{c}_bucket", "column": c, "bucketize": {"kind": "log_square"}, "null_policy": "own_key"}
                for c in DENSE
            ),
            *({"name": c, "null_policy": "own_key"} for c in SPARSE),
        ],
    }
