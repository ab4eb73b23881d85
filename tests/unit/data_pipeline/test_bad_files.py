"""Damaged files end in an error that names them, or are left out and counted; the process survives (P9)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.loader import Loader
from tests.support.parquet_files import config_for, load, numbered, numbered_config, rows_of, write


def run_alone(code: str) -> None:
    """Runs code in a process of its own, which must end well."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


# What each public file is: rows that it gives, or what its error says.
PUBLIC = {
    "ARROW-GH-41317.parquet": "promises 3 rows and holds 0|cannot be read",
    "ARROW-GH-41321.parquet": "cannot be read",
    "ARROW-GH-43605.parquet": 21186,
    "ARROW-GH-45185.parquet": "cannot be read",
    "ARROW-GH-47662.parquet": "cannot be read",
    "ARROW-RS-GH-6229-DICTHEADER.parquet": "cannot be read",
    "ARROW-RS-GH-6229-LEVELS.parquet": "cannot be read|cannot be an id",
    "PARQUET-1481.parquet": "not a readable Parquet file",
    "datapage_v1-corrupt-checksum.parquet": "cannot be read.*(checksum|CRC)",
    "encrypt_columns_plaintext_footer.parquet.encrypted": "cannot be read",
    "parquet_column_num_values_mismatch.parquet": "promises 8 rows and holds 0",
    "test-empty-row-group_1.parquet": "0 rows",
    "test-empty-row-group_2.parquet": 4,
    "test-empty-row-group_3.parquet": 5,
}


@pytest.mark.data
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_damaged_files(shared_data, name):
    path = shared_data / "parquet-bad" / name
    config = config_for(path)
    expected = PUBLIC[name]
    if isinstance(expected, int):
        dataset = Dataset.open(str(path), config)
        assert sum(b.num_rows for b in load(dataset)) == dataset.num_rows == expected
        return
    if config.labels == ("none",):
        expected += "|has no column 'none'"
    with pytest.raises(DataError, match=expected) as error:
        load(Dataset.open(str(path), config))
    assert name in str(error.value)


