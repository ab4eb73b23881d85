"""What the PyTorch side is given: the same rows as numbers, and the same job as another model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.deploy.bench.parity import peers
from paddlewheel.deploy.bench.parity.lab import ParityError
from paddlewheel.deploy.bench.parity.peers import Result
from paddlewheel.trainer.job.config import JobConfig


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    for part, rows in (("train", 60), ("eval", 20)):
        (tmp_path / part).mkdir()
        numbers = np.arange(rows)
        table = pa.table(
            {
                "click": pa.array(numbers % 2, pa.int8()),
                "price": pa.array(numbers / 4, pa.float32()),
                "item": pa.array([None if i % 10 == 0 else i % 7 for i in range(rows)], pa.int64()),
                "past": pa.array([[j % 7 for j in range(i % 4)] for i in range(rows)], pa.list_(pa.int64())),
                "rare": pa.array(numbers + (100 if part == "eval" else 0), pa.int64()),
            }
        )
        pq.write_table(table, tmp_path / part / "a.parquet")
    return JobConfig.parse(
        {
            "name": "x",
            "data": {
                "train": str(tmp_path / "train"),
                "eval": str(tmp_path / "eval"),
                "labels": ["click"],
                "batch_rows": 16,
                "threads": 0,
                "dense": {"columns": ["price"]},
                "sparse": [
                    {"name": "item", "table": "item"},
                    {"name": "past", "table": "item", "pooling": "none", "max_length": 3},
                    {"name": "rare"},
                ],
            },
            "tables": {"default": {"width": 4}, "item": {"width": 4}},
            "model": {"kind": "din", "tower": [8], "attention": [4]},
        }
    )


def test_rows_are_handed_over_as_they_are(job: JobConfig, tmp_path: Path) -> None:
    peers.encode(job, tmp_path / "rows.npz", min_count=2)
    with np.load(tmp_path / "rows.npz") as data:
        layout = json.loads(str(data["layout"]))
        assert layout["sizes"] == {
            "item": 8,
            "default": 1,
        }  # 7 items and one number for rare ones; all of `rare` is rare
        assert layout["targets"] == {"past": "item"}
        assert layout["dense"] == 1
        for part, rows in (("train", 60), ("eval", 20)):
            numbers = np.arange(rows)
            np.testing.assert_array_equal(data[f"{part}/label"], numbers % 2)
            np.testing.assert_allclose(data[f"{part}/dense"][:, 0], numbers / 4)
            item, past = data[f"{part}/item"], data[f"{part}/past"]
            assert past.shape == (rows, 3)
            assert (item[::10] == 0).all()
            of_value = {i % 7: int(item[i]) for i in range(rows) if i % 10}
            assert sorted(of_value.values()) == list(range(2, 9))
            for i in range(rows):  # one number for one id, in both features of the table
                assert past[i].tolist() == [of_value[j] for j in range(i % 4)] + [0] * (3 - i % 4)
            assert set(data[f"{part}/rare"].tolist()) == {1}


def test_the_job_becomes_each_model(job: JobConfig) -> None:
    deepfm = peers.variant(job, "deepfm")
    assert deepfm.model.tower == (8,)
    assert deepfm.data.sparse[1].pooling == "mean"
    assert peers.variant(job, "lr").model.kind == "lr"
    din = peers.variant(job, "din")
    assert (din.data.sparse[1].pooling, din.model.attention) == ("none", (4,))
    with pytest.raises(ParityError, match="needs a feature with `pooling: none`"):
        peers.variant(deepfm, "din")
    with pytest.raises(ParityError, match="no PyTorch peer"):
        peers.variant(job, "ple")


def test_the_table_of_results() -> None:
    result = Result("deepfm", 3, 0.781, 0.001, 0.42, 0.78, 0.002, 0.421)
    assert result.difference == pytest.approx(0.001)
    assert "| deepfm | 3 | 0.78100 ± 0.00100 | 0.42000 | 0.78000 ± 0.00200 | 0.42100 | +0.00100 |" in peers.markdown(
        [result]
    )
