"""The best checkpoint and the evaluations are those of an undisturbed run, whatever ended the run in between."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from paddlewheel.data_pipeline import synthetic
from paddlewheel.trainer.checkpoint import manifest
from tests.support.command import Job

pytestmark = pytest.mark.timeout(400)
EVERY, EPOCHS = 30, 5
SETTINGS = {
    # embeddings that learn too fast: the logloss falls at first, and then only rises
    "tables": {"default": {"width": 4, "initial_range": 0.05, "optimizer": {"rule": "adam", "learning_rate": 0.02}}},
    "model": {"kind": "deepfm", "tower": [16]},
    "train": {
        "epochs": EPOCHS,
        "max_staleness_steps": 0,
        "evaluation": {"every_steps": EVERY, "every_epochs": 1, "metric": "logloss", "save_best": True},
    },
    "checkpoint": {"every_steps": EVERY, "keep": 1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("clicks")
    synthetic.generate(folder, rows=12_000, seed=2)
    return {
        **synthetic.data_section(folder),
        "batch_rows": 160,
        "slice_assignment": "static",
    }  # 60 steps an epoch, two evaluations


@pytest.fixture(scope="module")
def undisturbed(data: dict, tmp_path_factory) -> dict:
    code, outcome = Job(tmp_path_factory.mktemp("undisturbed"), data, SETTINGS).run("train")
    assert code == 0, outcome
    return outcome["result"]


def _kill_the_trainer(process) -> None:
    [worker] = [
        p for p in psutil.Process(process.pid).children(recursive=True) if "paddlewheel.trainer.worker" in p.cmdline()
    ]
    worker.kill()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("a trainer dies", marks=pytest.mark.slow),
        pytest.param("stopped and started again", marks=pytest.mark.slow),
        pytest.param("everything dies", marks=pytest.mark.slow),
    ],
)
def test_the_best_checkpoint_survives(tmp_path: Path, data: dict, undisturbed: dict, eventually, how: str) -> None:
    job = Job(tmp_path, data, SETTINGS)
    kept = tmp_path / "run" / "checkpoints"
    process = job.start("train")
    eventually(
        lambda: process.poll() is not None or (kept / f"step-{3 * EVERY}").exists(),
        seconds=200,
        what="three checkpoints",
    )
    assert process.poll() is None, process.communicate()
    if how == "a trainer dies":
        _kill_the_trainer(process)
    elif how == "stopped and started again":
        os.kill(process.pid, signal.SIGTERM)
    else:
        family = psutil.Process(process.pid).children(recursive=True)
        for member in [process, *family]:
            member.kill()
        psutil.wait_procs(family, timeout=30)
    output, errors = process.communicate(timeout=200)
    if how != "a trainer dies":
        assert manifest.best(kept) is not None
        code, outcome = job.run("train")
    else:
        code, outcome = process.returncode, json.loads(output)
    assert code == 0, (outcome, errors[-2000:])
    result = outcome["result"]

    steps = [e["step"] for e in undisturbed["evaluations"]]
    assert steps == list(range(EVERY, 60 * EPOCHS + 1, EVERY))
    assert [e["step"] for e in result["evaluations"]] == steps
    for mine, other in zip(result["evaluations"], undisturbed["evaluations"], strict=True):
        assert mine["best"] == other["best"], mine["step"]
        assert mine["logloss"] == pytest.approx(other["logloss"], abs=1e-3)  # a checkpoint holds six digits
    lowest = min(undisturbed["evaluations"], key=lambda e: e["logloss"])["step"]
    assert EVERY < lowest < steps[-1] / 2
    assert result["best"]["step"] == undisturbed["best"]["step"] == lowest
    best = manifest.best(kept)
    assert best is not None
    assert best.name == f"step-{lowest}"
    assert result["best"]["checkpoint"] == str(best)
    assert sorted(p.name for p in manifest.committed(kept)) == sorted({best.name, f"step-{steps[-1]}"})


@pytest.mark.slow
def test_a_job_that_stopped_early_trains_no_more_when_it_is_started_again(tmp_path: Path, data: dict) -> None:
    """As when the final evaluation was cut short. The checkpoint of the last step is older than its evaluation."""
    evaluation = {"every_epochs": 1, "metric": "logloss", "patience": 1}
    job = Job(tmp_path, data, SETTINGS | {"train": {**SETTINGS["train"], "evaluation": evaluation}})
    results = []
    for _ in range(2):
        code, outcome = job.run("train")
        assert code == 0, outcome
        results.append(outcome["result"])
    assert results[0]["stopped_early"]
    assert results[0]["rows"] < results[0]["expected_rows"]
    for key in ("stopped_early", "rows", "steps"):
        assert results[1][key] == results[0][key], key
    assert [e["step"] for e in results[1]["evaluations"]] == [e["step"] for e in results[0]["evaluations"]]
