"""`data check` finds what is wrong, counts what is there, and says it on a page."""

from __future__ import annotations

import decimal
import json
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.data_pipeline import arrow_arrays, quality, quality_report
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.encoded_rows import Rows
from paddlewheel.data_pipeline.encoder import Encoder
from paddlewheel.data_pipeline.statistics import Fitted
from paddlewheel.deploy.cli import run
from paddlewheel.trainer.job.config import JobConfig
from tests.support.any_columns import columns, features
from tests.support.parquet_files import load, write


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
        {"name": "v", "null_policy": "own_key"},
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
    page = quality_report.page(found, "<job>")
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
    job = config(
        sparse=[{"name": "v"}, {"name": "c"}], dense={"columns": ["d"], "absent_column": 0}, on_bad_file="skip"
    )
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


@settings(max_examples=150)
@given(st.data())
def test_whatever_training_takes_can_be_described(data):
    """Every type, unit and encoding that a job can read as ids: the report has its rows, and ends that are in order."""
    array, values, _ = data.draw(columns())
    feature = {"name": "v", **features(data.draw, array)}
    job = config(sparse=[feature], on_bad_row="skip")
    running = quality._Feature(job.sparse[0])
    into = Rows.empty(job, len(values))
    click = pa.array(np.zeros(len(values), np.int8))
    Encoder(job, Fitted.load(job)).encode({"click": click, "v": array}, into, slice(0, len(values)))
    keys = into.singles["default"][:, 0]
    for start in range(0, max(1, len(values)), 5):  # blocks: the ends hold across them
        here = slice(start, start + 5)
        lengths = (keys[here] != 0).astype(np.int64)
        running.add(keys[here][keys[here] != 0], lengths, np.uint64(0), array.slice(start, 5))
    found = running.finish()
    present = [v for v in values if v is not None]
    json.dumps(vars(found))
    assert (found.smallest is None) == (not present)
    if present:
        order = {v: v.text if v.kind == "text" else Fraction(v.number, 10**v.scale) for v in present}
        texts = {text_of_value(array, values, end) for end in (min(order.values()), max(order.values()))}
        assert {found.smallest, found.largest} == texts
        assert sum(count for _, count in running.values.items()) == len(present)
        assert all(text.isprintable() and len(text) <= 40 for text, _ in found.top)


def text_of_value(array, values, end):
    """How a report writes the value that lies at an end."""
    for row, v in enumerate(values):
        if v is not None and (v.text if v.kind == "text" else Fraction(v.number, 10**v.scale)) == end:
            return quality._short(arrow_arrays.text_of(arrow_arrays.plain(array.slice(row, 1)), 0))
    raise AssertionError(end)


FAR = {
    "date32": pa.array([2932896, 4000000, -(2**31), 2**31 - 1] * 5, pa.int32()).cast(pa.date32()),
    "timestamp": pa.array([253402300800000000, 2**62, -(2**62), 0] * 5, pa.timestamp("us")),
    "time64[ns]": pa.array([1, 1002, 2003, 86_399_999_999_999] * 5, pa.time64("ns")),
    "no UTF-8": pa.array([b"K\xf6ln", b"Bonn", b"[/b]", b"\x1b[31m\n"] * 5).view(pa.string()),
    "uuid": pa.array([bytes(range(16)), b"\xff" * 16] * 10, pa.uuid()),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', "2"] * 10)),
    "string_view": pa.array(["a", "b" * 50] * 10, pa.string_view()),
    "list_view": pa.array([["a"], []] * 10, pa.list_view(pa.string())),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0] * 10, pa.int8())),
}


