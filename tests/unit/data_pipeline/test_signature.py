"""A model knows the kinds of its columns and its fit; data of other kinds, or another fit, are refused by name."""

from __future__ import annotations

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.fit import fit
from paddlewheel.data_pipeline.signature import ColumnKind, InputSignature
from paddlewheel.data_pipeline.statistics import Fitted
from tests.support.parquet_files import keys_by_row, load, write

RELATION = "with which run/step-9 was trained"
DAY = dt.date(2026, 1, 31)
COLUMNS: dict[str, pa.Array] = {
    "int64": pa.array([17], pa.int64()),
    "uint8": pa.array([17], pa.uint8()),
    "boolean": pa.array([True]),
    "decimal": pa.array([decimal.Decimal("17.00")]),
    "string": pa.array(["17"]),
    "binary": pa.array([b"17"]),
    "dictionary": pa.array(["17"]).dictionary_encode(),
    "date": pa.array([DAY]),
    "timestamp": pa.array([dt.datetime(2026, 1, 31, tzinfo=dt.timezone.utc)], pa.timestamp("us", tz="UTC")),
    "list": pa.array([[17]]),
    "null": pa.nulls(1),
}


def opened(folder: Path, column: pa.Array, **feature: Any) -> Dataset:
    write(folder / "a.parquet", {"click": [1], "user": column})
    rule = {"name": "user", **({"max_length": 3} if pa.types.is_list(column.type) else {}), **feature}
    return Dataset.open(str(folder), DataConfig(labels="click", sparse=[rule], threads=0))


@pytest.mark.parametrize("there", sorted(COLUMNS))
@pytest.mark.parametrize("here", sorted(COLUMNS))
def test_kinds_are_those_that_two_files_of_one_data_set_must_agree_on(tmp_path, here, there):
    """The signature refuses what `Dataset.open` refuses of two files side by side, and nothing else."""
    mine, theirs = opened(tmp_path / "here", COLUMNS[here]), opened(tmp_path / "there", COLUMNS[there])
    lists = {here, there} & {"list"} and {"max_length": 3}
    config = DataConfig(labels="click", sparse=[{"name": "user", **(lists or {})}], threads=0)
    agree = True
    try:
        Dataset.open([str(tmp_path / "here"), str(tmp_path / "there")], config)
    except DataError:
        agree = False
    if agree:
        mine.signature.check(theirs.signature, RELATION)
    else:
        with pytest.raises(DataError, match="column 'user' of feature 'user' is "):
            mine.signature.check(theirs.signature, RELATION)


def test_the_refusal_names_both_sides_and_a_remedy_that_works(tmp_path):
    known = opened(tmp_path / "day=1", COLUMNS["int64"])
    other = opened(tmp_path / "day=2", COLUMNS["string"])
    with pytest.raises(DataError) as refused:
        other.signature.check(known.signature, RELATION)
    for words in (
        f"is string (key kind string) in {tmp_path}/day=2/a.parquet",
        f"was int64 (key kind integer) in {tmp_path}/day=1/a.parquet, {RELATION}",
        "Declare the feature's `type: integer`",
    ):
        assert words in str(refused.value)
    remedied = opened(tmp_path / "day=2", COLUMNS["string"], type="integer")
    remedied.signature.check(known.signature, RELATION)
    assert keys_by_row(load(remedied), "user") == keys_by_row(load(known), "user")


def test_another_declared_type_is_another_kind(tmp_path):
    known = opened(tmp_path / "a", COLUMNS["string"], type="integer")
    with pytest.raises(DataError, match="type: integer"):
        opened(tmp_path / "b", COLUMNS["string"]).signature.check(known.signature, RELATION)
    with pytest.raises(DataError, match=r"Write 'user' as it was"):
        opened(tmp_path / "c", COLUMNS["date"]).signature.check(known.signature, RELATION)


