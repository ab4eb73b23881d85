"""Data in days: found by folders alone, each day a dataset of its own."""

from __future__ import annotations

import datetime as dt

import pyarrow.parquet as pq
import pytest

from paddlewheel.data_pipeline import synthetic
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.days import find_days, open_days
from paddlewheel.data_pipeline.errors import DataError
from tests.support.parquet_files import write

CONFIG = DataConfig(labels="click", sparse=[{"name": "v"}], threads=0)
FIRST, SECOND, THIRD = (dt.date(2026, 1, number) for number in (1, 2, 3))


@pytest.fixture
def root(tmp_path):
    for day, hour, rows in (("2026-01-01", 0, 3), ("2026-01-01", 1, 2), ("20260103", 0, 4)):
        write(tmp_path / "data" / f"day={day}" / f"hour={hour}" / "a.parquet", {"click": [0] * rows, "v": [1] * rows})
    return tmp_path / "data"


def test_days_are_found_by_name_and_opened_alone(root):
    (root / "day=2026-01-02").mkdir()
    (root / "day=2026-01-02" / "broken.parquet").write_text("not Parquet")
    assert find_days(str(root), "day") == (FIRST, SECOND, THIRD)
    found = open_days(str(root), CONFIG, "day", [THIRD, FIRST])
    assert {day: dataset.num_rows for day, dataset in found.items()} == {FIRST: 5, THIRD: 4}
    before = found[FIRST].fingerprint
    write(root / "day=2026-01-04" / "a.parquet", {"click": [0], "v": [1]})
    assert open_days(str(root), CONFIG, "day", [FIRST])[FIRST].fingerprint == before  # a later day changes nothing
    with pytest.raises(DataError, match=r"broken\.parquet"):
        open_days(str(root), CONFIG, "day", [SECOND])


def test_what_has_no_day_or_no_rows_is_refused(root):
    write(root / "loose.parquet", {"click": [0], "v": [1]})
    with pytest.raises(DataError, match=r"loose\.parquet: lies in no folder day=<day>"):
        find_days(str(root), "day")
    (root / "loose.parquet").unlink()
    write(root / "day=soon" / "a.parquet", {"click": [0], "v": [1]})
    with pytest.raises(DataError, match="day=soon: 'soon' is no day"):
        find_days(str(root), "day")
    (root / "day=soon" / "a.parquet").unlink()
    write(root / "day=2026-01-02" / "a.parquet", {"click": [], "v": []})
    with pytest.raises(DataError, match="2026-01-02: 0 rows for this day"):
        open_days(str(root), CONFIG, "day", [FIRST, SECOND])


def test_synthetic_days_share_the_training_rows(tmp_path):
    made = synthetic.generate(tmp_path / "d", 3_000, 1, days=["2026-01-01", "2026-01-02", "2026-01-03"])
    files = sorted((tmp_path / "d" / "train").rglob("*.parquet"))
    assert [path.parent.name for path in files] == [f"day=2026-01-0{number}" for number in (1, 2, 3)]
    assert [pq.read_metadata(path).num_rows for path in files] == [800] * 3
    assert made.train_rows == 2_400
