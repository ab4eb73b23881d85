"""Seeded clicks: the same data for the same seed, and the ceiling that is promised."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.synthetic import _World, auc, data_section, generate
from tests.support.parquet_files import load


def test_the_same_seed_gives_the_same_data(tmp_path):
    first, second = generate(tmp_path / "a", 5000, 3), generate(tmp_path / "b", 5000, 3)
    assert pq.read_table(tmp_path / "a" / "train").equals(pq.read_table(tmp_path / "b" / "train"))
    assert (first.best_auc, first.best_logloss) == (second.best_auc, second.best_logloss)
    generate(tmp_path / "b", 5000, 4)
    assert not pq.read_table(tmp_path / "a" / "eval").equals(pq.read_table(tmp_path / "b" / "eval"))
    assert (first.train_rows, first.eval_rows) == (4000, 1000)


def test_its_job_section_reads_every_row(tmp_path):
    result = generate(tmp_path / "a", 5000, 3)
    config = DataConfig(**data_section(tmp_path / "a"), threads=0)
    batches = load(Dataset.open(config.train, config))
    assert sum(b.num_rows for b in batches) == result.train_rows
    assert batches[0].tables["default"].index["tags"].ndim == 2


def test_the_ceiling_is_that_of_the_true_probability(tmp_path):
    _, probability, label = _World(1).draw(20_000, np.random.RandomState(0))
    assert auc(probability, label) == pytest.approx(roc_auc_score(label, probability))
    result = generate(tmp_path / "a", 40_000, 1)
    assert 0.75 < result.best_auc < 0.9
    assert result.best_logloss < log_loss(label, np.full(label.size, label.mean()))
    assert np.isnan(auc(np.array([0.1, 0.2]), np.array([1, 1], dtype=np.int8)))


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ValueError, match="holds other files"):
        generate(tmp_path, 100, 1)
    with pytest.raises(ValueError, match="rows be at least 10"):
        generate(tmp_path / "new", 5, 1)
