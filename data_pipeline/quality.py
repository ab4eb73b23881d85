"""One pass over the data that tells a user what a job will find in it (`paddlewheel data check`)."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from datasketches import hll_sketch

from paddlewheel.data_pipeline import arrow_arrays, schema
from paddlewheel.data_pipeline.arrow_arrays import Decimals, is_text, list_parts, nulls, plain, ragged, text_of
from paddlewheel.data_pipeline.config import DataConfig, SparseFeature
from paddlewheel.data_pipeline.dataset import Dataset, Slice
from paddlewheel.data_pipeline.encoded_rows import Rows
from paddlewheel.data_pipeline.encoder import Encoder, numbers
from paddlewheel.data_pipeline.errors import ChangedError, DataError
from paddlewheel.data_pipeline.files import SourceFile
from paddlewheel.data_pipeline.reader import RowGroups
from paddlewheel.data_pipeline.schema import columns_needed
from paddlewheel.data_pipeline.statistics import Fitted

_BLOCK_ROWS = 16384
_HLL_LG_K = 12
_TOP = 5
_KEPT = 200


@dataclass
class FeatureReport:
    """What one sparse feature looks like."""

    name: str
    column: str
    table: str
    rows: int = 0
    null_rows: int = 0
    """Rows without any id."""
    ids: int = 0
    distinct: float = 0.0
    """HyperLogLog estimate, standard error 1.6 %."""
    smallest: str | None = None
    largest: str | None = None
    longest_list: int = 0
    mean_list: float = 0.0
    truncated_ids: int = 0
    top: list[tuple[str, int]] = field(default_factory=list)
    """Most frequent values and (approximately) how often they occur."""


@dataclass
class DenseReport:
    """What one dense column looks like, as it is in the files."""

    name: str
    rows: int = 0
    null_rows: int = 0
    smallest: float | None = None
    largest: float | None = None
    mean: float | None = None


@dataclass
class FileReport:
    """Rows and click rate of one file."""

    name: str
    rows: int
    rows_read: int = 0
    positives: float = 0.0

    @property
    def rate(self) -> float | None:
        return self.positives / self.rows_read if self.rows_read else None


@dataclass
class TableReport:
    """Expected size of an embedding table."""

    name: str
    keys: float
    width: int
    memory_bytes: float
    checkpoint_bytes: float


@dataclass
class Quality:
    """The result. `errors` stop a job; `warnings` deserve a look."""

    fingerprint: str
    rows: int
    rows_read: int
    bytes: int
    label_rate: float | None
    features: list[FeatureReport]
    dense: list[DenseReport]
    files: list[FileReport]
    tables: list[TableReport] = field(default_factory=list)
    servers: int | None = None
    """Servers that hold the tables at the given memory of a server."""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        content = asdict(self)
        for dense in content["dense"]:  # JSON has no word for infinity
            for name in ("smallest", "largest", "mean"):
                dense[name] = dense[name] if dense[name] is not None and math.isfinite(dense[name]) else None
        for entry, file in zip(content["files"], self.files, strict=True):
            entry["rate"] = file.rate
        return content


class _Feature:
    """Running figures of a feature."""

    def __init__(self, feature: SparseFeature) -> None:
        self.feature = feature
        self.report = FeatureReport(feature.name, " x ".join(feature.columns), feature.table)
        self.sketch = hll_sketch(_HLL_LG_K)
        self.values: Counter[str] = Counter()
        self._low: Any = None
        self._high: Any = None

    def add(
        self,
        keys: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.int64],
        missing: np.uint64,
        array: pa.Array | None,
    ) -> None:
        """Takes the ids of a block, flat, and how many each row has; `missing` is the key that stands for none."""
        report = self.report
        if missing:
            row = np.repeat(np.arange(lengths.size), lengths)
            lengths = np.bincount(row[keys != missing], minlength=lengths.size)
            keys = keys[keys != missing]
        report.rows += lengths.size
        report.null_rows += int((lengths == 0).sum())
        report.ids += int(lengths.sum())
        report.longest_list = max(report.longest_list, int(lengths.max(initial=0)))
        for key in np.unique(keys[keys != 0]).view(np.int64).tolist():
            self.sketch.update(key)
        if array is None or self.feature.cross:
            return
        values, starts, lengths = list_parts(array)
        if len(values) != len(array):
            values = values.take(pa.array(ragged(starts, lengths)[1]))
        if pat.is_null(values.type) or values.null_count == len(values):
            return
        for value, text, count in _words(values):
            self.values[text] += count
            if self._low is None or value < self._low:
                self._low, self.report.smallest = value, text
            if self._high is None or value > self._high:
                self._high, self.report.largest = value, text
        if len(self.values) > 50 * _KEPT:
            self.values = Counter(dict(self.values.most_common(10 * _KEPT)))

    def finish(self) -> FeatureReport:
        report = self.report
        report.distinct = 0.0 if self.sketch.is_empty() else float(self.sketch.get_estimate())
        report.mean_list = report.ids / report.rows if report.rows else 0.0
        report.top = self.values.most_common(_TOP)
        return report


Words = list[tuple[Any, str, int]]
"""Values of a column: something that orders them among all of their kind, their text, how often they occur."""


def _words(array: pa.Array) -> Words:
    """Of the values of a simple array that is not all null: the smallest, the largest and the most frequent."""
    if pat.is_dictionary(array.type) and not is_text(array.dictionary.type):
        array = plain(array)
    gaps = nulls(array)
    rows = np.arange(len(array)) if gaps is None else np.flatnonzero(~gaps)
    if pat.is_dictionary(array.type) or is_text(array.type):
        return _distinct_texts(array, rows)
    if pat.is_decimal(array.type):
        values, scale = Decimals(array), array.type.scale
        unscaled = Counter(values.unscaled(row) for row in rows.tolist())
        chosen = {min(unscaled), max(unscaled), *(number for number, _ in unscaled.most_common(_KEPT))}
        return [
            (
                Fraction(number) / Fraction(10) ** scale,
                _short(arrow_arrays.decimal_text(number, scale)),
                unscaled[number],
            )
            for number in chosen
        ]
    is_clock = pat.is_time(array.type) or pat.is_timestamp(array.type)
    stored = arrow_arrays.raw(array, arrow_arrays.numpy_dtype(array.type)) if is_clock else arrow_arrays.integers(array)
    used, at, counts = np.unique(stored[rows], return_index=True, return_counts=True)
    order = {0, used.size - 1, *np.argsort(-counts, kind="stable")[:_KEPT].tolist()}
    unit = arrow_arrays.UNITS[array.type.unit] if is_clock else 1
    return [
        (int(used[place]) * unit, _short(text_of(array, int(rows[at[place]]))), int(counts[place])) for place in order
    ]


def _distinct_texts(array: pa.Array, rows: npt.NDArray[Any]) -> Words:
    """The same of text; whether its bytes are UTF-8 is not asked."""
    if not pat.is_dictionary(array.type):
        array = array.cast(pa.large_binary()).dictionary_encode()
    used, counts = np.unique(arrow_arrays.integers(array.indices)[rows], return_counts=True)
    words = array.dictionary.take(pa.array(used)).cast(pa.large_binary())
    ends = [pc.index(words, end).as_py() for end in pc.min_max(words).values()]
    order = {*ends, *np.argsort(-counts, kind="stable")[:_KEPT].tolist()}
    return [(words[place].as_py(), _short(text_of(words, place)), int(counts[place])) for place in order]


def _short(text: str | None) -> str:
    """A value for a table of a report: printable, on one line, not too long."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text or "")
    return text if len(text) <= 40 else text[:37] + "..."


