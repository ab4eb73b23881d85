"""Row groups -> Arrow columns, in bounded memory, with no error unnamed and no row missing."""

import concurrent.futures
import itertools
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.types as pat

from paddlewheel.data_pipeline.arrow_arrays import is_list
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import DataFile, Dataset, Slice
from paddlewheel.data_pipeline.errors import DataError, UnreadableError
from paddlewheel.data_pipeline.files import DataReader
from paddlewheel.data_pipeline.patience import UNREADABLE, read_patiently
from paddlewheel.data_pipeline.schema import columns_needed

_STREAM_ROWS = 4096
_PROBE_ROWS = 64
"""Rows of the first batch where only decoding tells how large rows are (text and lists can be stored in next to no
bytes); batches then grow with what was seen."""
_MOST_UNEVEN_ROWS = 1024
"""Rows of a batch of such columns: if rows suddenly are large, so many of them are decoded before that shows."""
_LEAST_PIECE_BYTES = 1 << 20
_TABLE_SHARE = 8
"""A row group that is kept whole takes at most this part of the memory."""


class RowGroups:
    """Open row groups. Small ones are kept whole; large ones are streams, read on from where they are.

    What is small is decided by decoded bytes: a few kilobytes of a file can be gigabytes of text. With `ahead`, the
    next batch of each stream is decoded there while the last one is used: half of the memory is for one, half for both.
    """

    def __init__(
        self, dataset: Dataset, config: DataConfig, most_streams: int, ahead: concurrent.futures.Executor | None = None
    ) -> None:
        self._dataset = dataset
        self._ahead = ahead
        self._columns = tuple(dict.fromkeys((*columns_needed(config), *dataset.carried)))
        self._memory_bytes = config.memory_bytes
        self._most_streams = most_streams
        self._piece_bytes = max(_LEAST_PIECE_BYTES, config.memory_bytes // (4 * most_streams))
        self._table_limit = max(self._piece_bytes, config.memory_bytes // _TABLE_SHARE)
        self._large: set[tuple[int, int]] = set()
        """Row groups that looked small and are not."""
        self._tables: OrderedDict[tuple[int, int], tuple[pa.Table, int]] = OrderedDict()
        self._table_bytes = 0
        self._streams: list[_Stream] = []
        self.rows_decoded = 0

    def pieces(
        self, piece: Slice, start: int, num_rows: int
    ) -> Generator[tuple[int, int, dict[str, pa.Array]], None, None]:
        """Rows `start` to `start + num_rows` of a slice, as (first row, rows, columns) one after the other.

        Usually in one piece; in several where the rows are so large that they would take too much memory together.
        """
        file = self._dataset.files[piece.file]
        first, end = piece.row_start + start, piece.row_start + start + num_rows
        if file.row_groups[piece.row_group].is_small(len(self._columns)):
            table = self._table(file, piece, num_rows)
            if table is not None:
                yield start, num_rows, self._columns_of(file, table.slice(first, num_rows))
                return
        stream = self._stream(file, piece, first)
        self.rows_decoded += end - stream.position
        while first < end:
            got = stream.read(first, end - first, self._piece_bytes)
            if first + got.num_rows == end:
                stream.serves = piece.index if start + num_rows < piece.num_rows else None
                if stream.position == stream.num_rows:
                    self._streams.remove(stream)
                    stream.close()
            yield first - piece.row_start, got.num_rows, self._columns_of(file, got)
            first += got.num_rows

    def _columns_of(self, file: DataFile, table: pa.Table) -> dict[str, pa.Array]:
        result = {name: _one_chunk(column) for name, column in zip(table.column_names, table.columns, strict=True)}
        for column, value in file.source.partitions:
            if column in file.columns:
                result[column] = pa.repeat(pa.scalar(value, pa.string()), table.num_rows)
        return result

    def _physical(self, file: DataFile) -> list[str]:
        partitions = {k for k, _ in file.source.partitions}
        return [c for c in self._columns if c in file.columns and c not in partitions]

    def _table(self, file: DataFile, piece: Slice, num_rows: int) -> pa.Table | None:
        """A small row group, whole. It is forgotten once all of its rows were asked for. None if it turns out large."""
        key = (piece.file, piece.row_group)
        if key in self._large:
            return None
        if key in self._tables:
            table, served = self._tables.pop(key)
            self._table_bytes -= table.nbytes
        else:
            stream = _Stream(file, piece.row_group, self._physical(file), 1 << 20, self._table_limit)
            try:
                table, served = stream.read(0, stream.num_rows, self._table_limit), 0
                self.rows_decoded += table.num_rows
                if table.num_rows < stream.num_rows:
                    self._large.add(key)
                    return None
                with stream.named_errors():
                    table = table.combine_chunks()
            finally:
                stream.close()
        if served + num_rows < table.num_rows:
            self._tables[key] = (table, served + num_rows)
            self._table_bytes += table.nbytes
            while self._table_bytes > self._memory_bytes and len(self._tables) > 1:
                _, (old, _) = self._tables.popitem(last=False)
                self._table_bytes -= old.nbytes
        return table

    def _stream(self, file: DataFile, piece: Slice, first: int) -> "_Stream":
        here = [s for s in self._streams if s.file is file and s.row_group == piece.row_group and s.position <= first]
        mine = [s for s in here if s.serves == piece.index]
        idle = [s for s in here if s.serves is None]
        if mine:
            stream = mine[0]
        elif idle:
            stream = max(idle, key=lambda s: s.position)
        else:
            stream = _Stream(file, piece.row_group, self._physical(file), _STREAM_ROWS, self._piece_bytes, self._ahead)
            while len(self._streams) >= self._most_streams:
                old = next((s for s in self._streams if s.serves is None), self._streams[0])
                self._streams.remove(old)
                old.close()
            self._streams.append(stream)
        return stream

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._tables.clear()


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class _Stream:
    """A row group read from its start in small batches. Every error names the file; fewer rows than promised are an
    error. A failure that may pass is tried again, from the start of the row group.
    """

    def __init__(
        self,
        file: DataFile,
        row_group: int,
        columns: list[str],
        most_rows: int,
        batch_bytes: int,
        ahead: concurrent.futures.Executor | None = None,
    ) -> None:
        self._executor = ahead
        self._ahead: concurrent.futures.Future[pa.RecordBatch | None] | None = None
        self._batch_bytes = batch_bytes
        row_bytes = _row_bytes(file.columns[c].type for c in columns)
        self._row_bytes = row_bytes
        self._is_even = row_bytes is not None
        self._most_rows = most_rows if self._is_even else min(most_rows, _MOST_UNEVEN_ROWS)
        batch_rows = self._fitting(row_bytes) if row_bytes is not None else min(_PROBE_ROWS, self._most_rows)
        self.file = file
        self.row_group = row_group
        self.num_rows = file.row_groups[row_group].num_rows
        self.position = 0
        self.serves: int | None = None
        """Slice that will be read on from here, if any."""
        self._columns, self._batch_rows = columns, batch_rows
        self._held: pa.RecordBatch | None = None
        self._reader: DataReader | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._num_read = 0
        self._failure: DataError | None = None
        if columns:
            with self.named_errors():
                read_patiently(self._name, self._open)
        else:
            nothing = pa.RecordBatch.from_struct_array(pa.array([{}] * self.num_rows, pa.struct([])))
            self._batches = iter((nothing,))

    @property
    def _name(self) -> str:
        return f"{self.file.source.name}: row group {self.row_group}"

    def _open(self) -> None:
        """Opens the file, again if need be, and goes to the batch that is next."""
        self._close_file()
        size = self.file.row_groups[self.row_group].num_bytes
        self._reader = DataReader(self.file.source, self.file.footprint, row_group_bytes=size)
        batches = self._reader.batches(self._batch_rows, self.row_group, self._columns)
        rows = 0
        while rows < self._num_read and (batch := next(batches, None)) is not None:
            rows += batch.num_rows
            if rows > self._num_read:  # batches need not be as large as before
                batches = itertools.chain([batch.slice(batch.num_rows - (rows - self._num_read))], batches)
        self._batches = batches

    def _fetch(self) -> pa.RecordBatch | None:
        """The next batch, which another thread may have decoded already; then that one goes on to the one after it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.cancel():  # nobody has begun: it is decoded here
            ahead = None
        batch = read_patiently(self._name, self._next) if ahead is None else ahead.result()
        if self._executor is not None and batch is not None and self._num_read < self.num_rows:
            self._ahead = self._executor.submit(read_patiently, self._name, self._next)
        return batch

    def _next(self) -> pa.RecordBatch | None:
        if self._columns and self._reader is None:  # what was open has failed
            self._open()
        try:
            batch = next(self._batches, None)
            if self._reader is not None:
                self._reader.check_unchanged()
        except BaseException:
            self._close_file()
            raise
        self._num_read += batch.num_rows if batch is not None else 0
        if batch is not None and not self._is_even and self._reader is not None:
            rows = self._fitting(_decoded_bytes(batch) / max(1, batch.num_rows))
            self._batch_rows = max(1, min(rows, self._num_read & -self._num_read))
            self._reader.set_batch_rows(self._batch_rows)
        return batch

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        if self._failure is not None:  # no need to decode up to there again
            raise self._failure
        try:
            yield
        except DataError as error:
            self._failure = error
            raise
        except UNREADABLE as error:
            self._failure = UnreadableError(f"{self._name} cannot be read: {error}")
            raise self._failure from error

    def _bytes_of(self, batch: pa.RecordBatch) -> int:
        if self._row_bytes is None:
            return _decoded_bytes(batch)
        validity = batch.num_columns * batch.num_rows // 8  # Arrow takes a fifth of a millisecond to add up all buffers
        return int(self._row_bytes * batch.num_rows + validity)

    def _fitting(self, row_bytes: float) -> int:
        """Rows of a batch: a power of two, so that blocks, which are, too, are whole batches and nothing is copied."""
        rows = min(self._most_rows, self._batch_bytes // max(1, int(row_bytes)))
        return 1 << (max(1, rows).bit_length() - 1)

    def read(self, first: int, num_rows: int, most_bytes: int) -> pa.Table:
        """Rows from `first` on, which must not lie before `position`; fewer (but some) if they exceed `most_bytes`."""
        got: list[pa.RecordBatch] = []
        num_bytes = 0
        while num_rows > 0 and num_bytes < most_bytes:
            if self._held is None or self._held.num_rows == 0:
                with self.named_errors():
                    self._held = self._fetch()
                if self._held is None:
                    raise UnreadableError(
                        f"{self.file.source.name}: row group {self.row_group} promises {self.num_rows} "
                        f"rows and holds {self.position}"
                    )
                continue
            skip = min(first - self.position, self._held.num_rows)
            take = min(num_rows, self._held.num_rows - skip)
            if take:
                got.append(self._held.slice(skip, take))
                num_bytes += self._bytes_of(got[-1])
            self._held = self._held.slice(skip + take)
            self.position += skip + take
            first += take
            num_rows -= take
        return pa.Table.from_batches(got)

    def close(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.cancel():
            concurrent.futures.wait([ahead])
        self._close_file()

    def _close_file(self) -> None:
        self._batches = iter(())
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _row_bytes(types: Iterable[pa.DataType]) -> int | None:
    """Decoded bytes of a row of these columns; None if only decoding tells."""
    total = 0
    for kind in types:
        if pat.is_dictionary(kind):
            return None
        try:
            total += 0 if pat.is_null(kind) else (kind.bit_width + 7) // 8
        except ValueError:  # text and lists, of any size
            return None
    return total


def _decoded_bytes(batch: pa.RecordBatch) -> int:
    """Bytes that grow with the rows: words of dictionaries, which all batches of a row group share, do not."""
    total: int = batch.nbytes
    for column in batch.columns:
        inner = column.values if is_list(column.type) else column
        if pat.is_dictionary(inner.type):
            total -= inner.dictionary.nbytes
    return total
