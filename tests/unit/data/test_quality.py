"""`data check` finds what is wrong, counts what is there, and says it on a page."""

from __future__ import annotations

import decimal
import json

import numpy as np
import pyarrow as pa
import pytest

from data_pipeline import quality, quality_page
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from tests.parquet_files import write


def config(**more) -> DataConfig:
    return DataConfig(**{"labels": "click", "sparse": [{"name": "v"}], "threads": 0, **more})


def clicks(num_rows: int, rate: float = 0.25, seed: int = 0) -> np.ndarray:
    return (np.random.RandomState(seed).random_sample(num_rows) < rate).astype(np.int8)


def checked(tmp_path, job: DataConfig, **more) -> quality.Quality:
    return quality.check(Dataset.open(str(tmp_path), job, require_fitted=False), job, **more)


def test_figures_of_every_feature(tmp_path):
    num_rows = 20_000
    columns = {
        "click": clicks(num_rows),
        "v": pa.array([None if i % 4 == 0 else i % 1000 for i in range(num_rows)]),
        "s": pa.array(["often" if i % 2 else f"s{i % 50}" for i in range(num_rows)]).dictionary_encode(),
        "l": pa.array([list(range(i % 5)) for i in range(num_rows)]),
        "d": pa.array([None if i % 10 == 0 else float(i % 7) - 3 for i in range(num_rows)]),
    }
    write(tmp_path / "a.parquet", columns, row_group_rows=3000)
    sparse = [
        {"name": "v", "missing": "key"},
        {"name": "s"},
        {"name": "l", "max_length": 3},
        {"name": "x", "cross": ["v", "s"]},
    ]
    job = config(sparse=sparse, dense={"columns": ["d"]})
    ticks: list[int] = []
    found = checked(tmp_path, job, on_progress=lambda done, _: ticks.append(done))
    assert ticks[-1] == num_rows
    by_name = {f.name: f for f in found.features}
    assert by_name["v"].null_rows == num_rows // 4
    assert abs(by_name["v"].distinct - 750) < 40
    assert (by_name["v"].smallest, by_name["v"].largest) == ("1", "999")
    assert by_name["s"].top[0] == ("often", num_rows // 2)
    assert by_name["l"].longest_list == 3
    assert by_name["l"].null_rows == num_rows // 5
    assert by_name["l"].truncated_ids == num_rows // 5
    assert (found.dense[0].smallest, found.dense[0].largest, found.dense[0].null_rows) == (-3, 3, num_rows // 10)
    assert found.label_rate == pytest.approx(columns["click"].mean())
    quality.plan_capacity(found, job, {"default": quality.KeySize(17, 200.0, 50.0)}, lambda total: int(total // 1000))
    assert found.tables[0].memory_bytes == pytest.approx(200 * found.tables[0].keys)
    assert found.tables[0].checkpoint_bytes == pytest.approx(50 * found.tables[0].keys)
    assert found.servers == int(found.tables[0].memory_bytes // 1000)
    json.dumps(found.to_json())
    page = quality_page.page(found, "<job>")
    assert "&lt;job&gt;" in page
    assert "often" in page


def test_shared_values_are_counted_once_in_a_table(tmp_path):
    write(tmp_path / "a.parquet", {"click": clicks(1000), "a": np.arange(1000), "b": np.arange(1000)})
    sparse = [{"name": "a", "table": "item"}, {"name": "b", "table": "item"}]
    found = checked(tmp_path, config(sparse=sparse))
    quality.plan_capacity(found, config(sparse=sparse), {"item": quality.KeySize(9, 1.0, 1.0)}, lambda _: 1)
    assert found.tables[0].keys == pytest.approx(1000, rel=0.1)


def test_findings(tmp_path):
    num_rows = 30_000
    write(
        tmp_path / "a.parquet",
        {"click": clicks(num_rows, 0.1), "v": np.arange(num_rows), "c": [1] * num_rows, "d": [2.0] * num_rows},
    )
    write(
        tmp_path / "b.parquet",
        {"click": clicks(num_rows, 0.4), "v": num_rows + np.arange(num_rows), "c": [1] * num_rows},
    )
    (tmp_path / "copy.parquet").write_bytes((tmp_path / "a.parquet").read_bytes())
    (tmp_path / "zero.parquet").write_bytes(b"")
    job = config(sparse=[{"name": "v"}, {"name": "c"}], dense={"columns": ["d"], "absent": 0}, on_bad_file="skip")
    found = checked(tmp_path, job)
    text = "\n".join(found.errors + found.warnings)
    for expected in (
        "zero.parquet: the file is empty",
        "b.parquet: label rate 0.4",
        "copy.parquet: has the same content as",
        "column d: 1 of 3 files lack it",
        "feature c: it has one value only",
        "most are seen once",
    ):
        assert expected in text, expected
    assert len(found.errors) == 1


@pytest.mark.parametrize(("policy", "where"), [("fail", "errors"), ("skip", "warnings")])
def test_bad_rows_and_unreadable_files_are_findings(tmp_path, policy, where):
    write(tmp_path / "a.parquet", {"click": [0, 1, 2, 2], "v": [1, 2, 3, 4]})
    write(
        tmp_path / "b.parquet",
        {"click": [0, 1] * 500, "v": list(range(1000))},
        compression="none",
        use_dictionary=False,
    )
    raw = bytearray((tmp_path / "b.parquet").read_bytes())
    raw[4:600] = b"\xff" * 596
    (tmp_path / "b.parquet").write_bytes(bytes(raw))
    found = checked(tmp_path, config(on_bad_row=policy))
    assert any("2 rows: column 'click'" in line and "row 2" in line for line in getattr(found, where))
    assert any("b.parquet: row group 0 cannot be read" in e for e in found.errors)
    assert found.rows_read == 2


def test_one_class_is_an_error(tmp_path):
    write(tmp_path / "a.parquet", {"click": [1, 1], "v": [1, 2]})
    assert "every label is 1" in checked(tmp_path, config()).errors[0]


def test_a_sample_reads_less_and_from_everywhere(tmp_path):
    for i in range(8):
        write(tmp_path / f"{i}.parquet", {"click": clicks(20_000, seed=i), "v": np.full(20_000, i)})
    found = checked(tmp_path, config(), sample_rows=40_000)
    assert 30_000 < found.rows_read < 70_000
    assert found.features[0].distinct > 2


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1001, None] * 10, pa.timestamp("ns")),
        pa.array([18000, 18001] * 10, pa.date32()),
        pa.array([b"a", None] * 10),
        pa.array([True, False] * 10),
        pa.array([decimal.Decimal("1.5"), None] * 10),
        pa.array([[b"a"], [None, b"b"]] * 10),
        pa.nulls(20),
    ],
    ids=lambda c: str(c.type),
)
def test_every_kind_of_id_column_can_be_described(tmp_path, column):
    write(tmp_path / "a.parquet", {"click": [0, 1] * 10, "v": column})
    found = checked(tmp_path, config(sparse=[{"name": "v", "max_length": 4}]))
    assert found.errors == []
    assert found.features[0].rows == 20
    json.dumps(found.to_json())
