"""Slices -> batches, in an order that is a function of (data, seed, epoch) alone.

How rows are mixed: up to `interleave` slices are open at a time; a window takes a block of rows from each of them, permutes the rows
of each block, and deals the blocks out in a random interleaving. So a position is exact and short: rows handed out per slice.

Shapes: B rows of a batch, N rows of a window, F1 single-valued features, L list length.
"""

import concurrent.futures
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.batch import Batch, Span, TableKeys
from data_pipeline.config import DataConfig
from data_pipeline.dataset import DataFile, Dataset, Slice, open_parquet
from data_pipeline.encode import Encoder, Lists, Rows
from data_pipeline.errors import DataError
from data_pipeline.schema import columns_needed

_WHOLE_ROW_GROUP_BYTES = 16 << 20
_STREAM_ROWS = 8192


class Part(NamedTuple):
    """A block of a slice: rows `start` to `start + num_rows` of it, of which the first `done` (in permuted order) were trained."""

    slice: Slice
    start: int
    num_rows: int
    done: int


def plan_windows(
    slices: Iterable[Slice], *, interleave: int, window_rows: int, done: Mapping[int, int]
) -> Iterator[list[Part]]:
    """Cuts slices into windows of blocks. Pulls a slice only when its rows are needed. Windows wholly done are left out."""
    source = iter(slices)
    block_rows = max(1, window_rows // interleave)
    active: deque[tuple[Slice, int]] = deque()
    more = True
    while True:
        parts: list[Part] = []
        rows = 0
        while rows < window_rows:
            while more and len(active) < interleave:
                piece = next(source, None)
                if piece is None:
                    more = False
                else:
                    active.append((piece, 0))
            if not active:
                break
            for _ in range(len(active)):
                piece, start = active.popleft()
                num_rows = min(block_rows, piece.num_rows - start)
                if num_rows > 0:
                    before = min(num_rows, max(0, done.get(piece.index, 0) - start))
                    parts.append(Part(piece, start, num_rows, before))
                    rows += num_rows
                if start + num_rows < piece.num_rows:
                    active.append((piece, start + num_rows))
        if not parts:
            return
        if any(p.done < p.num_rows for p in parts):
            yield parts


def _random(*words: int) -> np.random.RandomState:
    return np.random.RandomState(np.array([w & 0xFFFFFFFF for w in words], dtype=np.uint32))


@dataclass
class Window:
    """Encoded rows and the order in which they leave."""

    rows: Rows
    order_N: npt.NDArray[np.int64]
    """Row of `rows` at each place of the order."""
    owner_N: npt.NDArray[np.int32]
    """Position in `slices` of the slice that each place belongs to."""
    slices: list[int]
    next_row: list[int]
    """Per slice: its next row, in its permuted order."""
    good_N: npt.NDArray[np.int64]
    """Places whose rows are not bad."""
    taken: int = 0
    """Places handed out."""
    taken_good: int = 0


class _Readers:
    """Open row groups. Small ones are held whole, large ones stream and are read on from where they are."""

    def __init__(self, dataset: Dataset, columns: tuple[str, ...], memory_bytes: int, most: int) -> None:
        self._dataset = dataset
        self._columns = columns
        self._memory_bytes = memory_bytes
        self._most = most
        self._tables: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._table_bytes = 0
        self._streams: OrderedDict[tuple[int, int, int], _Stream] = OrderedDict()
        self._next_stream = 0
        self.rows_decoded = 0

    def read(self, piece: Slice, start: int, num_rows: int) -> dict[str, pa.Array]:
        file = self._dataset.files[piece.file]
        first = piece.row_start + start
        group = file.row_groups[piece.row_group]
        try:
            if group.num_bytes <= _WHOLE_ROW_GROUP_BYTES:
                table = self._table(file, piece).slice(first, num_rows)
            else:
                table = self._stream(file, piece, first).read(first, num_rows)
        except (OSError, pa.ArrowException, ValueError, MemoryError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{file.source.name}: row group {piece.row_group} cannot be read: {error}") from error
        result = {name: _one_chunk(table.column(name)) for name in table.column_names}
        for column, value in file.source.partitions:
            if column in file.columns:
                result[column] = pa.repeat(pa.scalar(value, pa.string()), num_rows)
        return result

    def _physical(self, file: DataFile) -> list[str]:
        partitions = {k for k, _ in file.source.partitions}
        return [c for c in self._columns if c in file.columns and c not in partitions]

    def _table(self, file: DataFile, piece: Slice) -> pa.Table:
        key = (piece.file, piece.row_group)
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        with open_parquet(file.source) as parquet:
            table = parquet.read_row_group(piece.row_group, columns=self._physical(file), use_threads=False)
        promised = file.row_groups[piece.row_group].num_rows
        if table.num_rows != promised and table.num_columns:
            raise DataError(
                f"{file.source.name}: row group {piece.row_group} promises {promised} rows and holds {table.num_rows}"
            )
        self.rows_decoded += promised
        self._tables[key] = table
        self._table_bytes += table.nbytes
        while self._table_bytes > self._memory_bytes // 2 and len(self._tables) > 1:
            _, old = self._tables.popitem(last=False)
            self._table_bytes -= old.nbytes
        return table

    def _stream(self, file: DataFile, piece: Slice, first: int) -> "_Stream":
        best: tuple[int, int, int] | None = None
        for key, stream in self._streams.items():
            near = stream.position <= first and (best is None or stream.position > self._streams[best].position)
            if key[:2] == (piece.file, piece.row_group) and near:
                best = key
        if best is None:
            while len(self._streams) >= self._most:
                _, old = self._streams.popitem(last=False)
                old.close()
            best = (piece.file, piece.row_group, self._next_stream)
            self._next_stream += 1
            self._streams[best] = _Stream(self, file, piece.row_group, self._physical(file))
        self._streams.move_to_end(best)
        return self._streams[best]

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._tables.clear()


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class _Stream:
    """A row group read from its start in small batches."""

    def __init__(self, readers: _Readers, file: DataFile, row_group: int, columns: list[str]) -> None:
        self._readers = readers
        self._name = file.source.name
        self._row_group = row_group
        self._promised = file.row_groups[row_group].num_rows
        self._parquet: pq.ParquetFile = open_parquet(file.source)
        self._batches = self._parquet.iter_batches(
            _STREAM_ROWS, row_groups=[row_group], columns=columns, use_threads=False
        )
        self._held: pa.RecordBatch | None = None
        self.position = 0

    def read(self, first: int, num_rows: int) -> pa.Table:
        got: list[pa.RecordBatch] = []
        while num_rows > 0:
            if self._held is None or self._held.num_rows == 0:
                self._held = next(self._batches, None)
                if self._held is None:
                    raise DataError(
                        f"{self._name}: row group {self._row_group} promises {self._promised} rows and holds {self.position}"
                    )
                self._readers.rows_decoded += self._held.num_rows
            skip = min(first - self.position, self._held.num_rows)
            take = min(num_rows, self._held.num_rows - skip)
            if take:
                got.append(self._held.slice(skip, take))
            self._held = self._held.slice(skip + take)
            self.position += skip + take
            if take:
                first += take
                num_rows -= take
        return pa.Table.from_batches(got)

    def close(self) -> None:
        self._batches.close()
        self._parquet.close()


class Loader:
    """Iterator of batches over the slices of one trainer.

    `slices` may be lazy: it is asked for a slice only when more rows are needed, in the thread that iterates. `resume` holds rows
    already handed out by slice index; with the slices of the interrupted run the continuation is identical. All batches are full
    but the last. Raises DataError for unreadable files and, unless `on_bad_row` says otherwise, for bad rows.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        slices: Iterable[Slice],
        *,
        seed: int,
        epoch: int,
        training: bool = True,
        threads: int | None = None,
        resume: Mapping[int, int] | None = None,
    ) -> None:
        self._dataset = dataset
        self._config = config
        self._seed = seed
        self._epoch = epoch
        self._shuffle = training and config.shuffle.enabled
        lanes = dataset.lanes() if self._shuffle else 1
        self._done: dict[int, int] = dict(resume or {})
        self._windows = plan_windows(
            slices,
            interleave=lanes,
            window_rows=config.shuffle.window_rows if self._shuffle else min(16384, config.shuffle.window_rows),
            done=dict(self._done),
        )
        self._encoder = Encoder(config)
        self._readers = _Readers(dataset, columns_needed(config), config.memory_bytes, lanes + 1)
        self._threads = config.threads if threads is None else threads
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads, "data") if self._threads else None
        self.counters: Counter[str] = Counter()
        """`rows`, `skipped_rows`, `truncated_ids`, `rows_decoded`."""
        self._batches = self._produce()
        self._closed = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        batch = next(self._batches)
        for span in batch.spans:
            self._done[span.slice_index] = span.row_start + span.num_rows
        self.counters["rows"] += batch.num_rows
        self.counters["skipped_rows"] += batch.num_skipped_rows
        return batch

    def state(self) -> dict[int, int]:
        """Rows handed out so far, by slice index, those of `resume` included."""
        return dict(self._done)

    def close(self) -> None:
        """Stops the threads and closes the files. Safe to call twice."""
        self._closed = True
        self._batches.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._readers.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, work: Callable[..., Any], *args: Any) -> "concurrent.futures.Future[Any]":
        if self._pool is not None:
            return self._pool.submit(work, *args)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(work(*args))
        return future

    def _produce(self) -> Iterator[Batch]:
        """Keeps one window ahead and a bounded number of batches in work; yields them in order."""
        ready: deque[concurrent.futures.Future[Batch]] = deque()
        limit = self._config.prefetch_batches if self._threads else 1
        segments: list[tuple[Window, int, int]] = []
        gathered = 0
        window = self._next_window()
        while window is not None:
            current: Window = window.result()
            window = self._next_window() if self._threads else None
            while True:
                wanted = self._config.batch_rows - gathered
                here = current.good_N.size - current.taken_good
                take = min(wanted, here)
                if here > take:
                    end = int(current.good_N[current.taken_good + take])
                else:
                    end = current.order_N.size
                if end > current.taken:
                    segments.append((current, current.taken, end))
                current.taken, current.taken_good = end, current.taken_good + take
                gathered += take
                if gathered < self._config.batch_rows:
                    break
                ready.append(self._submit(self._assemble, segments))
                segments, gathered = [], 0
                while len(ready) >= limit or (ready and ready[0].done()):
                    yield ready.popleft().result()
            if window is None:
                window = self._next_window()
        if segments:
            ready.append(self._submit(self._assemble, segments))
        while ready:
            yield ready.popleft().result()

    def _next_window(self) -> "concurrent.futures.Future[Window] | None":
        parts = next(self._windows, None)
        return None if parts is None else self._submit(self._build, parts)

    def _build(self, parts: list[Part]) -> Window:
        """Reads and encodes the blocks of a window and draws the order of its rows."""
        blocks: list[Rows] = []
        position: dict[int, int] = {}
        for part in parts:
            position.setdefault(part.slice.index, len(position))
        slices = list(position)
        places: list[list[npt.NDArray[np.int64]]] = [[] for _ in slices]
        sizes = np.zeros(len(slices), dtype=np.int64)
        next_row = [0] * len(slices)
        base = 0
        for part in parts:
            piece = part.slice
            owner = position[piece.index]
            if sizes[owner] == 0:
                next_row[owner] = part.start
            sizes[owner] += part.num_rows
            if part.done == part.num_rows:
                places[owner].append(np.full(part.num_rows, -1, dtype=np.int64))
                continue
            rows = self._encoder.encode(self._readers.read(piece, part.start, part.num_rows), part.num_rows)
            if rows.reasons and self._config.on_bad_row == "fail":
                self._refuse(part, rows)
            blocks.append(rows)
            order = np.arange(part.num_rows, dtype=np.int64)
            if self._shuffle:
                order = _random(
                    0x726F7773, self._seed, self._seed >> 32, self._epoch, piece.index, part.start
                ).permutation(order)
            order = order + base
            order[: part.done] = -1
            places[owner].append(order)
            base += part.num_rows
        owner_N = np.repeat(np.arange(len(slices), dtype=np.int32), sizes)
        if self._shuffle:
            first = parts[0]
            owner_N = _random(
                0x6D697865, self._seed, self._seed >> 32, self._epoch, first.slice.index, first.start
            ).permutation(owner_N)
        order_N = np.empty(owner_N.size, dtype=np.int64)
        order_N[np.argsort(owner_N, kind="stable")] = np.concatenate([p for per in places for p in per])
        left = order_N >= 0
        if not left.all():
            gone = np.bincount(owner_N[~left], minlength=len(slices))
            next_row = [n + int(g) for n, g in zip(next_row, gone, strict=True)]
            order_N, owner_N = order_N[left], owner_N[left]
        rows = _concatenate(blocks)
        self.counters.update({"truncated_ids": sum(rows.truncated.values())})
        good_N = np.flatnonzero(~rows.bad_N[order_N])
        return Window(rows, order_N, owner_N, slices, next_row, good_N)

    def _refuse(self, part: Part, rows: Rows) -> None:
        row, why = min(rows.reasons.items())
        file = self._dataset.files[part.slice.file]
        number = (
            sum(g.num_rows for g in file.row_groups[: part.slice.row_group]) + part.slice.row_start + part.start + row
        )
        raise DataError(
            f"{file.source.name}: row {number}: {why}; {len(rows.reasons)} of {part.num_rows} rows here are unusable "
            "(data.on_bad_row: skip or quarantine leaves them out)"
        )

    def _assemble(self, segments: list[tuple[Window, int, int]]) -> Batch:
        """Gathers the rows of a batch and finds the unique keys of each table."""
        picks: list[tuple[Rows, npt.NDArray[np.int64]]] = []
        spans: list[Span] = []
        places = 0
        for window, start, end in segments:
            at = window.order_N[start:end]
            places += at.size
            counts = np.bincount(window.owner_N[start:end], minlength=len(window.slices))
            before = np.bincount(window.owner_N[:start], minlength=len(window.slices))
            for owner in np.flatnonzero(counts):
                spans.append(
                    Span(window.slices[owner], window.next_row[owner] + int(before[owner]), int(counts[owner]))
                )
            bad = window.rows.bad_N[at]
            picks.append((window.rows, at[~bad] if bad.any() else at))
        num_rows = sum(at.size for _, at in picks)

        def gather(get: Callable[[Rows], Any]) -> Any:
            pieces = [get(rows).take(at, axis=0) for rows, at in picks]
            return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

        tables: dict[str, TableKeys] = {}
        for table in self._config.tables:
            features = [f for f in self._config.sparse if f.table == table]
            singles = [f.name for f in features if not f.multi_valued]
            ids_BF = gather(lambda rows, table=table: rows.singles[table])  # type: ignore[misc]
            ragged = {
                f.name: [_gather_lists(rows.lists[f.name], at) for rows, at in picks]
                for f in features
                if f.multi_valued
            }
            flat = [ids_BF.ravel()] + [keys for pieces in ragged.values() for keys, _, _ in pieces]
            keys_U, positions = _unique(flat)
            cursor = ids_BF.size
            single_BF = positions[:cursor].reshape(num_rows, len(singles))
            index = {name: single_BF[:, i] for i, name in enumerate(singles)}
            weights: dict[str, npt.NDArray[np.float32]] = {}
            for feature in features:
                if not feature.multi_valued:
                    continue
                pieces = ragged[feature.name]
                count = sum(keys.size for keys, _, _ in pieces)
                lengths = np.concatenate([n for _, n, _ in pieces])
                index[feature.name] = _pad(positions[cursor : cursor + count], lengths)
                cursor += count
                if feature.weights is not None:
                    weights[feature.name] = _pad(np.concatenate([w for _, _, w in pieces if w is not None]), lengths)
            index = {f.name: index[f.name] for f in features}
            tables[table] = TableKeys(keys_U, index, single_BF, tuple(singles), weights)
        return Batch(
            num_rows=num_rows,
            dense_BD=gather(lambda rows: rows.dense_ND),
            labels_BL=gather(lambda rows: rows.labels_NL),
            tables=tables,
            spans=tuple(spans),
            sample_weight_B=gather(lambda rows: rows.weight_N) if self._config.sample_weight is not None else None,
            group_B=gather(lambda rows: rows.group_N) if self._config.group is not None else None,
            num_skipped_rows=places - num_rows,
        )


def _unique(pieces: list[npt.NDArray[np.uint64]]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
    """Distinct non-zero keys, and for every key 1 + its position among them (0 for key 0)."""
    keys = np.concatenate([np.zeros(1, dtype=np.uint64), *pieces])
    encoded = pa.array(keys).dictionary_encode()
    return encoded.dictionary.to_numpy()[1:], encoded.indices.to_numpy()[1:]


def _gather_lists(
    lists: Lists, at: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.float32] | None]:
    """Keys of the chosen rows, flat; the number of keys of each; their weights."""
    starts = lists.offsets[at]
    lengths = lists.offsets[at + 1] - starts
    rows = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    return lists.keys[rows], lengths, None if lists.weights is None else lists.weights[rows]


def _pad(flat: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """[B, L], left-aligned, 0 where there is nothing; L is the longest list, at least 1."""
    longest = max(1, int(lengths.max(initial=0)))
    out = np.zeros((lengths.size, longest), dtype=flat.dtype)
    out[np.arange(longest) < lengths[:, None]] = flat
    return out


def _concatenate(blocks: list[Rows]) -> Rows:
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    lists: dict[str, Lists] = {}
    for name in first.lists:
        pieces = [b.lists[name] for b in blocks]
        counts = np.concatenate([np.diff(p.offsets) for p in pieces])
        weights = (
            None if pieces[0].weights is None else np.concatenate([p.weights for p in pieces if p.weights is not None])
        )
        lists[name] = Lists(np.concatenate([p.keys for p in pieces]), np.concatenate([[0], np.cumsum(counts)]), weights)
    truncated: Counter[str] = Counter()
    for block in blocks:
        truncated.update(block.truncated)
    return Rows(
        labels_NL=np.concatenate([b.labels_NL for b in blocks]),
        dense_ND=np.concatenate([b.dense_ND for b in blocks]),
        singles={t: np.concatenate([b.singles[t] for b in blocks]) for t in first.singles},
        lists=lists,
        weight_N=None
        if first.weight_N is None
        else np.concatenate([b.weight_N for b in blocks if b.weight_N is not None]),
        group_N=None if first.group_N is None else np.concatenate([b.group_N for b in blocks if b.group_N is not None]),
        bad_N=np.concatenate([b.bad_N for b in blocks]),
        truncated=truncated,
        reasons={},
    )
