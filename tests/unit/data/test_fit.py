"""Means, quantiles and vocabularies come from the training data, once, and fit only the job they were made for."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import DataError
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from data_pipeline.fit import KeyCounter, Moments, fit
from data_pipeline.fitted import Fitted, KeySet
from tests import reference_keys
from tests.parquet_files import keys_by_row, load, write


def make(tmp_path, **more):
    values = np.random.RandomState(0).lognormal(size=1000)
    columns = {
        "click": [0] * 1000,
        "a": pa.array([None if i % 10 == 0 else v for i, v in enumerate(values)]),
        "v": [i if i % 2 else 7 for i in range(1000)],
        "l": pa.array([[1, i] for i in range(1000)]),
    }
    write(tmp_path / "in" / "a.parquet", columns, row_group_rows=300)
    config = DataConfig(
        **{"labels": "click", "threads": 0, "shuffle": {"enabled": False}, "fitted": str(tmp_path / "fitted"), **more}
    )
    return Dataset.open(str(tmp_path / "in"), config, require_fitted=False), values


def test_standardised_columns_have_mean_0_and_deviation_1(tmp_path):
    dataset, values = make(tmp_path, dense={"columns": ["a"], "transform": "log1p", "fill": 1.0, "standardise": True})
    fit(dataset, dataset.config)
    dense = np.concatenate([b.dense_BD for b in load(dataset)])
    assert abs(dense.mean()) < 1e-5
    assert abs(dense.std() - 1) < 1e-5
    expected = np.log1p(np.where(np.arange(1000) % 10 == 0, 1.0, values))
    np.testing.assert_allclose(dense[:, 0], (expected - expected.mean()) / expected.std(), rtol=1e-4, atol=1e-5)


def test_a_constant_column_is_no_division_by_zero(tmp_path):
    dataset, _ = make(tmp_path, dense={"columns": ["click2"], "absent": 3.0, "standardise": True})
    fit(dataset, dataset.config)
    assert (load(dataset)[0].dense_BD == 0).all()


@pytest.mark.parametrize("rare", ["shared", "none"])
def test_vocabulary_keeps_what_occurs_often_enough(tmp_path, rare):
    vocabulary = {"min_count": 2, "rare": rare}
    sparse = [
        {"name": "v", "vocabulary": vocabulary, "missing": "key"},
        {"name": "l", "max_length": 5, "vocabulary": vocabulary},
    ]
    dataset, _ = make(tmp_path, sparse=sparse)
    found = fit(dataset, dataset.config)
    assert found.vocabularies["v"].tolist() == [reference_keys.key("v", 7)]
    batches = load(dataset)
    instead = [reference_keys.special("v", "rare")] if rare == "shared" else []
    v = keys_by_row(batches, "v")
    assert v[:9] == [[reference_keys.key("v", 7)], instead] * 3 + [[reference_keys.key("v", 7)]] * 3
    one, other = reference_keys.key("l", 1), reference_keys.special("l", "rare")
    assert (
        keys_by_row(batches, "l")[:3] == [[one, other], [one, one], [one, other]]
        if rare == "shared"
        else [[one], [one, one], [one]]
    )


def test_quantile_buckets_are_about_equally_full(tmp_path):
    sparse = [{"name": "b", "column": "a", "bucketize": {"kind": "quantiles", "num_buckets": 8}}]
    dataset, _ = make(tmp_path, sparse=sparse)
    fit(dataset, dataset.config)
    keys = [row[0] for row in keys_by_row(load(dataset), "b") if row]
    _, counts = np.unique(np.array(keys, dtype=np.uint64), return_counts=True)
    assert counts.size == 8
    assert counts.sum() == 900
    assert counts.min() > 900 / 8 - 3


def test_a_missing_or_foreign_fit_is_refused_before_anything_is_read(tmp_path):
    dense = {"columns": ["a"], "standardise": True}
    dataset, _ = make(tmp_path, dense=dense)
    with pytest.raises(DataError, match=r"fitted.json does not exist; run `paddlewheel data fit JOB`"):
        Dataset.open(str(tmp_path / "in"), dataset.config)
    fit(dataset, dataset.config)
    other, _ = make(tmp_path, dense={**dense, "transform": "log1p"})
    with pytest.raises(DataError, match="made for other settings of 'dense a'"):
        load(other)
    path = tmp_path / "fitted" / "fitted.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(DataError, match="has version 99"):
        Fitted.load(dataset.config)
    with pytest.raises(ValueError, match=r"'a' needs numbers from the training data: set data\.fitted"):
        DataConfig(labels="click", dense=dense)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50), st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_key_set_is_a_set(inside, asked):
    keys = np.array(inside, dtype=np.uint64)
    query = np.array(asked + inside + [i ^ 1 for i in inside], dtype=np.uint64)
    assert KeySet(keys).holds(query).tolist() == [int(q) in set(inside) - {0} for q in query]


@given(st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=6))
def test_key_counter_counts(parts):
    counter = KeyCounter()
    for part in parts:
        counter.add(np.array(part, dtype=np.uint64))
    keys, counts = counter.result()
    flat = [v for part in parts for v in part if v]
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == {v: flat.count(v) for v in set(flat)}


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=20), max_size=6))
def test_moments_are_those_of_all_values(parts):
    moments = Moments()
    for part in parts:
        moments.add(np.array(part))
    flat = np.array([v for part in parts for v in part])
    if flat.size:
        np.testing.assert_allclose([moments.mean, moments.deviation], [flat.mean(), flat.std()], rtol=1e-6, atol=1e-6)
