"""Data that change under a job or a trained model: refused by name, whatever the command, and never trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.deploy.cli import run
from paddlewheel.deploy.launch.launcher import run_local
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.coordinator import run_report
from paddlewheel.trainer.job.config import JobConfig
from tests.support.command import Job

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes, pytest.mark.slow]

SETTINGS = {
    "tables": {"default": {"width": 4}},
    "model": {"kind": "fm"},
    "cluster": {"servers": 1, "trainers": 1},
    "control": {"max_restarts": 0},
    "metrics": {"enabled": False},
}
ROWS = 2_000


def write(path: Path, ids: pa.DataType, *, flipped: bool = False) -> Path:
    """Rows whose clicks depend on the id; `flipped` turns every label round and changes nothing else."""
    draw = np.random.default_rng(1)
    user = draw.integers(0, 60, ROWS)
    click = (draw.random(ROWS) < (0.2 + 0.6 * (user % 2))) ^ flipped
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"click": pa.array(click.astype(np.int8)), "user": pa.array(user).cast(ids)})
    pq.write_table(table, path, row_group_size=500, compression="none", use_dictionary=False)
    return path


def test_a_day_of_another_kind_is_refused_and_its_remedy_meets_the_old_keys(tmp_path, capsys):
    write(tmp_path / "data/day=2026-01-01/a.parquet", pa.int64())
    second = write(tmp_path / "data/day=2026-01-02/a.parquet", pa.string())
    data = {"train": str(tmp_path / "data"), "labels": ["click"], "sparse": [{"name": "user"}], "batch_rows": 100}
    job = Job(tmp_path, data, {**SETTINGS, "train": {"days": {}}})
    code, outcome = job.run("train", "--days", "2026-01-01")
    assert (code, outcome["result"]["keys"]) == (0, {"default": 60})
    first = manifest.latest(tmp_path / "run/checkpoints")
    assert first is not None
    seen = manifest.read_manifest(first)["inputs_seen"]
    assert [(kind["column"], kind["kind"], kind["type"]) for kind in seen["kinds"]] == [("user", "integer", "int64")]

    running = ["--coordinator", "127.0.0.1:9"]
    refused = [
        ["train", str(job.path), "--days", "2026-01-02"],
        ["evaluate", str(job.path), "--set", f"data.eval={second}"],
        ["predict", str(job.path), "--data", str(second), "--to", str(tmp_path / "x.parquet")],
        ["predict", str(first), "--data", str(second), "--to", str(tmp_path / "x.parquet"), *running],
    ]
    assert run(["export", str(job.path), "--to", str(tmp_path / "export")]) == 0
    refused.append(
        ["predict", "--export", str(tmp_path / "export"), "--data", str(second), "--to", str(tmp_path / "x.parquet")]
    )
    capsys.readouterr()
    for words in refused:
        assert run(words) == 64, words
        said = capsys.readouterr().err
        for part in ("day=2026-01-02/a.parquet", "day=2026-01-01/a.parquet", "int64 (key kind integer)", "string"):
            assert part in said
    # trainers that nothing has checked before, as in a cluster, refuse by themselves
    outcome = run_local(JobConfig.load(job.path, [f"data.eval={second}"]), "evaluate", restore=str(first))
    assert outcome.exit_code == 64
    assert "was int64 (key kind integer)" in outcome.cause

    job.data["sparse"] = [{"name": "user", "type": "integer"}]
    code, outcome = job.run("train", "--days", "2026-01-02")
    assert (code, outcome["result"]["keys"]) == (0, {"default": 60})  # text "17" is the integer 17
    spec = json.loads((tmp_path / "export/export.json").read_text())
    assert spec["inputs_seen"] == seen


def test_a_file_that_is_replaced_in_mid_run_ends_the_job_which_goes_on_when_it_is_back(tmp_path, eventually):
    paths = [write(tmp_path / f"data/{name}.parquet", pa.int64()) for name in "abcd"]
    data = {"train": str(tmp_path / "data"), "labels": ["click"], "sparse": [{"name": "user"}], "batch_rows": 20}
    data["shuffle"] = {"window_rows": 500, "interleave": 1}
    settings = {**SETTINGS, "train": {"epochs": 40}, "checkpoint": {"every_steps": 30}, "control": {"max_restarts": 3}}
    job = Job(tmp_path, data, settings)
    fresh = write(tmp_path / "fresh.parquet", pa.int64(), flipped=True)
    assert fresh.stat().st_size == paths[0].stat().st_size
    process = job.start("train")
    eventually(lambda: manifest.latest(tmp_path / "run/checkpoints"), seconds=120)
    kept = tmp_path / "kept.parquet"
    paths[1].rename(kept)
    fresh.rename(paths[1])
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 64, errors[-2000:]
    outcome = json.loads(out)
    assert "b.parquet: is not the file that was there" in outcome["cause"]
    assert outcome["num_restarts"] == 0
    kept.rename(paths[1])
    paths[1].touch()  # when it was written does not matter to a new run
    newest = manifest.latest(tmp_path / "run/checkpoints")
    assert newest is not None
    epochs = manifest.read_cursor(newest)["position"]["epoch"] + 1
    code, outcome = job.run("train", f"--set=train.epochs={epochs}", "--set=checkpoint.every_steps=10000")
    assert code == 0, outcome
    assert run_report.report(tmp_path / "run").exact
