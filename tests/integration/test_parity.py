"""A run on servers that waits for every push learns what one process learns; seeds alone move it further."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlewheel.data_pipeline import synthetic
from paddlewheel.deploy.bench.parity import single
from paddlewheel.pserver.local import local_servers
from paddlewheel.trainer.job.config import JobConfig
from tests.support.trainers import result_of, run_trainers


def job(tmp_path: Path, **parts) -> JobConfig:
    optimizer = {"rule": "adagrad", "learning_rate": 0.1}
    return JobConfig.parse(
        {
            "name": "parity",
            "seed": 7,
            "run_dir": str(tmp_path / "run"),
            "data": {
                **synthetic.data_section(tmp_path / "data"),
                "batch_rows": 256,
                "threads": 0,
                "slice_assignment": "static",
            },
            "tables": {"default": {"width": 4, "shards": 2, "admission_threshold": 3, "optimizer": optimizer}},
            "model": {"kind": "deepfm", "tower": [16], "dropout": 0.2},
            "train": {
                "epochs": 2,
                "max_staleness_steps": 0,
                "embedding_l2": 0.01,
                "dense_optimizer": {"clip_norm": 0.5, "schedule": {"warmup_steps": 5, "decay": "cosine"}},
            },
            "cluster": {"servers": 2, "trainers": 1},
            **parts,
        }
    )


def test_servers_and_one_process_learn_the_same(tmp_path: Path) -> None:
    synthetic.generate(tmp_path / "data", 8_000, seed=2)
    config = job(tmp_path)
    alone = single.run(config)
    with local_servers(config.tables, 2, tmp_path) as servers:
        [(code, events)] = run_trainers(config, servers.endpoints, tmp_path)
    spread = result_of(events)
    assert code == 0
    assert spread["keys"] == alone["keys"]
    assert (spread["rows"], spread["steps"]) == (alone["rows"], alone["steps"])
    assert spread["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    for metric in ("auc", "logloss", "calibration"):
        assert spread["eval"][metric] == pytest.approx(alone["eval"][metric], rel=1e-4), metric
    other = single.run(job(tmp_path, seed=8))
    assert abs(other["eval"]["logloss"] / alone["eval"]["logloss"] - 1) > 1e-4
