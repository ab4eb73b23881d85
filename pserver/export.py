"""Saved tables as Parquet for serving, and a lookup that scores from them on one machine without a server.

An export holds effective values (initial vector plus change), so a reader needs neither optimizer state nor seed for
the keys in it. Layout: `<directory>/<table>/export-<n>.parquet` with the columns

    key          uint64
    first_order  float32                     absent for a table without first-order weights
    embedding    fixed_size_list[width]      null where the key has none (below the admission score)
    scale        float32                     only for int8: embedding = integers * scale
    shows, clicks  float32                   as counted, decayed at day boundaries

Legend of shapes: N rows of one batch, K embedding floats, U unique keys of one call, W = K + first-order weight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from pserver import checkpoint
from pserver.config import TableConfig
from pserver.errors import CheckpointError
from pserver.initial import Initializer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

Dtype = Literal["float32", "float16", "bfloat16", "int8"]
_METADATA = b"paddlewheel"
_ROWS_PER_GROUP = 100_000
_ROWS_PER_FILE = 20_000_000


class Exported(NamedTuple):
    """What `export_table` wrote."""

    num_rows: int
    num_embeddings: int
    num_bytes: int
    paths: tuple[Path, ...]


def export_table(saved: checkpoint.SavedTable, directory: Path, *, dtype: Dtype = "float32") -> Exported:
    """Write a saved table into the new folder `directory`, a few hundred thousand rows in memory at a time.

    dtype of the embeddings: bfloat16 is stored as uint16 (the high halves of float32s, rounded to nearest even). Raises
    CheckpointError when the folder exists or the table is damaged; then nothing of the folder is left.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(saved, dtype)
    initializer = Initializer(saved.name, saved.config, saved.seed)
    paths: list[Path] = []
    num_rows = num_embeddings = 0
    with checkpoint.new_directory(directory):
        writer: Any = None
        rows_in_file = 0
        try:
            for group in _grouped(checkpoint.read_rows(saved)):
                if writer is None or rows_in_file >= _ROWS_PER_FILE:
                    if writer is not None:
                        writer.close()
                    paths.append(directory / f"export-{len(paths):05d}.parquet")
                    writer, rows_in_file = pq.ParquetWriter(paths[-1], schema, compression="zstd"), 0
                batches = [_batch(rows, saved.config, initializer, schema, dtype) for rows in group]
                table = pa.Table.from_batches(batches, schema)
                writer.write_table(table, row_group_size=len(table))
                rows_in_file += len(table)
                num_rows += len(table)
                num_embeddings += len(table) - table.column("embedding").null_count
            if writer is None:
                paths.append(directory / "export-00000.parquet")
                writer = pq.ParquetWriter(paths[-1], schema, compression="zstd")
        finally:
            if writer is not None:
                writer.close()
        if num_rows != saved.num_rows:
            raise CheckpointError(f"{saved.directory} gave {num_rows} rows instead of {saved.num_rows}")
    return Exported(num_rows, num_embeddings, sum(path.stat().st_size for path in paths), tuple(paths))


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
        with checkpoint.new_directory(directory):
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

    def pull(self, table: str, keys_U: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        """Effective values float32 [U, W], as `Client.pull`: a key that is not there has what a new key has."""
        return self._tables[table].pull(keys_U)


class _Mapped:
    def __init__(self, folder: Path) -> None:
        try:
            about = json.loads((folder / "about.json").read_text())
            self._config = TableConfig.model_validate(about["config"])
            self._keys_N = np.load(folder / "keys.npy", mmap_mode="r")
            self._values_NW = np.load(folder / "values.npy", mmap_mode="r")
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder} is not a table of a lookup: {error}") from error
        self._initializer = Initializer(about["name"], self._config, about["seed"])

    def pull(self, keys_U: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        at_U = np.searchsorted(self._keys_N, keys_U)
        at_U[at_U == len(self._keys_N)] = 0
        known_U = self._keys_N[at_U] == keys_U if len(self._keys_N) else np.zeros(len(keys_U), np.bool_)
        none_UW = np.zeros((len(keys_U), self._config.pull_width), np.float32)
        fresh = np.zeros(len(keys_U), np.float32)
        values_UW = self._initializer.effective(none_UW, keys_U, self._initializer.admitted(fresh, fresh))
        values_UW[known_U] = self._values_NW[at_U[known_U]]
        return values_UW


def read_export(directory: Path) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]]:
    """(keys_N, effective values_NW) of an exported table, a row group at a time; embeddings decoded, 0 where null."""
    import pyarrow.parquet as pq

    for path in _export_paths(directory):
        with pq.ParquetFile(path) as file:
            about = _about(file.schema_arrow, path)
            config = TableConfig.model_validate(about["config"])
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                yield table.column("key").to_numpy(), _decode(table, config, about["dtype"])


