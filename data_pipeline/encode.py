"""Arrow columns -> keys and numbers, one block of rows at a time.

Shapes: N rows of a block, D dense columns, L labels, F1 single-valued features of a table.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from data_pipeline import keys
from data_pipeline.config import DataConfig, SparseFeature
from data_pipeline.errors import DataError

UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]


@dataclass
class Lists:
    """Ids of a multi-valued feature: row i holds `keys[offsets[i]:offsets[i + 1]]`."""

    keys: UInt64
    offsets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None


@dataclass
class Rows:
    """Encoded rows, in the order in which they were read."""

    labels_NL: npt.NDArray[np.float32]
    dense_ND: npt.NDArray[np.float32]
    singles: dict[str, UInt64]
    """Per table: keys [N, F1]; 0 = no feature."""
    lists: dict[str, Lists]
    weight_N: npt.NDArray[np.float32] | None
    group_N: UInt64 | None
    bad_N: Bool
    truncated: Counter[str]
    reasons: dict[int, str]
    """Why rows are bad, by row."""

    @property
    def num_rows(self) -> int:
        return int(self.bad_N.size)


def nulls(array: pa.Array) -> Bool | None:
    """Mask of nulls, or None if there is none."""
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


def integers(array: pa.Array) -> Array:
    """Integer, boolean, date, time values as they are stored; nulls hold anything."""
    kind = array.type
    if pat.is_boolean(kind):
        return _raw(array.cast(pa.uint8()), np.uint8)
    if pat.is_date(kind) or pat.is_time(kind):
        wide = pat.is_date64(kind) or pat.is_time64(kind)
        return _raw(array, np.int64 if wide else np.int32)
    return _raw(array, kind.to_pandas_dtype())


def patterns(array: pa.Array) -> UInt64:
    """Integers as 64-bit two's complement patterns (a new array)."""
    values = integers(array)
    if values.dtype == np.uint64 or values.dtype == np.int64:
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
        values = _raw(array, kind.to_pandas_dtype())
        gaps = np.isnan(values)
        if gaps.any():
            mask = gaps if mask is None else mask | gaps
    else:
        values = integers(array)
        values = values.astype(np.float32 if values.dtype.itemsize < 4 else np.float64)
    return values, mask


