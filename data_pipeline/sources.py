"""Finds the data files behind the paths of a job: local, S3, Google Cloud Storage, HDFS."""

import glob as globbing
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import xxhash

from data_pipeline.errors import ChangedError, DataError
from data_pipeline.patience import read_patiently

_DATA_SUFFIXES = (".parquet", ".parq", ".pq")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_MAGIC = frozenset("*?[")
_FETCHED_BYTES = 64 << 20
_TAIL_BYTES = 1 << 16
_FOOTER_MAGIC = (b"PAR1", b"PARE")
_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class SourceFile:
    """One data file. `relative` (below its root) names it in fingerprints, so that moved data stays the same data."""

    filesystem: pafs.FileSystem = field(repr=False, compare=False)
    path: str
    relative: str
    size: int
    partitions: tuple[tuple[str, str | None], ...] = ()
    uri_prefix: str = ""

    @property
    def name(self) -> str:
        """How messages call the file."""
        return self.uri_prefix + self.path

    @property
    def is_local(self) -> bool:
        return self.uri_prefix == ""


@dataclass(frozen=True)
class Footprint:
    """By what a file is known again when it is opened a second time."""

    size: int
    """Bytes."""
    version: str
    """When a local file was written; what a store calls this content of an object."""
    footer: str
    """Hash of the footer, which holds row counts and, for each chunk of a column, its place and statistics."""


@contextmanager
def open_footer(source: SourceFile) -> Iterator[tuple[pq.ParquetFile, Footprint]]:
    """The footer alone, and what the file is known by."""
    with closing(_open(source)) as handle:
        tail = _read_tail(handle)
        footprint = Footprint(handle.size(), _version(source, handle), xxhash.xxh3_128_hexdigest(memoryview(tail)))
        with pq.ParquetFile(pa.BufferReader(tail)) as parquet:
            yield parquet, footprint


