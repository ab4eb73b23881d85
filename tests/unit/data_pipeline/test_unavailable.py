"""A failure of the moment is no fault of the data: it is tried again, told apart from damage, and never skipped."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from paddlewheel.data_pipeline import patience
from paddlewheel.data_pipeline.dataset import Dataset, read_footer
from paddlewheel.data_pipeline.errors import DataError, UnavailableError
from paddlewheel.data_pipeline.files import SourceFile
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.data_pipeline.patience import passes
from paddlewheel.data_pipeline.scoring_reader import Blocks, scoring_config
from tests.support.parquet_files import load, numbered, numbered_config, rows_of

NUM_ROWS = 20_000


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.0, 0.0, 0.0))


class _Handler(pafs.FileSystemHandler):
    """A store whose reads `fault` may fail: it is given the number of the read, and raises."""

    def __init__(self, fault: Callable[[int], None]) -> None:
        self.fault, self.num_reads = fault, 0

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_File(path, self), mode="r")

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return pafs.LocalFileSystem().get_file_info(paths)

    def get_type_name(self) -> str:
        return "failing"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def _none(self, *_: Any) -> Any:
        raise NotImplementedError

    copy_file = create_dir = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = _none
    get_file_info_selector = move = normalize_path = open_append_stream = open_input_stream = open_output_stream = _none


class _File:
    closed = False

    def __init__(self, path: str, store: _Handler) -> None:
        self._file, self._store = Path(path).open("rb"), store  # noqa: SIM115

    def read(self, size: int = -1) -> bytes:
        self._store.num_reads += 1
        self._store.fault(self._store.num_reads)
        return self._file.read(size)

    def seek(self, *where: int) -> int:
        return self._file.seek(*where)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False


def stored(path: Path, fault: Callable[[int], None], **config: Any) -> tuple[Dataset, _Handler]:
    """A dataset of one file in such a store, its footer read without a fault."""
    numbered(path, 0, NUM_ROWS, row_group_rows=NUM_ROWS // 4)
    job = numbered_config(**config)
    store = _Handler(lambda _: None)
    source = SourceFile(pafs.PyFileSystem(store), str(path), path.name, path.stat().st_size, (), "failing://")
    dataset = Dataset((read_footer(source, job),), job)
    store.fault, store.num_reads = fault, 0
    return dataset, store


def at(number: int, error: Exception) -> Callable[[int], None]:
    def fault(read: int) -> None:
        if read == number:
            raise error

    return fault


def always(error: Exception) -> Callable[[int], None]:
    def fault(_: int) -> None:
        raise error

    return fault


PASSING: list[Exception] = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.EMFILE, "Too many open files"),
    TimeoutError("timed out"),
    ConnectionResetError("the store is gone"),
    OSError("When reading x: AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 7"),
    OSError("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: Service Unavailable"),
    OSError("google::cloud::Status(UNAVAILABLE: try again)"),
    MemoryError("malloc of size 65536 failed"),
    pa.ArrowMemoryError("realloc of size 1024 failed"),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda e: f"{type(e).__name__}-{str(e)[:40]}")
def test_a_failure_that_passes_costs_no_row(tmp_path, error):
    dataset, store = stored(tmp_path / "a.parquet", at(5, error), shuffle={"enabled": False})
    assert rows_of(load(dataset)) == list(range(NUM_ROWS))
    assert store.num_reads > 5


@pytest.mark.parametrize("error", PASSING, ids=lambda e: f"{type(e).__name__}-{str(e)[:40]}")
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_failure_that_stays_is_no_bad_file(tmp_path, error, policy):
    dataset, _ = stored(tmp_path / "a.parquet", always(error), on_bad_file=policy)
    with pytest.raises(UnavailableError, match=r"a\.parquet: row group \d cannot be read now") as raised:
        load(dataset)
    assert not isinstance(raised.value, ValueError)
    scored = Dataset(dataset.files, scoring_config(dataset.config))
    with Blocks(scored) as blocks, pytest.raises(UnavailableError):
        list(blocks)


def test_a_long_row_group_is_read_on_after_each_of_many_failures(tmp_path, monkeypatch):
    """As a stream, in small batches: what was handed out before a failure does not come twice."""
    monkeypatch.setattr("paddlewheel.data_pipeline.dataset._CACHED_CELLS", 1)
    monkeypatch.setattr("paddlewheel.data_pipeline.files._FETCHED_BYTES", 0)
    failed = Counter[str]()

    def fault(read: int) -> None:
        if read % 7 == 0:
            failed["reads"] += 1
            raise TimeoutError("slow")

    dataset, _ = stored(tmp_path / "a.parquet", fault, shuffle={"enabled": False})
    assert rows_of(load(dataset)) == list(range(NUM_ROWS))
    assert failed["reads"] > 2


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file"),
        PermissionError(errno.EACCES, "Permission denied"),
        IsADirectoryError(errno.EISDIR, "Is a directory"),
        OSError("Couldn't deserialize thrift: TProtocolException: Invalid data"),
        OSError("Corrupt snappy compressed data."),
        OSError("AWS Error ACCESS_DENIED during GetObject operation: no"),
        OSError("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation: no"),
        OSError("google::cloud::Status(PERMISSION_DENIED: no)"),
        MemoryError(f"malloc of size {1 << 60} failed"),
        pa.ArrowInvalid("Index not in dictionary bounds"),
        ValueError("anything"),
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[:40]}",
)
def test_what_stays_wrong_is_not_tried_again(tmp_path, error):
    assert not passes(error)
    dataset, store = stored(tmp_path / "a.parquet", always(error))
    with pytest.raises(DataError, match=r"a\.parquet"):
        load(dataset)
    assert store.num_reads == 1


@pytest.fixture
def no_descriptors(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Calling it takes every file descriptor that this process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def take() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))  # noqa: PTH208
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    yield take
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("when", ["listing", "footers", "rows"])
def test_no_file_descriptors_left_is_no_bad_file(tmp_path, no_descriptors, policy, when):
    numbered(tmp_path / "a.parquet", 0, 1000)
    config = numbered_config(on_bad_file=policy)
    path = tmp_path if when == "listing" else tmp_path / "a.parquet"
    dataset = Dataset.open(str(path), config)
    with Loader(dataset, config, dataset.slices(), seed=0, epoch=0) as loader:
        no_descriptors()
        read = partial(next, loader) if when == "rows" else partial(Dataset.open, str(path), config)
        with pytest.raises(UnavailableError, match="Too many open files"):
            read()


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """Also for root, whom no permission stops."""

    def refuse(_: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match=r"cannot be listed: .*Permission denied"):
        Dataset.open(str(tmp_path), numbered_config())