@pytest.mark.parametrize("what", sorted(FAR))
def test_the_command_reports_values_that_python_cannot_hold(tmp_path, capsys, what):
    write(tmp_path / "data" / "a.parquet", {"click": [0, 1] * 10, "x": FAR[what], "y": list(range(20))})
    job = {
        "name": "far",
        "data": {
            "train": str(tmp_path / "data"),
            "labels": "click",
            "sparse": [{"name": "x", "max_length": 2}, {"name": "y"}],
            "slice_metrics_by": [] if what == "list_view" else ["x"],
            "on_bad_row": "fail",
        },
        "tables": {"default": {"width": 4}},
        "model": {"kind": "lr"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    code = run(["data", "check", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "out")])
    told = capsys.readouterr()
    assert code in (0, 3), told.err + told.out
    assert "\x1b[31m" not in told.out
    if what == "no UTF-8":
        assert "K\\xf6ln" in (tmp_path / "out" / "data-check.html").read_text()
    if what == "timestamp":
        report = json.loads((tmp_path / "out" / "data-check.json").read_text())["features"][0]
        assert ["1970-01-01 00:00:00", 5] in report["top"]
    batches = load(Dataset.open(str(tmp_path / "data"), JobConfig.load(tmp_path / "job.yaml").data))
    assert sum(batch.num_rows for batch in batches) == 20


def test_dense_numbers_that_json_cannot_hold_are_left_out_of_it(tmp_path):
    write(tmp_path / "a.parquet", {"click": [0, 1], "d": [float("inf"), float("-inf")], "v": [1, 2]})
    found = checked(tmp_path, config(dense={"columns": ["d"], "clip": [-1, 1]}))
    assert found.rows_read == 2
    json.dumps(found.to_json(), allow_nan=False)
    quality_report.page(found, "job")


def test_features_of_one_key_space_that_cannot_hold_equal_ids_are_warned_of(tmp_path):
    columns = {"click": [0, 1] * 10, "item": list(range(20)), "seen": pa.array([["1", "2"]] * 20)}
    write(tmp_path / "a.parquet", columns)
    sparse = [{"name": "item", "table": "t"}, {"name": "seen", "table": "t", "max_length": 3}]
    (warning,) = [w for w in checked(tmp_path, config(sparse=sparse)).warnings if "key space" in w]
    assert "'item' (int64) and 'seen' (list<element: string>) share the key space 't'" in warning
    for settled in ({"type": "integer"}, {"type": "string"}, {"key_space": "own"}):
        job = config(sparse=[{**sparse[0], **settled}, {**sparse[1], **settled, "key_space": "t"}])
        assert not [w for w in checked(tmp_path, job).warnings if "key space" in w]


def test_evaluation_data_that_is_trained_too_is_warned_of(tmp_path, capsys):
    write(tmp_path / "all" / "a.parquet", {"click": [0, 1] * 10, "v": list(range(20))})
    write(tmp_path / "all" / "eval" / "b.parquet", {"click": [0, 1] * 10, "v": list(range(20, 40))})
    (tmp_path / "copy.parquet").write_bytes((tmp_path / "all" / "a.parquet").read_bytes())
    write(tmp_path / "fresh.parquet", {"click": [0, 1] * 10, "v": list(range(40, 60))})
    job = {
        "name": "inside", "tables": {"default": {"width": 4}}, "model": {"kind": "lr"},
        "run_dir": str(tmp_path / "run"),
        "data": {"train": str(tmp_path / "all"), "labels": "click", "sparse": [{"name": "v"}]},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    for path, words in (
        ("all/eval", ["1 of 1 evaluation files are training files, too", "b.parquet"]),
        ("copy.parquet", ["copy.parquet (data.eval): has the same content as", "a.parquet (data.train)"]),
        ("fresh.parquet", []),
    ):
        code = run(["data", "check", str(tmp_path / "job.yaml"), "--json", "--set", f"data.eval={tmp_path / path}"])
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert code == (3 if words else 0)
        assert all(word in " ".join(warnings) for word in words)
    assert run(["job", "check", str(tmp_path / "job.yaml"), "--set", f"data.eval={tmp_path / 'all' / 'eval'}"]) == 0
    assert "warning: 1 of 1 evaluation files are training files" in capsys.readouterr().out
