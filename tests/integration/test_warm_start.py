"""Jobs that begin with what another job has learnt, through the command."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from paddlewheel.data_pipeline import synthetic
from paddlewheel.pserver import export, saved_tables
from paddlewheel.pserver.initializer import Initializer
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.coordinator import run_report
from tests.support.command import Job

pytestmark = pytest.mark.timeout(300)

SETTINGS = {
    "tables": {"default": {"width": 4, "initial_range": 0.05, "optimizer": {"rule": "adam", "learning_rate": 0.01}}},
    "model": {"kind": "deepfm", "tower": [16]},
    "cluster": {"servers": 1, "trainers": 1},
    "control": {"max_restarts": 0},
}
STILL = [  # learns nothing, so what it began with is what it ends with
    "--set=tables.default.optimizer.learning_rate=1e-12",
    "--set=train.dense_optimizer.learning_rate=1e-12",
]


def values_of(step: Path, table: str) -> dict[int, np.ndarray]:
    saved = saved_tables.open_table(step / "sparse" / table)
    initializer = Initializer(saved.name, saved.config, saved.seed)
    return {
        key: row
        for rows in saved_tables.read_rows(saved)
        for key, row in zip(rows.keys_N.tolist(), export.effective(rows, saved.config, initializer), strict=True)
    }


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> tuple[Job, dict]:
    folder = tmp_path_factory.mktemp("learnt")
    synthetic.generate(folder / "data", rows=15_000, seed=2)
    job = Job(folder, synthetic.data_section(folder / "data"), SETTINGS)
    code, outcome = job.run("train")
    assert code == 0, outcome
    assert outcome["result"]["warm_start"] is None
    return job, outcome["result"]


def test_a_job_begins_with_all_of_another_and_once_only(learnt, tmp_path: Path) -> None:
    old, before = learnt
    source = tmp_path / "source"
    shutil.copytree(old.folder / "run" / "checkpoints", source)
    settings = {**SETTINGS, "seed": 99, "warm_start": {"source": str(source), "dense": True}}
    settings["cluster"] = {"servers": 2, "trainers": 2}
    job = Job(tmp_path, old.data, settings)
    code, outcome = job.run("train", *STILL)
    assert code == 0, outcome
    result = outcome["result"]
    step = manifest.latest(source)
    keys = before["keys"]["default"]
    assert result["warm_start"]["tables"] == {"default": {"from": "default", "keys": keys}}
    assert result["warm_start"]["source"] == str(step)
    for metric in ("auc", "logloss"):
        assert result["eval"][metric] == pytest.approx(before["eval"][metric], abs=5e-5)
    theirs, mine = values_of(step, "default"), values_of(manifest.latest(job.folder / "run/checkpoints"), "default")
    assert theirs.keys() == mine.keys()
    worst = max(np.abs(theirs[key] - mine[key]).max() for key in theirs)
    assert worst < 2e-5
    left = [path.name for path in (job.folder / "run/checkpoints").iterdir() if path.name.startswith(".")]
    assert left == []
    # It goes on from its own checkpoint; the source may be gone.
    shutil.rmtree(source)
    code, outcome = job.run("train", *STILL, "--set", "train.epochs=2")
    assert code == 0, outcome
    assert outcome["result"]["rows"] == 2 * result["rows"]
    assert outcome["result"]["warm_start"] == result["warm_start"]
    newest = manifest.latest(job.folder / "run" / "checkpoints")
    assert manifest.read_manifest(newest)["warm_start"] == result["warm_start"]
    report = run_report.report(job.folder / "run")
    assert (report.exact, report.warm_start) == (True, result["warm_start"])
    # Beginning again is another matter.
    code, outcome = job.run("train", *STILL, "--from-scratch")
    assert code == 64
    assert "no trained model" in outcome["error"]["message"]


def test_new_features_start_fresh_under_another_table_name(learnt, tmp_path: Path) -> None:
    old, _ = learnt
    sparse = [{**feature, "table": "ids", "key_space": feature["name"]} for feature in old.data["sparse"]]
    sparse.append({"name": "new", "column": "hour", "table": "ids", "key_space": "new"})
    table = {**SETTINGS["tables"]["default"], "initial_range": 0.2, "optimizer": {"rule": "adagrad"}}
    source = old.folder / "run"
    settings = {
        **SETTINGS,
        "tables": {"ids": table},
        "warm_start": {"source": str(source), "tables": {"ids": "default"}},
    }
    job = Job(tmp_path, {**old.data, "sparse": sparse}, settings)
    still = ["--set=tables.ids.optimizer.learning_rate=1e-12"]
    code, outcome = job.run("train", *still)
    assert code == 0, outcome
    theirs = values_of(manifest.latest(source / "checkpoints"), "default")
    mine = values_of(manifest.latest(job.folder / "run" / "checkpoints"), "ids")
    assert max(np.abs(theirs[key] - mine[key]).max() for key in theirs) < 2e-5
    fresh = mine.keys() - theirs.keys()
    assert len(fresh) == 24  # hours of a day, in a space of their own
    assert all(mine[key][0] == pytest.approx(0, abs=1e-6) and np.abs(mine[key][1:]).max() <= 0.2 for key in fresh)


def test_another_width_is_refused_before_anything_starts(learnt, tmp_path: Path) -> None:
    old, _ = learnt
    settings = {**SETTINGS, "warm_start": {"source": str(old.folder / "run")}}
    job = Job(tmp_path, old.data, settings)
    for arguments in (["train"], ["train", "--from-scratch"]):
        code, outcome = job.run(*arguments, "--set", "tables.default.width=8")
        assert code == 64
        assert "tables.default.width: is 8" in outcome["error"]["message"]
        assert not (tmp_path / "run" / "journal.jsonl").exists()
