"""Memory follows what rows take when they are decoded: a few kilobytes of a file can be gigabytes of text or lists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[3]
_LIMITED = """
import json, resource, sys
import numpy as np, pyarrow as pa
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset, plan_epoch
from paddlewheel.data_pipeline.fit import fit
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.data_pipeline.quality import check
from paddlewheel.data_pipeline.scoring_reader import Blocks, scoring_config
what, job = sys.argv[1], json.loads(sys.argv[2])
config = DataConfig(**job)
dataset = Dataset.open(config.train, config, require_fitted=False)
taken = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (taken + (400 << 20),) * 2)
if what == "train":
    with Loader(dataset, config, plan_epoch(dataset, 0, 0), seed=0, epoch=0) as loader:
        print(sum(batch.num_rows for batch in loader), loader.counters["bad_rows"])
elif what == "predict":
    scoring = scoring_config(config)
    with Blocks(Dataset.open(scoring.train, scoring, carried=["x"])) as blocks:
        print(sum(block.num_rows for block in blocks), 0)
elif what == "check":
    print(check(dataset, config).rows_read, 0)
else:
    fit(dataset, config)
    print(dataset.num_rows, 0)
"""


def run_limited(what: str, job: dict) -> list[int]:
    """Rows and bad rows that a process with 400 MiB to spare reads."""
    command = [sys.executable, "-c", _LIMITED, what, json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(word) for word in done.stdout.split()]


ROWS = 20_000
COLUMNS = {
    "text": pa.DictionaryArray.from_arrays(
        pa.array(np.arange(ROWS) % 3, pa.int32()), pa.array([letter * 40_000 for letter in "abc"])
    ),
    "fixed bytes": pa.DictionaryArray.from_arrays(
        pa.array(np.arange(ROWS) % 3, pa.int32()),
        pa.array([letter * 40_000 for letter in (b"a", b"b", b"c")], pa.binary(40_000)),
    ),
    "lists": pa.ListArray.from_arrays(
        pa.array(np.arange(ROWS + 1, dtype=np.int32) * 5_000), pa.array(np.zeros(5_000 * ROWS, np.int8))
    ),
}
"""800 MB each in one row group, and some kilobytes in the file. (Integers of lists become keys of 64 bits.)"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoded")
    for what, column in COLUMNS.items():
        table = pa.table({"click": pa.array(np.arange(ROWS) % 2, pa.int8()), "x": column})
        (folder / what).mkdir()
        with pq.ParquetWriter(folder / what / "a.parquet", table.schema, store_schema=False) as writer:
            writer.write_table(table, row_group_size=ROWS)
        assert (folder / what / "a.parquet").stat().st_size < 300_000
    return folder


@pytest.mark.parametrize(
    ("what", "column"),
    [
        ("train", "text"),
        ("predict", "text"),
        ("check", "text"),
        ("fit", "text"),
        pytest.param("train", "fixed bytes", marks=pytest.mark.slow),
        pytest.param("train", "lists", marks=pytest.mark.slow),
    ],
)
def test_rows_that_decode_to_much_fit_into_little_memory(files, tmp_path, what, column):
    path = files / column / "a.parquet"
    feature = {"name": "x", "vocabulary": {"min_count": 2}} if what == "fit" else {"name": "x"}
    job = {
        "train": str(path), "labels": "click", "threads": 2,
        **({"statistics": str(tmp_path / "fitted")} if what == "fit" else {}),
        "sparse": [{**feature, **({"max_length": 10} if column == "lists" else {})}],
    }  # fmt: skip
    assert run_limited(what, job) == [ROWS, 0]
