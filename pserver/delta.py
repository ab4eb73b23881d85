"""Chains of exports: a full one (the base) and then only what changed, with the keys that are gone.

Deltas are made by comparing two saved tables, not by Paddle's own delta saves: those cannot say which keys were
deleted, leave out rows whose score did not grow, and forget what they left out when a save is lost on its way. A delta
says from which content to which it leads, so a chain with a gap, out of order or of another table cannot be applied.

Layout: `<directory>/export-<n>.parquet` (changed and new rows, as in `export`), `removed.parquet` (one column, key) and
`delta.json`, written last.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from paddlewheel.pserver import export, saved_tables
from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.initializer import Initializer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_FILE, _REMOVED = "delta.json", "removed.parquet"
_COUNT_TOLERANCE = 2e-5  # counts are saved with six significant digits


class Delta(BaseModel):
    """From which content a delta leads to which, and what happened to the counts of the rows that it leaves out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    name: str
    from_content_id: str
    to_content_id: str
    count_decay: float
    num_changed: int
    num_removed: int


class Chained(NamedTuple):
    """What `apply_deltas` wrote."""

    exported: export.Exported
    content_id: str


def write_delta(
    before: saved_tables.SavedTable,
    after: saved_tables.SavedTable,
    directory: Path,
    *,
    dtype: export.Dtype = "float32",
    count_decay: float = 1.0,
) -> Delta:
    """Write what leads from one saved table to a later one of the same job into the new folder `directory`.

    count_decay: the product of the show_click_decay of all day boundaries between the two; rows whose shows and clicks
    only decayed by it are left out. Memory: one shard of each. Raises CheckpointError.
    """
    saved_tables.check_fits(before, after.name, after.config, after.seed)
    from_content_id = before.content_id
    removed: list[npt.NDArray[np.uint64]] = [np.zeros(0, np.uint64)]
    with (
        saved_tables.new_directory(directory),
        tempfile.TemporaryDirectory() as temporary,
        export.Writer(directory, export.about_saved(after, dtype)) as writer,
    ):
        if len(before.parts) != len(after.parts):
            before = saved_tables.reshard(before, Path(temporary) / "resharded", len(after.parts))
        initializer = Initializer(after.name, after.config, after.seed)
        for shard in range(len(after.parts)):
            old, new = _shard(before, shard), _shard(after, shard)
            if new is not None:
                writer.write(new if old is None else new.take(_is_changed(old, new, count_decay, initializer)))
            if old is not None:
                removed.append(old.keys_N if new is None else np.setdiff1d(old.keys_N, new.keys_N))
        done = writer.finish()
        removed_N = np.concatenate(removed)
        _write_keys(removed_N, directory / _REMOVED)
        delta = Delta(
            name=after.name,
            from_content_id=from_content_id,
            to_content_id=after.content_id,
            count_decay=count_decay,
            num_changed=done.num_rows,
            num_removed=len(removed_N),
        )
        (directory / _FILE).write_text(delta.model_dump_json(indent=1) + "\n")
    return delta


def read_delta(directory: Path) -> Delta:
    """What the delta in `directory` says about itself. Raises CheckpointError when it is incomplete or none."""
    try:
        return Delta.model_validate_json((directory / _FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} is not a complete delta: {error}") from error


def apply_deltas(base: Path, deltas: Sequence[Path], directory: Path) -> Chained:
    """Write the export that `base` becomes through `deltas` (oldest first) into the new folder `directory`.

    Keys and values are those of a full export of the last content; counts too where nothing decayed, else to 2e-5.
    Memory: one row group, and the keys of the deltas. Raises CheckpointError for anything but a chain without a gap.
    """
    about = export.about_export(base)
    content_id, chain = about.content_id, []
    for folder in deltas:
        delta, delta_about = read_delta(folder), export.about_export(folder)
        if delta.from_content_id != content_id:
            raise CheckpointError(
                f"{folder} leads on from content {delta.from_content_id}, but the chain is at {content_id} there: "
                "a delta is missing, twice, or out of order"
            )
        if delta_about.model_copy(update={"content_id": about.content_id}) != about:
            raise CheckpointError(f"{folder} is a delta of another table, or of another dtype, than {base}")
        content_id = delta.to_content_id
        chain.append(delta)
    with (
        saved_tables.new_directory(directory),
        export.Writer(directory, about.model_copy(update={"content_id": content_id})) as writer,
    ):
        # From the newest to the oldest: the first that mentions a key has the last word on it.
        decided_N = np.zeros(0, np.uint64)
        decay = 1.0
        for folder, delta in zip(reversed(deltas), reversed(chain), strict=True):
            mentioned = [decided_N, _read_keys(folder / _REMOVED)]
            for table in export.read_groups(folder):
                writer.write_table(_undecided(table, decided_N, decay))
                mentioned.append(table.column("key").to_numpy())
            decided_N = np.unique(np.concatenate(mentioned))
            decay *= delta.count_decay
        for table in export.read_groups(base):
            writer.write_table(_undecided(table, decided_N, decay))
        done = writer.finish()
    return Chained(done, content_id)


def _shard(saved: saved_tables.SavedTable, shard: int) -> saved_tables.Rows | None:
    batches = [rows for rows in saved_tables.read_rows(saved, shards=[shard]) if len(rows)]
    return saved_tables.Rows.concatenate(batches) if batches else None


def _is_changed(
    old: saved_tables.Rows, new: saved_tables.Rows, count_decay: float, initializer: Initializer
) -> npt.NDArray[np.bool_]:
    """Which rows of `new` a reader of `old` does not know."""
    order_O = np.argsort(old.keys_N)
    at_N = np.searchsorted(old.keys_N, new.keys_N, sorter=order_O)
    at_N[at_N == len(order_O)] = 0
    old = old.take(order_O[at_N])
    same_N: npt.NDArray[np.bool_] = old.keys_N == new.keys_N
    same_N &= old.first_order_N == new.first_order_N
    was_admitted_N, is_admitted_N = (
        initializer.admitted(rows.shows_N, rows.clicks_N, rows.class_N) for rows in (old, new)
    )
    same_N &= was_admitted_N == is_admitted_N
    same_N &= (old.embedding_NK == new.embedding_NK).all(axis=1)
    for was_N, is_N in ((old.shows_N, new.shows_N), (old.clicks_N, new.clicks_N)):
        same_N &= np.isclose(is_N, was_N * count_decay, rtol=_COUNT_TOLERANCE, atol=1e-30)
    return ~same_N


def _undecided(table: Any, decided_N: npt.NDArray[np.uint64], decay: float) -> Any:
    import pyarrow as pa

    table = table.filter(pa.array(~np.isin(table.column("key").to_numpy(), decided_N)))
    if decay != 1.0:
        for name in ("shows", "clicks"):
            at = table.schema.get_field_index(name)
            counts_N = (table.column(at).to_numpy() * decay).astype(np.float32)
            table = table.set_column(at, table.schema.field(at), pa.array(counts_N))
    return table


def _write_keys(keys_N: npt.NDArray[np.uint64], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"key": keys_N}), path)


def _read_keys(path: Path) -> npt.NDArray[np.uint64]:
    import pyarrow.parquet as pq

    keys_N: npt.NDArray[np.uint64] = pq.read_table(path)["key"].to_numpy()
    return keys_N
