"""Exported tables on one machine without a server: sorted by key and memory-mapped.

Legend of shapes: N rows of a table, U unique keys of one call, W floats of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.export import About, about_export, export_paths, read_export
from paddlewheel.pserver.initializer import Initializer
from paddlewheel.pserver.saved_tables import new_directory

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt


class Lookup:
    """Exported tables on local disk, sorted and memory-mapped: pulls like a `Client`, without servers.

    `build` it once from exports, then `open` it any number of times, in any process.
    """

    def __init__(self, directory: Path, tables: dict[str, _Mapped]) -> None:
        self.directory = directory
        self._tables = tables

    @staticmethod
    def build(exports: dict[str, Path], directory: Path) -> Lookup:
        """exports: table -> folder that `export_table` wrote. Needs memory for 24 bytes a key of the largest table."""
        with new_directory(directory):
            for name, source in exports.items():
                _build_mapped(source, directory / name)
        return Lookup.open(directory)

    @staticmethod
    def open(directory: Path) -> Lookup:
        """Raises CheckpointError when the folder is not a lookup."""
        folders = sorted(path for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
        if not folders:
            raise CheckpointError(f"{directory} is not a lookup: it holds no table")
        return Lookup(directory, {folder.name: _Mapped(folder) for folder in folders})

    def check_made_from(self, exports: dict[str, Path]) -> None:
        """Raise CheckpointError unless it was built from just these exports."""
        for name in sorted({*exports, *self._tables}):
            made_from = self._tables[name].about if name in self._tables else None
            if name not in exports or made_from != about_export(exports[name]):
                raise CheckpointError(
                    f"{self.directory} is not a lookup of these tables ({name} is of another export, or not there): "
                    "remove it, or name another folder"
                )

    def pull(
        self, table: str, keys_U: npt.NDArray[np.uint64], *, class_U: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.float32]:
        """Effective values float32 [U, W], as `Client.pull`: a key that is not there has what a new key has."""
        return self._tables[table].pull(keys_U, class_U)


class _Mapped:
    def __init__(self, folder: Path) -> None:
        try:
            self.about = about = About.model_validate_json((folder / "about.json").read_text())
            self._keys_N = np.load(folder / "keys.npy", mmap_mode="r")
            self._values_NW = np.load(folder / "values.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} is not a table of a lookup: {error}") from error
        self._initializer = Initializer(about.name, about.config, about.seed)
        self._config = about.config

    def pull(self, keys_U: npt.NDArray[np.uint64], class_U: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.float32]:
        at_U = np.searchsorted(self._keys_N, keys_U)
        at_U[at_U == len(self._keys_N)] = 0
        known_U = self._keys_N[at_U] == keys_U if len(self._keys_N) else np.zeros(len(keys_U), np.bool_)
        none_UW = np.zeros((len(keys_U), self._config.pull_width), np.float32)
        fresh = np.zeros(len(keys_U), np.float32)
        values_UW = self._initializer.effective(none_UW, keys_U, self._initializer.admitted(fresh, fresh, class_U))
        values_UW[known_U] = self._values_NW[at_U[known_U]]
        return values_UW


def _build_mapped(source: Path, folder: Path) -> None:
    import pyarrow.parquet as pq

    folder.mkdir()
    paths = export_paths(source)
    about = about_export(source)
    width = about.config.pull_width
    keys_N = np.concatenate(
        [np.zeros(0, np.uint64), *(pq.read_table(path, columns=["key"])["key"].to_numpy() for path in paths)]
    )
    order_N = np.argsort(keys_N)
    position_N = np.empty_like(order_N)
    position_N[order_N] = np.arange(len(order_N))
    np.save(folder / "keys.npy", keys_N[order_N])
    values_NW = np.lib.format.open_memmap(
        folder / "values.npy", mode="w+", dtype=np.float32, shape=(len(keys_N), width)
    )
    start = 0
    for keys, values in read_export(source):
        values_NW[position_N[start : start + len(keys)]] = values
        start += len(keys)
    values_NW.flush()
    (folder / "about.json").write_text(about.model_dump_json())
