"""The pass over the training data that finds means, quantiles and vocabularies (`paddlewheel data fit`)."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from paddlewheel.data_pipeline.arrow_arrays import simple
from paddlewheel.data_pipeline.config import DataConfig, DenseBlock
from paddlewheel.data_pipeline.dataset import Dataset, Slice
from paddlewheel.data_pipeline.encoder import Encoder, numbers
from paddlewheel.data_pipeline.errors import DataError, UnreadableError
from paddlewheel.data_pipeline.reader import RowGroups
from paddlewheel.data_pipeline.statistics import Fitted, needs

UInt64 = npt.NDArray[np.uint64]
_BLOCK_ROWS = 16384
_QUANTILE_VALUES = 1 << 20


def blocks(dataset: Dataset, config: DataConfig) -> Iterator[tuple[Slice, int, int, dict[str, pa.Array]]]:
    """All rows in file order: slice, first row in the slice, number of rows, columns.

    Raises UnreadableError, unless the job leaves damaged files out.
    """
    readers = RowGroups(dataset, config, 1)
    try:
        for piece in dataset.slices():
            for start in range(0, piece.num_rows, _BLOCK_ROWS):
                num_rows = min(_BLOCK_ROWS, piece.num_rows - start)
                try:
                    for first, count, columns in readers.pieces(piece, start, num_rows):
                        yield piece, first, count, {name: simple(array) for name, array in columns.items()}
                except UnreadableError:
                    if config.on_bad_file == "fail":
                        raise
    finally:
        readers.close()


def fit(dataset: Dataset, config: DataConfig, *, on_progress: Callable[[int, int], None] | None = None) -> Fitted:
    """Reads the training data once and writes what the job needs of it to `data.statistics`.

    Counts and moments are exact. Quantiles come from up to 2^20 values at even distances. Raises DataError for
    unreadable data.
    """
    encoder = Encoder(config, Fitted({}, {}, {}, {}))
    blocks_to_fit = [b for b in config.dense if b.standardise]
    moments = {c: Moments() for b in blocks_to_fit for c in b.columns}
    counters = {f.name: KeyCounter() for f in config.sparse if f.vocabulary is not None}
    quantile_features = [f for f in config.sparse if f.bucketize is not None and f.bucketize.kind == "quantiles"]
    samples: dict[str, list[npt.NDArray[np.float64]]] = {f.name: [] for f in quantile_features}
    stride = -(-dataset.num_rows // _QUANTILE_VALUES)
    done = 0
    for _, _, num_rows, columns in blocks(dataset, config):
        for block in blocks_to_fit:
            _add_moments(encoder, block, columns, num_rows, moments)
        for feature in config.sparse:
            if feature.name not in counters:
                continue
            if feature.multi_valued:
                lists = encoder.list_keys(feature, columns, num_rows, _ignore, vocabulary=False)
                counters[feature.name].add(lists.keys)
            else:
                counters[feature.name].add(encoder.single_keys(feature, columns, num_rows, _ignore))
        for feature in quantile_features:
            if feature.columns[0] in columns:
                values, mask = numbers(columns[feature.columns[0]])
                kept = values.astype(np.float64)[~mask] if mask is not None else values.astype(np.float64)
                samples[feature.name].append(np.clip(kept[::stride], -1e15, 1e15))  # as before they are compared
        done += num_rows
        if on_progress is not None:
            on_progress(done, dataset.num_rows)
    _check_moments(moments)
    vocabularies: dict[str, UInt64] = {}
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for feature in config.sparse:
        if feature.vocabulary is not None:
            keys, occurrences = counters[feature.name].result()
            often = occurrences >= feature.vocabulary.min_count
            vocabularies[feature.name], counts[feature.name] = keys[often], occurrences[often]
    boundaries: dict[str, npt.NDArray[np.float64]] = {}
    for feature in quantile_features:
        assert feature.bucketize is not None
        values = np.concatenate(samples[feature.name]) if samples[feature.name] else np.zeros(0)
        at = np.arange(1, feature.bucketize.num_buckets) / feature.bucketize.num_buckets
        boundaries[feature.name] = np.unique(np.quantile(values, at)) if values.size else np.zeros(0)
    about = {"fingerprint": dataset.fingerprint, "num_rows": dataset.num_rows}
    result = Fitted({c: (m.mean, m.deviation) for c, m in moments.items()}, boundaries, vocabularies, about)
    if needs(config):
        result.save(config, counts)
    return result


def _add_moments(
    encoder: Encoder, block: DenseBlock, columns: dict[str, pa.Array], num_rows: int, moments: dict[str, "Moments"]
) -> None:
    """Takes a block of rows. Without a `fill`, a row that lacks the value is a bad row and no zero."""
    absent = np.zeros((num_rows, len(block.columns)), dtype=bool)
    values = encoder.dense_values(columns, block, num_rows, absent)
    for position, column in enumerate(block.columns):
        kept = slice(None) if block.fill is not None else ~absent[:, position]
        moments[column].add(values[kept, position])


def _check_moments(moments: dict[str, "Moments"]) -> None:
    for column, found in moments.items():
        if not (np.isfinite(found.mean) and np.isfinite(found.deviation)):
            raise DataError(
                f"column {column!r}: its mean is {found.mean} and its deviation {found.deviation}, so it cannot be "
                "standardised: give its block a `clip`, or `transform: log1p`"
            )


def _ignore(mask: Any, column: str, array: pa.Array, why: str) -> None:
    """Bad rows are for the loader to judge."""


class KeyCounter:
    """Exact counts of keys, in memory proportional to the distinct ones."""

    def __init__(self) -> None:
        self._keys = np.zeros(0, dtype=np.uint64)
        self._counts = np.zeros(0, dtype=np.int64)
        self._pending: list[UInt64] = []
        self._size = 0

    def add(self, keys: UInt64) -> None:
        self._pending.append(keys[keys != 0])
        self._size += self._pending[-1].size
        if self._size > max(1 << 20, self._keys.size):
            self._merge()

    def _merge(self) -> None:
        fresh, counts = np.unique(
            np.concatenate(self._pending) if self._pending else self._keys[:0], return_counts=True
        )
        both = np.concatenate([self._keys, fresh])
        self._keys, where = np.unique(both, return_inverse=True)
        total = np.zeros(self._keys.size, dtype=np.int64)
        np.add.at(total, where, np.concatenate([self._counts, counts]))
        self._counts = total
        self._pending, self._size = [], 0

    def result(self) -> tuple[UInt64, npt.NDArray[np.int64]]:
        """Distinct keys, rising, and how often each occurred."""
        self._merge()
        return self._keys, self._counts


class Moments:
    """Mean and standard deviation of a stream of blocks, as of their distances from the first value.

    So a constant has the deviation 0, whichever it is: the mean of a thousand times 0.1 is not 0.1 in floats, but their
    distances are 0. Squares are kept in units of a power of two, or those of 1e200 would be infinite.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first = 0.0
        self._distance = 0.0
        self._squares = 0.0
        self._unit = 2.0**-1022

    def add(self, values: npt.NDArray[Any]) -> None:
        """Takes a block; values that are not finite are left out."""
        values = values.astype(np.float64)
        values = values[np.isfinite(values)]
        if values.size == 0:
            return
        if self.count == 0:
            self._first = float(values[0])
        with np.errstate(over="ignore", invalid="ignore"):
            far = values - self._first
            largest = float(np.abs(far).max())
            if np.isfinite(largest) and largest > self._unit:
                unit = 2.0 ** int(np.frexp(largest)[1] - 1)
                self._distance, self._squares = (
                    self._distance * (self._unit / unit),
                    self._squares * (self._unit / unit) ** 2,
                )
                self._unit = unit
            far /= self._unit
            # Chan, Golub, LeVeque 1983
            mean = float(far.mean())
            squares = float(((far - mean) ** 2).sum())
            total = self.count + values.size
            shift = mean - self._distance
            self._distance += shift * values.size / total
            self._squares += squares + shift * shift * self.count * values.size / total
            self.count = total

    @property
    def mean(self) -> float:
        return self._first + self._distance * self._unit

    @property
    def deviation(self) -> float:
        return float(np.sqrt(self._squares / self.count)) * self._unit if self.count else 0.0
