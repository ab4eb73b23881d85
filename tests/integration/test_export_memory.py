"""Exporting and scoring many keys takes bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from paddlewheel.pserver import saved_tables
from paddlewheel.pserver.config import table_id
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.coordinator import resume
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.serving.export import dense_program

WIDTH, NUM_SHARDS, NUM_ROWS = 8, 48, 100_000
# Measured at five million keys: 490 MiB for the export, 710 for scores from it (Paddle alone takes more than half).
EXPORT_MIB, EXPORT_MORE_MIB, PREDICT_MIB = 700, 150, 1_000


def make_checkpoint(folder: Path, num_keys: int) -> Path:
    """A checkpoint of a small model with a large table."""
    rng = np.random.default_rng(0)
    (folder / "data").mkdir(parents=True)
    ids = pa.array(rng.integers(0, 1 << 40, NUM_ROWS))
    pq.write_table(pa.table({"click": rng.integers(0, 2, NUM_ROWS), "a": ids, "b": ids}), folder / "data" / "a.parquet")
    job = JobConfig.parse(
        {
            "name": "large",
            "run_dir": str(folder / "run"),
            "data": {"eval": str(folder / "data"), "labels": ["click"], "sparse": [{"name": "a"}, {"name": "b"}]},
            "tables": {"default": {"width": WIDTH}},
            "model": {"kind": "dcn", "tower": [16]},
        }
    )
    draft = manifest.Draft(Path(job.checkpoint_location), ".step-1-x", 1)
    table = draft.sparse / "default"
    parts = table / f"{table_id('default'):03d}"
    parts.mkdir(parents=True)
    options = csv.WriteOptions(include_header=False, delimiter=" ", quoting_style="none")
    for shard in range(NUM_SHARDS):
        count = num_keys // NUM_SHARDS
        keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(NUM_SHARDS * 1_000_003) + np.uint64(shard)
        whole = [keys, *(np.zeros((3, count), np.int8)), *rng.integers(1, 9, (2, count)).astype(np.float32)]
        floats = rng.normal(size=(WIDTH + 3, count)).round(4).astype(np.float32)
        columns = [pa.array(column) for column in (*whole, *floats)]
        with (parts / f"part-000-{shard:05d}").open("wb") as file:
            csv.write_csv(pa.table(columns, names=[str(i) for i in range(len(columns))]), file, options)
    saved_tables.record(table, "default", job.tables["default"], job.seed, NUM_SHARDS)
    settings = job.model_dump(mode="json")
    dense = dense_program(job, job.tables).state()
    draft.finish(dense=dense, cursor={"job": resume.identity(job)}, facts={"settings": settings})
    return manifest.commit(draft.path, 1, 1)


# A process between: Linux counts what the forking process held as the worker's peak, and pytest may hold more.
_MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_mib(*words: Any) -> float:
    """Peak resident memory of one command."""
    command = [
        sys.executable,
        "-c",
        _MEASURE,
        sys.executable,
        "-m",
        "paddlewheel.deploy.cli",
        *map(str, words),
        "--json",
    ]
    code, peak = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert code == "0"
    return int(peak) / 1024


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_million_keys(tmp_path: Path) -> None:
    peaks = {}
    for num_keys in (480_000, 4_999_968):
        folder = tmp_path / str(num_keys)
        step = make_checkpoint(folder, num_keys)
        peaks[num_keys] = peak_mib("export", step, "--to", folder / "export", "--dtype", "float16", "--no-compare")
        assert pq.read_metadata(folder / "export/tables/default/export-00000.parquet").num_rows == num_keys
    few, many = peaks.values()
    assert many < EXPORT_MIB, peaks
    assert many - few < EXPORT_MORE_MIB, peaks
    assert peak_mib("predict", "--export", folder / "export", "--to", folder / "scores.parquet") < PREDICT_MIB
    assert pq.read_metadata(folder / "scores.parquet").num_rows == NUM_ROWS
