"""A file that is replaced while it is read ends the reading, with its name; other data are never trained."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.errors import ChangedError
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.data_pipeline.scoring_reader import Blocks, scoring_config
from tests.support.parquet_files import numbered, numbered_config, rows_of, write

NUM_ROWS = 4000


def file(path: Path, *, label: int = 0, ids: int = 7, num_rows: int = NUM_ROWS) -> Path:
    """As `numbered`, but of a size that only the number of rows decides; `label` 1 turns each label round."""
    row = list(range(num_rows))
    columns = {
        "click": pa.array([(r + label) % 2 for r in row], pa.int8()),
        "row": pa.array(row, pa.float32()),
        "item": pa.array([r % ids for r in row], pa.int64()),
    }
    return write(path, columns, row_group_rows=500, compression="none", use_dictionary=False)


def by_rename(path: Path, fresh: Path) -> None:
    fresh.replace(path)


def in_place(path: Path, fresh: Path) -> None:
    path.write_bytes(fresh.read_bytes())
    fresh.unlink()


def keeping_its_time(path: Path, fresh: Path) -> None:
    """As `cp -p` or `rsync -t` of a file with other content would."""
    before = path.stat()
    in_place(path, fresh)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("replace", [by_rename, in_place])
def test_a_file_with_the_same_size_and_other_labels_ends_reading(tmp_path, replace, policy):
    path = file(tmp_path / "data/a.parquet")
    config = numbered_config(on_bad_file=policy, shuffle={"enabled": False, "window_rows": 500})
    dataset = Dataset.open(str(path), config)
    fresh = file(tmp_path / "fresh.parquet", label=1)
    assert fresh.stat().st_size == path.stat().st_size
    with Loader(dataset, config, dataset.slices(), seed=0, epoch=0) as loader:
        got = [next(loader)]
        replace(path, fresh)
        with pytest.raises(ChangedError, match=r"a\.parquet: is not the file that was there .* written since"):
            got += list(loader)
    rows = rows_of(got)
    labels = [int(v) for batch in got for v in batch.labels_BL[:, 0]]
    assert labels == [row % 2 for row in rows]  # nothing of the new file was handed out


def test_a_file_with_more_rows_ends_reading(tmp_path):
    path = file(tmp_path / "data/a.parquet")
    config = numbered_config()
    dataset = Dataset.open(str(path), config)
    file(path, num_rows=2 * NUM_ROWS)
    with (
        Loader(dataset, config, dataset.slices(), seed=0, epoch=0) as loader,
        pytest.raises(ChangedError, match=r"a\.parquet: .* had \d+ bytes then and has \d+ now"),
    ):
        list(loader)


def test_another_file_with_the_same_size_and_time_is_known_by_its_footer(tmp_path):
    path = file(tmp_path / "data/a.parquet")
    config = scoring_config(numbered_config())
    dataset = Dataset.open(str(path), config)
    fresh = file(tmp_path / "fresh.parquet", ids=5)  # other values, so other statistics
    assert fresh.stat().st_size == path.stat().st_size
    keeping_its_time(path, fresh)
    with Blocks(dataset) as blocks, pytest.raises(ChangedError, match="another footer"):
        list(blocks)


def test_a_long_row_group_is_held_against_the_plan_while_it_is_read(tmp_path, monkeypatch):
    """A stream stays open for long: a file that is written to meanwhile is noticed at the next batch."""
    monkeypatch.setattr("paddlewheel.data_pipeline.dataset._CACHED_CELLS", 1)
    path = numbered(tmp_path / "a.parquet", 0, 60_000)
    config = numbered_config(shuffle={"enabled": False, "window_rows": 4096}, batch_rows=4096)
    dataset = Dataset.open(str(path), config)
    with Loader(dataset, config, dataset.slices(), seed=0, epoch=0) as loader:
        next(loader)
        os.utime(path, ns=(1, 1))
        with pytest.raises(ChangedError, match="written since"):
            list(loader)


def test_a_file_that_is_removed_is_not_left_out(tmp_path):
    path = file(tmp_path / "data/a.parquet")
    numbered(tmp_path / "data/b.parquet", NUM_ROWS, 100)
    config = numbered_config(on_bad_file="skip")
    dataset = Dataset.open(str(path.parent), config)
    path.unlink()
    with (
        Loader(dataset, config, dataset.slices(), seed=0, epoch=0) as loader,
        pytest.raises(ChangedError, match=r"a\.parquet: .* is gone"),
    ):
        list(loader)


def test_the_fingerprint_knows_what_a_column_holds_and_not_when_it_was_written(tmp_path):
    path = file(tmp_path / "a.parquet")
    before, size = Dataset.open(str(path), numbered_config()).fingerprint, path.stat().st_size
    os.utime(path, ns=(1, 1))
    assert Dataset.open(str(path), numbered_config()).fingerprint == before
    file(path, ids=5)
    assert path.stat().st_size == size
    assert Dataset.open(str(path), numbered_config()).fingerprint != before
