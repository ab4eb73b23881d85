"""Which rows tell the labels' rates that training begins with."""

from __future__ import annotations

import numpy as np
import pytest

from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.trainer.worker import first_biases
from paddlewheel.trainer.worker.first_biases import shift_to, take_sample
from tests.support.parquet_files import write


def config(**more) -> DataConfig:
    return DataConfig(**{"labels": ["click", "buy"], "sparse": [{"name": "item"}], "batch_rows": 100, **more})


def files(folder, click, buy, *, row_group_rows=1000, **more) -> None:
    rows = np.arange(len(click))
    write(folder / "a.parquet", {"click": click, "buy": buy, "item": rows % 7, **more}, row_group_rows=row_group_rows)


def test_all_rows_of_small_data_are_counted(tmp_path) -> None:
    rng = np.random.default_rng(0)
    click = (rng.random(3_000) < 0.03).astype(int)
    buy = click * (rng.random(3_000) < 0.5)
    files(tmp_path, click, buy)
    job = config()
    sample = take_sample(Dataset.open(str(tmp_path), job), job)
    assert sample.num_rows == 3_000
    assert sample.rate_Y == pytest.approx([click.mean(), buy.mean()])
    assert 2_048 <= sum(batch.num_rows for batch in sample.batches) < 2_048 + 100


def test_rows_from_all_over_large_data_are_counted(tmp_path, monkeypatch) -> None:
    """The data is sorted by its label: the first rows alone would say that nobody clicks."""
    monkeypatch.setattr(first_biases, "_ROWS_COUNTED", 2_000)
    click = (np.arange(40_000) >= 30_000).astype(int)
    files(tmp_path, click, click)
    job = config()
    data = Dataset.open(str(tmp_path), job)
    sample = take_sample(data, job)
    assert 1_900 <= sample.num_rows <= 2_100
    assert sample.rate_Y[0] == pytest.approx(0.25, abs=0.03)
    again = take_sample(data, job)
    assert again.rate_Y.tolist() == sample.rate_Y.tolist()


def test_rates_are_by_sample_weight_and_of_soft_labels_too(tmp_path) -> None:
    rng = np.random.default_rng(0)
    click, buy, weight = rng.random(500), rng.random(500) ** 2, rng.random(500)
    files(tmp_path, click, buy, w=weight)
    job = config(label_rule={"soft": True}, sample_weight="w")
    sample = take_sample(Dataset.open(str(tmp_path), job), job)
    expected = [np.average(click, weights=weight), np.average(buy, weights=weight)]
    assert sample.rate_Y == pytest.approx(expected, rel=1e-6)


def test_a_label_that_is_never_seen_is_rare_and_not_impossible(tmp_path) -> None:
    files(tmp_path, np.zeros(999, int), np.ones(999, int))
    job = config()
    sample = take_sample(Dataset.open(str(tmp_path), job), job)
    assert sample.rate_Y == pytest.approx([0.0005, 0.9995])


def test_rows_that_cannot_be_used_do_not_count_and_are_put_into_quarantine_by_training_alone(tmp_path) -> None:
    click = [7 if row < 900 else row % 2 for row in range(1_000)]
    files(tmp_path / "data", click, [0] * 1_000)
    job = config(on_bad_row="quarantine", quarantine_directory=str(tmp_path / "bad"))
    sample = take_sample(Dataset.open(str(tmp_path / "data"), job), job)
    assert (sample.num_rows, sample.rate_Y[0]) == (100, 0.5)
    assert not list(tmp_path.glob("bad/**/*.parquet"))
    strict = config()
    with pytest.raises(DataError):
        take_sample(Dataset.open(str(tmp_path / "data"), strict), strict)


def test_without_usable_rows_there_is_no_rate(tmp_path) -> None:
    files(tmp_path, [7] * 50, [0] * 50)
    job = config(on_bad_row="skip")
    assert take_sample(Dataset.open(str(tmp_path), job), job) is None


@pytest.mark.parametrize("rate", [1e-7, 0.3, 0.999])
def test_the_shift_meets_the_rate(rate: float) -> None:
    rng = np.random.default_rng(1)
    logit, weight = 30 * rng.standard_normal(200), rng.random(200)
    shift = shift_to(rate, logit, weight)
    assert np.average(1 / (1 + np.exp(-(logit + shift))), weights=weight) == pytest.approx(rate, rel=1e-6)
