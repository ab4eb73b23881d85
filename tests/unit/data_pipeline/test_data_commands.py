"""`paddlewheel data ...`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from paddlewheel.data_pipeline.synthetic import data_section
from paddlewheel.deploy.cli import run
from tests.support.parquet_files import write


def job(tmp_path: Path, data: dict) -> str:
    path = tmp_path / "job.yaml"
    content = {"name": "test", "data": data, "tables": {"default": {"width": 4}}, "model": {"kind": "fm"}}
    path.write_text(yaml.safe_dump(content))
    return str(path)


def clicks(tmp_path: Path, label: list[int] | None = None) -> dict:
    num_rows = 400
    values = label if label is not None else [i % 2 for i in range(num_rows)]
    draw = np.random.RandomState(0)
    write(
        tmp_path / "in" / "a.parquet",
        {"click": values, "v": draw.randint(0, 9, num_rows), "d": draw.random_sample(num_rows)},
    )
    return {"train": str(tmp_path / "in"), "labels": ["click"], "sparse": [{"name": "v"}], "dense": {"columns": ["d"]}}


def test_synth_says_what_the_best_possible_is(tmp_path, capsys):
    assert run(["data", "synth", str(tmp_path / "clicks"), "--rows", "2k", "--seed", "3"]) == 0
    best = json.loads((tmp_path / "clicks" / "best.json").read_text())
    out = capsys.readouterr().out
    assert "1,600 training and 400 evaluation rows" in out
    assert f"AUC {best['best_auc']:.4f}" in out
    assert run(["data", "check", job(tmp_path, data_section(tmp_path / "clicks"))]) in {0, 3}


def test_check_without_findings(tmp_path, capsys):
    assert run(["data", "check", job(tmp_path, clicks(tmp_path)), "--out", str(tmp_path / "report")]) == 0
    out = capsys.readouterr().out
    assert "400 rows in 1 files" in out
    assert "servers needed: 1" in out
    content = json.loads((tmp_path / "report" / "data-check.json").read_text())
    assert content["label_rate"] == 0.5
    assert (tmp_path / "report" / "data-check.html").read_text().startswith("<!doctype html>")


def test_check_tells_warnings_from_errors(tmp_path, capsys):
    data = clicks(tmp_path)
    (tmp_path / "in" / "copy.parquet").write_bytes((tmp_path / "in" / "a.parquet").read_bytes())
    assert run(["data", "check", job(tmp_path, data)]) == 3
    assert "warning: " in capsys.readouterr().out
    assert run(["data", "check", job(tmp_path, clicks(tmp_path, [2] + [0, 1] * 199 + [1])), "--json"]) == 64
    answer = json.loads(capsys.readouterr().out)
    assert "1 rows: column 'click'" in answer["errors"][0]


def test_check_names_what_cannot_be_read(tmp_path, capsys):
    data = clicks(tmp_path)
    (tmp_path / "in" / "zero.parquet").write_bytes(b"")
    assert run(["data", "check", job(tmp_path, data)]) == 64
    assert "zero.parquet: the file is empty" in capsys.readouterr().out
    assert run(["data", "check", job(tmp_path, {**data, "train": str(tmp_path / "nowhere")})]) == 64
    assert "nowhere: does not exist" in capsys.readouterr().err


def test_fit_writes_what_the_job_needs(tmp_path, capsys):
    data = clicks(tmp_path)
    assert run(["data", "fit", job(tmp_path, data)]) == 64
    assert "needs no fit" in capsys.readouterr().err
    data |= {"statistics": str(tmp_path / "fitted"), "dense": {"columns": ["d"], "standardise": True}}
    assert run(["data", "fit", job(tmp_path, data)]) == 0
    assert (tmp_path / "fitted" / "fitted.json").exists()
    assert run(["data", "check", job(tmp_path, data)]) == 0


def test_prepare_csv(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("click,user\n" + "".join(f"{i % 2},u{i}\n" for i in range(50)))
    arguments = [
        "data",
        "prepare",
        "csv",
        str(tmp_path / "a.csv"),
        str(tmp_path / "out"),
        "--schema",
        "click:int8, user:string",
    ]
    assert run([*arguments, "--split", "order", "--train-rows", "40"]) == 0
    assert "40 training and 10 evaluation rows" in capsys.readouterr().out
    assert run([*arguments[:-1], "click:int7"]) == 64
    assert "schema: 'click:int7'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "many", "2.5x"])
def test_rows_that_are_no_number(tmp_path, text):
    assert run(["data", "synth", str(tmp_path / "x"), "--rows", text]) == 64


@pytest.mark.parametrize(("text", "rows"), [("1_000", 1000), ("2k", 2000), ("0.5m", 500_000)])
def test_rows_in_words(text, rows):
    from paddlewheel.deploy.cli.data import parse_rows

    assert parse_rows(text) == rows


def test_a_page_for_data_of_every_kind(tmp_path):
    columns = {
        "click": [0, 1] * 10,
        "l": pa.array([[1, 2], None] * 10),
        "b": pa.array([True, None] * 10),
        "s": ["<x>"] * 20,
    }
    write(tmp_path / "in" / "a.parquet", columns)
    sparse = [{"name": "l", "max_length": 1}, {"name": "b"}, {"name": "s"}]
    data = {"train": str(tmp_path / "in"), "labels": ["click"], "sparse": sparse}
    assert run(["data", "check", job(tmp_path, data), "--out", str(tmp_path / "report")]) == 3
    page = (tmp_path / "report" / "data-check.html").read_text()
    assert "&lt;x&gt;" in page
    assert "<x>" not in page
