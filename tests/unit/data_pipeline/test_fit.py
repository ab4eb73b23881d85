"""Means, quantiles and vocabularies come from the training data, once, and fit only the job they were made for."""

from __future__ import annotations

import decimal
import json
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.fit import KeyCounter, Moments, fit
from paddlewheel.data_pipeline.statistics import Fitted, KeySet
from tests.support import reference_keys
from tests.support.parquet_files import keys_by_row, load, write


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
        **{
            "labels": "click",
            "threads": 0,
            "shuffle": {"enabled": False},
            "statistics": str(tmp_path / "fitted"),
            **more,
        }
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
    dataset, _ = make(tmp_path, dense={"columns": ["click2"], "absent_column": 3.0, "standardise": True})
    fit(dataset, dataset.config)
    assert (load(dataset)[0].dense_BD == 0).all()


@pytest.mark.parametrize("rare", ["shared", "none"])
def test_vocabulary_keeps_what_occurs_often_enough(tmp_path, rare):
    vocabulary = {"min_count": 2, "rare": rare}
    sparse = [
        {"name": "v", "vocabulary": vocabulary, "null_policy": "own_key"},
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
    with pytest.raises(ValueError, match=r"'a' needs numbers from the training data: set data\.statistics"):
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


CONSTANTS = [0.0, 0.1, 0.3, 7.7, 99.99, -1e-9, 1e300, -1.7e308, 5e-324, 1e-310, float(2**53 + 2), 3.4e38]


@pytest.mark.parametrize("value", CONSTANTS)
@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()])
def test_a_constant_column_has_scale_1_whatever_the_constant(tmp_path, value, kind):
    if kind == pa.float32() and abs(value) > 3e38:
        return
    columns = {"click": [0, 1] * 500, "a": pa.array([value] * 1000, pa.float64()).cast(kind, safe=False)}
    write(tmp_path / "in" / "a.parquet", columns, row_group_rows=300)
    config = DataConfig(
        labels="click", dense={"columns": ["a"], "standardise": True}, statistics=str(tmp_path / "fitted"), threads=0
    )
    dataset = Dataset.open(str(tmp_path / "in"), config, require_fitted=False)
    found = fit(dataset, config)
    assert found.moments["a"] == (columns["a"][0].as_py(), 0.0)
    assert Fitted.load(config).mean_and_scale(config.dense[0])[1].tolist() == [1.0]
    assert (load(dataset)[0].dense_BD == 0).all()
    other = Dataset.open(str(write(tmp_path / "b.parquet", {"click": [0, 1], "a": [value + 0.1, 0.2]})), config)
    if abs(value) < 1e9:
        (batch,) = load(other)
        np.testing.assert_allclose(sorted(batch.dense_BD[:, 0]), sorted([0.1, 0.2 - value]), rtol=1e-4, atol=1e-6)


def test_a_constant_but_for_its_last_digits_is_a_constant(tmp_path):
    values = [0.3 if i % 2 else 0.1 + 0.2 for i in range(1000)]
    write(tmp_path / "a.parquet", {"click": [0] * 1000, "a": values})
    config = DataConfig(
        labels="click", dense={"columns": ["a"], "standardise": True}, statistics=str(tmp_path / "fitted"), threads=0
    )
    fit(Dataset.open(str(tmp_path), config, require_fitted=False), config)
    assert Fitted.load(config).mean_and_scale(config.dense[0])[1].tolist() == [1.0]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40), st.integers(1, 40))
def test_moments_of_any_finite_values(values, cut):
    moments = Moments()
    for start in range(0, len(values), cut):
        moments.add(np.array(values[start : start + cut]))
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact)
    squares = sum((v - mean) ** 2 for v in exact) / len(exact)
    if max(exact) - min(exact) >= 2**1023:
        return  # told as an error by `fit`
    largest = max(map(abs, exact))
    assert abs(Fraction(moments.mean) - mean) <= largest * Fraction(1, 2**40) + Fraction(5e-324)
    spread = max(exact) - min(exact)
    with decimal.localcontext(prec=60):
        root = (decimal.Decimal(squares.numerator) / decimal.Decimal(squares.denominator)).sqrt()
        assert abs(decimal.Decimal(moments.deviation) - root) <= decimal.Decimal(float(spread)) * decimal.Decimal(
            "1e-7"
        ) + decimal.Decimal("1e-320")


