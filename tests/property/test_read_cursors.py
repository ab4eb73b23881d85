"""Slices, assignment, order and resuming: properties over many shapes of data."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.data_pipeline.dataset import Dataset, Slice, assign, plan_epoch
from paddlewheel.data_pipeline.loader import Loader, plan_windows
from paddlewheel.data_pipeline.read_cursor import ReadCursor
from tests.support.parquet_files import load, numbered, numbered_config, rows_of

slice_lists = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 500)), max_size=60).map(
    lambda items: [Slice(i, f, g, 0, n) for i, (f, g, n) in enumerate(items)]
)


@given(slice_lists, st.integers(1, 7), st.data())
def test_assignment_is_disjoint_complete_and_balanced_by_rows(slices, num_trainers, data):
    done = {s.index: data.draw(st.integers(0, s.num_rows)) for s in slices if data.draw(st.booleans())}
    parts = [assign(slices, num_trainers, rank, done) for rank in range(num_trainers)]
    assert Counter(s.index for part in parts for s in part) == Counter(s.index for s in slices)
    left = [sum(s.num_rows - done.get(s.index, 0) for s in part) for part in parts]
    largest = max((s.num_rows - done.get(s.index, 0) for s in slices), default=0)
    assert max(left) - min(left) <= largest
    places = {s.index: i for i, s in enumerate(slices)}
    for part in parts:
        assert [places[s.index] for s in part] == sorted(places[s.index] for s in part)


@settings(max_examples=50)
@given(slice_lists, st.integers(1, 20), st.sampled_from([1, 16, 256]), st.integers(1, 3000), st.data())
def test_windows_hold_every_row_once_and_pull_no_slice_early(slices, interleave, block_rows, window_rows, data):
    done = {s.index: data.draw(st.integers(0, s.num_rows)) for s in slices if data.draw(st.booleans())}
    pulled = 0

    def lazy():
        nonlocal pulled
        for piece in slices:
            pulled += 1
            yield piece

    covered: Counter[tuple[int, int]] = Counter()
    begun: set[int] = set()
    for parts in plan_windows(lazy(), interleave=interleave, block_rows=block_rows, window_rows=window_rows, done=done):
        begun |= {p.slice.index for p in parts}
        assert pulled <= len(begun) + interleave + len(done)
        for part in parts:
            covered.update((part.slice.index, part.start + i) for i in range(part.num_rows))
    assert all(count == 1 for count in covered.values())
    expected = {(s.index, r) for s in slices for r in range(s.num_rows)}
    missing = expected - set(covered)
    assert all(row < done.get(index, 0) for index, row in missing), "a row that was not done is in no window"


@cache
def _dataset(sizes: tuple[tuple[int, ...], ...], slice_rows: int, interleave: int, window_rows: int) -> Dataset:
    """Files with the given row groups; made once."""
    root = Path(tempfile.mkdtemp())
    start = 0
    for number, groups in enumerate(sizes):
        for part, rows in enumerate(groups):
            numbered(root / f"f{number}-{part}.parquet", start, rows, row_group_rows=max(1, -(-rows // 3)))
            start += rows
    shuffle = {"slice_rows": slice_rows, "interleave": interleave, "window_rows": window_rows}
    return Dataset.open(str(root), numbered_config(shuffle=shuffle))


shapes = st.sampled_from([((100,),), ((1,),), ((17,),), ((33, 5), (64,)), ((10,) * 10,), ((90,), (100,))])
datasets = st.builds(
    _dataset, shapes, st.sampled_from([1, 7, 32, 1000]), st.sampled_from([1, 3, 16]), st.sampled_from([1, 20, 500])
)


@settings(max_examples=40)
@given(datasets, st.integers(1, 4), st.integers(0, 3), st.integers(0, 2))
def test_every_row_once_whatever_the_shape(dataset, trainers, seed, epoch):
    rows: list[int] = []
    for rank in range(trainers):
        batches = load(dataset, trainers=trainers, rank=rank, seed=seed, epoch=epoch)
        assert all(b.num_rows == dataset.config.batch_rows for b in batches[:-1])
        assert all(sum(s.num_rows for s in b.spans) == b.num_rows for b in batches)
        rows += rows_of(batches)
    assert sorted(rows) == list(range(dataset.num_rows))


@settings(max_examples=40)
@given(datasets, st.integers(1, 4), st.integers(0, 3), st.data())
def test_resuming_with_as_many_trainers_goes_on_identically(dataset, trainers, seed, data):
    cursor = ReadCursor.start(dataset, seed, 1, trainers)
    for rank in range(trainers):
        whole = load(dataset, trainers=trainers, rank=rank, seed=seed, epoch=1)
        stop = data.draw(st.integers(0, len(whole)))
        loader = Loader(dataset, dataset.config, cursor.slices(dataset, trainers, rank), seed=seed, epoch=1)
        with loader:
            for _ in range(stop):
                next(loader)
            here = ReadCursor.from_json(cursor.with_done(loader.state()).to_json())
        rest = load(dataset, slices=here.slices(dataset, trainers, rank), seed=seed, epoch=1, resume=here.done)
        assert rows_of(whole[:stop]) + rows_of(rest) == rows_of(whole)
        assert [b.spans for b in rest] == [b.spans for b in whole[stop:]]


@settings(max_examples=40)
@given(datasets, st.integers(1, 4), st.integers(1, 4), st.data())
def test_resuming_with_other_trainers_reads_each_row_once(dataset, before, after, data):
    cursor = ReadCursor.start(dataset, 3, 0, before)
    rows: list[int] = []
    states = []
    for rank in range(before):
        with Loader(dataset, dataset.config, cursor.slices(dataset, before, rank), seed=3, epoch=0) as loader:
            for _, batch in zip(range(data.draw(st.integers(0, 5))), loader, strict=False):
                rows += rows_of([batch])
            states.append(loader.state())
    cursor = cursor.with_done(*states)
    assert cursor.num_rows == len(rows)
    for rank in range(after):
        batches = load(dataset, slices=cursor.slices(dataset, after, rank), seed=3, epoch=0, resume=cursor.done)
        assert all(b.num_rows == dataset.config.batch_rows for b in batches[:-1])
        rows += rows_of(batches)
    assert sorted(rows) == list(range(dataset.num_rows))


@settings(max_examples=30)
@given(datasets, st.integers(0, 1000), st.integers(0, 5))
def test_plan_is_a_permutation_that_depends_on_seed_and_epoch_only(dataset, seed, epoch):
    plan = plan_epoch(dataset, seed, epoch)
    assert sorted(plan) == list(dataset.slices())
    assert plan == plan_epoch(dataset, seed, epoch)
    covered = np.zeros(dataset.num_rows, dtype=int)
    starts = np.cumsum([0] + [f.num_rows for f in dataset.files])
    for piece in plan:
        groups = dataset.files[piece.file].row_groups
        first = starts[piece.file] + sum(g.num_rows for g in groups[: piece.row_group]) + piece.row_start
        covered[first : first + piece.num_rows] += 1
    assert (covered == 1).all()


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="rank 2"):
        assign([], 2, 2)
