"""Saved tables as Parquet, for serving.

An export holds effective values (initial vector plus change), so a reader needs neither optimizer state nor seed for
the keys in it. Layout: `<directory>/<table>/export-<n>.parquet` with the columns

    key          uint64
    first_order  float32                     absent for a table without first-order weights
    embedding    list, `width` long          null where the key has none (below the admission score)
    scale        float32                     only for int8: embedding = integers * scale
    shows, clicks  float32                   as counted, decayed at day boundaries

An embedding is a plain list because pyarrow before 26 cannot read a fixed_size_list with nulls from Parquet, where a
null has no elements. Files of earlier versions that have such a column are read where pyarrow can.

Each file says in its metadata what it belongs to (`About`). Legend of shapes: N rows of one batch, K embedding floats,
W = K + first-order weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from paddlewheel.pserver import saved_tables
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.initializer import Initializer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt
    from typing_extensions import Self

Dtype = Literal["float32", "float16", "bfloat16", "int8"]
_METADATA = b"paddlewheel"
_ROWS_PER_GROUP = 100_000
_ROWS_PER_FILE = 20_000_000


class About(BaseModel):
    """What an exported file belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    config: TableConfig
    seed: int
    dtype: Dtype
    content_id: str  # of the saved table that was exported

    @property
    def element_type(self) -> Any:
        """Arrow's type of one embedding float as stored."""
        import pyarrow as pa

        return {"float32": pa.float32(), "float16": pa.float16(), "bfloat16": pa.uint16(), "int8": pa.int8()}[
            self.dtype
        ]

    def arrow_schema(self) -> Any:
        """Arrow's schema of the files, with this in its metadata."""
        import pyarrow as pa

        fields = [
            pa.field("key", pa.uint64(), nullable=False),
            *([pa.field("first_order", pa.float32(), nullable=False)] if self.config.first_order else []),
            pa.field("embedding", pa.list_(self.element_type)),
            *([pa.field("scale", pa.float32(), nullable=False)] if self.dtype == "int8" else []),
            pa.field("shows", pa.float32(), nullable=False),
            pa.field("clicks", pa.float32(), nullable=False),
        ]
        return pa.schema(fields, metadata={_METADATA: self.model_dump_json().encode()})


class Exported(NamedTuple):
    """What was written."""

    num_rows: int
    num_embeddings: int
    num_bytes: int
    paths: tuple[Path, ...]


def export_table(saved: saved_tables.SavedTable, directory: Path, *, dtype: Dtype = "float32") -> Exported:
    """Write a saved table into the new folder `directory`, some hundred thousand rows in memory at a time.

    dtype of the embeddings: bfloat16 is stored as uint16 (the high halves of float32s, rounded to nearest even). Raises
    CheckpointError when the folder exists or the table is damaged; then nothing of the folder is left.
    """
    about = about_saved(saved, dtype)
    with saved_tables.new_directory(directory), Writer(directory, about) as writer:
        for rows in saved_tables.read_rows(saved):
            writer.write(rows)
        done = writer.finish()
        if done.num_rows != saved.num_keys:
            raise CheckpointError(f"{saved.directory} gave {done.num_rows} rows instead of {saved.num_keys}")
    return done


def about_saved(saved: saved_tables.SavedTable, dtype: Dtype) -> About:
    """What an export of this saved table says about itself."""
    return About(name=saved.name, config=saved.config, seed=saved.seed, dtype=dtype, content_id=saved.content_id)


def about_export(directory: Path) -> About:
    """What the exported table in `directory` is. Raises CheckpointError when it is none."""
    import pyarrow.parquet as pq

    path = export_paths(directory)[0]
    try:
        return About.model_validate_json((pq.read_schema(path).metadata or {})[_METADATA])
    except (KeyError, ValidationError, ValueError) as error:
        raise CheckpointError(f"{path} is not an exported table: it does not say what it holds") from error


def export_paths(directory: Path) -> list[Path]:
    """The files of an exported table, in order. Raises CheckpointError when there are none."""
    paths = sorted(directory.glob("export-*.parquet"))
    if not paths:
        raise CheckpointError(f"{directory} is not an exported table: it holds no export-*.parquet")
    return paths


def read_export(directory: Path) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]]:
    """(keys_N, effective values_NW) of an exported table, a row group at a time; embeddings decoded, 0 where null."""
    about = about_export(directory)
    for table in read_groups(directory):
        yield table.column("key").to_numpy(), decode(table, about)