def check(
    dataset: Dataset,
    config: DataConfig,
    *,
    evaluation: Dataset | None = None,
    sample_rows: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """Reads all rows, or slices at even distances with about `sample_rows` rows. Bad rows and files become findings.

    Of the `evaluation` data nothing is read, but files that are as large as one of the training data.
    """
    encoder = Encoder(config, Fitted.load(config) if config.statistics is not None else Fitted({}, {}, {}, {}))
    features = [_Feature(f) for f in config.sparse]
    dense = {c: DenseReport(c) for c in config.dense_columns}
    sums: dict[str, float] = defaultdict(float)
    files = [FileReport(f.source.name, f.num_rows) for f in dataset.files]
    quality = Quality(
        dataset.fingerprint, dataset.num_rows, 0, sum(f.source.size for f in dataset.files), None, [], [], files
    )
    quality.errors += list(dataset.skipped_files)
    slices = [s for s in dataset.slices(max(dataset.slice_rows, _BLOCK_ROWS)) if s.num_rows]
    if sample_rows is not None and sample_rows < dataset.num_rows:
        count = max(1, math.ceil(len(slices) * sample_rows / dataset.num_rows))
        slices = [slices[i * len(slices) // count] for i in range(count)]
    total = sum(s.num_rows for s in slices)
    readers = RowGroups(dataset, config, 1)
    bad: dict[str, tuple[int, str]] = {}
    done = 0
    try:
        for piece in slices:
            try:
                for start in range(0, piece.num_rows, _BLOCK_ROWS):
                    asked = min(_BLOCK_ROWS, piece.num_rows - start)
                    for first, num_rows, columns in readers.pieces(piece, start, asked):
                        _block(encoder, config, piece, first, num_rows, columns, features, dense, sums, quality, bad)
            except ChangedError:
                raise
            except DataError as error:
                if str(error) not in quality.errors:
                    quality.errors.append(str(error))
            done += piece.num_rows
            if on_progress is not None:
                on_progress(done, total)
    finally:
        readers.close()
    quality.features = [f.finish() for f in features]
    for name, report in dense.items():
        present = report.rows - report.null_rows
        report.mean = sums[name] / present if present else None
    quality.dense = list(dense.values())
    if quality.rows_read:
        quality.label_rate = sum(f.positives for f in files) / quality.rows_read
    for why, (count, example) in bad.items():
        target = quality.errors if config.on_bad_row == "fail" else quality.warnings
        target.append(f"{count:,} rows: {why} (first: {example})")
    _findings(quality, dataset, config)
    quality.warnings += warnings(dataset, evaluation)
    if evaluation is not None:
        quality.warnings += _copies(dataset, evaluation)
    return quality


def _block(
    encoder: Encoder,
    config: DataConfig,
    piece: Slice,
    start: int,
    num_rows: int,
    columns: dict[str, pa.Array],
    features: list[_Feature],
    dense: dict[str, DenseReport],
    sums: dict[str, float],
    quality: Quality,
    bad: dict[str, tuple[int, str]],
) -> None:
    rows = Rows.empty(config, num_rows)
    reasons = encoder.encode(columns, rows, slice(0, num_rows))
    file = quality.files[piece.file]
    for row, why in reasons.items():
        column = why.split(" is ", 1)[0]
        count, example = bad.get(
            column, (0, f"{file.name}, row group {piece.row_group}, row {piece.row_start + start + row}: {why}")
        )
        bad[column] = (count + 1, example)
    good = ~rows.bad_N
    file.rows_read += int(good.sum())
    file.positives += float(rows.labels_NL[good, 0].sum())
    quality.rows_read += int(good.sum())
    places: dict[str, int] = defaultdict(int)
    for item in features:
        feature = item.feature
        array = columns.get(feature.columns[0])
        if feature.multi_valued:
            lists = rows.lists[feature.name][0]
            item.report.truncated_ids += lists.num_truncated
            item.add(lists.keys, np.diff(lists.offsets), encoder.missing_key(feature), array)
        else:
            keys = rows.singles[feature.table][:, places[feature.table]]
            places[feature.table] += 1
            item.add(keys[keys != 0], (keys != 0).astype(np.int64), encoder.missing_key(feature), array)
    for name, report in dense.items():
        report.rows += num_rows
        if name not in columns:
            report.null_rows += num_rows
            continue
        values, gaps = numbers(columns[name])
        values = values.astype(np.float64)
        values = values if gaps is None else values[~gaps]
        report.null_rows += num_rows - values.size
        if values.size:
            low, high = float(values.min()), float(values.max())
            report.smallest = low if report.smallest is None else min(report.smallest, low)
            report.largest = high if report.largest is None else max(report.largest, high)
            with np.errstate(over="ignore", invalid="ignore"):
                sums[name] += float(values.sum())


def _findings(quality: Quality, dataset: Dataset, config: DataConfig) -> None:
    """What deserves a look."""
    warn = quality.warnings.append
    rate = quality.label_rate
    if rate is None:
        quality.errors.append("no usable row was read")
        return
    if rate in (0.0, 1.0):
        quality.errors.append(f"every label is {int(rate)}: nothing can be learned, and AUC is undefined")
    for file in quality.files:
        if file.rate is None or not 0 < rate < 1:
            continue
        error = math.sqrt(rate * (1 - rate) / file.rows_read)
        if abs(file.rate - rate) > max(6 * error, 0.2 * rate):
            warn(
                f"{file.name}: label rate {file.rate:.4f}, overall {rate:.4f}: the data drifts or is "
                "sorted; shuffling evens it out"
            )
    _feature_findings(quality)
    for column, count in dataset.absent_columns.items():
        warn(f"column {column}: {count} of {len(dataset.files)} files lack it")
    for first, second in duplicates(dataset):
        warn(f"{second}: has the same content as {first}; its rows are trained twice")
    num_columns = len(columns_needed(config))
    largest = max(g.num_rows for f in dataset.files for g in f.row_groups)
    if (
        config.shuffle.enabled
        and dataset.lanes() < min(8, config.shuffle.interleave)
        and dataset.num_rows > 4 * config.shuffle.window_rows
    ):
        warn(
            f"row groups of up to {largest:,} rows and {num_columns} columns: rows are mixed from "
            f"{dataset.lanes()} places only. Row "
            "groups of about 65,536 rows mix better and are shared better among trainers"
        )
    if len(dataset.files) > 100 and dataset.num_rows < 2000 * len(dataset.files):
        warn(
            f"{len(dataset.files):,} files with {dataset.num_rows / len(dataset.files):,.0f} rows "
            "each: larger files read faster"
        )


def _feature_findings(quality: Quality) -> None:
    warn = quality.warnings.append
    for item in quality.features:
        if item.rows and item.null_rows > 0.95 * item.rows:
            warn(f"feature {item.name}: {item.null_rows / item.rows:.1%} of the rows have no id")
        elif item.rows and item.distinct < 1.5:
            warn(f"feature {item.name}: it has one value only")
        if item.truncated_ids > 0.05 * max(1, item.ids):
            warn(f"feature {item.name}: {item.truncated_ids:,} ids are cut off by max_length")
        if item.ids and item.distinct > 0.5 * item.ids and item.ids > 10_000:
            warn(
                f"feature {item.name}: about {item.distinct:,.0f} values among {item.ids:,} ids: most "
                "are seen once (a row id?); consider vocabulary"
            )
    for number in quality.dense:
        if number.rows and number.smallest == number.largest:
            warn(f"dense column {number.name}: it has one value only")


def warnings(dataset: Dataset, evaluation: Dataset | None) -> list[str]:
    """What deserves a look and can be told from names and footers."""
    found = schema.mixed_spaces(dataset.types_by_column(), dataset.config)
    shared = evaluation.files_shared_with(dataset) if evaluation is not None else []
    if evaluation is not None and shared:
        found.append(
            f"{len(shared):,} of {len(evaluation.files):,} evaluation files are training files, too, such as "
            f"{shared[0]}: what is evaluated has been trained. Keep the files of data.eval out of data.train"
        )
    return found


def _copies(dataset: Dataset, evaluation: Dataset) -> list[str]:
    """Warnings of evaluation files that are copies of training files."""
    shared = set(evaluation.files_shared_with(dataset))
    return [
        f"{copy} (data.eval): has the same content as {trained} (data.train)"
        for trained, copy in duplicates(dataset, evaluation)
        if copy not in shared
    ]


def duplicates(dataset: Dataset, other: Dataset | None = None) -> list[tuple[str, str]]:
    """Pairs of files with the same bytes, within a dataset or between it and another. Only files of equal size and rows
    are read.
    """
    groups: dict[tuple[int, int], list[tuple[SourceFile, bool]]] = defaultdict(list)
    for is_other, files in ((False, dataset.files), (True, other.files if other is not None else ())):
        for file in files:
            groups[file.source.size, file.num_rows].append((file.source, is_other))
    found: list[tuple[str, str]] = []
    for members in groups.values():
        if len(members) == 1 or (other is not None and not any(is_other for _, is_other in members)):
            continue
        seen: dict[str, str] = {}
        for source, is_other in members:
            digest = hashlib.sha256()
            with source.filesystem.open_input_stream(source.path) as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
            if is_other:
                first = seen.get(digest.hexdigest(), source.name)
            else:
                first = seen.setdefault(digest.hexdigest(), source.name)
            if first != source.name and is_other == (other is not None):
                found.append((first, source.name))
    return found


@dataclass(frozen=True)
class KeySize:
    """What one key of a table takes, in bytes; `floats` are those pulled for it."""

    floats: int
    memory_bytes: float
    saved_bytes: float


def plan_capacity(
    quality: Quality, config: DataConfig, sizes: Mapping[str, KeySize], servers_needed: Callable[[float], int]
) -> None:
    """Adds expected sizes of tables and the number of servers.

    Args:
        quality: what the data holds.
        config: its features.
        sizes: of a key, by table.
        servers_needed: how many servers hold so many bytes of tables.
    """
    by_table: dict[str, float] = defaultdict(float)
    by_space: dict[tuple[str, str], float] = defaultdict(float)
    for item, feature in zip(quality.features, config.sparse, strict=True):
        space = (feature.table, feature.space)
        by_space[space] = max(by_space[space], item.distinct)  # features of a space may share their values
    for (table, _), keys in by_space.items():
        by_table[table] += keys
    quality.tables = [
        TableReport(table, keys, sizes[table].floats, keys * sizes[table].memory_bytes, keys * sizes[table].saved_bytes)
        for table, keys in by_table.items()
    ]
    quality.servers = servers_needed(sum(table.memory_bytes for table in quality.tables))
