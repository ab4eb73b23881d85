"""How whole jobs end: with rows or scores that cannot be used, and when evaluations are lost or interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.trainer.checkpoint import manifest
from tests.support.command import Job

pytestmark = pytest.mark.timeout(300)

DENSE = ["x0", "x1", "x2", "x3"]
SMALL = {
    "tables": {"default": {"width": 4, "optimizer": {"rule": "sgd", "learning_rate": 0.003}}},
    "model": {"kind": "deepfm", "tower": [64]},
    "cluster": {"servers": 1, "trainers": 1},
    "metrics": {"enabled": False},
}


def _rows(folder: Path, click: np.ndarray, x: np.ndarray | None = None) -> None:
    folder.mkdir()
    columns = {"click": click, "a": np.arange(len(click)) % 50}
    for name in DENSE:
        columns[name] = np.zeros(len(click), np.float32) if x is None else x
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=1000)


def _data(tmp_path: Path, **more) -> dict:
    return {
        "train": str(tmp_path / "train"),
        "eval": str(tmp_path / "eval"),
        "labels": ["click"],
        "batch_rows": 200,
        "dense": {"columns": DENSE},
        "sparse": [{"name": "a"}],
        **more,
    }


def test_bad_rows_at_the_end_and_scores_that_are_not_finite_do_not_keep_a_job_from_its_end(tmp_path: Path) -> None:
    """Clicks are rare, and nothing is learnt: so predictions are still those that training began with."""
    rng = np.random.default_rng(1)
    click = (rng.random(6_000) < 0.02).astype(int)
    click[5_500:] = 9
    _rows(tmp_path / "train", click)
    x = np.zeros(2_000, np.float32)
    x[77] = 3e38  # each is finite, but not what a layer makes of the four
    _rows(tmp_path / "eval", (rng.random(2_000) < 0.02).astype(int), x)
    settings = {
        **SMALL,
        "tables": {"default": {"width": 4, "optimizer": {"rule": "sgd", "learning_rate": 1e-9}}},
        "train": {"dense_optimizer": {"learning_rate": 1e-9}, "evaluation": {"every_steps": 10}},
        "cluster": {"servers": 1, "trainers": 2},
        "control": {"max_restarts": 0},
    }
    data = _data(tmp_path, on_bad_row="skip", shuffle={"enabled": False})
    code, outcome = Job(tmp_path, data, settings).run("train")
    assert code == 0, outcome
    result = outcome["result"]
    assert (result["rows"], result["skipped_rows"]) == (5_500, 500)
    rate = click[:5_500].mean()
    told = result["first_predictions"]
    assert (told["rows"], told["label_rates"]) == (5_500, {"click": pytest.approx(rate)})
    found = result["eval"]
    assert (found["rows"], found["rows_not_finite"]) == (1_999, 1)
    mean = sum(band["rows"] * band["prediction"] for band in found["bands"]) / found["rows"]
    assert mean == pytest.approx(rate, rel=0.01)
    saved = manifest.read(manifest.latest(tmp_path / "run" / "checkpoints"))
    assert saved.manifest["first_predictions"] == told
    assert saved.manifest["progress"]["rows"] == 5_500


def _run_with_worker(job: Job, worker: str) -> list[str]:
    """A command that runs the job with trainers that are changed by this code."""
    path = job.folder / "worker.py"
    path.write_text(worker + "\nfrom paddlewheel.trainer.worker.__main__ import main\nmain()\n")
    code = f"""
from paddlewheel.deploy.launch.launcher import run_local
from paddlewheel.trainer.job.config import JobConfig
found = run_local(JobConfig.load({str(job.path)!r}), worker_commands={{"trainer": [{sys.executable!r}, {str(path)!r}]}})
print("ended", found.exit_code)
"""
    return [sys.executable, "-c", code]


def _journal(job: Job, what: str) -> list[dict]:
    path = job.folder / "run" / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["what"] == what]


SLOW_PREDICTION = """
import time
from pathlib import Path
from paddlewheel.trainer.dense.program import DenseProgram
predict = DenseProgram.predict
def slow(self, batch, rows):
    Path("evaluating").touch()
    time.sleep(0.2)
    return predict(self, batch, rows)
DenseProgram.predict = slow
"""


def test_an_interrupt_within_an_evaluation_saves_what_is_trained(tmp_path: Path, eventually) -> None:
    _rows(tmp_path / "train", np.arange(6_000) % 2)
    _rows(tmp_path / "eval", np.arange(60_000) % 2)  # at a fifth of a second for 200 rows, a minute
    settings = {
        **SMALL,
        "cluster": {"servers": 1, "trainers": 2},
        "train": {"evaluation": {"every_steps": 4}, "start_at_label_rate": False},
    }
    job = Job(tmp_path, _data(tmp_path), settings)
    process = subprocess.Popen(
        _run_with_worker(job, SLOW_PREDICTION.replace('"evaluating"', repr(str(tmp_path / "evaluating")))),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    eventually(
        lambda: process.poll() is not None or (tmp_path / "evaluating").exists(), seconds=120, what="an evaluation"
    )
    process.send_signal(signal.SIGINT)
    output, log = process.communicate(timeout=60)
    assert output.split()[-2:] == ["ended", "130"], log[-3000:]
    assert "will be killed" not in log
    assert [record["step"] for record in _journal(job, "committed")] == [4]
    assert _journal(job, "lost") == []


KILLED_IN_THE_FINAL_EVALUATION = """
import os, signal
import paddlewheel.trainer.worker.evaluator
def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
paddlewheel.trainer.worker.evaluator.evaluate = killed
"""


def test_a_job_that_is_lost_in_each_final_evaluation_comes_to_an_end(tmp_path: Path) -> None:
    _rows(tmp_path / "train", np.arange(1_000) % 2)
    _rows(tmp_path / "eval", np.arange(100) % 2)
    job = Job(tmp_path, _data(tmp_path), {**SMALL, "control": {"max_restarts": 1, "backoff_seconds": 0.1}})
    done = subprocess.run(
        _run_with_worker(job, KILLED_IN_THE_FINAL_EVALUATION),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert done.stdout.split()[-2:] == ["ended", "75"], done.stderr[-3000:]
    assert len(_journal(job, "attempt")) == 2
    assert [record["step"] for record in _journal(job, "committed")] == [5]
