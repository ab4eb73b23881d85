"""Variants, the runs they become, and the arithmetic of the comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from scipy import stats

from paddlewheel.deploy.bench.parity import lab
from paddlewheel.deploy.bench.parity.lab import ParityError, Run, Variant
from paddlewheel.trainer.job.config import JobConfig


def job(**data) -> JobConfig:
    return JobConfig.parse(
        {
            "name": "x",
            "seed": 4,
            "data": {
                "train": "t",
                "eval": "e",
                "labels": ["click"],
                "batch_rows": 256,
                "sparse": [{"name": "user", "table": "default"}],
                **data,
            },
            "checkpoint": {"every_steps": 5},
        }
    )


def test_variants_become_jobs_with_the_same_rows_a_step() -> None:
    for text, servers, trainers, rows, staleness in (
        ("2x4@8", 2, 4, 64, 8),
        ("1x2", 1, 2, 128, 1),
        ("single", 1, 1, 256, 1),
    ):
        made = Variant.parse(text).job(job(), 9, Path("/r"))
        assert (made.cluster.servers, made.cluster.trainers) == (servers, trainers)
        assert (made.data.batch_rows, made.train.max_staleness_steps) == (rows, staleness)
        assert (made.seed, made.run_dir, made.checkpoint.every_steps) == (9, "/r", None)
        assert [f.space for f in made.data.sparse] == ["default"]


@pytest.mark.parametrize("text", ["", "2", "0x1", "1x0", "axb", "1x1@", "1x1@x", "doubles"])
def test_what_is_no_variant_is_refused(text: str) -> None:
    with pytest.raises(ParityError, match="is no variant"):
        Variant.parse(text)


def test_an_uneven_batch_or_no_evaluation_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="no multiple of 3 trainers"):
        lab.run_all(job(), [Variant.parse("single"), Variant.parse("1x3")], [1], tmp_path / "out", print)
    with pytest.raises(ParityError, match=r"data\.eval"):
        lab.run_all(job(eval=[]), [Variant.parse("single")], [1], tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


def test_runs_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def execute(variant: Variant, config: JobConfig, out: Path) -> dict:
        asked.append((variant.name, config.seed))
        return {"eval": {"auc": 0.7, "logloss": 0.4}, "rows": 10, "seconds": 1.0}

    monkeypatch.setattr(lab, "execute", execute)
    variants = [Variant.parse("single"), Variant.parse("1x1")]
    lab.run_all(job(), variants, [1], tmp_path, lambda _: None)
    store = tmp_path / "runs.jsonl"
    store.write_text(store.read_text() + '{"variant": "1x1", "se')  # cut off
    asked.clear()
    runs = lab.run_all(job(), variants, [1, 2], tmp_path, lambda _: None)
    assert asked == [("single", 2), ("1x1", 2)]
    assert len(runs) == len(lab.read(store)) == 4
    with pytest.raises(ParityError, match="another job"):
        lab.run_all(job(batch_rows=512), variants, [1], tmp_path, lambda _: None)


def test_differences_are_paired_by_seed() -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(0.78, 0.01, 6)
    apart = rng.normal(0.001, 0.0005, 6)
    runs = [Run("single", s, float(base[s]), 0.4, 1, 1.0) for s in range(6)]
    runs += [Run("2x2", s, float(base[s] + apart[s]), 0.41, 1, 1.0) for s in range(1, 6)]
    single, spread = lab.compare(runs)
    assert (single.difference, single.difference_half_width) == (None, None)
    assert spread.seeds == 5
    assert spread.difference == pytest.approx(apart[1:].mean())
    low, high = stats.t.interval(0.95, 4, loc=apart[1:].mean(), scale=stats.sem(apart[1:]))
    assert spread.difference_half_width == pytest.approx((high - low) / 2, rel=1e-3)
    assert spread.logloss_difference == pytest.approx(0.01)
    assert single.auc_sd == pytest.approx(np.std(base, ddof=1))
    assert "| 2x2 | 5 |" in lab.markdown([single, spread])
    json.dumps([vars(c) for c in (single, spread)])


def test_one_seed_has_no_interval_and_no_common_seed_no_difference() -> None:
    [_single, spread] = lab.compare([Run("single", 1, 0.7, 0.4, 1, 1.0), Run("2x2", 1, 0.71, 0.4, 1, 1.0)])
    assert spread.difference == pytest.approx(0.01)
    assert spread.difference_half_width is None
    [_, other] = lab.compare([Run("single", 1, 0.7, 0.4, 1, 1.0), Run("2x2", 2, 0.71, 0.4, 1, 1.0)])
    assert other.difference is None


def test_students_t_table() -> None:
    for degrees, value in enumerate(lab._T, start=1):
        assert value == pytest.approx(stats.t.ppf(0.975, degrees), abs=1e-3)


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    runs = [Run(v, s, 0.7 + s / 100, 0.4, 1, 1.0) for v in ("single", "1x1", "2x2@8") for s in range(3)]
    lab.plot(runs, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_what_the_lab_starts_does_not_outlive_it() -> None:
    """Even kill -9 of the command leaves no run behind."""
    worker = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    start = f"subprocess.run(tied([sys.executable, '-c', {worker!r}]))"
    lab_process = f"import subprocess, sys; from paddlewheel.trainer.distributed.subprocesses import tied; {start}"
    with subprocess.Popen([sys.executable, "-c", lab_process], stdout=subprocess.PIPE, text=True) as parent:
        run = psutil.Process(int(parent.stdout.readline()))
        assert run.is_running()
        parent.kill()
        run.wait(timeout=30)
    assert not psutil.pid_exists(run.pid) or psutil.Process(run.pid) != run
