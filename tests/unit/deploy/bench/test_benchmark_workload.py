from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from paddlewheel.deploy.bench.speed.workload import Workload, blocks, keys_per_row, prepare

WORK = Workload(rows=101, num_slots=3, ids_per_slot=50, num_dense=2, num_files=4, tower=(8, 4), width=2)


def test_parquet_and_text_hold_the_same_rows(tmp_path: Path) -> None:
    files = prepare(WORK, tmp_path)
    expected = list(blocks(WORK))
    assert sum(len(block.labels_B) for block in expected) == WORK.rows
    for block, parquet, text in zip(expected, files.parquet, files.text, strict=True):
        table = pq.read_table(parquet)
        assert np.array_equal(np.stack([table[name].to_numpy() for name in WORK.slots], 1), block.ids_BF)
        assert np.array_equal(np.stack([table[name].to_numpy() for name in WORK.dense], 1), block.dense_BD)
        assert np.array_equal(table["label"].to_numpy(), block.labels_B)
        for line, ids_F, dense_D, label in zip(
            text.read_text().splitlines(), block.ids_BF, block.dense_BD, block.labels_B, strict=True
        ):
            words = line.split()
            assert [int(word) for word in words[1:6:2]] == [ids_F[0], 50 + ids_F[1], 100 + ids_F[2]]
            assert (words[0], words[2], words[4], words[6], words[9]) == ("1", "1", "1", "2", "1")
            assert np.array_equal(np.array(words[7:9], np.float32), dense_D)
            assert float(words[10]) == label


def test_ids_are_never_zero_and_stay_in_their_slot() -> None:
    for block in blocks(WORK):
        assert block.ids_BF.min() >= 1
        assert block.ids_BF.max() <= WORK.ids_per_slot


def test_made_once_and_found_again_whatever_the_model(tmp_path: Path) -> None:
    first = prepare(WORK, tmp_path)
    made = first.parquet[0].stat().st_mtime_ns
    assert prepare(replace(WORK, width=5, tower=(2,)), tmp_path) == first
    assert first.parquet[0].stat().st_mtime_ns == made
    assert prepare(replace(WORK, seed=2), tmp_path) != first
    assert sorted(path.name[:4] for path in tmp_path.iterdir()) == ["rows", "rows"]


def test_size_and_flops_of_the_tower() -> None:
    assert WORK.tower_sizes == [3 * 2 + 2, 8, 4, 1]
    assert WORK.tower_flops_per_row == 6 * (8 * 8 + 8 * 4 + 4)
    assert WORK.tower_bytes == 4 * (8 * 8 + 8 + 8 * 4 + 4 + 4 + 1)


def test_keys_per_row_counts_an_id_once_per_slot_and_batch() -> None:
    ids_BF = next(blocks(WORK)).ids_BF[:10]
    distinct = {(slot, int(i)) for row in ids_BF for slot, i in enumerate(row)}
    assert keys_per_row(WORK, 10) == len(distinct) / 10
