"""Arrow columns -> keys and numbers, one block of rows at a time.

Shapes: N rows of a block, D dense columns, L labels, F1 single-valued features of a table.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from data_pipeline import keys
from data_pipeline.config import DataConfig, DenseBlock, SparseFeature
from data_pipeline.fitted import Fitted

UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
Reject = Callable[[Bool, str, pa.Array, str], None]
"""Takes a mask of bad rows, the column, its values and the reason."""
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")


@dataclass
class Lists:
    """Ids of a multi-valued feature: row i holds `keys[offsets[i]:offsets[i + 1]]`."""

    keys: UInt64
    offsets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None
    num_truncated: int = 0
    """Ids left out because a list was longer than `max_length`."""


_NO_LISTS = Lists(np.zeros(0, dtype=np.uint64), np.zeros(1, dtype=np.int64), None)


@dataclass
class Rows:
    """Encoded rows, in the order in which they were read. Filled block by block; see `Encoder.encode`."""

    labels_NL: npt.NDArray[np.float32]
    dense_ND: npt.NDArray[np.float32]
    singles: dict[str, UInt64]
    """Per table: keys [N, F1]; 0 = no feature."""
    lists: dict[str, list[Lists]]
    """Per multi-valued feature: one entry per block."""
    weight_N: npt.NDArray[np.float32] | None
    group_N: UInt64 | None
    bad_N: Bool
    report_by: dict[str, npt.NDArray[np.object_]] = field(default_factory=dict)
    """Per column of `data.report_by`: values as text, None for null."""

    @classmethod
    def empty(cls, config: DataConfig, num_rows: int, num_blocks: int = 1) -> "Rows":
        """Room for `num_rows` rows that come in `num_blocks` blocks."""
        return cls(
            labels_NL=np.empty((num_rows, len(config.labels)), dtype=np.float32),
            dense_ND=np.empty((num_rows, len(config.dense_columns)), dtype=np.float32),
            singles={
                t: np.empty(
                    (num_rows, sum(f.table == t and not f.multi_valued for f in config.sparse)), dtype=np.uint64
                )
                for t in config.tables
            },
            lists={f.name: [_NO_LISTS] * num_blocks for f in config.sparse if f.multi_valued},
            weight_N=None if config.sample_weight is None else np.empty(num_rows, dtype=np.float32),
            group_N=None if config.group is None else np.empty(num_rows, dtype=np.uint64),
            bad_N=np.zeros(num_rows, dtype=bool),
            report_by={c: np.empty(num_rows, dtype=object) for c in config.report_by},
        )


def nulls(array: pa.Array) -> Bool | None:
    """Mask of nulls, or None if there is none. (Dictionaries read from Parquet have no null words.)"""
    if array.null_count == 0:
        return None
    mask: Bool = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def plain(array: pa.Array) -> pa.Array:
    """The array without dictionary encoding, in one chunk."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array.dictionary_decode() if pat.is_dictionary(array.type) else array


def _raw(array: pa.Array, dtype: Any) -> Array:
    """Values of a fixed-width array without a copy and without a detour through float; nulls hold anything."""
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), dtype=dtype)
    values: Array = np.frombuffer(buffer, dtype=dtype)
    return values[array.offset : array.offset + len(array)]


def numpy_dtype(kind: pa.DataType) -> Any:
    """How NumPy calls a number type; timestamps and durations are int64 as stored. (Arrow's own answer needs
    pandas.)
    """
    letter = "f" if pat.is_floating(kind) else "u" if pat.is_unsigned_integer(kind) else "i"
    return np.dtype(f"{letter}{kind.bit_width // 8}")


def integers(array: pa.Array) -> Array:
    """Integer, boolean, date, time values as they are stored; nulls hold anything."""
    kind = array.type
    if pat.is_boolean(kind):
        return _raw(array.cast(pa.uint8()), np.uint8)
    if pat.is_date(kind) or pat.is_time(kind):
        wide = pat.is_date64(kind) or pat.is_time64(kind)
        return _raw(array, np.int64 if wide else np.int32)
    return _raw(array, numpy_dtype(kind))


