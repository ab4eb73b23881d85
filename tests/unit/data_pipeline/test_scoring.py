"""Rows to be scored: every row in file order, whatever is missing or wrong, with columns handed through as they are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.scoring_reader import Blocks, scoring_config
from tests.support.parquet_files import numbered, numbered_config, write


def read(path, config, carried=()):
    with Blocks(Dataset.open(str(path), scoring_config(config), carried=carried)) as blocks:
        return list(blocks)


@pytest.mark.parametrize("threads", [0, 3])
def test_rows_come_in_order_without_labels(tmp_path, threads):
    numbered(tmp_path / "a.parquet", 0, 70, row_group_rows=30)
    numbered(tmp_path / "b.parquet", 70, 25)
    for path in tmp_path.glob("*.parquet"):
        write(path, pq.read_table(path).drop_columns(["click"]))
    config = numbered_config(threads=threads, sample_weight="gone", group="gone", slice_metrics_by="gone")
    blocks = read(tmp_path, config, ["row"])
    rows = np.concatenate([block.batch.dense_BD[:, 0] for block in blocks])
    np.testing.assert_array_equal(rows, np.arange(95))
    assert [x for block in blocks for x in block.carried["row"].to_pylist()] == list(range(95))
    assert max(block.num_rows for block in blocks) == 16
    assert all(block.batch.labels_BL.shape == (block.num_rows, 0) for block in blocks)
    assert not any(block.reasons for block in blocks)


def bad_rows(path):
    values = [0.0, float("inf"), 2.0, float("inf"), 4.0]
    write(path / "in" / "a.parquet", {"row": values, "item": [1, 2, 3, 4, 5], "click": [7] * 5})
    return path / "in"


def test_bad_rows_are_named_and_left_out(tmp_path):
    (block,) = read(bad_rows(tmp_path), numbered_config(on_bad_row="skip"), ["item"])
    assert block.usable_N.tolist() == [True, False, True, False, True]
    assert set(block.reasons) == {1, 3}
    assert "column 'row' is inf" in block.reasons[1]
    assert block.carried["item"].to_pylist() == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(block.batch.dense_BD[:, 0], [0, 2, 4])
    assert len(block.batch.tables["default"].keys_U) == 3


def test_bad_rows_stop_or_are_quarantined(tmp_path):
    folder = bad_rows(tmp_path)
    with pytest.raises(DataError, match=r"a.parquet: row 1: column 'row' is inf.*on_bad_row"):
        read(folder, numbered_config())
    config = numbered_config(on_bad_row="quarantine", quarantine_directory=str(tmp_path / "q"))
    read(folder, config, ["click"])
    kept = pq.read_table(tmp_path / "q")
    assert kept["_row"].to_pylist() == [1, 3]
    assert set(kept.column_names) == {"row", "item", "_file", "_row", "_reason"}


def test_columns_are_handed_through_as_they_are(tmp_path):
    odd = {
        "text": pa.array(["a", None]).dictionary_encode(),
        "list": pa.array([[1], None], pa.list_(pa.int16())),
        "when": pa.array([1, None], pa.timestamp("ms")),
        "big": pa.array([2**63, None], pa.uint64()),
    }
    write(tmp_path / "day=2" / "a.parquet", {"row": [0.0, 1.0], "item": [1, 2], **odd})
    (block,) = read(tmp_path, numbered_config(), [*odd, "day", "item"])
    for name, array in odd.items():
        assert block.carried[name].equals(array.cast(block.carried[name].type)), name
    assert block.carried["day"].to_pylist() == ["2", "2"]
    assert block.carried["item"].to_pylist() == [1, 2]


def test_a_carried_column_that_is_not_there_is_refused_with_the_nearest(tmp_path):
    numbered(tmp_path / "a.parquet", 0, 5)
    with pytest.raises(DataError, match=r"no column 'clik'; the nearest are 'click'"):
        read(tmp_path, numbered_config(), ["clik"])


def test_damaged_files_stop_or_are_left_out_and_counted(tmp_path):
    numbered(tmp_path / "a.parquet", 0, 40, row_group_rows=20)
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[10:200] = bytes(190)  # pages of the first row group
    numbered(tmp_path / "b.parquet", 40, 8)
    (tmp_path / "a.parquet").write_bytes(raw)
    with pytest.raises(DataError, match=r"a.parquet: row group 0 cannot be read"):
        read(tmp_path, numbered_config())
    config = scoring_config(numbered_config(on_bad_file="skip"))
    with Blocks(Dataset.open(str(tmp_path), config)) as blocks:
        rows = np.concatenate([block.batch.dense_BD[:, 0] for block in blocks])
    np.testing.assert_array_equal(rows, np.arange(20, 48))
    assert blocks.num_unreadable_rows == 20
    assert list(blocks.unreadable) == [str(tmp_path / "a.parquet")]