def read_groups(directory: Path) -> Iterator[Any]:
    """The row groups of an exported table as Arrow tables, as they are stored."""
    import pyarrow.parquet as pq

    for path in export_paths(directory):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)


class Writer:
    """Writes the files of one exported table into an existing folder; collects rows into groups of even size."""

    def __init__(self, directory: Path, about: About) -> None:
        self._directory, self._about, self._schema = directory, about, about.arrow_schema()
        self._initializer = Initializer(about.name, about.config, about.seed)
        self._waiting: list[Any] = []
        self._file: Any = None
        self._rows_in_file = self._num_rows = self._num_embeddings = 0
        self._paths: list[Path] = []

    def write(self, rows: saved_tables.Rows) -> None:
        """Add saved rows, as effective values."""
        if len(rows):
            self.write_table(_table(rows, self._about, self._initializer, self._schema))

    def write_table(self, table: Any) -> None:
        """Add rows of another export of the same schema."""
        import pyarrow as pa

        # cast: an earlier version wrote fixed_size_list
        self._waiting.append(table.replace_schema_metadata(self._schema.metadata).cast(self._schema))
        if sum(map(len, self._waiting)) >= _ROWS_PER_GROUP:
            self._write_group(pa.concat_tables(self._waiting))

    def finish(self) -> Exported:
        """Write what is left; nothing can be added afterwards."""
        import pyarrow as pa

        if self._waiting or not self._paths:
            self._write_group(pa.concat_tables([*self._waiting, self._schema.empty_table()]))
        self._close()
        num_bytes = sum(path.stat().st_size for path in self._paths)
        return Exported(self._num_rows, self._num_embeddings, num_bytes, tuple(self._paths))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _write_group(self, table: Any) -> None:
        import pyarrow.parquet as pq

        self._waiting = []
        if self._file is None or self._rows_in_file >= _ROWS_PER_FILE:
            self._close()
            self._paths.append(self._directory / f"export-{len(self._paths):05d}.parquet")
            self._file, self._rows_in_file = pq.ParquetWriter(self._paths[-1], self._schema, compression="zstd"), 0
        if len(table):
            self._file.write_table(table, row_group_size=len(table))
        self._rows_in_file += len(table)
        self._num_rows += len(table)
        self._num_embeddings += len(table) - table.column("embedding").null_count

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def effective(
    rows: saved_tables.Rows,
    config: TableConfig,
    initializer: Initializer,
    admitted_N: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.float32]:
    """Effective values float32 [N, W] of saved rows. admitted_N: which have an embedding; None: those that hold one."""
    change_NW = np.concatenate([rows.first_order_N[:, None]] * config.first_order + [rows.embedding_NK], axis=1)
    return initializer.effective(change_NW, rows.keys_N, rows.has_embedding_N if admitted_N is None else admitted_N)


def _table(rows: saved_tables.Rows, about: About, initializer: Initializer, schema: Any) -> Any:
    import pyarrow as pa

    # as a client decides it, and not by whether the row has an embedding: counts may have decayed since it got one
    admitted_N = initializer.admitted(rows.shows_N, rows.clicks_N, rows.class_N)
    values_NW = effective(rows, about.config, initializer, admitted_N)
    scale_N, encoded_NK = _encode(values_NW[:, int(about.config.first_order) :], about.dtype)
    columns: dict[str, Any] = {
        "key": rows.keys_N,
        "first_order": values_NW[:, 0],
        "scale": scale_N,
        "shows": rows.shows_N,
        "clicks": rows.clicks_N,
    }
    arrays = []
    for field in schema:
        if field.name == "embedding":
            flat = pa.array(encoded_NK[admitted_N].reshape(-1), field.type.value_type)
            ends_N = np.cumsum(admitted_N, dtype=np.int32) * np.int32(about.config.width)
            offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends_N]))
            arrays.append(pa.ListArray.from_arrays(offsets, flat, type=field.type, mask=pa.array(~admitted_N)))
        else:
            arrays.append(pa.array(columns[field.name], field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


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


def decode(table: Any, about: About) -> npt.NDArray[np.float32]:
    """Effective values float32 [N, W] of rows as stored; embedding 0 where null."""
    config, dtype = about.config, about.dtype
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