@pytest.mark.data
def test_one_process_survives_all_public_files_and_reads_the_good_ones_between(shared_data, tmp_path):
    """In a process of its own: an abort would otherwise end the test run."""
    numbered(tmp_path / "good.parquet", 0, 40)
    code = f"""
import sys
from pathlib import Path
from paddlewheel.data_pipeline.dataset import Dataset
from tests.support.parquet_files import *
for path in sorted(Path({str(shared_data / "parquet-bad")!r}).iterdir()):
    print(path.name, file=sys.stderr, flush=True)
    both = numbered_config(on_bad_file="skip")
    assert sorted(rows_of(load(Dataset.open([str(path), {str(tmp_path)!r}], both)))) == list(range(40))
    try:
        load(Dataset.open(str(path), config_for(path, on_bad_file="skip")))
    except ValueError as error:
        assert path.name in str(error)
"""
    run_alone(code)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"", r"the file is empty \(0 bytes\)"),
        (lambda raw: raw[: len(raw) // 2], "not a readable Parquet file"),
        (lambda raw: b"click,row,item\n0,1,2\n", "not a readable Parquet file"),
        (lambda raw: raw[:-8] + b"\xff\xff\xff\x7f" + raw[-4:], "not a readable Parquet file"),
        (lambda raw: raw[:40] + bytes(len(raw) // 2) + raw[40 + len(raw) // 2 :], "b.parquet"),
    ],
    ids=["zero-byte", "truncated", "renamed-csv", "footer-length", "zeroed-pages"],
)
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_damage_of_every_kind(tmp_path, damage, message, policy):
    for number, name in enumerate("abc"):
        numbered(tmp_path / f"{name}.parquet", 1000 * number, 1000, row_group_rows=1000)
    path = tmp_path / "b.parquet"
    path.write_bytes(damage(path.read_bytes()))
    config = numbered_config(on_bad_file=policy)
    if policy == "fail":
        with pytest.raises(DataError, match=message) as error:
            load(Dataset.open(str(tmp_path), config))
        assert "b.parquet" in str(error.value)
        return
    dataset = Dataset.open(str(tmp_path), config)
    with Loader(dataset, config, dataset.slices(), seed=0, epoch=0) as loader:
        rows = rows_of(list(loader))
        assert sum(loader.state().values()) == dataset.num_rows
        assert loader.counters["unreadable_rows"] == dataset.num_rows - 2000
    assert sorted(rows) == [*range(1000), *range(2000, 3000)]
    assert len(dataset.skipped_files) + len(loader.unreadable) == 1


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("bad", [(1500, 3000), (0, 3000), (2990, 3000)])
def test_rows_that_cannot_be_used_at_the_end_are_in_the_spans_all_the_same(tmp_path, shuffle, bad):
    """Whoever trains counts rows by the spans that it is given, not by the loader's position."""
    click = [7 if bad[0] <= row < bad[1] else row % 2 for row in range(3000)]
    write(tmp_path / "a.parquet", {"click": click, "row": [float(r) for r in range(3000)], "item": click})
    config = numbered_config(on_bad_row="skip", batch_rows=256, shuffle={"enabled": shuffle, "window_rows": 512})
    dataset = Dataset.open(str(tmp_path), config)
    batches = load(dataset)
    assert sum(span.num_rows for batch in batches for span in batch.spans) == 3000
    assert sum(batch.num_skipped_rows for batch in batches) == bad[1] - bad[0]
    assert sorted(rows_of(batches)) == [row for row in range(3000) if not bad[0] <= row < bad[1]]
    assert all(batch.num_rows for batch in batches[:-1])


def test_all_files_bad_is_an_error_even_when_skipping(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"0 rows in 0 files; left out: .*a\.parquet"):
        Dataset.open(str(tmp_path), numbered_config(on_bad_file="skip"))


def test_random_damage_never_ends_the_process_and_never_loses_rows_silently(tmp_path):
    """Bytes of good files are changed at random, in a process of its own, which must live, and give "
    "all rows or an error.
    """
    code = f"""
import math, random, sys, collections
sys.path.insert(0, ".")
import pyarrow as pa
from pathlib import Path
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.config import DataConfig
from tests.support.parquet_files import *
root = Path({str(tmp_path)!r})
text = pa.array([f"s{{i % 9}}" if i % 5 else None for i in range(300)])
extra = dict(s=text, l=pa.array([[i, i + 1][: i % 3] for i in range(300)]))
numbered(root / "good.parquet", 0, 300, row_group_rows=100, **extra)
table = pq.read_table(root / "good.parquet")
goods = []
for codec in ("none", "snappy", "zstd"):
    sums = codec == "zstd"
    pq.write_table(table, root / "good.parquet", compression=codec, row_group_size=100, write_page_checksum=sums)
    goods.append((root / "good.parquet").read_bytes())
draw = random.Random(1)
sparse = [{{"name": "item"}}, {{"name": "s"}}, {{"name": "l", "max_length": 3}}]
config = numbered_config(sparse=sparse, on_bad_row="skip")
found = collections.Counter()
for number in range(200):
    raw = bytearray(goods[number % 3])
    for _ in range(draw.choice([1, 1, 3, 20])):
        raw[draw.randrange(len(raw))] = draw.randrange(256)
    (root / "bad.parquet").write_bytes(bytes(raw))
    print(number, flush=True, file=sys.stderr)
    try:
        dataset = Dataset.open(str(root / "bad.parquet"), config)
        rows = sum(s.num_rows for b in load(dataset) for s in b.spans)
        assert rows == dataset.num_rows
        found["read"] += 1
    except DataError:
        found["refused"] += 1
print(dict(found))
"""
    run_alone(code)