def patterns(array: pa.Array) -> UInt64:
    """Integers as 64-bit two's complement patterns (a new array)."""
    values = integers(array)
    if values.dtype.itemsize == 8:
        return values.view(np.uint64).copy()
    if values.dtype.kind == "u":
        return values.astype(np.uint64)
    return values.astype(np.int64).view(np.uint64)


def string_key_array(array: pa.Array, seed: np.uint64) -> UInt64:
    """Keys of strings or bytes; nulls hold anything."""
    kind = array.type
    if len(array) == 0:
        return np.zeros(0, dtype=np.uint64)
    if pat.is_fixed_size_binary(kind):
        width = kind.byte_width
        starts = (np.arange(len(array), dtype=np.int64) + array.offset) * width
        ends = starts + width
        buffer = array.buffers()[1]
    else:
        large = pat.is_large_string(kind) or pat.is_large_binary(kind)
        offsets = np.frombuffer(array.buffers()[1], dtype=np.int64 if large else np.int32)
        offsets = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
        starts, ends = offsets[:-1], offsets[1:]
        buffer = array.buffers()[2]
    data: npt.NDArray[np.uint8] = (
        np.frombuffer(buffer, dtype=np.uint8) if buffer is not None else np.zeros(8, dtype=np.uint8)
    )
    return keys.string_keys(data, starts, ends, seed)


def numbers(array: pa.Array) -> tuple[Array, Bool | None]:
    """Float values and the mask of nulls and NaN (None if there is none)."""
    array = plain(array)
    kind = array.type
    if pat.is_null(kind):
        return np.zeros(len(array), dtype=np.float32), np.ones(len(array), dtype=bool)
    mask = nulls(array)
    if pat.is_decimal(kind):
        array = array.cast(pa.float64())
        values: Array = _raw(array, np.float64)
    elif pat.is_floating(kind):
        values = _raw(array, numpy_dtype(kind))
        gaps = np.isnan(values)
        if gaps.any():
            mask = gaps if mask is None else mask | gaps
    else:
        values = integers(array)
        values = values.astype(np.float32 if values.dtype.itemsize < 4 else np.float64)
    return values, mask


