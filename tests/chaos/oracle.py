"""What the final model must have seen, counted without any of paddlewheel's code: not its reader, not its ledger.

Shows and clicks of every key in the newest checkpoint, against counts made from the Parquet files with keys as
trainer/serving/EXPORT.md says. A row that was lost, repeated or pushed twice changes them, whatever the journal tells.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.support.reference_keys import key

Counts = dict[int, tuple[float, float]]
"""Shows and clicks by key."""


def expected(raw: Mapping[str, Any]) -> Counts:
    """Of a job file's training data, for all of its epochs. Features with a name alone, single-valued or lists."""
    shows: Counter[int] = Counter()
    clicks: Counter[int] = Counter()
    data = raw["data"]
    for path in sorted(Path(data["train"]).rglob("*.parquet")):
        for row in pq.ParquetFile(path).read().to_pylist():
            for found in _keys(row, data["sparse"]):
                shows[found] += 1
                clicks[found] += row[data["labels"][0]]
    epochs = raw["train"]["epochs"]
    return {found: (float(epochs * count), float(epochs * clicks[found])) for found, count in shows.items()}


def _keys(row: Mapping[str, Any], features: list[dict[str, Any]]) -> Iterator[int]:
    """Of one row. The missing_key is 0 unless a job says otherwise: who has no id adds no key."""
    for feature in features:
        assert set(feature) <= {"name", "pooling", "max_length"}, "the oracle knows no other rule"
        name, value = feature["name"], row[feature["name"]]
        if isinstance(value, list) or "max_length" in feature:
            yield from [key(name, one) for one in value or () if one is not None][: feature.get("max_length")]
        elif value is not None:
            yield key(name, value)


def counted(checkpoint: Path) -> Counts:
    """Of all tables of a checkpoint."""
    found: Counts = {}
    for part in sorted((checkpoint / "sparse").glob("*/*/part-*")):
        for number, shows, clicks in _rows(part.read_bytes()):
            assert number not in found, f"key {number} twice"
            found[number] = (shows, clicks)
    return found


def _rows(part: bytes) -> Iterator[tuple[int, float, float]]:
    """Key, shows and clicks, and not what is of no interest here, of a part of either engine."""
    if part.startswith(b"PWHLRWS1"):  # a header of 80 bytes, then rows of one size that begin with these three
        (row_bytes,), (num_rows,) = struct.unpack_from("<I", part, 12), struct.unpack_from("<Q", part, 40)
        assert len(part) == 80 + num_rows * row_bytes
        for start in range(80, len(part), row_bytes):
            yield struct.unpack_from("<Qff", part, start)
        return
    for line in part.decode().splitlines():  # key, slot, unseen days, score, shows, clicks, ...
        number, _, _, _, shows, clicks, *_ = line.split()
        yield int(number), float(shows), float(clicks)


def check(checkpoint: Path, raw: Mapping[str, Any]) -> int:
    """Every key, both counts, exactly; the number of keys."""
    right, found = expected(raw), counted(checkpoint)
    wrong = {
        one: (right.get(one), found.get(one)) for one in right.keys() | found.keys() if right.get(one) != found.get(one)
    }
    assert not wrong, f"{len(wrong)} of {len(right)} keys; (right, found): {dict(list(wrong.items())[:5])}"
    return len(right)
