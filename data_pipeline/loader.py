"""Slices -> batches, in an order that is a function of (data, seed, epoch) alone.

How rows are mixed: up to `interleave` slices are open at a time; a window takes a block of rows from each of them,
permutes the rows of each block, and deals the blocks out in a random interleaving. So a position is exact and short:
rows handed out per slice.

Shapes: B rows of a batch, N rows of a window, F1 single-valued features, L list length.
"""

import concurrent.futures
import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Self

from paddlewheel.data_pipeline.assemble import RowSelection, assemble
from paddlewheel.data_pipeline.batch import Batch, Span
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset, Slice
from paddlewheel.data_pipeline.encoded_rows import Lists, Rows
from paddlewheel.data_pipeline.encoder import Encoder
from paddlewheel.data_pipeline.errors import UnreadableError
from paddlewheel.data_pipeline.quarantine import BadRows
from paddlewheel.data_pipeline.reader import RowGroups
from paddlewheel.data_pipeline.statistics import Fitted

_PARALLEL_ROWS = 1024


class Part(NamedTuple):
    """A block of a slice: rows `start` to `start + num_rows` of it, of which the first `done` (in permuted order)
    were trained.
    """

    slice: Slice
    start: int
    num_rows: int
    done: int


def plan_windows(
    slices: Iterable[Slice], *, interleave: int, block_rows: int, window_rows: int, done: Mapping[int, int]
) -> Iterator[list[Part]]:
    """Cuts slices into blocks and deals these out to windows. Pulls a slice only when its rows are needed.

    Blocks depend on `block_rows` alone: that is what keeps the order of a slice's rows, and so a position,
    independent of how many trainers there are. Windows that are wholly done are left out.
    """
    source = iter(slices)
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
            piece, start = active.popleft()
            num_rows = min(block_rows, piece.num_rows - start)
            parts.append(Part(piece, start, num_rows, min(num_rows, max(0, done.get(piece.index, 0) - start))))
            rows += num_rows
            if start + num_rows < piece.num_rows:
                active.append((piece, start + num_rows))
        if not parts:
            return
        if any(p.done < p.num_rows for p in parts):
            yield parts