def test_what_cannot_be_standardised_is_told_when_it_is_fitted(tmp_path):
    write(tmp_path / "a.parquet", {"click": [0, 1], "a": [1.7e308, -1.7e308]})
    config = DataConfig(
        labels="click", dense={"columns": ["a"], "standardise": True}, statistics=str(tmp_path / "fitted"), threads=0
    )
    with pytest.raises(DataError, match=r"column 'a': .* cannot be standardised: give its block a `clip`"):
        fit(Dataset.open(str(tmp_path), config, require_fitted=False), config)
    assert not (tmp_path / "fitted").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moments": {"a": [0.0, -1.0]}}, "mean 0.0 and deviation -1.0 for 'a'"),
        ({"moments": {"a": [float("nan"), 1.0]}}, "mean nan and deviation 1.0 for 'a'"),
        ({"boundaries": {"q": [2.0, 1.0]}}, "quantiles for 'q' that do not rise"),
        (None, "is damaged"),
    ],
)
def test_damaged_numbers_of_a_fit_are_refused(tmp_path, change, message):
    dataset, _ = make(tmp_path, dense={"columns": ["a"], "standardise": True})
    fit(dataset, dataset.config)
    path = tmp_path / "fitted" / "fitted.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}) if change else path.read_text()[:40])
    with pytest.raises(DataError, match=rf"{message}.*run `paddlewheel data fit JOB`"):
        Fitted.load(dataset.config)


def test_rows_without_a_needed_number_do_not_count_as_zeros(tmp_path):
    write(tmp_path / "a.parquet", {"click": [0] * 4, "a": pa.array([5.0, None, 7.0, None])})
    dense = {"columns": ["a"], "standardise": True, "fill": None}
    config = DataConfig(labels="click", dense=dense, statistics=str(tmp_path / "fitted"), threads=0)
    assert fit(Dataset.open(str(tmp_path), config, require_fitted=False), config).moments["a"] == (6.0, 1.0)


def test_a_fit_leaves_out_the_files_that_training_leaves_out(tmp_path):
    write(tmp_path / "a.parquet", {"click": [0] * 4, "a": [5.0, 7.0, 5.0, 7.0]})
    broken = write(tmp_path / "b.parquet", {"click": [0] * 900, "a": [1.0] * 900}, compression="none")
    raw = bytearray(broken.read_bytes())
    raw[4:60] = b"\xff" * 56
    broken.write_bytes(bytes(raw))
    dense = {"columns": ["a"], "standardise": True}
    for policy in ("skip", "fail"):
        config = DataConfig(labels="click", dense=dense, statistics=str(tmp_path / "f"), threads=0, on_bad_file=policy)
        dataset = Dataset.open(str(tmp_path), config, require_fitted=False)
        if policy == "skip":
            assert fit(dataset, config).moments["a"] == (6.0, 1.0)
        else:
            with pytest.raises(DataError, match=r"b\.parquet: row group 0 cannot be read"):
                fit(dataset, config)


def test_a_number_does_not_depend_on_the_columns_beside_it(tmp_path):
    values = pa.array([0.1, 3.7, 1e10], pa.float32())
    write(tmp_path / "a.parquet", {"click": [0, 1, 0], "a": values, "narrow": values, "wide": [0.5, 0.25, 1e300]})
    seen = []
    for beside in ("narrow", "wide"):
        dense = {"columns": ["a", beside], "transform": "log1p"}
        config = DataConfig(labels="click", dense=dense, threads=0, shuffle={"enabled": False})
        seen.append(load(Dataset.open(str(tmp_path / "a.parquet"), config))[0].dense_BD[:, 0].tolist())
    assert seen[0] == seen[1] == np.log1p(values.to_numpy().astype(np.float64)).astype(np.float32).tolist()