class Encoder:
    """Applies the job's features to blocks of Arrow columns."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._singles: dict[str, list[SparseFeature]] = {t: [] for t in config.tables}
        for feature in config.sparse:
            if not feature.multi_valued:
                self._singles[feature.table].append(feature)
        self._seeds = {f.space: keys.space_seed(f.space) for f in config.sparse}
        self._column_seeds = {c: keys.space_seed(c) for f in config.sparse for c in f.cross}
        self._missing = {f.space: keys.special_key(f.space, "missing") for f in config.sparse}
        self._group_seed = keys.space_seed("group")

    def encode(self, columns: dict[str, pa.Array], num_rows: int) -> Rows:
        """Encodes `num_rows` rows. A column that is absent from `columns` is treated as its feature declares."""
        config = self._config
        reasons: dict[int, str] = {}
        bad = np.zeros(num_rows, dtype=bool)

        def reject(mask: Bool, column: str, array: pa.Array, why: str) -> None:
            fresh = np.flatnonzero(mask & ~bad)
            for row in fresh:
                reasons[int(row)] = f"column {column!r} is {array[int(row)].as_py()!r}: {why}"
            bad[fresh] = True

        labels = np.empty((num_rows, len(config.labels)), dtype=np.float32)
        for position, column in enumerate(config.labels):
            labels[:, position] = self._label(columns[column], column, reject)
        dense = np.empty((num_rows, len(config.dense_columns)), dtype=np.float32)
        position = 0
        for block in config.dense:
            for column in block.columns:
                if column not in columns:
                    dense[:, position] = block.absent
                else:
                    self._dense(columns[column], column, block, dense[:, position], reject)
                position += 1
        truncated: Counter[str] = Counter()
        singles = {t: self._single_table(fs, columns, num_rows) for t, fs in self._singles.items()}
        lists = {f.name: self._list(f, columns, num_rows, truncated, reject) for f in config.sparse if f.multi_valued}
        weight = None
        if config.sample_weight is not None:
            values, mask = numbers(columns[config.sample_weight])
            weight = values.astype(np.float32)
            wrong = ~np.isfinite(weight) | (weight < 0)
            if mask is not None:
                wrong |= mask
            if wrong.any():
                reject(
                    wrong,
                    config.sample_weight,
                    columns[config.sample_weight],
                    "a sample weight must be finite and not negative",
                )
        group = None
        if config.group is not None:
            group = self._value_keys(plain(columns[config.group]), self._group_seed, None, 0, config.group)
        return Rows(labels, dense, singles, lists, weight, group, bad, truncated, reasons)

    def _label(self, array: pa.Array, column: str, reject: Any) -> Array:
        values, mask = numbers(array)
        rule = self._config.label
        if rule.positive is not None:
            result, allowed = (values == rule.positive).astype(np.float32), "a label must not be null"
            wrong = np.zeros(values.shape, dtype=bool)
        elif rule.at_least is not None:
            result, allowed = (values >= rule.at_least).astype(np.float32), "a label must not be null"
            wrong = np.zeros(values.shape, dtype=bool)
        elif rule.soft:
            result, allowed = values.astype(np.float32), "label: {soft: true} takes numbers from 0 to 1"
            wrong = ~((values >= 0) & (values <= 1))
        else:
            result, allowed = (
                values.astype(np.float32),
                "a label is 0 or 1 (else declare label: {positive: VALUE}, {at_least: VALUE} or {soft: true})",
            )
            wrong = (values != 0) & (values != 1)
        if mask is not None:
            wrong = wrong | mask
        if wrong.any():
            reject(wrong, column, array, allowed)
        return result

    def _dense(self, array: pa.Array, column: str, block: Any, out: Array, reject: Any) -> None:
        values, mask = numbers(array)
        if mask is not None:
            values = np.where(mask, values.dtype.type(0 if block.fill is None else block.fill), values)
        with np.errstate(over="ignore", invalid="ignore"):
            if block.transform == "log1p":
                values = np.copysign(np.log1p(np.abs(values)), values)
            if block.clip is not None:
                values = np.clip(values, block.clip[0], block.clip[1])
            out[:] = values
        wrong = ~np.isfinite(out)
        if mask is not None and block.fill is None:
            wrong |= mask
        if wrong.any():
            reject(wrong, column, array, "not a finite number after fill, transform and clip")

    def _single_table(self, features: list[SparseFeature], columns: dict[str, pa.Array], num_rows: int) -> UInt64:
        """Keys [N, F1]. Plain integers of all features are mixed together in one go."""
        out = np.empty((num_rows, len(features)), dtype=np.uint64)
        for position, feature in enumerate(features):
            out[:, position] = self._single(feature, columns, num_rows)
        return out

    def _single(self, feature: SparseFeature, columns: dict[str, pa.Array], num_rows: int) -> UInt64:
        missing = self._missing[feature.space] if feature.missing == "key" else np.uint64(0)
        if any(c not in columns for c in feature.columns):
            return np.full(num_rows, missing, dtype=np.uint64)
        seed = self._seeds[feature.space]
        if feature.cross:
            result = np.full(num_rows, seed, dtype=np.uint64)
            gaps = np.zeros(num_rows, dtype=bool)
            for column in feature.cross:
                array = plain(columns[column])
                mask = nulls(array)
                if mask is not None:
                    gaps |= mask
                result = keys.combine(
                    result, self._value_keys(array, self._column_seeds[column], feature.type, 0, column)
                )
            result[gaps] = missing
            return result
        array = plain(columns[feature.columns[0]])
        if feature.bucketize is not None:
            values, mask = numbers(array)
            buckets = self._bucket(feature, values)
            result = keys.integer_keys(buckets.astype(np.int64).view(np.uint64), seed)
        else:
            mask = nulls(array)
            result = self._value_keys(array, seed, feature.type, feature.offset, feature.columns[0])
        if mask is not None:
            result[mask] = missing
        return result

    def _bucket(self, feature: SparseFeature, values: Array) -> Array:
        rule = feature.bucketize
        assert rule is not None
        values = values.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            if rule.kind == "log_square":
                large = values > 2
                logs = np.log(np.where(large, values, 1.0))
                return np.where(large, np.floor(logs * logs), np.floor(np.clip(np.nan_to_num(values), -1e15, 2)))
            return np.searchsorted(np.asarray(rule.boundaries), values, side="right")

    def _value_keys(self, array: pa.Array, seed: np.uint64, declared: str | None, offset: int, column: str) -> UInt64:
        """Keys of values; rows that are null hold anything but are 0 where the column is all null."""
        kind = array.type
        if pat.is_null(kind):
            return np.zeros(len(array), dtype=np.uint64)
        is_text = not (
            pat.is_integer(kind)
            or pat.is_boolean(kind)
            or pat.is_date(kind)
            or pat.is_time(kind)
            or pat.is_timestamp(kind)
            or pat.is_decimal(kind)
        )
        if declared == "string" and not is_text:
            array, is_text = array.cast(pa.string()), True
        elif declared == "integer" and is_text:
            array, is_text = _parse_integers(array, column), False
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

    def _list(
        self, feature: SparseFeature, columns: dict[str, pa.Array], num_rows: int, truncated: Counter[str], reject: Any
    ) -> Lists:
        assert feature.max_length is not None
        column = feature.columns[0]
        missing = self._missing[feature.space] if feature.missing == "key" else np.uint64(0)
        if column not in columns or pat.is_null(columns[column].type):
            lengths = np.full(num_rows, int(missing != 0), dtype=np.int64)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            flat = np.full(int(offsets[-1]), missing, dtype=np.uint64)
            return Lists(flat, offsets, np.ones(flat.size, dtype=np.float32) if feature.weights else None)
        array = columns[column]
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if pat.is_dictionary(array.type):
            array = array.dictionary_decode()
        mask = nulls(array)
        values, starts, lengths = _list_parts(array)
        value_nulls = nulls(values)
        value_keys = self._value_keys(plain(values), self._seeds[feature.space], feature.type, feature.offset, column)
        if value_nulls is not None:
            value_keys[value_nulls] = 0
        if mask is not None:
            lengths = np.where(mask, 0, lengths)
        weights = None
        if feature.weights is not None:
            weights = self._list_weights(feature, columns, lengths, starts, values, reject)
        # gather the ids that exist, row by row
        rows = np.repeat(np.arange(num_rows), lengths)
        inside = np.arange(rows.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = np.repeat(starts, lengths) + inside
        flat = value_keys[at]
        if weights is not None:
            weights = weights[: rows.size]
        real = flat != 0
        if not real.all():
            rows, flat = rows[real], flat[real]
            weights = weights[real] if weights is not None else None
        counts = np.bincount(rows, minlength=num_rows).astype(np.int64)
        if counts.size and counts.max() > feature.max_length:
            position = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
            if feature.keep == "last":
                position = np.repeat(counts, counts) - 1 - position
            kept = position < feature.max_length
            truncated[feature.name] += int(kept.size - kept.sum())
            rows, flat = rows[kept], flat[kept]
            weights = weights[kept] if weights is not None else None
            counts = np.minimum(counts, feature.max_length)
        if missing:
            empty = np.flatnonzero(counts == 0)
            if empty.size:
                at = (np.cumsum(counts) - counts)[empty]
                flat = np.insert(flat, at, missing)
                weights = np.insert(weights, at, 1.0) if weights is not None else None
                counts[empty] = 1
        return Lists(flat, np.concatenate([[0], np.cumsum(counts)]), weights)

    def _list_weights(
        self,
        feature: SparseFeature,
        columns: dict[str, pa.Array],
        lengths: Array,
        starts: Array,
        values: pa.Array,
        reject: Any,
    ) -> npt.NDArray[np.float32]:
        """Weights of all ids, flat in row order; a row whose two lists differ in length is bad."""
        assert feature.weights is not None
        total = int(lengths.sum())
        if feature.weights not in columns or pat.is_null(columns[feature.weights].type):
            return np.ones(total, dtype=np.float32)
        array = columns[feature.weights]
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        weight_values, weight_starts, weight_lengths = _list_parts(array)
        gaps = nulls(array)
        if gaps is not None:
            weight_lengths = np.where(gaps, 0, weight_lengths)
        differ = weight_lengths != lengths
        if differ.any():
            reject(differ, feature.weights, array, f"must be as long as column {feature.columns[0]!r}")
        raw, mask = numbers(weight_values)
        raw = raw.astype(np.float32)
        if mask is not None:
            raw = np.where(mask, np.float32(np.nan), raw)
        row = np.repeat(np.arange(lengths.size), lengths)
        inside = np.arange(row.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        usable = inside < weight_lengths[row]
        at = np.where(usable, weight_starts[row] + inside, 0)
        flat = np.where(usable, raw[at], np.float32(0)) if raw.size else np.zeros(row.size, dtype=np.float32)
        broken = ~np.isfinite(flat)
        if broken.any():
            wrong = np.zeros(lengths.size, dtype=bool)
            wrong[row[broken]] = True
            reject(wrong, feature.weights, array, "weights must be finite")
            flat[broken] = 0
        result: npt.NDArray[np.float32] = flat
        return result


def _list_parts(array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Values of a list array, and where each row starts in them and how many it has. A scalar column is lists of one."""
    kind = array.type
    if pat.is_fixed_size_list(kind):
        starts = (np.arange(len(array), dtype=np.int64) + array.offset) * kind.list_size
        return array.values, starts, np.full(len(array), kind.list_size, dtype=np.int64)
    if pat.is_list(kind) or pat.is_large_list(kind):
        if len(array) == 0:
            return array.values, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        offsets = array.offsets.to_numpy().astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        return array.values.slice(first, last - first), offsets[:-1] - first, np.diff(offsets)
    lengths = np.ones(len(array), dtype=np.int64)
    return array, np.arange(len(array), dtype=np.int64), lengths


def _parse_integers(array: pa.Array, column: str) -> pa.Array:
    try:
        return array.cast(pa.string()).cast(pa.int64())
    except pa.ArrowInvalid:
        try:
            return array.cast(pa.string()).cast(pa.uint64())
        except pa.ArrowInvalid as error:
            raise DataError(
                f"column {column!r} is declared `type: integer` but holds text that is no 64-bit integer: {error}"
            ) from error


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