class _Random:
    """Seeded draws. RandomState's streams are frozen by NumPy (NEP 19), so a position stays valid across versions."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._words = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, epoch)
        self._state = np.random.RandomState(0)

    def draw(self, *words: int) -> np.random.RandomState:
        """The generator, set to a state that depends on seed, epoch and `words` alone."""
        self._state.seed((*self._words, *(w & 0xFFFFFFFF for w in words)))
        return self._state


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

    def take(self, end: int) -> list[Span]:
        """Hands out the places up to `end`: which rows of which slices these are."""
        counts = np.bincount(self.owner_N[self.taken : end], minlength=len(self.slices))
        spans = []
        for owner in np.flatnonzero(counts).tolist():
            count = int(counts[owner])
            spans.append(Span(self.slices[owner], self.next_row[owner], count))
            self.next_row[owner] += count
        self.taken = end
        return spans


_Segment = tuple[Window, int, int, list[Span]]
"""Places of a window, from and up to, and what rows these are."""


class Loader:
    """Iterator of batches over the slices of one trainer.

    `slices` may be lazy: it is asked for a slice only when more rows are needed, in the thread that iterates.
    `resume` holds rows already handed out by slice index; with the slices of the interrupted run the continuation is
    identical. All batches are full but the last; that one has spans and no rows when the rows that were left are all
    unusable, so that whoever counts rows by spans hears of each. Raises DataError for unreadable files and, unless
    `on_bad_row` says otherwise, for bad rows.
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
        window_rows = config.shuffle.window_rows if self._shuffle else min(16384, config.shuffle.window_rows)
        if self._shuffle and isinstance(slices, Sequence):
            # Windows of equal size: a short last one would mix rows from few places.
            total = sum(piece.num_rows for piece in slices)
            window_rows = -(-total // max(1, round(total / window_rows)))
        self._windows = plan_windows(
            slices,
            interleave=lanes,
            block_rows=dataset.block_rows,
            window_rows=max(1, window_rows),
            done=dict(self._done),
        )
        self._encoder = Encoder(config, dataset.fitted or Fitted.load(config))
        self._threads = config.threads if threads is None else threads
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads, "data") if self._threads else None
        self._readers = RowGroups(dataset, config, lanes, self._pool if self._threads > 1 else None)
        self.counters: Counter[str] = Counter()
        """`rows` and `skipped_rows` handed out; `bad_rows` and `unreadable_rows` met; `rows_decoded`;
        `truncated_ids.<feature>`."""
        self.unreadable: dict[str, str] = {}
        """Files that turned out to be unreadable (`on_bad_file: skip`), with the reason."""
        self._bad_rows = BadRows(config)
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

    def __enter__(self) -> Self:
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

    def _produce(self) -> Generator[Batch, None, None]:
        """Keeps one window ahead and a bounded number of batches in work; yields them in order."""
        ready: deque[concurrent.futures.Future[Batch]] = deque()
        limit = self._config.prefetch_batches if self._threads else 1
        segments: list[_Segment] = []
        gathered = 0
        window = self._next_window()
        while window is not None:
            current: Window = window.result()
            window = self._next_window() if self._threads else None
            while True:
                wanted = self._config.batch_rows - gathered
                here = current.good_N.size - current.taken_good
                take = min(wanted, here)
                end = int(current.good_N[current.taken_good + take]) if here > take else current.order_N.size
                if end > current.taken:
                    segments.append((current, current.taken, end, current.take(end)))
                current.taken_good += take
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
        """Reads and encodes the blocks of a window, and draws the order of its rows."""
        order = self._pool.submit(self._order, parts) if self._pool is not None and self._threads > 1 else None
        fresh = [part for part in parts if part.done < part.num_rows]
        rows = Rows.empty(self._config, sum(part.num_rows for part in fresh), len(fresh))
        encoded: deque[tuple[Part, dict[str, pa.Array], concurrent.futures.Future[dict[int, str]]]] = deque()
        base = 0
        for block, part in enumerate(fresh):
            at = slice(base, base + part.num_rows)
            base = at.stop
            columns = self._read(part, rows, at, block)
            if columns is None:
                pass
            elif self._threads > 1 and part.num_rows >= _PARALLEL_ROWS:
                encoded.append((part, columns, self._submit(self._encoder.encode, columns, rows, at, block)))
            else:
                self._apply_policy(part, columns, self._encoder.encode(columns, rows, at, block))
            if len(encoded) > self._threads:
                self._apply_policy_to_next(encoded)
        while encoded:
            self._apply_policy_to_next(encoded)
        for name, blocks in rows.lists.items():
            self.counters[f"truncated_ids.{name}"] += sum(lists.num_truncated for lists in blocks)
            rows.lists[name] = [_join(blocks)]
        self.counters["rows_decoded"] = self._readers.rows_decoded
        if order is None or order.cancel():  # cancelled: nobody has begun
            order_N, owner_N, slices, next_row = self._order(parts)
        else:
            order_N, owner_N, slices, next_row = order.result()
        good_N = np.flatnonzero(~rows.bad_N[order_N])
        return Window(rows, order_N, owner_N, slices, next_row, good_N)

    def _order(self, parts: list[Part]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], list[int], list[int]]:
        """Draws the order in which the rows of a window leave: a function of seed, epoch and `parts` alone.

        Returns `order_N`, `owner_N`, `slices` and `next_row` of a Window.
        """
        position: dict[int, int] = {}
        for part in parts:
            position.setdefault(part.slice.index, len(position))
        slices = list(position)
        places: list[list[npt.NDArray[np.int64]]] = [[] for _ in slices]
        sizes = np.zeros(len(slices), dtype=np.int64)
        next_row = [0] * len(slices)
        base = 0
        random = _Random(self._seed, self._epoch)
        for part in parts:
            owner = position[part.slice.index]
            if sizes[owner] == 0:
                next_row[owner] = part.start
            sizes[owner] += part.num_rows
            if part.done == part.num_rows:
                places[owner].append(np.full(part.num_rows, -1, dtype=np.int64))
                continue
            order = np.arange(base, base + part.num_rows, dtype=np.int64)
            if self._shuffle:
                order = random.draw(0x726F7773, part.slice.index, part.start).permutation(order)
            order[: part.done] = -1
            places[owner].append(order)
            base += part.num_rows
        owner_N = np.repeat(np.arange(len(slices), dtype=np.int32), sizes)
        if self._shuffle:
            first = parts[0]
            owner_N = random.draw(0x6D697865, first.slice.index, first.start).permutation(owner_N)
        order_N = np.empty(owner_N.size, dtype=np.int64)
        narrow = owner_N.astype(np.uint16) if len(slices) <= 1 << 16 else owner_N  # 16 bits: NumPy sorts by radix
        order_N[np.argsort(narrow, kind="stable")] = np.concatenate([p for per in places for p in per])
        left = order_N >= 0
        if not left.all():
            gone = np.bincount(owner_N[~left], minlength=len(slices))
            next_row = [n + int(g) for n, g in zip(next_row, gone, strict=True)]
            order_N, owner_N = order_N[left], owner_N[left]
        return order_N, owner_N, slices, next_row

    def _read(self, part: Part, rows: Rows, at: slice, block: int) -> dict[str, pa.Array] | None:
        """Columns of a block. None if there is nothing left to do: its rows were so large that they were encoded piece
        by piece, or they cannot be read and the job leaves such files out.
        """
        try:
            pieces = self._readers.pieces(part.slice, part.start, part.num_rows)
            start, num_rows, columns = next(pieces)
            if num_rows == part.num_rows:
                pieces.close()
                return columns
            self._encode_pieces(part, itertools.chain([(start, num_rows, columns)], pieces), rows, at, block)
        except UnreadableError as error:
            if self._config.on_bad_file == "fail":
                raise
            self.unreadable.setdefault(self._dataset.files[part.slice.file].source.name, str(error))
            self.counters["unreadable_rows"] += part.num_rows
            self._encoder.leave_out(rows, at, block)
        return None

    def _encode_pieces(
        self, part: Part, pieces: Iterable[tuple[int, int, dict[str, pa.Array]]], rows: Rows, at: slice, block: int
    ) -> None:
        """Encodes a block of which not all columns fit into memory at a time."""
        lists: dict[str, list[Lists]] = {name: [] for name in rows.lists}
        bad: list[tuple[dict[str, pa.Array], dict[int, str]]] = []
        for start, num_rows, columns in pieces:
            before = start - part.start
            reasons = self._encoder.encode(columns, rows, slice(at.start + before, at.start + before + num_rows), block)
            for name, blocks in rows.lists.items():
                lists[name].append(blocks[block])
            if reasons:
                picked = self._bad_rows.pick(columns, reasons)
                bad.append((picked, {before + row: why for row, why in reasons.items()}))
        for name, several in lists.items():
            rows.lists[name][block] = _join(several)
        if bad:
            together = {name: pa.chunked_array([columns[name] for columns, _ in bad]) for name in bad[0][0]}
            everything = {row: why for _, reasons in bad for row, why in reasons.items()}
            self._bad_rows.apply_policy_to_bad_rows(
                self._dataset, part.slice, part.start, part.num_rows, together, everything
            )
            self.counters["bad_rows"] += len(everything)

    def _apply_policy_to_next(
        self, encoded: deque[tuple[Part, dict[str, pa.Array], "concurrent.futures.Future[dict[int, str]]"]]
    ) -> None:
        part, columns, reasons = encoded.popleft()
        self._apply_policy(part, columns, reasons.result())

    def _apply_policy(self, part: Part, columns: dict[str, pa.Array], reasons: dict[int, str]) -> None:
        """What happens to bad rows."""
        if not reasons:
            return
        self._bad_rows.apply_policy(self._dataset, part.slice, part.start, part.num_rows, columns, reasons)
        self.counters["bad_rows"] += len(reasons)

    def _assemble(self, segments: list[_Segment]) -> Batch:
        """The batch of some places of windows."""
        picks: list[RowSelection] = []
        spans: list[Span] = []
        places = 0
        for window, start, end, given in segments:
            at = window.order_N[start:end]
            places += at.size
            spans += given
            bad = window.rows.bad_N[at]
            picks.append((window.rows, at[~bad] if bad.any() else at))
        num_rows = sum(at.size for _, at in picks)
        return assemble(self._config, picks, spans=spans, num_skipped=places - num_rows)


def _join(blocks: list[Lists]) -> Lists:
    if len(blocks) == 1:
        return blocks[0]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(b.offsets) for b in blocks]))])
    weights = [b.weights for b in blocks if b.weights is not None]
    num_truncated = sum(b.num_truncated for b in blocks)
    keys = np.concatenate([b.keys for b in blocks])
    return Lists(keys, offsets, np.concatenate(weights) if weights else None, num_truncated)
