"""Begin a job's table from another job's: other name, seed, initial range, rule or number of shards, same vectors.

Legend of shapes: N rows of one batch, K embedding floats, A accumulators of the first-order weight, E of the embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paddlewheel.pserver import export, row_parts, saved_tables
from paddlewheel.pserver.config import Adam, TableConfig, table_id
from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.initializer import Initializer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt


def warm_start(
    source: Path, directory: Path, *, name: str, config: TableConfig, seed: int, num_shards: int
) -> saved_tables.SavedTable:
    """Write into the new folder `directory` a saved table `name` that holds the vectors, shows and clicks of `source`.

    source: a saved table's folder, or an exported table's. Accumulators are kept when a saved table has the same rule,
    else they begin anew. Keys that `source` lacks start fresh, as everywhere. Raises CheckpointError when the widths
    differ, one of the two has no first-order weights, a saved table has changed since it was saved, or what `source`
    has learnt does not fit into this table's `weight_bounds`: the first push of a key would cut it. Exported tables
    hold no hashes of their own, so whoever knows those looks first.
    """
    is_saved = (source / saved_tables.DESCRIPTION).exists()
    was = saved_tables.open_table(source).config if is_saved else export.about_export(source).config
    for field in ("width", "first_order"):
        if getattr(was, field) != getattr(config, field):
            raise CheckpointError(
                f"table {name!r} has {field} {getattr(config, field)}, but {source} has {getattr(was, field)}: "
                "a warm start needs the same"
            )
    if is_saved:
        saved_tables.verify(saved_tables.open_table(source))
    initializer = Initializer(name, config, seed)
    with saved_tables.new_directory(directory):
        folder = directory / f"{table_id(name):03d}"
        folder.mkdir()
        writer = row_parts.Writer(folder, config, num_shards)
        for rows in _saved_rows(source, config) if is_saved else _exported_rows(source, config):
            changed = _with_changes(rows, config, initializer)
            _check_bounds(changed, name, config, source, slack=config.initial_range + was.initial_range)
            writer.add(row_parts.rows_of(vars(changed), config))
        writer.finish()
        return saved_tables.record(directory, name, config, seed, num_shards)


def _saved_rows(source: Path, config: TableConfig) -> Iterator[saved_tables.Rows]:
    """Rows whose embeddings are effective values, with the accumulators that the rule needs."""
    saved = saved_tables.open_table(source)
    was = Initializer(saved.name, saved.config, saved.seed)
    for rows in saved_tables.read_rows(saved):
        values_NW = export.effective(rows, saved.config, was)
        fresh = None if config.optimizer.rule == saved.config.optimizer.rule else _fresh_state(config, len(rows))
        yield saved_tables.Rows(
            keys_N=rows.keys_N,
            unseen_days_N=rows.unseen_days_N,
            delta_score_N=rows.delta_score_N,
            shows_N=rows.shows_N,
            clicks_N=rows.clicks_N,
            first_order_N=rows.first_order_N,
            first_order_state_NA=rows.first_order_state_NA if fresh is None else fresh[0],
            has_embedding_N=rows.has_embedding_N,
            embedding_NK=values_NW[:, int(config.first_order) :],
            embedding_state_NE=rows.embedding_state_NE if fresh is None else fresh[1],
            class_N=np.zeros(len(rows), np.uint8),
        )


def _exported_rows(source: Path, config: TableConfig) -> Iterator[saved_tables.Rows]:
    """As _saved_rows, from an export."""
    about = export.about_export(source)
    for table in export.read_groups(source):
        values_NW = export.decode(table, about)
        zeros_N = np.zeros(len(table), np.float32)
        first_state, state = _fresh_state(config, len(table))
        yield saved_tables.Rows(
            keys_N=table.column("key").to_numpy(),
            unseen_days_N=zeros_N,
            delta_score_N=zeros_N,
            shows_N=table.column("shows").to_numpy(),
            clicks_N=table.column("clicks").to_numpy(),
            first_order_N=values_NW[:, 0] if config.first_order else zeros_N,
            first_order_state_NA=first_state,
            has_embedding_N=~table.column("embedding").is_null().to_numpy(),
            embedding_NK=values_NW[:, int(config.first_order) :],
            embedding_state_NE=state,
            class_N=np.zeros(len(table), np.uint8),
        )


def _fresh_state(config: TableConfig, num_rows: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Accumulators [N, A] and [N, E] of keys that were never updated."""
    first_NA, embedding_NE = (np.zeros((num_rows, width), np.float32) for width in saved_tables.state_widths(config))
    if isinstance(config.optimizer, Adam):  # the powers of beta1 and beta2 come last
        for state in (first_NA, embedding_NE):
            state[:, -2:] = config.optimizer.beta1, config.optimizer.beta2
    return first_NA, embedding_NE


def _with_changes(rows: saved_tables.Rows, config: TableConfig, initializer: Initializer) -> saved_tables.Rows:
    """Effective embeddings turned into changes from the new table's initial vectors."""
    none_NW = np.zeros((len(rows), config.pull_width), np.float32)
    start_NW = initializer.effective(none_NW, rows.keys_N, np.ones(len(rows), np.bool_))
    change_NK = rows.embedding_NK - start_NW[:, int(config.first_order) :]
    return replace(rows, embedding_NK=change_NK)


def _check_bounds(rows: saved_tables.Rows, name: str, config: TableConfig, source: Path, *, slack: float) -> None:
    """Refuse vectors that the rule would cut. slack: what lies between two tables' initial vectors may be cut."""
    low, high = config.optimizer.weight_bounds
    parts = [rows.first_order_N, rows.embedding_NK[rows.has_embedding_N]]
    least = min((float(part.min()) for part in parts if part.size), default=0.0)
    most = max((float(part.max()) for part in parts if part.size), default=0.0)
    if least < low - slack or most > high + slack:
        raise CheckpointError(
            f"table {name!r} has optimizer.weight_bounds [{low:g}, {high:g}], but weights of {source} lie {least:g} to "
            f"{most:g} from where this table's begin, and the first push of their keys would cut them to the bounds. "
            f"Give bounds that hold them (the default is [-10, 10]), or start the table fresh"
        )