def test_a_column_that_was_null_is_learnt_later_and_then_known(tmp_path):
    parts = [opened(tmp_path / name, COLUMNS[name]).signature for name in ("null", "int64")]
    both = InputSignature.joined(parts)
    assert both.kinds == parts[1].kinds
    opened(tmp_path / "null", COLUMNS["null"]).signature.check(both, RELATION)
    with pytest.raises(DataError):
        opened(tmp_path / "string", COLUMNS["string"]).signature.check(both, RELATION)


def test_numbers_and_buckets_have_no_kind(tmp_path):
    for name in ("int64", "boolean"):
        found = opened(tmp_path / name, COLUMNS[name], bucketize={"kind": "log_square"}).signature
        assert found.kinds == ()


@given(
    st.lists(
        st.builds(ColumnKind, **dict.fromkeys(("feature", "column", "kind", "type", "file"), st.text())), max_size=4
    ),
    st.dictionaries(st.text(), st.text(), max_size=3),
)
def test_a_signature_survives_json_and_agrees_with_itself(kinds, fitted):
    kinds = list({(k.feature, k.column): k for k in kinds}.values())
    one = InputSignature(kinds=tuple(kinds), fitted=fitted)
    again = InputSignature.from_json(one.model_dump(mode="json"))
    assert again == one
    again.check(one, RELATION)
    assert again.identity == one.identity
    assert InputSignature.joined([one, again]).kinds == one.kinds


def test_what_is_no_signature_is_refused():
    with pytest.raises(ValueError, match="cannot be read"):
        InputSignature.from_json({"kinds": [{"feature": 1}]})


def fittable(tmp_path: Path, values: Any, name: str = "data") -> Dataset:
    """Every kind of fit of one column."""
    write(tmp_path / name / "a.parquet", {"click": [0] * len(values), "d": values, "v": [int(v) for v in values]})
    config = DataConfig(
        labels="click",
        threads=0,
        statistics=str(tmp_path / "fitted"),
        dense={"columns": ["d"], "standardise": True},
        sparse=[
            {"name": "q", "column": "d", "bucketize": {"kind": "quantiles", "num_buckets": 3}},
            {"name": "v", "vocabulary": {"min_count": 1}},
        ],
    )
    dataset = Dataset.open(str(tmp_path / name), config, require_fitted=False)
    fit(dataset, config)
    return dataset


def test_every_part_of_another_fit_is_refused_and_the_same_fit_again_is_not(tmp_path):
    first = fittable(tmp_path, np.arange(50.0))
    path = str(tmp_path / "data")
    known = Dataset.open(path, first.config).signature
    assert set(known.fitted) == {"dense d", "quantiles q", "vocabulary v"}
    fit(first, first.config)
    Dataset.open(path, first.config).signature.check(known, RELATION)
    fittable(tmp_path, np.arange(50.0) * 2, "other")
    again = Dataset.open(path, first.config).signature
    assert not set(again.fitted.items()) & set(known.fitted.items())
    with pytest.raises(DataError, match=f"data.statistics: dense d, quantiles q, vocabulary v .*50 rows .*{RELATION}"):
        again.check(known, RELATION)
    again.check(known, RELATION, refitted=True)


def test_a_fit_that_is_made_anew_while_rows_are_read_is_not_taken(tmp_path):
    first = fittable(tmp_path, np.arange(50.0))
    dataset = Dataset.open(str(tmp_path / "data"), first.config)
    before = np.concatenate([batch.dense_BD for batch in load(dataset)])
    fittable(tmp_path, np.arange(50.0) * 2, "other")
    np.testing.assert_array_equal(np.concatenate([batch.dense_BD for batch in load(dataset)]), before)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": 1}', '{"version": 1, "moments": 3}'])
def test_a_damaged_fit_is_told_with_its_remedy(tmp_path, content):
    config = fittable(tmp_path, np.arange(9.0)).config
    (tmp_path / "fitted/fitted.json").write_text(content)
    with pytest.raises(DataError, match=r"data\.statistics: .*paddlewheel data fit"):
        Fitted.load(config)
    fittable(tmp_path, np.arange(9.0))
    (tmp_path / "fitted/vocabulary.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"data\.statistics: .*paddlewheel data fit"):
        Fitted.load(config)
