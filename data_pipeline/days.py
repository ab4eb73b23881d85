"""Data that comes in days: one folder `day=2026-01-31` for each, anywhere on the path of its files.

Job files hold days: importing this reads nothing and needs neither pyarrow nor NumPy.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paddlewheel.data_pipeline.errors import DataError

if TYPE_CHECKING:
    from paddlewheel.data_pipeline.config import DataConfig
    from paddlewheel.data_pipeline.dataset import DataFile, Dataset
    from paddlewheel.data_pipeline.files import SourceFile

Day = dt.date
_DAY = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})", re.ASCII)


def parse_day(text: str) -> Day:
    """`2026-01-31` or `20260131`. Raises DataError for anything else."""
    found = _DAY.fullmatch(text.strip())
    if found is None:
        raise DataError(f"{text!r} is no day: write 2026-01-31")
    try:
        return Day(*map(int, found.groups()))
    except ValueError as error:
        raise DataError(f"{text!r} is no day: {error}") from None


def parse_days(text: str) -> tuple[Day, ...]:
    """The days of `2026-01-01..2026-01-07`, both ends included; or one day. Raises DataError."""
    first_text, dots, last_text = text.partition("..")
    first = parse_day(first_text)
    last = parse_day(last_text) if dots else first
    if last < first:
        raise DataError(f"{text!r} ends before it begins: write FIRST..LAST")
    return tuple(first + dt.timedelta(days=number) for number in range((last - first).days + 1))


def find_days(paths: str | Iterable[str], column: str) -> tuple[Day, ...]:
    """The days that have files below the paths, in order. Looks at names only.

    Raises DataError for paths without files, and for a file that lies in no folder `<column>=<day>`.
    """
    from paddlewheel.data_pipeline.files import discover

    sources = discover((paths,) if isinstance(paths, str) else paths)
    return tuple(sorted({day_of(source, column) for source in sources}))


def open_days(paths: str | Iterable[str], config: DataConfig, column: str, days: Iterable[Day]) -> dict[Day, Dataset]:
    """The data of these days, each as a dataset of its own; no other day's files are opened.

    Raises DataError as `Dataset.open` does, and for a day without rows.
    """
    from paddlewheel.data_pipeline.dataset import Dataset

    wanted = set(days)
    whole = Dataset.open(paths, config, keep=lambda source: day_of(source, column) in wanted)
    files: dict[Day, list[DataFile]] = {day: [] for day in sorted(wanted)}
    for file in whole.files:
        files[day_of(file.source, column)].append(file)
    found = {day: Dataset(tuple(here), config, fitted=whole.fitted) for day, here in files.items()}
    empty = [day.isoformat() for day, dataset in found.items() if dataset.num_rows == 0]
    if empty:
        raise DataError(f"{', '.join(empty)}: 0 rows for {'this day' if len(empty) == 1 else 'these days'}")
    return found


def day_of(source: SourceFile, column: str) -> Day:
    """The day of a file, from the innermost folder `<column>=<day>` above it. Raises DataError."""
    value = {**dict(source.above), **dict(source.partitions)}.get(column)
    if value is None:
        raise DataError(
            f"{source.name}: lies in no folder {column}=<day>, so its day is unknown. Training by days needs one for "
            f"every file, such as .../{column}=2026-01-31/part-0.parquet (train.days.column names another column)"
        )
    try:
        return parse_day(value)
    except ValueError as error:
        raise DataError(f"{source.name}: {column}={value}: {error}") from None
