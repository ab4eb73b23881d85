"""Search over settings: the file, the trials, going on after a break, what is written."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from paddlewheel.deploy.bench import tuning
from paddlewheel.deploy.bench.parity.lab import ParityError, Variant
from paddlewheel.deploy.bench.tuning import Search, TuningError
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError

JOB = """
name: small
data:
  train: data/train
  eval: data/eval
  labels: [click]
  sparse: [{name: user}]
tables: {default: {width: 8, optimizer: {rule: adam}}}
model: {kind: wide_deep, tower: [8]}
"""
SPACE = """
train.dense_optimizer.learning_rate: {low: 1e-4, high: 1e-1, log: true}
model.dropout: {low: 0, high: 0.5}
tables.default.width: {low: 4, high: 16, step: 4}
model.tower: {choices: [[8], [16, 8], []]}
"""


@pytest.fixture
def search(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB)

    def search(space: str = SPACE, metric: str = "auc", **fields) -> Search:
        (tmp_path / "space.yaml").write_text(space)
        loaded = tuning.load_space(tmp_path / "space.yaml")
        return Search(tmp_path / "job.yaml", (), loaded, metric, Variant.parse("single"), fields.get("seeds", 1))

    return search


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[JobConfig]:
    """Instead of training: AUC is best at a learning rate of 0.01 and a width of 12; a dropout above 0.4 fails."""
    asked: list[JobConfig] = []

    def execute(variant: Variant, job: JobConfig, out: Path) -> dict:
        asked.append(job)
        if job.model.dropout > 0.4:
            raise ParityError("it failed")
        distance = abs(job.train.dense_optimizer.learning_rate - 0.01) + abs(job.tables["default"].width - 12) / 100
        return {"eval": {"auc": 0.8 - distance, "logloss": 0.4 + distance, "gauc": None}}

    monkeypatch.setattr(tuning, "execute", execute)
    return asked


def test_trials_stay_within_the_space_and_the_best_is_written_as_a_job(tmp_path: Path, search, runs) -> None:
    said: list[str] = []
    study = tuning.run(search(), 25, tmp_path / "out", said.append)
    assert len(runs) == 25
    for job in runs:
        assert 1e-4 <= job.train.dense_optimizer.learning_rate <= 0.1
        assert job.tables["default"].width in {4, 8, 12, 16}
        assert job.model.tower in {(8,), (16, 8), ()}
    files = tuning.write(search(), study, tmp_path / "out")
    assert [f.name for f in files] == ["trials.csv", "best.yaml", "trials.png"]
    rows = list(csv.DictReader(files[0].read_text(encoding="utf-8").splitlines()))
    scores = [float(row["auc"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert len(rows) == sum(job.model.dropout <= 0.4 for job in runs)
    assert (len(said), sum("failed: it failed" in line for line in said)) == (25, 25 - len(rows))
    best = JobConfig.load(files[1])
    params = study.best_trial.params.items()
    assert best == search().configured({k: json.loads(v) if isinstance(v, str) else v for k, v in params})
    assert (best.model.kind, best.tables["default"].optimizer.rule) == ("wide_deep", "adam")
    assert best.train.dense_optimizer.learning_rate == pytest.approx(
        float(rows[0]["train.dense_optimizer.learning_rate"])
    )
    assert list(best.model.tower) == json.loads(rows[0]["model.tower"])
    assert max(scores) > 0.75
    assert files[2].stat().st_size > 5000
    table = tuning.markdown(search(), study)
    assert "| trial | auc |" in table
    assert ("failed." in table) == (len(rows) < 25)


def test_a_search_goes_on_and_does_not_repeat_itself(tmp_path: Path, search, runs) -> None:
    tuning.run(search(), 4, tmp_path / "out", lambda _: None)
    study = tuning.run(search(), 9, tmp_path / "out", lambda _: None)
    assert len(study.trials) == 9
    assert len({job.train.dense_optimizer.learning_rate for job in runs}) == 9
    tuning.run(search(), 9, tmp_path / "out", lambda _: None)
    assert len(runs) == 9
    with pytest.raises(TuningError, match="another search"):
        tuning.run(search(metric="logloss"), 9, tmp_path / "out", lambda _: None)


def test_lower_is_better_where_it_is_and_seeds_are_averaged(tmp_path: Path, search, runs) -> None:
    chosen = search("train.dense_optimizer.learning_rate: {choices: [0.001, 0.01, 0.1]}", "logloss", seeds=2)
    study = tuning.run(chosen, 8, tmp_path / "out", lambda _: None)
    assert json.loads(study.best_trial.params["train.dense_optimizer.learning_rate"]) == 0.01
    assert [job.seed for job in runs[:4]] == [0, 1, 0, 1]


def test_an_undefined_metric_fails_the_trial_not_the_search(tmp_path: Path, search, runs) -> None:
    study = tuning.run(search(metric="gauc"), 3, tmp_path / "out", lambda _: None)
    assert [t.state.name for t in study.trials] == ["FAIL"] * 3
    with pytest.raises(TuningError, match="no trial has finished"):
        tuning.write(search(metric="gauc"), study, tmp_path / "out")


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("a.b: {low: 2, high: 1}", r"a.b must be a range.*low = 2.0 must be below high = 1.0"),
        ("a.b: {low: 0, high: 1, log: true}", "log needs low > 0"),
        ("a.b: {choices: []}", "a.b must be a range"),
        ("a.b: 3", "a.b must be a range"),
    ],
)
def test_a_search_file_that_cannot_be_used(search, space: str, message: str) -> None:
    with pytest.raises(TuningError, match=message):
        search(space)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            "train.dense_optimizer.learning_rat: {low: 1e-4, high: 1e-2}",
            "did you mean train.dense_optimizer.learning_rate",
        ),
        ("model.dropout: {low: 0, high: 2}", "model.dropout"),
        ("model.kind: {choices: [deepfm, depfm]}", "did you mean deepfm"),
    ],
)
def test_keys_and_ends_are_checked_before_the_first_run(tmp_path: Path, search, runs, space: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tuning.run(search(space), 3, tmp_path / "out", lambda _: None)
    assert runs == []
    assert not (tmp_path / "out").exists()
