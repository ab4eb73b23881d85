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

from paddlewheel.data_pipeline.errors import ChangedError, DataError
from paddlewheel.data_pipeline.patience import passes, read_patiently

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
    """Columns from folders `key=value` below the path that was given."""
    uri_prefix: str = ""
    above: tuple[tuple[str, str | None], ...] = ()
    """The same of folders above it. They give no columns: who reads one day's folder does not mean the day."""

    @property
    def name(self) -> str:
        """How messages call the file."""
        return self.uri_prefix + self.path

    @property
    def identity(self) -> tuple[int, int] | str:
        """What two names of one file have in common, symbolic and hard links included."""
        if not self.is_local:
            return self.name
        try:
            status = Path(self.path).stat()
        except OSError:
            return self.name
        return status.st_dev, status.st_ino

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

    def set_batch_rows(self, batch_rows: int) -> None:
        """Rows of the batches that are still to come."""
        self.parquet.reader.set_batch_size(batch_rows)

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
        "new one --from-scratch"
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


_DELTA, _HUDI, _ICEBERG = "_delta_log", ".hoodie", "metadata"


def _refuse_table(where: str, root: str, kind: str) -> None:
    """Refuses a folder of a table format, whose files of older versions lie beside the current ones."""
    name, remedy = {
        _DELTA: ("a Delta Lake table", "deltalake: DeltaTable(path).to_pyarrow_dataset(); .file_uris() lists them"),
        _HUDI: ("an Apache Hudi table", 'Spark: spark.read.format("hudi").load(path).write.parquet(...)'),
        _ICEBERG: ("an Apache Iceberg table", "pyiceberg: table.scan().to_arrow(); table.inspect.files() lists them"),
    }[kind]
    raise DataError(
        f"{where}: {'this is' if where == root else f'{root} is'} {name}; its folders also hold files of older "
        "versions, whose rows would be read, too. Export the version you want to plain Parquet, or give its current "
        f"files one by one ({remedy})"
    )


def _is_iceberg(names: Iterable[str]) -> bool:
    """Whether the folder `metadata` with these files is that of an Iceberg table."""
    return any(".metadata.json" in name or name == "version-hint.text" for name in names)


def _refuse_table_folder(where: str, folder: Path) -> None:
    for kind in (_DELTA, _HUDI):
        if (folder / kind).is_dir():
            _refuse_table(where, str(folder), kind)
    metadata = folder / _ICEBERG
    if metadata.is_dir() and _is_iceberg(member.name for member in metadata.iterdir()):
        _refuse_table(where, str(folder), _ICEBERG)


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
        try:
            str(file).encode()
        except UnicodeEncodeError:
            raise DataError(f"{os.fsencode(file)!r}: the name is no UTF-8; rename the file or its folder") from None
        below = _partitions(str(relative), hive)
        above = _partitions(str(file.absolute()), hive)
        above = above[: len(above) - len(below)]
        size = file.stat().st_size
        return str(file.resolve()), SourceFile(filesystem, str(file), str(relative), size, below, above=above)

    for folder in _folders_to_ask(roots, base):
        _refuse_table_folder(path, folder)
    for root in roots:
        if not root.exists():
            raise DataError(f"{root}: {'is a link whose target is gone' if _exists(root) else 'does not exist'}")
        if root.is_file():
            if base is None or _is_data(root.name):
                yield found(root, base or root)
        elif base is None or not _hidden(root.name):
            for file in _walk(root, frozenset()):
                yield found(file, base or root)


def _folders_to_ask(roots: Iterable[Path], base: Path | None) -> list[Path]:
    """Folders that may belong to a table: those given or matched, and all above. Not those of files given by name."""
    given = [root if root.is_dir() else root.parent for root in roots if base is not None or root.is_dir()]
    return list(dict.fromkeys(f for folder in given for f in (folder.absolute(), *folder.absolute().parents)))


def _exists(path: Path) -> bool:
    """Whether there is anything, be it a link to nowhere."""
    return path.is_symlink() or path.exists()


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    real = folder.resolve()
    if real in above:
        raise DataError(f"{folder}: the link leads back to a folder that holds it")
    members = sorted(folder.iterdir())
    _refuse_table_folder(str(folder), folder)
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
    if not head.split("://", 1)[1].strip("/"):
        raise DataError(f"{uri}: names no bucket or host; write {scheme}://<bucket>/<folder>")
    filesystem, root = pafs.FileSystem.from_uri(head + question + options)
    pattern = root + address[len(head) :] if head != address else ""
    info = filesystem.get_file_info(root)
    if info.type == pafs.FileType.NotFound:
        raise DataError(f"{uri}: does not exist")
    if info.type == pafs.FileType.File:
        infos = [info]
    else:
        infos = filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
    if info.type != pafs.FileType.File:
        _refuse_remote_table(uri, filesystem, root, infos)
    for info in infos:
        relative = info.path[len(root) :].lstrip("/") or info.path.rpartition("/")[2]
        inner = relative.split("/")
        if info.type != pafs.FileType.File or any(_hidden(p) for p in inner):
            continue
        if pattern and not _matches(info.path, pattern):
            continue
        if info.path != root and not _is_data(inner[-1]):
            continue
        below = _partitions(relative, hive)
        above = _partitions(info.path, hive)
        above = above[: len(above) - len(below)]
        yield (
            f"{scheme}://{info.path}",
            SourceFile(filesystem, info.path, relative, info.size, below, f"{scheme}://", above),
        )


def _refuse_remote_table(uri: str, filesystem: pafs.FileSystem, root: str, infos: Iterable[pafs.FileInfo]) -> None:
    """Looks for the folders of table formats among what was listed, and beside the folders above it."""
    for info in infos:
        folder, _, name = info.path.rpartition("/")
        parts = info.path.split("/")
        for kind in (_DELTA, _HUDI):
            if kind in parts:
                _refuse_table(uri, "/".join(parts[: parts.index(kind)]), kind)
        if folder.endswith(f"/{_ICEBERG}") and _is_iceberg([name]):
            _refuse_table(uri, folder.removesuffix(f"/{_ICEBERG}"), _ICEBERG)
    parts = root.rstrip("/").split("/")
    above = ["/".join(parts[:depth]) for depth in range(1, len(parts)) if parts[:depth] != [""]]
    asked = [(folder, kind) for folder in above for kind in (_DELTA, _HUDI, _ICEBERG)]
    try:
        found = filesystem.get_file_info([f"{folder}/{kind}" for folder, kind in asked]) if asked else []
        for (folder, kind), info in zip(asked, found, strict=True):
            if info.type != pafs.FileType.Directory:
                continue
            if kind == _ICEBERG:
                beside = filesystem.get_file_info(pafs.FileSelector(info.path))
                if not _is_iceberg(i.base_name for i in beside):
                    continue
            _refuse_table(uri, folder, kind)
    except (OSError, pa.ArrowException) as error:
        if passes(error):
            raise
        return  # who may read the data need not be allowed to look above it


def _matches(path: str, pattern: str) -> bool:
    """Whether the path, or a folder above it, matches the pattern part by part (`**` is any number of folders)."""

    def match(parts: list[str], patterns: list[str]) -> bool:
        if not patterns:
            return True
        if patterns[0] == "**":
            return any(match(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
        return bool(parts) and fnmatchcase(parts[0], patterns[0]) and match(parts[1:], patterns[1:])

    return match(path.split("/"), pattern.rstrip("/").split("/"))
