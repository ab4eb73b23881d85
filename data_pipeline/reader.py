"""Row groups -> Arrow columns, in bounded memory, with no error unnamed and no row missing."""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from data_pipeline.config import DataConfig
from data_pipeline.dataset import DataFile, Dataset, Slice
from data_pipeline.errors import DataError
from data_pipeline.patience import UNREADABLE, read_patiently
from data_pipeline.schema import columns_needed
from data_pipeline.sources import DataReader

_STREAM_ROWS = 4096


class RowGroups:
    """Open row groups. Small ones are kept whole; large ones are streams, read on from where they are."""

    def __init__(self, dataset: Dataset, config: DataConfig, most_streams: int) -> None:
        self._dataset = dataset
        self._columns = tuple(dict.fromkeys((*columns_needed(config), *dataset.carried)))
        self._memory_bytes = config.memory_bytes
        self._most_streams = most_streams
        self._tables: OrderedDict[tuple[int, int], tuple[pa.Table, int]] = OrderedDict()
        self._table_bytes = 0
        self._streams: list[_Stream] = []
        self.rows_decoded = 0

    def read(self, piece: Slice, start: int, num_rows: int) -> dict[str, pa.Array]:
        """Columns of rows `start` to `start + num_rows` of a slice."""
        file = self._dataset.files[piece.file]
        first = piece.row_start + start
        if file.row_groups[piece.row_group].is_small(len(self._columns)):
            table = self._table(file, piece, num_rows).slice(first, num_rows)
        else:
            stream = self._stream(file, piece, first)
            self.rows_decoded += first + num_rows - stream.position
            table = stream.read(first, num_rows)
            stream.serves = piece.index if start + num_rows < piece.num_rows else None
            if stream.position == stream.num_rows:
                self._streams.remove(stream)
                stream.close()
        result = {name: _one_chunk(table.column(name)) for name in table.column_names}
        for column, value in file.source.partitions:
            if column in file.columns:
                result[column] = pa.repeat(pa.scalar(value, pa.string()), num_rows)
        return result

    def _physical(self, file: DataFile) -> list[str]:
        partitions = {k for k, _ in file.source.partitions}
        return [c for c in self._columns if c in file.columns and c not in partitions]

    def _table(self, file: DataFile, piece: Slice, num_rows: int) -> pa.Table:
        """A small row group, whole. It is forgotten once all of its rows were asked for."""
        key = (piece.file, piece.row_group)
        if key in self._tables:
            table, served = self._tables.pop(key)
            self._table_bytes -= table.nbytes
        else:
            stream = _Stream(file, piece.row_group, self._physical(file), 1 << 20)
            try:
                table, served = stream.read(0, stream.num_rows).combine_chunks(), 0
            finally:
                stream.close()
            self.rows_decoded += table.num_rows
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
            stream = _Stream(file, piece.row_group, self._physical(file), _STREAM_ROWS)
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

    def __init__(self, file: DataFile, row_group: int, columns: list[str], batch_rows: int) -> None:
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
            with self._named_errors():
                read_patiently(self._name, self._open)
        else:
            nothing = pa.RecordBatch.from_struct_array(pa.array([{}] * self.num_rows, pa.struct([])))
            self._batches = iter((nothing,))

    @property
    def _name(self) -> str:
        return f"{self.file.source.name}: row group {self.row_group}"

    def _open(self) -> None:
        """Opens the file, again if need be, and goes to the batch that is next."""
        self.close()
        size = self.file.row_groups[self.row_group].num_bytes
        self._reader = DataReader(self.file.source, self.file.footprint, row_group_bytes=size)
        batches = self._reader.batches(self._batch_rows, self.row_group, self._columns)
        rows = 0
        while rows < self._num_read and (batch := next(batches, None)) is not None:
            rows += batch.num_rows
            if rows > self._num_read:  # batches need not be as large as before
                batches = itertools.chain([batch.slice(batch.num_rows - (rows - self._num_read))], batches)
        self._batches = batches

    def _next(self) -> pa.RecordBatch | None:
        if self._columns and self._reader is None:  # what was open has failed
            self._open()
        try:
            batch = next(self._batches, None)
            if self._reader is not None:
                self._reader.check_unchanged()
        except BaseException:
            self.close()
            raise
        self._num_read += batch.num_rows if batch is not None else 0
        return batch

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        if self._failure is not None:  # no need to decode up to there again
            raise self._failure
        try:
            yield
        except DataError as error:
            self._failure = error
            raise
        except UNREADABLE as error:
            self._failure = DataError(f"{self._name} cannot be read: {error}")
            raise self._failure from error

    def read(self, first: int, num_rows: int) -> pa.Table:
        """Rows from `first` on, which must not lie before `position`."""
        got: list[pa.RecordBatch] = []
        while num_rows > 0:
            if self._held is None or self._held.num_rows == 0:
                with self._named_errors():
                    self._held = read_patiently(self._name, self._next)
                if self._held is None:
                    raise DataError(
                        f"{self.file.source.name}: row group {self.row_group} promises {self.num_rows} "
                        f"rows and holds {self.position}"
                    )
                continue
            skip = min(first - self.position, self._held.num_rows)
            take = min(num_rows, self._held.num_rows - skip)
            if take:
                got.append(self._held.slice(skip, take))
            self._held = self._held.slice(skip + take)
            self.position += skip + take
            first += take
            num_rows -= take
        return pa.Table.from_batches(got)

    def close(self) -> None:
        self._batches = iter(())
        if self._reader is not None:
            self._reader.close()
            self._reader = None
