"""Avazu click-through-rate prediction: CSV with a header (id, click, hour as YYMMDDHH, ...), in order of time.

`id` is dropped (a row number tells a model nothing). `hour` becomes a timestamp `time`, `hour_of_day` and `weekday`
(Monday is 0). Hexadecimal categories become exact int64 values.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.recipes import delimited, preparation
from paddlewheel.data_pipeline.recipes.delimited import BadLine, Format, Notes
from paddlewheel.data_pipeline.recipes.preparation import Advance, Progress, Split

HEX = (
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
)
INTEGERS = ("C1", "banner_pos", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22)))
_TYPES = {
    "click": pa.int8(),
    "hour": pa.int64(),
    **dict.fromkeys(HEX, pa.string()),
    **dict.fromkeys(INTEGERS, pa.int64()),
}


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
    """Writes `train/` and `eval/` below `directory`. The file is in order of time, so split `order` evaluates on its
    end.
    """
    settings = {"recipe": "avazu", "version": 1, "on_bad_line": on_bad_line}
    convert = partial(_convert, form=Format(on_bad_line=on_bad_line), notes=notes)
    return preparation.prepare(
        sources, directory, convert, split, settings=settings, threads=threads, on_progress=on_progress
    )


def _convert(source: Path, advance: Advance, *, form: Format, notes: Notes | None) -> Iterator[pa.RecordBatch]:
    for batch in delimited.read(source, advance, types=_TYPES, form=form, notes=notes):
        if batch.column("hour").null_count:
            raise DataError(f"{source}, column hour: a value is missing")
        stamp = batch.column("hour").to_numpy()
        day, hour = np.divmod(stamp, 100)
        year, month, date = 2000 + day // 10000, day // 100 % 100, day % 100
        if stamp.size and not ((hour < 24) & (month >= 1) & (month <= 12) & (date >= 1) & (date <= 31)).all():
            raise DataError(f"{source}, column hour: not all values are YYMMDDHH")
        months = (year - 1970) * 12 + (month - 1)
        days = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) + date - 1
        columns = {
            "click": batch.column("click"),
            "time": pa.array((days * 24 + hour) * 3600, pa.int64()).cast(pa.timestamp("s")),
            "hour_of_day": pa.array(hour.astype(np.int8)),
            "weekday": pa.array(((days + 3) % 7).astype(np.int8)),
            **{name: delimited.hex_to_int64(batch.column(name), f"{source}, column {name}") for name in HEX},
            **{name: batch.column(name) for name in INTEGERS},
        }
        yield pa.record_batch(list(columns.values()), names=list(columns))


def data_section(directory: str | Path) -> dict[str, Any]:
    """A `data` section with every column as a sparse feature, and the site crossed with the hour."""
    root = Path(directory)
    names = ["hour_of_day", "weekday", *HEX, *INTEGERS]
    return {
        "train": str(root / "train"),
        "eval": str(root / "eval"),
        "batch_rows": 2048,
        "labels": ["click"],
        "sparse": [*({"name": n} for n in names), {"name": "site_hour", "cross": ["site_id", "hour_of_day"]}],
    }