class Encoder:
    """Applies the job's features to blocks of Arrow columns."""

    def __init__(self, config: DataConfig, fitted: Fitted) -> None:
        self._config = config
        self._fitted = fitted
        self._singles: dict[str, list[SparseFeature]] = {t: [] for t in config.tables}
        for feature in config.sparse:
            if not feature.multi_valued:
                self._singles[feature.table].append(feature)
        self._seeds = {f.space: keys.space_seed(f.space) for f in config.sparse}
        self._column_seeds = {c: keys.space_seed(c) for f in config.sparse for c in f.cross}
        self._missing = {f.space: keys.special_key(f.space, "missing") for f in config.sparse}
        self._group_seed = keys.space_seed("group")

    def encode(self, columns: dict[str, pa.Array], into: Rows, at: slice, block: int = 0) -> dict[int, str]:
        """Encodes block number `block` into rows `at` of `into`. Returns why rows are bad, by position in the block.

        Blocks may be encoded at the same time in several threads.

        A column that is absent from `columns` is treated as its feature declares.
        """
        config = self._config
        num_rows = at.stop - at.start
        reasons: dict[int, str] = {}
        bad = into.bad_N[at]

        def reject(mask: Bool, column: str, array: pa.Array, why: str) -> None:
            fresh = np.flatnonzero(mask & ~bad)
            for row in fresh.tolist():
                reasons[row] = f"column {column!r} is {array[row].as_py()!r}: {why}"
            bad[fresh] = True

        for position, column in enumerate(config.labels):
            into.labels_NL[at, position] = self._label(columns[column], column, reject)
        position = 0
        for dense in config.dense:
            self._dense(columns, dense, into.dense_ND[at, position : position + len(dense.columns)], reject)
            position += len(dense.columns)
        for table, features in self._singles.items():
            if features:
                self._single_table(features, columns, into.singles[table][at], reject)
        for feature in config.sparse:
            if feature.multi_valued:
                into.lists[feature.name][block] = self.list_keys(feature, columns, num_rows, reject)
        if config.sample_weight is not None and into.weight_N is not None:
            self._sample_weight(columns[config.sample_weight], config.sample_weight, into.weight_N[at], reject)
        for column, values_N in into.report_by.items():
            text = plain(columns[column])
            text = text if pat.is_binary(text.type) else text.cast(pa.string())
            values_N[at] = text.to_numpy(zero_copy_only=False)
        if config.group is not None and into.group_N is not None:
            into.group_N[at] = self._group(columns[config.group])
        return reasons

    @staticmethod
    def _sample_weight(array: pa.Array, column: str, out: Array, reject: Reject) -> None:
        values, mask = numbers(array)
        out[:] = values
        wrong = ~np.isfinite(out) | (values < 0)
        if mask is not None:
            wrong |= mask
        if wrong.any():
            reject(wrong, column, array, "a sample weight must be finite and not negative")

    def _group(self, array: pa.Array) -> UInt64:
        group = self._value_keys(array, self._group_seed, None, 0)
        gaps = nulls(array)
        if gaps is not None:
            group[gaps] = 0
        return group

    def leave_out(self, into: Rows, at: slice, block: int) -> None:
        """Marks rows `at` as bad without values, because they cannot be read."""
        into.bad_N[at] = True
        num_rows = at.stop - at.start
        for feature in self._config.sparse:
            if feature.multi_valued:
                weights = np.zeros(0, dtype=np.float32) if feature.weights is not None else None
                nothing = np.zeros(num_rows + 1, dtype=np.int64)
                into.lists[feature.name][block] = Lists(np.zeros(0, dtype=np.uint64), nothing, weights)

    def _label(self, array: pa.Array, column: str, reject: Reject) -> Array:
        values, mask = numbers(array)
        rule = self._config.label
        result: Array
        if rule.positive is not None or rule.at_least is not None:
            result = values == rule.positive if rule.positive is not None else values >= rule.at_least
            wrong, allowed = np.zeros(values.shape, dtype=bool), "a label must not be null"
        elif rule.soft:
            result, wrong = values, ~((values >= 0) & (values <= 1))
            allowed = "label: {soft: true} takes numbers from 0 to 1"
        else:
            result, wrong = values, (values != 0) & (values != 1)
            allowed = "a label is 0 or 1 (else declare label: {positive: VALUE}, {at_least: VALUE} or {soft: true})"
        if mask is not None:
            wrong = wrong | mask
        if wrong.any():
            reject(wrong, column, array, allowed)
        return result

    def dense_values(
        self, columns: dict[str, pa.Array], block: DenseBlock, num_rows: int, absent: Bool | None = None
    ) -> Array:
        """Values [N, D] of a block of columns after fill, transform and clip. Marks filled ones in `absent`."""
        read = [numbers(columns[c]) if c in columns else None for c in block.columns]
        exact = any(r is not None and r[0].dtype == np.float64 for r in read)
        values = np.empty((num_rows, len(read)), dtype=np.float64 if exact else np.float32)
        for position, got in enumerate(read):
            if got is None:
                values[:, position] = block.absent
                continue
            values[:, position] = got[0]
            if got[1] is not None:
                values[got[1], position] = 0 if block.fill is None else block.fill
                if absent is not None:
                    absent[:, position] = got[1]
        with np.errstate(over="ignore", invalid="ignore"):
            if block.transform == "log1p":
                values = np.copysign(np.log1p(np.abs(values)), values)
            if block.clip is not None:
                np.clip(values, block.clip[0], block.clip[1], out=values)
        return values

    def _dense(self, columns: dict[str, pa.Array], block: DenseBlock, out: Array, reject: Reject) -> None:
        """Writes a block of columns [N, D] into `out`, all columns in one go."""
        absent = np.zeros(out.shape, dtype=bool)
        values = self.dense_values(columns, block, out.shape[0], absent)
        if block.standardise:
            mean, scale = self._fitted.mean_and_scale(block)
            values = (values - mean) * scale
        with np.errstate(over="ignore", invalid="ignore"):
            out[:] = values
        wrong = ~np.isfinite(out)
        if block.fill is None:
            wrong |= absent
        if wrong.any():
            for position in np.flatnonzero(wrong.any(axis=0)).tolist():
                column = block.columns[position]
                reject(
                    wrong[:, position], column, columns[column], "not a finite number after fill, transform and clip"
                )

    def _single_table(
        self, features: list[SparseFeature], columns: dict[str, pa.Array], out: UInt64, reject: Reject
    ) -> None:
        """Writes keys [N, F1] into `out`. Plain integers of all features are mixed together, in one go."""
        together: list[int] = []
        gaps: list[tuple[int, Bool]] = []
        for position, feature in enumerate(features):
            array = columns.get(feature.columns[0])
            if array is None or not _is_plain_integer(feature, array.type):
                continue
            together.append(position)
            values = integers(array)
            if values.dtype.kind == "u":
                out[:, position] = values
            else:
                out.view(np.int64)[:, position] = values
            if feature.offset:
                out[:, position] += np.uint64(feature.offset & 0xFFFFFFFFFFFFFFFF)
            mask = nulls(array)
            if mask is not None:
                gaps.append((position, mask))
        if together:
            seeds = np.array([self._seeds[features[p].space] for p in together], dtype=np.uint64)
            if len(together) == len(features):
                keys.integer_keys(out, seeds)
            else:
                out[:, together] = keys.integer_keys(out[:, together], seeds)
            for position, mask in gaps:
                out[mask, position] = self.missing_key(features[position])
        for position, feature in enumerate(features):
            if position not in together:
                out[:, position] = self.single_keys(feature, columns, out.shape[0], reject)
            if feature.vocabulary is not None:
                out[:, position] = self._fitted.known(feature, out[:, position])

    def missing_key(self, feature: SparseFeature) -> np.uint64:
        """What stands for null: a key of its own, or 0 for no feature."""
        return self._missing[feature.space] if feature.missing == "key" else np.uint64(0)

    def single_keys(
        self, feature: SparseFeature, columns: dict[str, pa.Array], num_rows: int, reject: Reject
    ) -> UInt64:
        """Keys [N] of a single-valued feature, before its vocabulary."""
        missing = self.missing_key(feature)
        if any(c not in columns for c in feature.columns):
            return np.full(num_rows, missing, dtype=np.uint64)
        gaps = np.zeros(num_rows, dtype=bool)
        seed = self._seeds[feature.space]
        result = np.full(num_rows, seed, dtype=np.uint64)
        for column in feature.columns:
            array = columns[column]
            if feature.bucketize is not None:
                values, mask = numbers(array)
                result = keys.integer_keys(self._bucket(feature, values).astype(np.int64).view(np.uint64), seed)
            else:
                mask = nulls(array)
                unparsed = np.zeros(num_rows, dtype=bool)
                part_seed = self._column_seeds[column] if feature.cross else seed
                part = self._value_keys(array, part_seed, feature.type, feature.offset, unparsed)
                result = keys.combine(result, part) if feature.cross else part
                if unparsed.any():
                    reject(unparsed, column, array, f"feature {feature.name!r} is declared `type: integer`")
            if mask is not None:
                gaps |= mask
        result[gaps] = missing
        return result

    def _bucket(self, feature: SparseFeature, values: Array) -> Array:
        rule = feature.bucketize
        assert rule is not None
        values = np.clip(np.nan_to_num(values.astype(np.float64), nan=0.0), -1e15, 1e15)
        if rule.kind == "log_square":
            logs = np.log(np.maximum(values, 1.0))
            squared: Array = np.where(values > 2, np.floor(logs * logs), np.floor(values))
            return squared
        edges = self._fitted.boundaries[feature.name] if rule.kind == "quantiles" else np.asarray(rule.boundaries)
        buckets: Array = np.searchsorted(edges, values, side="right")
        return buckets

    def _value_keys(
        self, array: pa.Array, seed: np.uint64, declared: str | None, offset: int, unparsed: Bool | None = None
    ) -> UInt64:
        """Keys of values; a null's key may be anything. Sets `unparsed` where declared integers are no integers."""
        kind = array.type
        if pat.is_dictionary(kind):
            words = array.dictionary
            wrong = np.zeros(len(words), dtype=bool)
            word_keys = self._value_keys(words, seed, declared, offset, wrong)
            at = integers(array.indices)
            if array.null_count:
                at = np.where(array.is_null().to_numpy(zero_copy_only=False), 0, at)
            if len(words) == 0:
                return np.zeros(len(array), dtype=np.uint64)
            if unparsed is not None:
                unparsed |= wrong[at]
            return word_keys[at]
        if pat.is_null(kind):
            return np.zeros(len(array), dtype=np.uint64)
        is_text = not _is_number(kind)
        if declared == "string" and not is_text:
            array, is_text = array.cast(pa.string()), True
        elif declared == "integer" and is_text:
            array, wrong = _parse_integers(array)
            is_text = False
            if unparsed is not None:
                unparsed |= wrong
        if is_text:
            return string_key_array(array, seed)
        if pat.is_decimal(array.type):
            return _decimal_keys(array, seed)
        if pat.is_timestamp(array.type):
            return _timestamp_keys(array, seed)
        bits = patterns(array)
        if offset:
            bits += np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        return keys.integer_keys(bits, seed)

    def list_keys(
        self,
        feature: SparseFeature,
        columns: dict[str, pa.Array],
        num_rows: int,
        reject: Reject,
        *,
        vocabulary: bool = True,
    ) -> Lists:
        """Ids of a multi-valued feature: null ids are left out, rare ones replaced, long lists cut, in this order."""
        assert feature.max_length is not None
        column = feature.columns[0]
        lists = columns.get(column)
        if lists is None or pat.is_null(lists.type):
            lists = pa.nulls(num_rows, pa.list_(pa.null()))
        values, starts, lengths = _list_parts(lists)
        unparsed = np.zeros(len(values), dtype=bool)
        value_keys = self._value_keys(values, self._seeds[feature.space], feature.type, feature.offset, unparsed)
        value_gaps = nulls(values)
        if value_gaps is not None:
            value_keys[value_gaps] = 0
        if feature.vocabulary is not None and vocabulary:
            value_keys = self._fitted.known(feature, value_keys)
        row, at = ragged(starts, lengths)
        if unparsed.any():
            wrong = np.bincount(row, unparsed[at], num_rows) > 0
            reject(wrong, column, lists, f"feature {feature.name!r} is declared `type: integer`")
        flat = value_keys[at]
        weights = self._weights(feature, columns, lengths, row, reject) if feature.weights is not None else None

        def keep(kept: Bool) -> None:
            nonlocal row, flat, weights
            row, flat = row[kept], flat[kept]
            weights = weights[kept] if weights is not None else None

        real = flat != 0
        if not real.all():
            keep(real)
        counts = np.bincount(row, minlength=num_rows).astype(np.int64)
        truncated = 0
        if counts.max(initial=0) > feature.max_length:
            place = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
            if feature.keep == "last":
                place = np.repeat(counts, counts) - 1 - place
            truncated = int((place >= feature.max_length).sum())
            keep(place < feature.max_length)
            counts = np.minimum(counts, feature.max_length)
        empty = np.flatnonzero(counts == 0)
        if feature.missing == "key" and empty.size:
            before = (np.cumsum(counts) - counts)[empty]
            flat = np.insert(flat, before, self.missing_key(feature))
            weights = np.insert(weights, before, 1.0) if weights is not None else None
            counts[empty] = 1
        return Lists(flat, np.concatenate([[0], np.cumsum(counts)]), weights, truncated)

    def _weights(
        self, feature: SparseFeature, columns: dict[str, pa.Array], lengths: Array, row: Array, reject: Reject
    ) -> npt.NDArray[np.float32]:
        """Weights of all ids, flat; a row whose two lists differ in length, or with a weight that is no number, is
        bad.
        """
        assert feature.weights is not None
        lists = columns.get(feature.weights)
        if lists is None:
            return np.ones(row.size, dtype=np.float32)
        if pat.is_null(lists.type):
            lists = pa.nulls(lengths.size, pa.list_(pa.float32()))
        values, starts, num_weights = _list_parts(lists)
        raw, gaps = numbers(values)
        raw = np.append(raw.astype(np.float32), np.float32(np.nan))
        if gaps is not None:
            raw[:-1][gaps] = np.nan
        differ = num_weights != lengths
        if differ.any():
            reject(differ, feature.weights, lists, f"must be as long as column {feature.columns[0]!r}")
        inside = np.arange(row.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        flat = raw[np.where(differ[row], raw.size - 1, starts[row] + inside)]
        broken = ~np.isfinite(flat)
        if broken.any():
            wrong = np.bincount(row, broken, lengths.size) > 0
            reject(wrong, feature.weights, lists, "weights must be finite")
            flat[broken] = 0
        return flat


def ragged(starts: Array, lengths: Array) -> tuple[Array, Array]:
    """For lists that start at `starts`: the row and the place of every element, row by row."""
    row = np.repeat(np.arange(lengths.size), lengths)
    at = np.arange(row.size) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return row, at


def _list_parts(array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Values of a list array, and per row where it starts in them and its length (0 for null). Scalars are lists of
    one.
    """
    kind = array.type
    num_rows = len(array)
    starts = np.arange(num_rows, dtype=np.int64)
    if pat.is_fixed_size_list(kind):
        values = array.values
        starts, lengths = (starts + array.offset) * kind.list_size, np.full(num_rows, kind.list_size, dtype=np.int64)
    elif pat.is_list(kind) or pat.is_large_list(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        first, last = (int(offsets[0]), int(offsets[-1])) if num_rows else (0, 0)
        values = array.values.slice(first, last - first)
        starts, lengths = offsets[:-1] - first, np.diff(offsets)
    else:
        return array, starts, np.ones(num_rows, dtype=np.int64)
    gaps = nulls(array)
    return values, starts, lengths if gaps is None else np.where(gaps, 0, lengths)


def _is_plain_integer(feature: SparseFeature, kind: pa.DataType) -> bool:
    simple = pat.is_integer(kind) or pat.is_boolean(kind) or pat.is_date(kind) or pat.is_time(kind)
    return simple and not feature.cross and feature.bucketize is None and feature.type != "string"


def _is_number(kind: pa.DataType) -> bool:
    tests = (pat.is_integer, pat.is_boolean, pat.is_date, pat.is_time, pat.is_timestamp, pat.is_decimal)
    return any(test(kind) for test in tests)


def _parse_integers(array: pa.Array) -> tuple[pa.Array, Bool]:
    """Exact 64-bit integers of text, as patterns, and which texts are none."""
    array = array.cast(pa.string())
    try:
        return array.cast(pa.int64()), np.zeros(len(array), dtype=bool)
    except pa.ArrowInvalid:
        pass
    bits = np.zeros(len(array), dtype=np.uint64)
    wrong = np.zeros(len(array), dtype=bool)
    for row, text in enumerate(array.to_pylist()):
        if text is None:
            continue
        number = int(text) if _INTEGER.fullmatch(text) else None
        if number is None or not -(1 << 63) <= number < 1 << 64:
            wrong[row] = True
        else:
            bits[row] = number & 0xFFFFFFFFFFFFFFFF
    return pa.array(bits), wrong


def _decimal_keys(array: pa.Array, seed: np.uint64) -> UInt64:
    result = np.zeros(len(array), dtype=np.uint64)
    if array.type.scale <= 0 or pc.all(pc.equal(pc.round(array), array)).as_py() is not False:
        for target in (pa.int64(), pa.uint64()):
            try:
                return keys.integer_keys(patterns(array.cast(target)), seed)
            except pa.ArrowInvalid:
                continue
    integral, text = [], []
    for row, value in enumerate(array.to_pylist()):
        if value is None:
            continue
        if value == value.to_integral_value() and -(1 << 63) <= value < (1 << 64):
            integral.append((row, int(value) & 0xFFFFFFFFFFFFFFFF))
        else:
            text.append((row, format(value.normalize(), "f")))
    if integral:
        bits = np.array([v for _, v in integral], dtype=np.uint64)
        result[[r for r, _ in integral]] = keys.integer_keys(bits, seed)
    if text:
        result[[r for r, _ in text]] = string_key_array(pa.array([v for _, v in text]), seed)
    return result


def _timestamp_keys(array: pa.Array, seed: np.uint64) -> UInt64:
    values = _raw(array, np.int64)
    unit = array.type.unit
    if unit != "ns":
        factor = {"s": 1_000_000, "ms": 1_000, "us": 1}[unit]
        return keys.integer_keys((values * np.int64(factor)).view(np.uint64), seed)
    micros, rest = np.divmod(values, np.int64(1000))
    result = keys.integer_keys(micros.view(np.uint64), seed)
    odd = rest != 0
    if odd.any():
        result[odd] = keys.combine(result[odd], rest[odd].view(np.uint64))
    return result
