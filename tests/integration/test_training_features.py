"""Evaluations within training, early stopping, the best checkpoint, negative sampling, a user's own model: with real
trainers and servers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from paddlewheel.data_pipeline import synthetic
from paddlewheel.pserver.local import local_servers
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.job.config import JobConfig
from tests.support.trainers import result_of, run_trainers

MODEL = """
import paddle
from pydantic import BaseModel

from paddlewheel.trainer.models.base import Model, Tower


class Squeeze(Model):
    class Options(BaseModel):
        units: int

    def __init__(self, spec, options):
        super().__init__()
        self.tower = Tower(spec.flat_width, [options.units], spec.num_labels)

    def forward(self, inputs):
        return self.tower(inputs.flat_BX) + inputs.first_order_B1
"""


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clicks") / "data"
    synthetic.generate(folder, 12_000, seed=2)
    return folder


def run(
    tmp_path: Path, clicks: Path, *, trainers: int = 2, model: dict | None = None, data: dict | None = None, **train
) -> list[list[dict]]:
    """Events of every trainer of a small job."""
    job = JobConfig.parse(
        {
            "name": "features",
            "seed": 7,
            "run_dir": str(tmp_path / "run"),
            "data": {
                **synthetic.data_section(clicks),
                "batch_rows": 256,
                "group": "segment",
                "threads": 0,
                "slice_assignment": "static",
                **(data or {}),
            },
            "tables": {"default": {"width": 4, "shards": 2, "optimizer": {"rule": "adagrad", "learning_rate": 0.1}}},
            "model": model or {"kind": "deepfm", "tower": [16]},
            "train": train,
            "cluster": {"servers": 1, "trainers": trainers},
            "checkpoint": {"keep": 1},
        }
    )
    with local_servers(job.tables, 1, tmp_path) as servers:
        children = run_trainers(job, servers.endpoints, tmp_path)
    for code, events in children:
        result_of(events)
        assert code == 0
    return [events for _, events in children]


def test_evaluations_stop_training_and_keep_the_best(tmp_path: Path, clicks: Path) -> None:
    every = run(
        tmp_path,
        clicks,
        epochs=10,
        dense_optimizer={"learning_rate": 0.05},  # too fast: it soon gets worse
        evaluation={"every_steps": 8, "metric": "logloss", "patience": 2, "save_best": True},
    )
    results = [result_of(events) for events in every]
    evaluations = results[0]["evaluations"]
    for result in results[1:]:  # all trainers saw the same numbers, so all stopped at the same step
        assert [e["logloss"] for e in result["evaluations"]] == [e["logloss"] for e in evaluations]
        assert result["steps"] == results[0]["steps"]
    result = results[0]
    assert result["stopped_early"]
    assert result["rows"] < result["expected_rows"]
    assert [e["step"] for e in evaluations] == list(range(8, 8 * len(evaluations) + 1, 8))
    assert [e["best"] for e in evaluations[-2:]] == [False, False]
    assert evaluations[0]["trained_rows"] == 8 * 2 * 256
    assert evaluations[0]["rows"] == 2400
    assert evaluations[0]["gauc"] is not None
    lowest = min(evaluations, key=lambda e: e["logloss"])
    assert (result["best"]["step"], result["best"]["logloss"]) == (lowest["step"], lowest["logloss"])
    best = manifest.best(tmp_path / "run" / "checkpoints")
    assert best is not None
    assert best.name == f"step-{lowest['step']}"
    assert str(best) == result["best"]["checkpoint"]
    assert manifest.latest(best.parent).name == f"step-{result['steps']}"
    assert manifest.read(best).manifest["evaluation"]["best"]["step"] == lowest["step"]


def test_predictions_are_calibrated_when_negatives_are_left_out(tmp_path: Path, clicks: Path) -> None:
    events = run(tmp_path, clicks, trainers=1, epochs=4, negative_sampling={"keep": 0.3})[0]
    result = result_of(events)
    assert result["rows"] + result["left_out_rows"] == result["expected_rows"] == 4 * 9600
    assert 0.4 < result["left_out_rows"] / result["expected_rows"] < 0.7
    assert 0.85 < result["eval"]["calibration"] < 1.15  # without the shift it is about 2
    assert result["eval"]["auc"] > 0.65


def test_a_model_of_the_users_own_trains(tmp_path: Path, clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    events = run(tmp_path, clicks, trainers=1, epochs=3, model={"kind": "my_models:Squeeze", "options": {"units": 8}})[
        0
    ]
    assert result_of(events)["eval"]["auc"] > 0.65


def test_sample_weights_are_in_the_evaluation(tmp_path: Path, clicks: Path) -> None:
    hours = np.concatenate([pq.read_table(p, columns=["hour"])["hour"] for p in sorted((clicks / "eval").glob("*"))])
    every = run(tmp_path, clicks, data={"sample_weight": "hour"}, evaluation={"metric": "weighted_logloss"})
    evaluation = result_of(every[0])["eval"]
    assert evaluation["weight"] == hours.sum()
    assert 0.5 < evaluation["weighted_auc"] < 1
    assert evaluation["weighted_auc"] != evaluation["auc"]
    assert [result_of(events)["eval"]["weighted_logloss"] for events in every[1:]] == [evaluation["weighted_logloss"]]
