"""What a specification says is enough: a reader that shares no code makes the same keys and numbers of raw rows."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.fit import fit
from paddlewheel.data_pipeline.input_spec import describe
from paddlewheel.data_pipeline.scoring_reader import Blocks, scoring_config
from paddlewheel.data_pipeline.statistics import Fitted
from tests.support.export_reader import Reader
from tests.support.parquet_files import write

NUM_ROWS = 400
SPARSE = [
    {"name": "id"},
    {"name": "small", "null_policy": "own_key"},
    {"name": "unsigned"},
    {"name": "shifted", "column": "small", "offset": -5},
    {"name": "word", "null_policy": "own_key"},
    {"name": "flag"},
    {"name": "price", "column": "decimal"},
    {"name": "date"},
    {"name": "when"},
    {"name": "as_text", "column": "small", "type": "string"},
    {"name": "as_number", "column": "digits", "type": "integer"},
    {"name": "pair", "cross": ["small", "word", "date"], "null_policy": "own_key"},
    {"name": "log", "column": "number", "bucketize": {"kind": "log_square"}, "null_policy": "own_key"},
    {"name": "edges", "column": "number", "bucketize": {"kind": "boundaries", "boundaries": [-1, 0, 2.5, 9]}},
    {"name": "quantile", "column": "number", "bucketize": {"kind": "quantiles", "num_buckets": 8}},
    {"name": "frequent", "column": "word", "vocabulary": {"min_count": 30}, "null_policy": "own_key"},
    {"name": "frequent_only", "column": "word", "vocabulary": {"min_count": 30, "rare": "none"}, "table": "other"},
    {"name": "tags", "max_length": 3, "table": "other", "pooling": "mean"},
    {"name": "last_tags", "column": "tags", "max_length": 2, "truncate": "last", "null_policy": "own_key"},
    {"name": "weighted", "column": "tags", "weights": "tag_weights", "max_length": 4, "null_policy": "own_key"},
    {"name": "frequent_tags", "column": "tags", "max_length": 3, "vocabulary": {"min_count": 40, "rare": "none"}},
    {"name": "gone", "column": "not_there", "absent_column": "missing", "null_policy": "own_key"},
    {"name": "gone_list", "column": "no_list", "absent_column": "missing", "max_length": 2},
]
DENSE = [
    {"columns": ["number", "id"], "transform": "log1p", "fill": 3.5, "clip": [-1, 4]},
    {"columns": ["decimal"], "standardise": True, "fill": -2},
    {"columns": ["lacking"], "absent_column": 7, "transform": "log1p"},
]


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spec")
    rng = np.random.default_rng(3)

    def column(make, kind=None, nulls=0.1):
        return pa.array([None if rng.random() < nulls else make() for _ in range(NUM_ROWS)], kind)

    tags = [None if rng.random() < 0.1 else rng.integers(0, 9, rng.integers(0, 6)).tolist() for _ in range(NUM_ROWS)]
    tags = [t and [None if rng.random() < 0.1 else x for x in t] for t in tags]
    weights = [None if t is None else rng.random(len(t)).round(3).tolist() for t in tags]
    columns = {
        "click": [0] * NUM_ROWS,
        "id": column(lambda: int(rng.integers(-(2**63), 2**63 - 1)), pa.int64()),
        "small": column(lambda: int(rng.integers(-3, 9)), pa.int8()),
        "unsigned": column(lambda: int(rng.integers(2**62, 2**64, dtype=np.uint64)), pa.uint64()),
        "word": column(lambda: "wörd " * rng.geometric(0.4) + str(rng.integers(0, 2))),
        "flag": column(lambda: bool(rng.integers(0, 2))),
        "decimal": column(lambda: Decimal(int(rng.integers(-400, 400))) / 4, pa.decimal128(12, 2)),
        "date": column(lambda: dt.date(2020, 1, 1) + dt.timedelta(int(rng.integers(-9000, 900)))),
        "when": column(
            lambda: dt.datetime.fromtimestamp(int(rng.integers(-9e8, 9e8)) / 8, dt.timezone.utc),
            pa.timestamp("us", "UTC"),
        ),
        "digits": column(lambda: str(rng.integers(-(2**63), 2**63 - 1))),
        "number": column(lambda: float("nan") if rng.random() < 0.1 else float(rng.normal() * 10), pa.float64()),
        "tags": pa.array(tags, pa.list_(pa.int32())),
        "tag_weights": pa.array(weights, pa.list_(pa.float64())),
    }
    write(folder / "in.parquet", columns)
    config = DataConfig(
        labels="click", sparse=SPARSE, dense=DENSE, statistics=str(folder / "fitted"), batch_rows=64, threads=0
    )
    dataset = Dataset.open(str(folder / "in.parquet"), config, require_fitted=False)
    fit(dataset, config)
    inputs = describe(config, Fitted.load(config), vocabulary_folder="fitted/")
    (folder / "export.json").write_text(f'{{"format": 1, "inputs": {inputs.model_dump_json()}}}')
    with Blocks(Dataset.open(str(folder / "in.parquet"), scoring_config(config))) as blocks:
        batches = [block.batch for block in blocks]
    return Reader(folder), pa.table(columns).to_pylist(), batches, config


def test_every_kind_of_feature_gets_the_same_keys(described):
    reader, rows, batches, config = described
    rules = {rule["name"]: rule for rule in reader.spec["inputs"]["features"]}
    assert set(rules) == {feature.name for feature in config.sparse}
    for feature in config.sparse:
        found, weights = [], []
        for batch in batches:
            table = batch.tables[feature.table]
            index = table.index[feature.name].reshape(batch.num_rows, -1)
            keys = np.concatenate([np.zeros(1, np.uint64), table.keys_U])[index]
            found += [[k for k in row if k] for row in keys.tolist()]
            if feature.weights:
                kept = [w[i > 0].tolist() for w, i in zip(table.weights[feature.name], index, strict=True)]
                weights += kept
        expected = [reader.keys(rules[feature.name], row) for row in rows]
        assert found == [[k for k in keys if k] for keys, _ in expected], feature.name
        if feature.absent_column == "refuse":
            assert len({k for keys in found for k in keys}) >= 2
        if feature.weights:
            for here, (_, there) in zip(weights, expected, strict=True):
                assert here == pytest.approx(there, rel=1e-6)


def test_numbers_are_the_same(described):
    reader, rows, batches, _ = described
    found = np.concatenate([batch.dense_BD for batch in batches])
    np.testing.assert_allclose(found, [reader.dense(row) for row in rows], rtol=2e-6, atol=1e-6)
    assert np.ptp(found[:, :3], axis=0).min() > 1
