"""Files of saved tables: what Paddle's servers write, read without Paddle.

Layout of one table: `<directory>/<table>/<number>/part-<server>-<shard>`, `number` being the table's id (made from its name).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pserver.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pserver.config import TableConfig

# Paddle hands paths to a shell without quoting (`find`, `rm -rf`): any other character could do damage.
_SAFE_PATH = re.compile(r"/[\w./=@:+,%-]*", re.ASCII)
_PART = re.compile(r"part-(\d{3,})-(\d{5,})")
_BLOCK_BYTES = 1 << 22


class Mode(IntEnum):
    """What a save writes."""

    ALL = 0


class TableFiles(NamedTuple):
    """The parts of one saved table in shard order."""

    paths: tuple[Path, ...]
    rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.rows)


def check_path(path: Path) -> None:
    """Raise CheckpointError unless the path is absolute and safe in Paddle's shell commands."""
    if not _SAFE_PATH.fullmatch(str(path)):
        raise CheckpointError(
            f"{str(path)!r} cannot hold tables: Paddle's servers pass it to a shell, so it must be absolute and made of "
            "ASCII letters, digits and . _ / = @ : + , % - only"
        )


def adopt(directory: Path, table_number: int, config: TableConfig, num_shards: int) -> TableFiles:
    """Check what the servers have just written into `directory`: exactly one part per shard."""
    files = inspect(directory, config)
    if len(files.paths) != num_shards:
        raise CheckpointError(f"{directory} holds {len(files.paths)} parts after the save instead of {num_shards}")
    return files


def inspect(directory: Path, config: TableConfig) -> TableFiles:
    """The parts of a saved table; CheckpointError when parts are missing or extra, or rows have another width."""
    folders = sorted(p for p in directory.iterdir() if p.is_dir()) if directory.is_dir() else []
    if len(folders) != 1:
        raise CheckpointError(f"{directory} is not a saved table: one folder of parts is expected, {len(folders)} found")
    parts: dict[int, Path] = {}
    for path in folders[0].iterdir():
        match = _PART.fullmatch(path.name)
        if match is None:
            raise CheckpointError(f"{path} is not part of a table")
        shard = int(match[2])
        if shard in parts:
            raise CheckpointError(f"{path} and {parts[shard]} are both shard {shard}: two saves are mixed")
        parts[shard] = path
    if not parts or sorted(parts) != list(range(len(parts))):
        missing = sorted(set(range(max(parts, default=0) + 1)) - set(parts))[:5]
        raise CheckpointError(f"{folders[0]} has {len(parts)} parts; shards {missing} are missing")
    paths = tuple(parts[shard] for shard in range(len(parts)))
    return TableFiles(paths, tuple(count_rows(path) for path in paths))


def count_rows(path: Path) -> int:
    """Lines of a part."""
    rows = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            rows += block.count(b"\n")
    return rows


@contextlib.contextmanager
def staged(directory: Path, table_number: int, num_shards: int) -> Iterator[Path]:
    """A directory that servers which know the table under `table_number` can load: usually `directory` itself."""
    (folder,) = (p for p in directory.iterdir() if p.is_dir())
    check_path(directory)
    if folder.name == f"{table_number:03d}" and len(list(folder.iterdir())) == num_shards:
        yield directory
        return
    raise CheckpointError("resharding while loading is not there yet")
