"""Chosen encoded rows -> a batch with the unique keys of each table.

Shapes: B rows of a batch, N rows of a window, F1 single-valued features, L list length.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from paddlewheel.data_pipeline import native
from paddlewheel.data_pipeline.arrow_arrays import ragged
from paddlewheel.data_pipeline.batch import Batch, Span, TableKeys
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.encoded_rows import Lists, Rows
from paddlewheel.data_pipeline.keys import unique_keys

RowSelection = tuple[Rows, npt.NDArray[np.int64]]
"""Encoded rows, and which of them are meant. Lists of the rows are in one block."""


def assemble(
    config: DataConfig, picks: Sequence[RowSelection], *, spans: Sequence[Span] = (), num_skipped: int = 0
) -> Batch:
    """Gathers the rows of a batch and finds the unique keys of each table."""
    fast = native.choose(config.encoder_backend)
    keys_of = _table_keys if fast is None else partial(_native_table_keys, fast)

    def gather(get: Callable[[Rows], Any]) -> Any:
        return _gather(picks, get) if fast is None else _native_gather(fast, picks, get)

    return Batch(
        num_rows=sum(at.size for _, at in picks),
        dense_BD=gather(lambda rows: rows.dense_ND),
        labels_BL=gather(lambda rows: rows.labels_NL),
        tables={table: keys_of(config, table, picks) for table in config.tables},
        spans=tuple(spans),
        sample_weight_B=None if config.sample_weight is None else gather(lambda rows: rows.weight_N),
        group_B=None if config.group is None else gather(lambda rows: rows.group_N),
        slice_metrics_by={c: _gather(picks, partial(_report_values, c)) for c in config.slice_metrics_by},
        num_skipped_rows=num_skipped,
    )


def _table_keys(config: DataConfig, table: str, picks: Sequence[RowSelection]) -> TableKeys:
    """The unique keys of a table, and where each feature's ids are among them."""
    features = [f for f in config.sparse if f.table == table]
    multi = [f for f in features if f.multi_valued]
    singles = tuple(f.name for f in features if not f.multi_valued)
    ids_BF = _gather(picks, lambda rows: rows.singles[table])
    num_rows = ids_BF.shape[0]
    by_feature = {f.name: [_gather_lists(rows.lists[f.name][0], at) for rows, at in picks] for f in multi}
    flat = [ids_BF.ravel()] + [keys for pieces in by_feature.values() for keys, _, _ in pieces]
    keys_U, positions = unique_keys(flat[0] if len(flat) == 1 else np.concatenate(flat))
    cursor = ids_BF.size
    single_BF = positions[:cursor].reshape(num_rows, len(singles))
    index = {name: single_BF[:, i] for i, name in enumerate(singles)}
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for feature in multi:
        pieces = by_feature[feature.name]
        lengths = np.concatenate([n for _, n, _ in pieces])
        end = cursor + sum(keys.size for keys, _, _ in pieces)
        index[feature.name] = _pad(positions[cursor:end], lengths)
        cursor = end
        if feature.weights is not None:
            weights[feature.name] = _pad(np.concatenate([w for _, _, w in pieces if w is not None]), lengths)
    return TableKeys(keys_U, {f.name: index[f.name] for f in features}, single_BF, singles, weights)


def _native_table_keys(
    fast: native.Library, config: DataConfig, table: str, picks: Sequence[RowSelection]
) -> TableKeys:
    """`_table_keys`, with all keys written where they are looked through."""
    features = [f for f in config.sparse if f.table == table]
    multi = [f for f in features if f.multi_valued]
    singles = tuple(f.name for f in features if not f.multi_valued)
    num_rows = sum(at.size for _, at in picks)
    lengths = {f.name: [np.diff(rows.lists[f.name][0].offsets).take(at) for rows, at in picks] for f in multi}
    sizes = {name: [int(n.sum()) for n in pieces] for name, pieces in lengths.items()}
    cursor = num_rows * len(singles)
    flat = np.empty(cursor + sum(map(sum, sizes.values())), np.uint64)
    fast.gather([(rows.singles[table], at) for rows, at in picks], flat[:cursor].reshape(num_rows, len(singles)))
    for feature in multi:
        for (rows, at), size in zip(picks, sizes[feature.name], strict=True):
            lists = rows.lists[feature.name][0]
            fast.gather_lists(lists.keys, lists.offsets, at, flat[cursor : cursor + size])
            cursor += size
    keys_U, positions = fast.unique(flat)
    cursor = num_rows * len(singles)
    single_BF = positions[:cursor].reshape(num_rows, len(singles))
    index = {name: single_BF[:, i] for i, name in enumerate(singles)}
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for feature in multi:
        by_row = np.concatenate(lengths[feature.name])
        width = max(1, int(by_row.max(initial=0)))
        end = cursor + sum(sizes[feature.name])
        index[feature.name] = fast.pad(positions[cursor:end], by_row, width)
        if feature.weights is not None:
            flat_weights, done = np.empty(end - cursor, np.float32), 0
            for (rows, at), size in zip(picks, sizes[feature.name], strict=True):
                lists = rows.lists[feature.name][0]
                assert lists.weights is not None
                fast.gather_lists(lists.weights, lists.offsets, at, flat_weights[done : done + size])
                done += size
            weights[feature.name] = fast.pad(flat_weights, by_row, width)
        cursor = end
    return TableKeys(keys_U, {f.name: index[f.name] for f in features}, single_BF, singles, weights)


def _native_gather(fast: native.Library, picks: Sequence[RowSelection], get: Callable[[Rows], Any]) -> Any:
    first = get(picks[0][0])
    out = np.empty((sum(at.size for _, at in picks), *first.shape[1:]), first.dtype)
    fast.gather([(get(rows), at) for rows, at in picks], out)
    return out


def _report_values(column: str, rows: Rows) -> Any:
    return rows.slice_metrics_by[column]


def _gather(picks: Sequence[RowSelection], get: Callable[[Rows], Any]) -> Any:
    """The chosen rows of an array that every window has."""
    pieces = [get(rows).take(at, axis=0) for rows, at in picks]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _gather_lists(
    lists: Lists, at: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.float32] | None]:
    """Keys of the chosen rows, flat; the number of keys of each; their weights."""
    starts = lists.offsets[at]
    lengths = lists.offsets[at + 1] - starts
    _, places = ragged(starts, lengths)
    return lists.keys[places], lengths, None if lists.weights is None else lists.weights[places]


def _pad(flat: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """[B, L], left-aligned, 0 where there is nothing; L is the longest list, at least 1."""
    longest = max(1, int(lengths.max(initial=0)))
    out = np.zeros((lengths.size, longest), dtype=flat.dtype)
    out[np.arange(longest) < lengths[:, None]] = flat
    return out
