"""Data in an object store: a real S3 server on loopback, credentials from the usual environment."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from paddlewheel.data_pipeline import DataError, patience
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.errors import ChangedError, UnavailableError
from paddlewheel.data_pipeline.loader import Loader
from tests.support import reference_keys
from tests.support.object_stores import new_bucket, s3_server
from tests.support.parquet_files import keys_by_row, load, numbered_config, rows_of


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Address of the server, ready."""
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket with Hive folders, hidden files and odd names: 60 rows in 3 files."""
    filesystem, root = pafs.FileSystem.from_uri(f"s3://{new_bucket(endpoint, monkeypatch)}?allow_bucket_deletion=true")
    for number, folder in enumerate(("day=01", "day=02", "day=02/中 文")):
        row = range(20 * number, 20 * number + 20)
        table = pa.table(
            {"click": [r % 2 for r in row], "row": pa.array(row, pa.float32()), "item": [r % 7 for r in row]}
        )
        with filesystem.open_output_stream(f"{root}/train/{folder}/part-{number}.parquet") as out:
            pq.write_table(table, out, row_group_size=7)
    for junk in ("_SUCCESS", "_temporary/x.parquet", "day=01/.hidden.parquet", "notes.txt"):
        with filesystem.open_output_stream(f"{root}/train/{junk}") as out:
            out.write(b"not data")
    yield root
    filesystem.delete_dir(root)


def test_a_folder_in_s3(bucket):
    config = numbered_config(sparse=[{"name": "item"}, {"name": "day"}], threads=2)
    dataset = Dataset.open(f"s3://{bucket}/train", config)
    batches = load(dataset)
    assert sorted(rows_of(batches)) == list(range(60))
    days = {k for row in keys_by_row(batches, "day") for k in row}
    assert days == {reference_keys.key("day", d) for d in ("01", "02")}


def test_globs_single_files_and_mixed_roots(bucket, tmp_path):
    config = numbered_config(shuffle={"enabled": False})
    assert rows_of(load(Dataset.open(f"s3://{bucket}/train/day=01/part-0.parquet", config))) == list(range(20))
    assert sorted(rows_of(load(Dataset.open(f"s3://{bucket}/train/day=0[2]", config)))) == list(range(20, 60))
    assert sorted(rows_of(load(Dataset.open(f"s3://{bucket}/train/*/part-*.parquet", config)))) == list(range(40))
    both = Dataset.open([f"s3://{bucket}/train/day=02", f"s3://{bucket}/train"], config)
    assert sorted(rows_of(load(both))) == list(range(60))


def test_a_local_copy_has_the_same_order_and_fingerprint(bucket, tmp_path):
    filesystem = pafs.FileSystem.from_uri(f"s3://{bucket}")[0]
    pafs.copy_files(
        f"{bucket}/train",
        str(tmp_path / "train"),
        source_filesystem=filesystem,
        destination_filesystem=pafs.LocalFileSystem(),
    )
    config = numbered_config()
    remote, local = Dataset.open(f"s3://{bucket}/train", config), Dataset.open(str(tmp_path / "train"), config)
    assert remote.fingerprint == local.fingerprint
    assert rows_of(load(remote, seed=4)) == rows_of(load(local, seed=4))


def test_errors_name_the_address(bucket):
    config = numbered_config()
    with pytest.raises(DataError, match=rf"s3://{bucket}/nowhere: does not exist"):
        Dataset.open(f"s3://{bucket}/nowhere", config)
    with pytest.raises(DataError, match="s3://no-such-bucket-here/x: "):
        Dataset.open("s3://no-such-bucket-here/x", config)
    with pytest.raises(DataError, match=r"notes.txt: is not a readable Parquet file"):
        Dataset.open(f"s3://{bucket}/train/notes.txt", config)
    with pytest.raises(DataError, match=r"s3://.*part-0\.parquet: has no column 'itm'; the nearest are 'item'"):
        Dataset.open(f"s3://{bucket}/train", numbered_config(sparse=[{"name": "itm"}]))
    with pytest.raises(DataError, match="unknown://x"):
        Dataset.open("unknown://x", config)


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_an_object_that_is_removed_or_replaced_is_an_error(bucket, policy):
    filesystem = pafs.FileSystem.from_uri(f"s3://{bucket}")[0]
    dataset = Dataset.open(f"s3://{bucket}/train", numbered_config(threads=2, on_bad_file=policy))
    path = f"{bucket}/train/day=01/part-0.parquet"
    table = pq.read_table(path, filesystem=filesystem, partitioning=None)
    with filesystem.open_output_stream(path) as out:
        pq.write_table(table.set_column(0, "click", [[1 - row % 2 for row in range(20)]]), out, row_group_size=7)
    with pytest.raises(ChangedError, match=r"part-0\.parquet: is not the file that was there .*(written|bytes)"):
        load(dataset)
    filesystem.delete_file(path)
    with pytest.raises(ChangedError, match=r"part-0\.parquet: .* is gone"):
        load(dataset)


@pytest.mark.slow  # each attempt of the store's client takes 6 s
def test_a_store_that_goes_away_is_not_the_data_s_fault(monkeypatch):
    """In the middle of a file, and before: reported as what may pass, and skipped by no policy."""
    config = numbered_config(on_bad_file="skip", shuffle={"window_rows": 7, "interleave": 1})
    with s3_server() as address:
        root = new_bucket(address, monkeypatch)
        filesystem = pafs.FileSystem.from_uri(f"s3://{root}")[0]
        table = pa.table({"click": [0, 1] * 20, "row": pa.array(range(40), pa.float32()), "item": [1, 2] * 20})
        with filesystem.open_output_stream(f"{root}/train/a.parquet") as out:
            pq.write_table(table, out, row_group_size=7)
        dataset = Dataset.open(f"s3://{root}/train", config)
        loader = Loader(dataset, config, dataset.slices(), seed=0, epoch=0)
        next(loader)
    monkeypatch.setattr(patience, "_PATIENCE_SECONDS", 0.0)  # the client itself tries for 6 s
    with loader, pytest.raises(UnavailableError, match=r"a\.parquet: row group \d cannot be read now: .*NETWORK"):
        list(loader)
    with pytest.raises(UnavailableError, match=f"s3://{root}/train cannot be read now"):
        Dataset.open(f"s3://{root}/train", config)