# ---- writing --------------------------------------------------------------------------------------------------------


def _schema(saved: checkpoint.SavedTable, dtype: Dtype) -> Any:
    import pyarrow as pa

    element = {"float32": pa.float32(), "float16": pa.float16(), "bfloat16": pa.uint16(), "int8": pa.int8()}[dtype]
    fields = [
        pa.field("key", pa.uint64(), nullable=False),
        *([pa.field("first_order", pa.float32(), nullable=False)] if saved.config.first_order else []),
        pa.field("embedding", pa.list_(element, saved.config.width)),
        *([pa.field("scale", pa.float32(), nullable=False)] if dtype == "int8" else []),
        pa.field("shows", pa.float32(), nullable=False),
        pa.field("clicks", pa.float32(), nullable=False),
    ]
    about = {"name": saved.name, "config": saved.config.model_dump(mode="json"), "seed": saved.seed, "dtype": dtype}
    return pa.schema(fields, metadata={_METADATA: json.dumps(about).encode()})


def _grouped(batches: Iterator[checkpoint.Rows]) -> Iterator[list[checkpoint.Rows]]:
    group: list[checkpoint.Rows] = []
    for rows in batches:
        if len(rows):
            group.append(rows)
        if sum(map(len, group)) >= _ROWS_PER_GROUP:
            yield group
            group = []
    if group:
        yield group


def _batch(rows: checkpoint.Rows, config: TableConfig, initializer: Initializer, schema: Any, dtype: Dtype) -> Any:
    import pyarrow as pa

    values_NW = effective(rows, config, initializer)
    scale_N, encoded_NK = _encode(values_NW[:, int(config.first_order) :], dtype)
    columns: dict[str, Any] = {
        "key": rows.keys_N,
        "first_order": values_NW[:, 0] if config.first_order else None,
        "scale": scale_N,
        "shows": rows.shows_N,
        "clicks": rows.clicks_N,
    }
    arrays = []
    for field in schema:
        if field.name == "embedding":
            flat = pa.array(np.ascontiguousarray(encoded_NK).reshape(-1), field.type.value_type)
            missing = pa.array(~rows.has_embedding_N)
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type, mask=missing))
        else:
            arrays.append(pa.array(columns[field.name], field.type))
    return pa.record_batch(arrays, schema=schema)


def effective(rows: checkpoint.Rows, config: TableConfig, initializer: Initializer) -> npt.NDArray[np.float32]:
    """Effective values float32 [N, W] of saved rows, as a client would pull them."""
    change_NW = np.concatenate([rows.first_order_N[:, None]] * config.first_order + [rows.embedding_NK], axis=1)
    return initializer.effective(change_NW, rows.keys_N, rows.has_embedding_N)


def _encode(
    values_NK: npt.NDArray[np.float32], dtype: Dtype
) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[Any]]:
    if dtype == "float16":
        return None, values_NK.astype(np.float16)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values_NK).view(np.uint32)
        half = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))  # to nearest, ties to even
        return None, ((bits + half) >> np.uint32(16)).astype(np.uint16)
    if dtype == "int8":
        scale_N = np.abs(values_NK).max(axis=1) / np.float32(127)
        scale_N[scale_N == 0] = 1
        return scale_N, np.rint(values_NK / scale_N[:, None]).astype(np.int8)
    return None, values_NK


# ---- reading --------------------------------------------------------------------------------------------------------


def _export_paths(directory: Path) -> list[Path]:
    paths = sorted(directory.glob("export-*.parquet"))
    if not paths:
        raise CheckpointError(f"{directory} is not an exported table: it holds no export-*.parquet")
    return paths


def _about(schema: Any, path: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((schema.metadata or {})[_METADATA])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not an exported table: it does not say what it holds") from error
    return about


def _decode(table: Any, config: TableConfig, dtype: Dtype) -> npt.NDArray[np.float32]:
    embedding = table.column("embedding").combine_chunks()
    missing_N = embedding.is_null().to_numpy(zero_copy_only=False)
    present = embedding.flatten().to_numpy(zero_copy_only=False).reshape(-1, config.width)
    if dtype == "bfloat16":
        present = (present.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif dtype == "int8":
        present = present.astype(np.float32) * table.column("scale").to_numpy()[~missing_N, None]
    values_NW = np.zeros((len(table), config.pull_width), np.float32)
    if config.first_order:
        values_NW[:, 0] = table.column("first_order").to_numpy()
    values_NW[~missing_N, int(config.first_order) :] = present
    return values_NW


def _build_mapped(source: Path, folder: Path) -> None:
    import pyarrow.parquet as pq

    folder.mkdir()
    paths = _export_paths(source)
    about = _about(pq.read_schema(paths[0]), paths[0])
    width = TableConfig.model_validate(about["config"]).pull_width
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
    (folder / "about.json").write_text(json.dumps(about))
