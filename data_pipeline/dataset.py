"""The files of a job as a checked list of slices, and the order in which an epoch visits them.

A slice is a run of rows of one row group; it is what a trainer is given, and its number is the same on every machine.
"""

import concurrent.futures
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from paddlewheel.data_pipeline import schema
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.errors import ChangedError, DataError
from paddlewheel.data_pipeline.files import Footprint, SourceFile, discover, open_footer
from paddlewheel.data_pipeline.patience import UNREADABLE, read_patiently
from paddlewheel.data_pipeline.signature import ColumnKind, InputSignature
from paddlewheel.data_pipeline.statistics import Fitted

_CACHED_CELLS = 2 << 20
_CACHED_BYTES = 4 << 20
_STREAM_BYTES_PER_COLUMN = 2_100_000


class RowGroup(NamedTuple):
    """One row group as its footer describes it. Column metadata is never touched: it aborts the process on some
    files.
    """

    num_rows: int
    num_bytes: int

    def is_small(self, num_columns: int) -> bool:
        """Small row groups are decoded whole and kept; large ones are streamed from their start."""
        return self.num_bytes <= _CACHED_BYTES and self.num_rows * num_columns <= _CACHED_CELLS

    def open_bytes(self, num_columns: int) -> int:
        """Memory that reading it takes: all of its values, or (measured) a page and a dictionary per column."""
        if self.is_small(num_columns):
            return 8 * self.num_rows * num_columns
        return max(_CACHED_BYTES, min(2 * self.num_bytes, _STREAM_BYTES_PER_COLUMN * num_columns))


@dataclass(frozen=True)
class DataFile:
    """A file that has passed the check."""

    source: SourceFile
    row_groups: tuple[RowGroup, ...]
    columns: dict[str, schema.Column] = field(repr=False)
    footprint: Footprint = field(repr=False)
    """What it was when it was checked: the reader takes nothing else."""

    @property
    def num_rows(self) -> int:
        return sum(g.num_rows for g in self.row_groups)


@dataclass(frozen=True, order=True)
class Slice:
    """Rows `row_start` to `row_start + num_rows` of a row group of a file; `file` indexes `Dataset.files`."""

    index: int
    file: int
    row_group: int
    row_start: int
    num_rows: int


def read_footer(source: SourceFile, config: DataConfig, carried: Iterable[str] = ()) -> DataFile:
    """Checks one file. Raises DataError naming the file, UnavailableError where it cannot be read at the moment."""
    if source.size == 0:
        raise DataError(f"{source.name}: the file is empty (0 bytes)")

    def read() -> tuple[Footprint, pa.Schema, tuple[RowGroup, ...], int]:
        with open_footer(source) as (parquet, footprint):
            meta = parquet.metadata
            groups = tuple(
                RowGroup(meta.row_group(i).num_rows, meta.row_group(i).total_byte_size)
                for i in range(meta.num_row_groups)
            )
            return footprint, parquet.schema_arrow, groups, meta.num_rows

    try:
        footprint, arrow_schema, groups, num_rows = read_patiently(source.name, read)
    except UNREADABLE as error:
        raise DataError(f"{source.name}: is not a readable Parquet file: {error}") from error
    if any(g.num_rows < 0 for g in groups) or sum(g.num_rows for g in groups) != num_rows:
        raise DataError(
            f"{source.name}: the footer promises {num_rows} rows, its row groups {sum(g.num_rows for g in groups)}"
        )
    columns = schema.check_file(
        source.name, arrow_schema, dict(source.partitions), config, carried, above=dict(source.above)
    )
    return DataFile(source, groups, columns, footprint)