class DataReader:
    """A data file open for reading one of its row groups, so that it streams instead of being loaded whole.

    A row group of a remote file is fetched at once if it is not too large: many small reads over a network are slow.

    Args:
        source: the file.
        planned: what it was when it was checked.
        row_group_bytes: size of the row group.

    Raises:
        ChangedError: it is another file now.
    """

    def __init__(self, source: SourceFile, planned: Footprint, *, row_group_bytes: int) -> None:
        self._source, self._planned = source, planned
        self._checked = time.monotonic()
        try:
            self._handle = _open(source)
        except FileNotFoundError as error:
            raise ChangedError(_changed(source, "is gone")) from error
        try:
            tail = _read_tail(self._handle)
            digest = xxhash.xxh3_128_hexdigest(memoryview(tail))
            self._compare(Footprint(self._handle.size(), _version(source, self._handle), digest))
            at_once = not source.is_local and 0 < row_group_bytes <= _FETCHED_BYTES
            self.parquet = pq.ParquetFile(
                self._handle,
                metadata=pq.read_metadata(pa.BufferReader(tail)),
                pre_buffer=at_once,
                buffer_size=0 if at_once else 1 << 16 if source.is_local else 1 << 20,
                page_checksum_verification=True,
            )
        except BaseException:
            self._handle.close()
            raise

    def batches(self, batch_rows: int, row_group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The row group from its start."""
        yield from self.parquet.iter_batches(batch_rows, row_groups=[row_group], columns=columns, use_threads=False)

    def check_unchanged(self) -> None:
        """Raises ChangedError if the file was written to, or replaced, since it was opened. For what is read for long;
        a store is asked no more than once a second.
        """
        source, planned = self._source, self._planned
        if source.is_local:
            try:
                now = os.stat(source.path)  # noqa: PTH116 -- at every batch
            except FileNotFoundError as error:
                raise ChangedError(_changed(source, "is gone")) from error
            self._compare(Footprint(now.st_size, str(now.st_mtime_ns), planned.footer))
        elif time.monotonic() - self._checked > _SECONDS_BETWEEN_LOOKS:
            self._checked = time.monotonic()
            try:
                with closing(_open(source)) as again:
                    self._compare(Footprint(again.size(), _version(source, again), planned.footer))
            except FileNotFoundError as error:
                raise ChangedError(_changed(source, "is gone")) from error

    def _compare(self, now: Footprint) -> None:
        planned = self._planned
        if now.size != planned.size:
            raise ChangedError(_changed(self._source, f"had {planned.size} bytes then and has {now.size} now"))
        if now.version != planned.version:
            raise ChangedError(_changed(self._source, "was written since"))
        if now.footer != planned.footer:
            raise ChangedError(_changed(self._source, "has another footer now"))

    def close(self) -> None:
        self.parquet.close()
        self._handle.close()


def _changed(source: SourceFile, how: str) -> str:
    return (
        f"{source.name}: is not the file that was there when reading was planned: it {how}. What a job reads must stay "
        "as it is while it runs. Start again; to go on in the middle of an epoch takes the old file, to begin with the "
        "new one --fresh"
    )


def _open(source: SourceFile) -> pa.NativeFile:
    return pa.OSFile(source.path) if source.is_local else source.filesystem.open_input_file(source.path)


def _read_tail(handle: pa.NativeFile) -> pa.Buffer:
    """The footer with its length and magic behind it, or, of something that is no Parquet file, its last bytes."""
    size = handle.size()
    tail = _read_last(handle, size, min(size, _TAIL_BYTES))
    needed = int.from_bytes(bytes(tail[-8:-4]), "little") + 8 if tail.size >= 8 else 0
    if bytes(tail[-4:]) not in _FOOTER_MAGIC or needed > size:
        return tail  # Arrow says what is wrong with it
    return tail[-needed:] if needed <= tail.size else _read_last(handle, size, needed)


def _read_last(handle: pa.NativeFile, size: int, count: int) -> pa.Buffer:
    handle.seek(size - count)
    return handle.read_buffer(count)


def _version(source: SourceFile, handle: pa.NativeFile) -> str:
    if source.is_local:
        return str(os.stat(source.path).st_mtime_ns)  # noqa: PTH116 -- at every row group
    tag = handle.metadata().get("ETag")
    if tag is not None:
        return bytes(tag).decode()
    return str(source.filesystem.get_file_info(source.path).mtime_ns)


def discover(paths: Iterable[str], *, hive: bool = True) -> list[SourceFile]:
    """Data files below the paths, each once, sorted by name.

    Raises DataError for paths that do not exist, dangling links, table formats that are more than a folder of Parquet
    files, and when nothing is found.
    """
    paths = tuple(paths)
    if not paths:
        raise DataError("no data path is given (data.train / data.eval)")
    found: dict[str, SourceFile] = {}
    for path in paths:
        files = _listed(path, hive)
        if not files:
            raise DataError(
                f"{path}: 0 data files found (looked for {', '.join('*' + s for s in _DATA_SUFFIXES)} "
                "and names without a suffix)"
            )
        for identity, file in files:
            found.setdefault(identity, file)
    return sorted(found.values(), key=lambda f: (f.relative, f.name))


def _listed(path: str, hive: bool) -> list[tuple[str, SourceFile]]:
    is_remote = "://" in path and not path.startswith("file://")
    try:
        return read_patiently(path, lambda: list(_remote(path, hive) if is_remote else _local(path, hive)))
    except (OSError, pa.ArrowException, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be listed: {error}") from error


def _hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _is_data(name: str) -> bool:
    if _hidden(name) or name.endswith(".crc"):
        return False
    return name.lower().endswith(_DATA_SUFFIXES) or "." not in name


def _partitions(relative: str, hive: bool) -> tuple[tuple[str, str | None], ...]:
    if not hive:
        return ()
    pairs: list[tuple[str, str | None]] = []
    for part in relative.split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals and key:
            pairs.append((unquote(key), None if value == _HIVE_NULL else unquote(value)))
    return tuple(pairs)


def _refuse_table_format(root: str, names: Iterable[str]) -> None:
    if "_delta_log" in names:
        raise DataError(
            f"{root}: this is a Delta Lake table; its folder also holds files of older versions. "
            "Export the version you want to plain "
            "Parquet (deltalake: DeltaTable(path).to_pyarrow_dataset()), or give its current files one by one"
        )


def _local(path: str, hive: bool) -> Iterator[tuple[str, SourceFile]]:
    plain = Path(path.removeprefix("file://")).expanduser()
    base: Path | None = None
    roots = [plain]
    if not _exists(plain) and _MAGIC & set(str(plain)):
        roots = [Path(match) for match in sorted(globbing.glob(str(plain), recursive=True))]  # noqa: PTH207 -- absolute
        base = Path(*itertools.takewhile(lambda part: not _MAGIC & set(part), plain.parts))
        if not roots:
            raise DataError(f"{path}: no file matches")
    filesystem = pafs.LocalFileSystem()

    def found(file: Path, root: Path) -> tuple[str, SourceFile]:
        relative = file.relative_to(root) if file != root else Path(file.name)
        parts = _partitions(str(file.absolute()), hive)
        return str(file.resolve()), SourceFile(filesystem, str(file), str(relative), file.stat().st_size, parts)

    for root in roots:
        if not root.exists():
            raise DataError(f"{root}: {'is a link whose target is gone' if _exists(root) else 'does not exist'}")
        if root.is_file():
            if base is None or _is_data(root.name):
                yield found(root, base or root)
        elif base is None or not _hidden(root.name):
            for file in _walk(root, frozenset()):
                yield found(file, base or root)


def _exists(path: Path) -> bool:
    """Whether there is anything, be it a link to nowhere."""
    return path.is_symlink() or path.exists()


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    real = folder.resolve()
    if real in above:
        raise DataError(f"{folder}: the link leads back to a folder that holds it")
    members = sorted(folder.iterdir())
    _refuse_table_format(str(folder), (m.name for m in members))
    for member in members:
        if member.is_dir():
            if not _hidden(member.name):
                yield from _walk(member, above | {real})
        elif _is_data(member.name):
            if not member.exists():
                raise DataError(f"{member}: is a link whose target is gone")
            yield member


def _remote(uri: str, hive: bool) -> Iterator[tuple[str, SourceFile]]:
    scheme = uri.split("://", 1)[0]
    address, question, options = uri.partition("?")  # ?endpoint_override=... and the like, so `?` is no wildcard here
    head = address
    if "*" in address or "[" in address:
        head = address[: min(address.index(c) for c in "*[" if c in address)].rpartition("/")[0]
    filesystem, root = pafs.FileSystem.from_uri(head + question + options)
    pattern = root + address[len(head) :] if head != address else ""
    info = filesystem.get_file_info(root)
    if info.type == pafs.FileType.NotFound:
        raise DataError(f"{uri}: does not exist")
    if info.type == pafs.FileType.File:
        infos = [info]
    else:
        infos = filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
    _refuse_table_format(uri, {part for i in infos for part in i.path.split("/")})
    for info in infos:
        relative = info.path[len(root) :].lstrip("/") or info.path.rpartition("/")[2]
        inner = relative.split("/")
        if info.type != pafs.FileType.File or any(_hidden(p) for p in inner):
            continue
        if pattern and not _matches(info.path, pattern):
            continue
        if info.path != root and not _is_data(inner[-1]):
            continue
        parts = _partitions(info.path, hive)
        yield f"{scheme}://{info.path}", SourceFile(filesystem, info.path, relative, info.size, parts, f"{scheme}://")


def _matches(path: str, pattern: str) -> bool:
    """Whether the path, or a folder above it, matches the pattern part by part (`**` is any number of folders)."""

    def match(parts: list[str], patterns: list[str]) -> bool:
        if not patterns:
            return True
        if patterns[0] == "**":
            return any(match(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
        return bool(parts) and fnmatchcase(parts[0], patterns[0]) and match(parts[1:], patterns[1:])

    return match(path.split("/"), pattern.rstrip("/").split("/"))
