"""What the ready job files reach, through the command, on data whose yardsticks are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddlewheel.deploy.bench.parity import single
from paddlewheel.trainer.job.config import JobConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JOBS = Path(__file__).parents[2] / "jobs"


def _paddlewheel(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paddlewheel.deploy.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _train(job: str, sets: list[str], cwd: Path) -> dict:
    """The evaluation at the end."""
    output = _paddlewheel("train", str(JOBS / job), *(f"--set={s}" for s in sets), "--json", cwd=cwd)
    return json.loads(output)["result"]["eval"]


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> tuple[Path, float]:
    """A folder with the quickstart's data, and the best AUC that any model can reach on it."""
    folder = tmp_path_factory.mktemp("clicks")
    _paddlewheel("data", "synth", "data/quickstart", "--rows", "400k", "--seed", "1", cwd=folder)
    return folder, json.loads((folder / "data/quickstart/best.json").read_text())["best_auc"]


@pytest.mark.parametrize("roles", [1, 2])
def test_synthetic_clicks_are_learned_to_within_0_005_of_the_best_auc(clicks, tmp_path: Path, roles: int) -> None:
    folder, best = clicks
    sets = [f"run_dir={tmp_path}", f"cluster.servers={roles}", f"cluster.trainers={roles}"]
    auc = _train("quickstart.yaml", sets, folder)["auc"]
    assert best - 0.005 < auc <= best + 0.002, (auc, best)


@pytest.fixture(scope="module")
def criteo(shared_data: Path, tmp_path_factory) -> Path:
    """A folder with the Criteo sample, 12,000 rows to train and 3,433 to validate."""
    folder = tmp_path_factory.mktemp("criteo")
    raw = shared_data / "criteo" / "criteo_sample.tsv.gz"
    split = ["--split", "permutation", "--train-rows", "12000"]
    _paddlewheel("data", "prepare", "criteo", str(raw), "data/criteo", *split, cwd=folder)
    return folder


def test_criteo_sample_reaches_its_yardsticks(criteo: Path, tmp_path: Path) -> None:
    """Plain DeepFM elsewhere: AUC 0.780, logloss 0.421 (standard error 0.011)."""
    found = []
    for seed in range(3):
        sets = [f"run_dir={tmp_path / str(seed)}", f"seed={seed}"]
        report = _train("criteo-deepfm.yaml", sets, criteo)
        assert report["rows"] == 3_433
        found.append((report["auc"], report["logloss"]))
    auc, logloss = np.mean(found, axis=0)
    assert auc >= 0.775, found
    assert logloss <= 0.425, found


SEEDS = 5


@pytest.fixture(scope="module")
def criteo_float32(criteo: Path) -> tuple[float, float]:
    return _criteo_means(criteo, "float32")


def _criteo_means(criteo: Path, precision: str) -> tuple[float, float]:
    """AUC and logloss of `jobs/criteo-deepfm.yaml` in one process, mean over the seeds."""
    found = []
    for seed in range(SEEDS):
        sets = [f"data.{part}={criteo / 'data/criteo' / part}" for part in ("train", "eval")]
        sets += [f"seed={seed}", f"train.precision={precision}"]
        report = single.run(JobConfig.load(JOBS / "criteo-deepfm.yaml", sets))["eval"]
        found.append((report["auc"], report["logloss"]))
    auc, logloss = np.mean(found, axis=0)
    return float(auc), float(logloss)


# Measured with seeds 0 to 7: AUC 0.78084, standard deviation 0.00160; logloss 0.42114, 0.00148. Seeds are fixed here,
# and other rounding (bfloat16 products) moved no run by more than 0.0003 in AUC and 0.0002 in logloss. Without
# `start_at_label_rate` it is 0.78182 and 0.41984; what was tried against that: docs/decisions/027-first-predictions.md.
EXPECTED_AUC, EXPECTED_LOGLOSS, BAND = 0.78091, 0.42066, 0.001


def test_accuracy_is_what_it_was(criteo_float32: tuple[float, float]) -> None:
    """A change that costs accuracy, or brings some, has to say so here."""
    assert criteo_float32 == pytest.approx((EXPECTED_AUC, EXPECTED_LOGLOSS), abs=BAND)


@pytest.mark.needs("native operators", "bfloat16")
def test_bfloat16_products_cost_no_accuracy(criteo: Path, criteo_float32: tuple[float, float]) -> None:
    assert _criteo_means(criteo, "bfloat16") == pytest.approx(criteo_float32, abs=BAND)


def test_movielens_din_reaches_its_yardstick(shared_data: Path, tmp_path: Path) -> None:
    """The latest tenth of the ratings; what single seeds and plain PyTorch reach is in
    deploy/bench/parity/README.md.
    """
    raw = shared_data / "movielens-100k"
    _paddlewheel("data", "prepare", "movielens", str(raw), "data/movielens", cwd=tmp_path)
    report = _train("movielens-din.yaml", [f"run_dir={tmp_path / 'run'}"], tmp_path)
    assert report["rows"] == 10_000
    assert report["auc"] >= 0.73
    assert report["logloss"] <= 0.61
