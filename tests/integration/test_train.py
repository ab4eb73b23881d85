"""Whole jobs through the command: rows, accuracy, repeatability, losses, ordered ends, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.data_pipeline import synthetic
from paddlewheel.trainer.checkpoint import manifest
from tests.support.command import Job

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> tuple[Path, synthetic.SyntheticResult]:
    folder = tmp_path_factory.mktemp("clicks")
    return folder, synthetic.generate(folder, rows=30_000, seed=2)


SMALL = {
    "tables": {"default": {"width": 4, "initial_range": 0.05, "optimizer": {"rule": "adam", "learning_rate": 0.003}}},
    "model": {"kind": "deepfm", "tower": [16]},
    "cluster": {"servers": 1, "trainers": 1},
    "control": {"max_restarts": 0},
}


def _merged(*parts: dict) -> dict:
    result: dict = {}
    for part in parts:
        for key, value in part.items():
            result[key] = {**result[key], **value} if isinstance(result.get(key), dict) else value
    return result


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory, clicks) -> tuple[Job, dict[str, Any]]:
    """A job of two servers and two trainers on the clicks, and its result after one epoch."""
    job = Job(
        tmp_path_factory.mktemp("job"),
        synthetic.data_section(clicks[0]),
        _merged(SMALL, {"cluster": {"servers": 2, "trainers": 2}}),
    )
    code, outcome = job.run("train")
    assert code == 0, outcome
    return job, outcome["result"]


def _two_features(folder: Path, rows_by_file: list[int]) -> dict:
    rng = np.random.default_rng(0)
    (folder / "train").mkdir()
    for number, rows in enumerate(rows_by_file):
        table = {"click": rng.integers(0, 2, rows), "a": rng.integers(0, 50, rows), "b": rng.integers(0, 9, rows)}
        pq.write_table(pa.table(table), folder / "train" / f"{number}.parquet")
    return {
        "train": str(folder / "train"),
        "labels": ["click"],
        "batch_rows": 256,
        "sparse": [{"name": "a"}, {"name": "b"}],
    }


def test_two_trainers_train_all_of_10_000_and_9_000_rows(tmp_path: Path) -> None:
    data = _two_features(tmp_path, [10_000, 9_000])
    job = Job(tmp_path, data, _merged(SMALL, {"cluster": {"servers": 2, "trainers": 2}}))
    code, outcome = job.run("train")
    assert (code, outcome["result"]["rows"]) == (0, 19_000), outcome
    assert outcome["result"]["keys"] == {"default": 59}
    saved = manifest.read(manifest.latest(tmp_path / "run" / "checkpoints"))
    assert saved.cursor["rows"] == 19_000


def test_evaluate_repeats_what_train_reported(two_by_two) -> None:
    job, trained = two_by_two
    code, evaluated = job.run("evaluate", "--set", "cluster.servers=1", "--set", "cluster.trainers=1")
    assert code == 0, evaluated
    before, after = trained["eval"], evaluated["result"]["eval"]
    assert before["rows"] == after["rows"] == 6_000
    for metric in ("auc", "logloss", "calibration"):
        # the checkpoint holds six significant digits
        assert after[metric] == pytest.approx(before[metric], abs=2e-5), metric


def test_a_strictly_synchronous_run_repeats_bit_for_bit(tmp_path: Path, clicks) -> None:
    folder, _ = clicks
    data = {**synthetic.data_section(folder), "slice_assignment": "static"}
    settings = _merged(SMALL, {"train": {"max_staleness_steps": 0}})
    results = []
    for number in range(2):
        place = tmp_path / str(number)
        place.mkdir()
        code, outcome = Job(place, data, settings).run("train")
        assert code == 0, outcome
        results.append(outcome["result"])
    assert results[0]["dense_hash"] == results[1]["dense_hash"]
    assert results[0]["loss"] == results[1]["loss"]
    assert results[0]["eval"]["auc"] == results[1]["eval"]["auc"]


@pytest.mark.parametrize(("wire", "trainers"), [("bfloat16", 2), ("float16", 3)])
@pytest.mark.slow
def test_16_bits_between_trainers(tmp_path: Path, clicks, two_by_two, wire: str, trainers: int) -> None:
    """Trainers compare all dense parameters at the end. The model is as good; so is what goes on from a checkpoint."""
    folder, _ = clicks
    train = {"allreduce_dtype": wire, "epochs": 2}
    job = Job(
        tmp_path,
        synthetic.data_section(folder),
        _merged(SMALL, {"train": train, "cluster": {"trainers": trainers}}),
    )
    code, outcome = job.run("train", "--set", "train.epochs=1")
    assert code == 0, outcome
    first = outcome["result"]
    assert (first["rows"], first["bad_steps"]) == (24_000, 0)
    _, in_float32 = two_by_two
    assert first["dense_hash"] != in_float32["dense_hash"]
    assert first["eval"]["auc"] == pytest.approx(in_float32["eval"]["auc"], abs=0.01)
    code, outcome = job.run("train", "--set", f"cluster.trainers={5 - trainers}")
    assert code == 0, outcome
    assert outcome["result"]["rows"] == 48_000
    assert outcome["result"]["eval"]["auc"] > first["eval"]["auc"] - 0.005


def _with_a_row_that_explodes(tmp_path: Path, *, batch_rows: int, **written: Any) -> dict[str, Any]:
    """The `data` block of a job over 4,000 rows."""
    rng = np.random.default_rng(1)
    rows = 4_000
    x = rng.standard_normal(rows).astype(np.float32)
    x[1234] = 3e38  # finite, but its square and its products are not
    (tmp_path / "train").mkdir()
    table = pa.table({"click": rng.integers(0, 2, rows), "a": rng.integers(0, 50, rows), "x": x})
    pq.write_table(table, tmp_path / "train" / "a.parquet", **written)
    return {
        "train": str(tmp_path / "train"),
        "labels": ["click"],
        "batch_rows": batch_rows,
        "dense": {"columns": ["x"]},
        "sparse": [{"name": "a"}],
    }


@pytest.mark.parametrize("wire", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_bad_batch_of_one_trainer_is_skipped_by_all_with_16_bits(tmp_path: Path, wire: str) -> None:
    data = _with_a_row_that_explodes(tmp_path, batch_rows=250, row_group_size=500)
    data["slice_assignment"] = "static"
    settings = _merged(SMALL, {"train": {"allreduce_dtype": wire}, "cluster": {"trainers": 2}})
    code, outcome = Job(tmp_path, data, settings).run("train")
    assert code == 0, outcome
    result = outcome["result"]
    assert (result["rows"], result["bad_steps"], result["bad_rows"]) == (4_000, 1, 500)
    saved = manifest.read(manifest.latest(tmp_path / "run" / "checkpoints"))
    assert all(np.isfinite(value).all() for value in saved.dense().values())


def test_rows_that_explode_are_skipped_and_counted_and_tables_stay_finite(tmp_path: Path) -> None:
    data = _with_a_row_that_explodes(tmp_path, batch_rows=500)
    code, outcome = Job(tmp_path, data, SMALL).run("train")
    assert code == 0, outcome
    assert (outcome["result"]["bad_steps"], outcome["result"]["bad_rows"]) == (1, 500)
    saved = manifest.read(manifest.latest(tmp_path / "run" / "checkpoints"))
    assert all(np.isfinite(value).all() for value in saved.dense().values())


def test_what_the_readers_left_out_is_in_the_result(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    rows = [{"click": i % 2 if i != 5 else 7, "tags": ["a", "b", "c"] if i % 10 == 0 else ["a"]} for i in range(2_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train" / "a.parquet")
    data = {
        "train": str(tmp_path / "train"),
        "labels": ["click"],
        "batch_rows": 100,
        "sparse": [{"name": "tags", "max_length": 2}],
        "on_bad_row": "skip",
    }
    job = Job(tmp_path, data, _merged(SMALL, {"train": {"epochs": 2}, "cluster": {"trainers": 2}}))
    code, outcome = job.run("train")
    assert code == 0, outcome
    result = outcome["result"]
    assert (result["rows"], result["skipped_rows"], result["unreadable_rows"]) == (2 * 1_999, 2, 0)
    assert result["truncated_ids"] == {"tags": 400}


def test_more_bad_steps_than_allowed_end_the_job(tmp_path: Path) -> None:
    data = _two_features(tmp_path, [3_000])
    settings = _merged(SMALL, {"train": {"max_nonfinite_steps": 2, "dense_optimizer": {"learning_rate": 1e30}}})
    settings["control"] = {"max_restarts": 3}
    code, outcome = Job(tmp_path, data, settings).run("train")
    assert code == 64, "to start again would not help"
    assert "train.max_nonfinite_steps" in outcome["cause"]
    assert outcome["num_restarts"] == 0


def _children(process: subprocess.Popen, module: str) -> list[psutil.Process]:
    """The agents' Paddle processes."""
    agents = [p for p in psutil.Process(process.pid).children() if "paddlewheel.trainer.agent.agent" in p.cmdline()]
    return [worker for agent in agents for worker in agent.children() if module in worker.cmdline()]


