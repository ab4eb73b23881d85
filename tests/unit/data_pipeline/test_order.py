"""The order of rows: exact, deterministic, mixed, and the same however it is read (P1-P4, P16)."""

from __future__ import annotations

import itertools
import shutil
import threading

import numpy as np
import pyarrow as pa
import pytest

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset, assign, plan_epoch
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.data_pipeline.read_cursor import ReadCursor
from tests.support.parquet_files import load, numbered, numbered_config, rows_of, write


def test_uneven_trainers_lose_nothing(tmp_path):  # P1
    numbered(tmp_path / "a.parquet", 0, 10_000)
    numbered(tmp_path / "b.parquet", 10_000, 9_000)
    dataset = Dataset.open(str(tmp_path), numbered_config(batch_rows=512))
    parts = [rows_of(load(dataset, trainers=2, rank=rank)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(19_000))
    assert abs(len(parts[0]) - len(parts[1])) <= dataset.slice_rows


@pytest.mark.parametrize("files", [10, 1])
def test_few_row_groups_for_four_trainers(tmp_path, files):  # P2
    for i in range(files):
        numbered(tmp_path / f"{i}.parquet", 4000 // files * i, 4000 // files)
    dataset = Dataset.open(str(tmp_path), numbered_config())
    parts = [rows_of(load(dataset, trainers=4, rank=rank)) for rank in range(4)]
    assert sorted(itertools.chain(*parts)) == list(range(4000))
    assert min(len(p) for p in parts) >= 1000 - dataset.slice_rows


@pytest.mark.parametrize("batch_rows", [1, 7, 64, 99, 100, 101, 1000])
@pytest.mark.parametrize("row_group_rows", [1, 33, 100])
def test_batches_of_any_size_are_full_but_the_last(tmp_path, batch_rows, row_group_rows):  # P3, P4
    numbered(tmp_path / "a.parquet", 0, 100, row_group_rows=row_group_rows)
    dataset = Dataset.open(str(tmp_path), numbered_config(batch_rows=batch_rows))
    batches = load(dataset)
    assert sorted(rows_of(batches)) == list(range(100))
    assert [b.num_rows for b in batches] == [batch_rows] * (100 // batch_rows) + (
        [100 % batch_rows] if 100 % batch_rows else []
    )


def test_order_is_set_by_seed_and_epoch_alone(tmp_path):  # P16
    for i in range(5):
        numbered(tmp_path / f"{i}.parquet", 700 * i, 700, row_group_rows=300)
    config = numbered_config()
    dataset = Dataset.open(str(tmp_path), config)
    first = rows_of(load(dataset, seed=1, epoch=2))
    for threads in (0, 1, 2, 5):
        assert rows_of(load(dataset, seed=1, epoch=2, threads=threads)) == first
    listed = Dataset.open([str(tmp_path / f"{i}.parquet") for i in (3, 1, 4, 0, 2)], config)
    assert rows_of(load(listed, seed=1, epoch=2)) == first
    others = [rows_of(load(dataset, seed=s, epoch=e)) for s, e in ((1, 3), (2, 2), (1 + (1 << 32), 2))]
    assert all(sorted(o) == sorted(first) and o != first for o in others)


def test_this_order_never_changes(tmp_path):
    """A position saved by one version must mean the same rows in the next."""
    numbered(tmp_path / "a.parquet", 0, 300, row_group_rows=100)
    dataset = Dataset.open(
        str(tmp_path), numbered_config(shuffle={"slice_rows": 50, "window_rows": 100, "interleave": 2})
    )
    assert rows_of(load(dataset, seed=5, epoch=1))[:12] == GOLDEN_ORDER


GOLDEN_ORDER = [214, 208, 102, 206, 126, 213, 222, 120, 227, 221, 125, 220]


def test_evaluation_and_no_shuffle_read_in_file_order(tmp_path):
    for i in range(3):
        numbered(tmp_path / f"{i}.parquet", 100 * i, 100, row_group_rows=30)
    dataset = Dataset.open(str(tmp_path), numbered_config(shuffle={"enabled": False}))
    assert rows_of(load(dataset)) == list(range(300))
    shuffled = Dataset.open(str(tmp_path), numbered_config())
    assert rows_of(load(shuffled, slices=shuffled.slices(), training=False)) == list(range(300))


@pytest.mark.parametrize("layout", ["many row groups", "one row group", "two files", "large row groups"])
@pytest.mark.parametrize("trainers", [1, 2])
def test_data_sorted_by_label_gives_batches_near_the_global_rate(tmp_path, layout, trainers):  # P16
    num_rows = 200_000
    label = (np.arange(num_rows) >= 0.75 * num_rows).astype(np.int8)
    table = pa.table({"click": label, "v": np.arange(num_rows)})
    if layout == "two files":
        write(tmp_path / "a.parquet", table.slice(0, num_rows // 2))
        write(tmp_path / "b.parquet", table.slice(num_rows // 2))
    else:
        sizes = {"many row groups": 5_000, "one row group": num_rows, "large row groups": 25_000}
        write(tmp_path / "a.parquet", table, row_group_rows=sizes[layout])
    config = DataConfig(labels="click", sparse=[{"name": "v"}], batch_rows=2048, threads=0)
    dataset = Dataset.open(str(tmp_path), config)
    batches = [load(dataset, trainers=trainers, rank=rank, seed=3) for rank in range(trainers)]
    steps = [np.concatenate([b.labels_BL for b in step]).mean() for step in zip(*batches, strict=False)]
    assert np.abs(np.array(steps[:-1]) - 0.25).max() < 0.06
    assert abs(float(np.mean(steps)) - 0.25) < 0.01


def test_rows_are_mixed_beyond_their_neighbours(tmp_path):
    numbered(tmp_path / "a.parquet", 0, 20_000, row_group_rows=2_000)
    rows = np.array(rows_of(load(Dataset.open(str(tmp_path), numbered_config(batch_rows=1000)))))
    assert np.abs(np.diff(rows)).mean() > 20_000 / 3 * 0.9  # a random order has a third
    assert abs(np.corrcoef(rows, np.arange(rows.size))[0, 1]) < 0.05


def test_lazy_slices_are_pulled_only_when_needed_in_the_callers_thread(tmp_path):
    for i in range(40):
        numbered(tmp_path / f"{i:02d}.parquet", 100 * i, 100)
    config = numbered_config(
        batch_rows=50, prefetch_batches=2, threads=2, shuffle={"window_rows": 200, "interleave": 2}
    )
    dataset = Dataset.open(str(tmp_path), config)
    pulled: list[int] = []

    def lazy():
        for piece in plan_epoch(dataset, 0, 0):
            assert threading.current_thread() is threading.main_thread()
            pulled.append(piece.index)
            yield piece

    with Loader(dataset, config, lazy(), seed=0, epoch=0) as loader:
        assert pulled == []
        next(loader)
        assert len(pulled) <= 8  # two windows of two slices, and two ready batches
        rows = 50 + sum(b.num_rows for b in loader)
    assert rows == 4000


def test_closing_early_stops_the_threads(tmp_path):
    numbered(tmp_path / "a.parquet", 0, 50_000)
    dataset = Dataset.open(str(tmp_path), numbered_config(threads=3))
    loader = Loader(dataset, dataset.config, dataset.slices(), seed=0, epoch=0)
    next(loader)
    loader.close()
    loader.close()
    assert [t for t in threading.enumerate() if t.name.startswith("data")] == []
    assert list(loader) == []


def test_an_error_in_a_thread_reaches_the_caller(tmp_path):
    numbered(tmp_path / "a.parquet", 0, 5_000)
    dataset = Dataset.open(str(tmp_path), numbered_config(threads=2))
    (tmp_path / "a.parquet").write_bytes(b"gone")
    with pytest.raises(DataError, match=r"a\.parquet: is not the file that was there"):
        load(dataset)


def test_a_position_is_refused_for_other_data(tmp_path):  # P15
    numbered(tmp_path / "one" / "a.parquet", 0, 1000)
    dataset = Dataset.open(str(tmp_path / "one"), numbered_config())
    position = ReadCursor.start(dataset, 0, 0, 1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    numbered(tmp_path / "two" / "b.parquet", 0, 10)
    with pytest.raises(DataError, match="the data has changed"):
        position.slices(Dataset.open(str(tmp_path / "two"), numbered_config()), 1, 0)
    with pytest.raises(DataError, match=r"counts rows in slices of 256 rows.*now slices of 100 rows"):
        position.slices(Dataset.open(str(tmp_path / "one"), numbered_config(shuffle={"slice_rows": 100})), 1, 0)
    with pytest.raises(DataError, match="version 9"):
        ReadCursor.from_json({**position.to_json(), "version": 9})
    with pytest.raises(DataError, match="slice 0 cannot have 300 rows done"):
        position.with_done({0: 300}).check(dataset)
    with pytest.raises(ValueError, match="read by trainers 0 and 1"):
        position.with_done({0: 30}, {0: 40})
    with pytest.raises(ValueError, match="30 rows done after 40"):
        position.with_done({0: 40}).with_done({0: 30})


def test_a_large_row_group_is_streamed_and_read_once(tmp_path):
    num_rows = 300_000
    columns = {f"c{i}": np.random.RandomState(i).randint(0, 1 << 60, num_rows) for i in range(8)}
    write(tmp_path / "a.parquet", {"click": np.zeros(num_rows, np.int8), **columns}, row_group_rows=num_rows)
    sparse = [{"name": c} for c in columns]
    config = DataConfig(labels="click", sparse=sparse, threads=0, shuffle={"enabled": False})
    dataset = Dataset.open(str(tmp_path), config)
    assert not dataset.files[0].row_groups[0].is_small(9)
    with Loader(dataset, config, plan_epoch(dataset, 0, 0), seed=0, epoch=0) as loader:
        assert sum(b.num_rows for b in loader) == num_rows
        assert loader.counters["rows_decoded"] == num_rows
    mixed = DataConfig(labels="click", sparse=sparse, threads=0)
    dataset = Dataset.open(str(tmp_path), mixed)
    for trainers, most in ((1, 2.6), (3, 5.0), (12, 12.0)):
        decoded = 0
        for rank in range(trainers):
            with Loader(dataset, mixed, assign(plan_epoch(dataset, 0, 0), trainers, rank), seed=0, epoch=0) as loader:
                assert sum(b.num_rows for b in loader) > 0
                decoded += loader.counters["rows_decoded"]
        assert decoded <= most * num_rows
