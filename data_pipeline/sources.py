"""Finds the data files behind the paths of a job: local, S3, Google Cloud Storage, HDFS."""

import glob as globbing
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from data_pipeline.errors import DataError

_DATA_SUFFIXES = (".parquet", ".parq", ".pq")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_MAGIC = frozenset("*?[")
_FETCHED_BYTES = 64 << 20


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


def open_parquet(source: SourceFile, *, row_group_bytes: int = 0) -> pq.ParquetFile:
    """Opens a file so that a row group streams instead of being loaded whole.

    A row group of a remote file is fetched at once if it is not too large: many small reads over a network are slow.
    """
    if source.is_local:
        return pq.ParquetFile(source.path, pre_buffer=False, buffer_size=1 << 16, page_checksum_verification=True)
    handle = source.filesystem.open_input_file(source.path)
    at_once = 0 < row_group_bytes <= _FETCHED_BYTES
    return pq.ParquetFile(
        handle, pre_buffer=at_once, buffer_size=0 if at_once else 1 << 20, page_checksum_verification=True
    )


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
        files = list(_remote(path, hive) if "://" in path and not path.startswith("file://") else _local(path, hive))
        if not files:
            raise DataError(
                f"{path}: 0 data files found (looked for {', '.join('*' + s for s in _DATA_SUFFIXES)} "
                "and names without a suffix)"
            )
        for identity, file in files:
            found.setdefault(identity, file)
    return sorted(found.values(), key=lambda f: (f.relative, f.name))


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
    try:
        filesystem, root = pafs.FileSystem.from_uri(head + question + options)
        pattern = root + address[len(head) :] if head != address else ""
        info = filesystem.get_file_info(root)
        if info.type == pafs.FileType.NotFound:
            raise DataError(f"{uri}: does not exist")
        if info.type == pafs.FileType.File:
            infos = [info]
        else:
            infos = filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowException, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{uri}: cannot be listed: {error}") from error
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