@dataclass(frozen=True)
class Dataset:
    """Checked files, in an order that depends on their names alone."""

    files: tuple[DataFile, ...]
    config: DataConfig
    skipped_files: tuple[str, ...] = ()
    """Why files were left out (`on_bad_file: skip`), one message each."""
    carried: tuple[str, ...] = ()
    """Columns that are read for whoever asked for them; the job does not need them."""
    fitted: Fitted | None = field(default=None, repr=False, compare=False)
    """The numbers that were fitted, as they were when the data were opened; None: they were not wanted."""

    @classmethod
    def open(
        cls,
        paths: str | Iterable[str],
        config: DataConfig,
        *,
        threads: int = 16,
        require_fitted: bool = True,
        carried: Iterable[str] = (),
        on_progress: Callable[[int, int], None] | None = None,
        keep: Callable[[SourceFile], bool] = lambda _: True,
    ) -> "Dataset":
        """Finds the files that are to be kept and checks every footer against the job.

        `on_progress(done, total)` is called from this thread. `require_fitted` is False for the pass that makes
        `data.statistics`. `carried` are columns to read that the job does not need; every file must have them. Raises
        DataError before anything is read if a path, a file or a column is not usable, or if
        there is no row at all.
        """
        carried = tuple(dict.fromkeys(carried))
        fitted = Fitted.load(config) if require_fitted else None
        found = discover((paths,) if isinstance(paths, str) else paths, hive=config.partitions == "hive")
        sources = [source for source in found if keep(source)]
        files: list[DataFile] = []
        skipped: list[str] = []
        with concurrent.futures.ThreadPoolExecutor(max(1, min(threads, len(sources)))) as pool:
            futures = [pool.submit(read_footer, source, config, carried) for source in sources]
            try:
                for done, future in enumerate(futures, 1):
                    try:
                        files.append(future.result())
                    except DataError as error:
                        if config.on_bad_file == "fail" or isinstance(error, ChangedError):
                            raise
                        skipped.append(str(error))
                    if on_progress is not None:
                        on_progress(done, len(sources))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        dataset = cls(tuple(files), config, tuple(skipped), carried, fitted)
        dataset._compare(dataset)
        if dataset.num_rows == 0:
            where = ", ".join([paths] if isinstance(paths, str) else paths)
            detail = f"; left out: {skipped[0]}" if skipped else ""
            raise DataError(f"{where}: 0 rows in {len(files)} files{detail}")
        return dataset

    @property
    def num_rows(self) -> int:
        return sum(f.num_rows for f in self.files)

    def agree_with(self, other: "Dataset") -> None:
        """Raises DataError if a value would have one key here and another there (training and evaluation data)."""
        self._compare(other)

    def _compare(self, other: "Dataset") -> None:
        """Compares one file for each type that a column has here with one for each that it has there."""
        here, there = self.files_by_type(), other.files_by_type()
        for column, types in here.items():
            for mine in types.values():
                for theirs in there.get(column, {}).values():
                    if mine is not theirs:
                        a, b = {column: mine.columns[column]}, {column: theirs.columns[column]}
                        schema.agree(mine.source.name, a, theirs.source.name, b, self.config)

    def files_by_type(self) -> dict[str, dict[pa.DataType, DataFile]]:
        """By column and type: the first file that has it so. Columns without values are left out."""
        found: dict[str, dict[pa.DataType, DataFile]] = {}
        for file in self.files:
            for column, got in file.columns.items():
                if got.kind != "null":
                    found.setdefault(column, {}).setdefault(got.type, file)
        return found

    def types_by_column(self) -> dict[str, list[schema.Column]]:
        """What each column is in the files, every type once."""
        return {name: [file.columns[name] for file in files.values()] for name, files in self.files_by_type().items()}

    def files_shared_with(self, other: "Dataset") -> list[str]:
        """Names of the files that are in the other dataset, too: evaluation files inside the training data."""
        there = {file.source.identity for file in other.files}
        return [file.source.name for file in self.files if file.source.identity in there]

    @property
    def signature(self) -> InputSignature:
        """What a model trained on these data knows of its inputs."""
        kinds = []
        for feature in self.config.sparse:
            for name in feature.columns:
                file = next((f for f in self.files if name in f.columns and f.columns[name].kind != "null"), None)
                column = file.columns[name] if file is not None else None
                kind = schema.key_kind(column, feature)
                if kind is not None:
                    seen, where = (str(column.type), file.source.name) if file is not None and column else ("", "")
                    kinds.append(ColumnKind(feature=feature.name, column=name, kind=kind, type=seen, file=where))
        return InputSignature(kinds=tuple(kinds)).with_fit(self.fitted, self.config)

    @property
    def absent_columns(self) -> dict[str, int]:
        """Columns that some files lack (as the job allows), with the number of such files."""
        counts = Counter(c for f in self.files for c in schema.columns_needed(self.config) if c not in f.columns)
        return dict(sorted(counts.items()))

    @property
    def fingerprint(self) -> str:
        """Identity of the data: names below the root, sizes, row groups, footers with their statistics. Independent of
        where the root lies, and of when files were written.
        """
        digest = hashlib.sha256()
        for file in self.files:
            counts = ",".join(str(g.num_rows) for g in file.row_groups)
            digest.update(
                f"{file.source.relative}\0{file.footprint.size}\0{counts}\0{file.footprint.footer}\n".encode()
            )
        return digest.hexdigest()[:32]

    @property
    def slice_rows(self) -> int:
        """Rows of a full slice under the job's `shuffle.slice_rows`."""
        if self.config.shuffle.slice_rows is not None:
            return self.config.shuffle.slice_rows
        return 1 << min(16, max(8, (-(-self.num_rows // 256) - 1).bit_length()))

    @property
    def block_rows(self) -> int:
        """Rows of a slice that are permuted among themselves.

        A power of two, as slices usually are: then blocks are whole batches of a stream, and nothing is copied.
        """
        return 1 << (max(1, self.config.shuffle.window_rows // self.lanes()).bit_length() - 1)

    @property
    def order_id(self) -> str:
        """What the order of the rows within a slice depends on, beside seed and epoch."""
        blocks = f"blocks of {self.block_rows}" if self.config.shuffle.enabled else "file order"
        return f"slices of {self.slice_rows} rows, {blocks}"

    def slices(self, max_rows: int | None = None) -> tuple[Slice, ...]:
        """All rows as slices in file order; the index of a slice is its position here."""
        limit = max_rows or self.slice_rows
        result: list[Slice] = []
        for number, file in enumerate(self.files):
            for group, (num_rows, _) in enumerate(file.row_groups):
                for start in range(0, num_rows, limit):
                    result.append(Slice(len(result), number, group, start, min(limit, num_rows - start)))
        return tuple(result)

    def lanes(self) -> int:
        """From how many places of the data rows are mixed: bounded by the memory that open row groups take."""
        num_columns = len(schema.columns_needed(self.config))
        groups = [g for f in self.files for g in f.row_groups if g.num_rows]
        affordable = self.config.memory_bytes // max((g.open_bytes(num_columns) for g in groups), default=1)
        lanes = min(self.config.shuffle.interleave, affordable)
        num_streamed = sum(not g.is_small(num_columns) for g in groups)
        if num_streamed:
            # A lane that starts inside a streamed row group has to decode it up to there.
            lanes = min(lanes, max(4, num_streamed))
        return max(1, lanes)


def plan_epoch(dataset: Dataset, seed: int, epoch: int) -> list[Slice]:
    """Order of the slices in an epoch, the same on every machine.

    The data, in file order, is cut into as many lanes of equal rows as rows are mixed from. Row groups are permuted
    within a lane and lanes take turns, so that any run of consecutive slices is spread evenly over the data, however
    it is sorted. Slices of one row group keep their order, because a row group is read from its start.
    """
    slices = dataset.slices()
    if not dataset.config.shuffle.enabled:
        return list(slices)
    random = np.random.RandomState(
        np.array([0x706C616E, seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, epoch], dtype=np.uint32)
    )
    lanes: list[list[list[Slice]]] = [[] for _ in range(dataset.lanes())]
    num_columns = len(schema.columns_needed(dataset.config))
    streamed = [not g.is_small(num_columns) for f in dataset.files for g in f.row_groups]
    keep_whole = sum(streamed) >= len(lanes)
    total = sum(s.num_rows for s in slices)
    before, lane = 0, 0
    previous: tuple[int, int, int] | None = None
    for piece in slices:
        key = (piece.file, piece.row_group)
        if not (keep_whole and previous is not None and previous[:2] == key):
            lane = min(len(lanes) - 1, (2 * before + piece.num_rows) * len(lanes) // (2 * total))
        if previous != (*key, lane):
            lanes[lane].append([])
        lanes[lane][-1].append(piece)
        previous = (*key, lane)
        before += piece.num_rows
    queues = [[s for i in random.permutation(len(runs)) for s in runs[i]] for runs in lanes]
    merged: list[tuple[float, int, Slice]] = []
    for rank, number in enumerate(random.permutation(len(queues))):
        rows = sum(s.num_rows for s in queues[number])
        done = 0
        for piece in queues[number]:
            merged.append((done / rows, rank, piece))
            done += piece.num_rows
    merged.sort(key=lambda m: m[:2])
    return [piece for _, _, piece in merged]


def assign(slices: Sequence[Slice], num_trainers: int, rank: int, done: Mapping[int, int] | None = None) -> list[Slice]:
    """The part of a plan that trainer `rank` reads, in the plan's order.

    Parts are disjoint, complete, and differ by at most the largest slice in rows still to do. Slices of a row group
    stay together where that balance allows. `done` holds rows that were already trained, by slice index.
    """
    if not 0 <= rank < num_trainers:
        raise ValueError(f"rank {rank} is not below num_trainers {num_trainers}")
    if num_trainers == 1:
        return list(slices)
    done = done or {}
    left = [s.num_rows - done.get(s.index, 0) for s in slices]
    share = -(-sum(left) // num_trainers)
    # Whole row groups, in the plan's order, to whoever has the fewest rows; one that exceeds a share is cut into
    # neighbours.
    groups: dict[tuple[int, int], list[int]] = {}
    for place, piece in enumerate(slices):
        groups.setdefault((piece.file, piece.row_group), []).append(place)
    runs: list[list[int]] = []
    for places in groups.values():
        rows_of_run = share + 1
        for place in sorted(places, key=lambda p: slices[p].row_start):
            if rows_of_run + left[place] > share:
                runs.append([])
                rows_of_run = 0
            runs[-1].append(place)
            rows_of_run += left[place]
    parts: list[list[int]] = [[] for _ in range(num_trainers)]
    rows = [0] * num_trainers
    for run in runs:
        poorest = rows.index(min(rows))
        parts[poorest] += run
        rows[poorest] += sum(left[p] for p in run)
    # Then single slices go from the richest to the poorest while that makes them more equal.
    while True:
        richest, poorest = rows.index(max(rows)), rows.index(min(rows))
        gap = rows[richest] - rows[poorest]
        movable = [p for p in reversed(parts[richest]) if 0 < left[p] < gap]
        if not movable:
            break
        place = next((p for p in movable if 2 * left[p] <= gap), movable[0])
        parts[richest].remove(place)
        parts[poorest].append(place)
        rows[richest] -= left[place]
        rows[poorest] += left[place]
    return [slices[p] for p in sorted(parts[rank])]