@pytest.fixture
def long_job(tmp_path: Path) -> Job:
    """Would train for minutes."""
    data = _two_features(tmp_path, [50_000, 50_000])
    settings = _merged(SMALL, {"train": {"epochs": 200}, "cluster": {"servers": 2, "trainers": 2}})
    return Job(tmp_path, data, settings)


def _training(job: Job, eventually) -> subprocess.Popen:
    process = job.start("train")
    journal = job.folder / "run" / "journal.jsonl"
    try:
        eventually(
            lambda: process.poll() is not None or _has_progress(journal.parent), seconds=120, what="training has begun"
        )
    except BaseException:
        process.kill()
        raise
    assert process.poll() is None, process.communicate()
    return process


def _has_progress(run: Path) -> bool:
    log = run / "logs" / "coordinator.log"
    return log.exists() and "trainers are ready" in log.read_text()


@pytest.mark.parametrize(
    ("module", "role"),
    [
        ("paddlewheel.pserver.server_process", "pserver"),
        pytest.param("paddlewheel.trainer.worker", "trainer", marks=pytest.mark.slow),
    ],
)
def test_kill_9_of_a_role_ends_the_job_and_names_it(long_job: Job, eventually, module: str, role: str) -> None:
    process = _training(long_job, eventually)
    victim = _children(process, module)[1]
    victim.kill()
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    outcome = json.loads(output)
    assert process.returncode == 75
    assert outcome["failed_role"].startswith(role), outcome
    assert "SIGKILL" in outcome["cause"]
    assert seconds < 15


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_the_job_in_order(long_job: Job, eventually, number: int) -> None:
    process = _training(long_job, eventually)
    os.kill(process.pid, number)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert time.monotonic() - began < 30
