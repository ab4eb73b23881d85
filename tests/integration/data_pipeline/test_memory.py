"""Memory does not grow with the data: one large row group, and thousands of tiny files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

_MEASURE = """
import sys
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset, plan_epoch
from paddlewheel.data_pipeline.loader import Loader
config = DataConfig(
    labels="label", dense={"columns": [f"I{i}" for i in range(13)]}, sparse=[{"name": f"C{i}"} for i in range(26)]
)
dataset = Dataset.open(sys.argv[1], config)
with Loader(dataset, config, plan_epoch(dataset, 0, 0), seed=0, epoch=0) as loader:
    rows = sum(batch.num_rows for batch in loader)
assert rows == dataset.num_rows
# not getrusage: after a fork that counts the parent's memory too
print(next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def clicks(num_rows: int) -> pa.Table:
    draw = np.random.default_rng(0)
    columns = {"label": draw.integers(0, 2, num_rows).astype(np.int8)}
    columns |= {f"I{i}": draw.random(num_rows, np.float32) for i in range(13)}
    columns |= {f"C{i}": draw.zipf(1.2, num_rows) % 10**6 for i in range(26)}
    return pa.table(columns)


def peak_mib(path: Path) -> int:
    """Peak memory of a process that reads everything once."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", _MEASURE, str(path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one large row group", "thousands of tiny files"])
def test_peak_memory_stays_under_500_mb(tmp_path, layout):
    if layout == "one large row group":
        table = clicks(1_200_000)  # 310 MB decoded
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=table.num_rows)
        del table
    else:
        pq.write_table(clicks(60), tmp_path / "f0.parquet")
        for number in range(1, 1000):
            os.link(tmp_path / "f0.parquet", tmp_path / f"f{number}.parquet")
    peak = peak_mib(tmp_path)
    assert peak < 477, f"{layout}: {peak} MiB"
