"""What a real trainer says of a checkpoint that it cannot restore: whose fault it is, the coordinator finds out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.job.config import JobConfig
from tests.support.trainers import run_trainers


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"click": [0, 1] * 50, "a": list(range(100))}), tmp_path / "train" / "0.parquet")
    data = {"train": str(tmp_path / "train"), "labels": ["click"], "sparse": [{"name": "a"}]}
    return JobConfig.parse({"name": "j", "run_dir": str(tmp_path), "data": data, "model": {"kind": "lr"}})


def error_of(job: JobConfig, tmp_path: Path, restore: Path) -> tuple[int, dict[str, Any]]:
    [(code, events)] = run_trainers(job, ["127.0.0.1:1"], tmp_path, restore=str(restore))
    return code, next(event for event in events if event["event"] == "error")


@pytest.mark.parametrize("harm", ["removed", "damaged", "of another model"])
def test_a_checkpoint_that_cannot_be_restored(job: JobConfig, tmp_path: Path, harm: str) -> None:
    draft = manifest.Draft(tmp_path / "checkpoints", ".step-3-x", 3)
    (draft.sparse / "part").write_text("content")
    draft.finish(
        dense={"w": np.ones(3, np.float32)},
        cursor={"step": 3, "rows": 0, "position": {"epoch": 0, "done": []}},
        facts={},
    )
    path = manifest.commit(draft.path, 3, 3)
    if harm == "removed":
        shutil.rmtree(path)
    elif harm == "damaged":
        (path / "sparse" / "part").write_text("CONTENT")
    code, said = error_of(job, tmp_path, path)
    assert (code, said["kind"]) == (75, "checkpoint"), said
    assert str(path) in said["message"]
