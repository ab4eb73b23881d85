"""Arrow columns -> keys and numbers, one block of rows at a time.

Shapes: N rows of a block, D dense columns, L labels, F1 single-valued features of a table.
"""

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from paddlewheel.data_pipeline import arrow_arrays, keys, native
from paddlewheel.data_pipeline.arrow_arrays import Array, Bool, is_text, list_parts, nulls, ragged, simple
from paddlewheel.data_pipeline.batch import UInt64
from paddlewheel.data_pipeline.config import DataConfig, DenseBlock, SparseFeature
from paddlewheel.data_pipeline.encoded_rows import Lists, Rows
from paddlewheel.data_pipeline.statistics import Fitted

Reject = Callable[[Bool, str, pa.Array, str], None]
"""Takes a mask of bad rows, the column, its values and the reason."""
INTEGER = re.compile(rb"[ \t\n\v\f\r]*([+-]?)0*([0-9]{1,20})[ \t\n\v\f\r]*")
"""A text that `type: integer` takes, if the number lies within -2^63 and 2^64 - 1."""
_FAST_DIGITS = 18


def patterns(array: pa.Array) -> UInt64:
    """Integers as 64-bit two's complement patterns (a new array)."""
    values = arrow_arrays.integers(array)
    if values.dtype.itemsize == 8:
        return values.view(np.uint64).copy()
    if values.dtype.kind == "u":
        return values.astype(np.uint64)
    return values.astype(np.int64).view(np.uint64)


def numbers(array: pa.Array) -> tuple[Array, Bool | None]:
    """Float values and the mask of nulls and NaN (None if there is none)."""
    array = simple(array)
    if pat.is_dictionary(array.type):
        return _picked_numbers(array)
    kind = array.type
    if pat.is_null(kind):
        return np.zeros(len(array), dtype=np.float32), np.ones(len(array), dtype=bool)
    mask = nulls(array)
    values: Array
    if pat.is_decimal(kind):
        values = arrow_arrays.Decimals(array).floats(mask)
    elif pat.is_floating(kind):
        values = arrow_arrays.raw(array, arrow_arrays.numpy_dtype(kind))
        gaps = np.isnan(values)
        if gaps.any():
            mask = gaps if mask is None else mask | gaps
    elif is_text(kind):  # the name of a folder, which the footers' check has read as a number
        values = np.array([0.0 if t is None else folder_number(t) for t in array.to_pylist()], dtype=np.float64)
    else:
        values = arrow_arrays.integers(array)
        values = values.astype(np.float32 if values.dtype.itemsize < 4 else np.float64)
    return values, mask


def _picked_numbers(array: pa.Array) -> tuple[Array, Bool | None]:
    """`numbers` of a dictionary."""
    words, wrong = numbers(array.dictionary)
    codes, mask = _codes(array)
    if wrong is not None:
        picked = wrong[codes] if len(words) else np.zeros(len(array), dtype=bool)
        mask = picked if mask is None else picked | mask
    return words[codes] if len(words) else np.zeros(len(array), dtype=words.dtype), mask


def _codes(array: pa.Array) -> tuple[Array, Bool | None]:
    """Places in the dictionary [N], 0 for null, and which rows are null."""
    codes, mask = arrow_arrays.integers(array.indices), nulls(array)
    return codes if mask is None else np.where(mask, 0, codes), mask


def folder_number(text: str) -> float:
    """The number in the name of a folder `key=number`; true and false are 1 and 0. Raises ValueError."""
    word = text.strip().lower()
    return float(word == "true") if word in ("true", "false") else float(word)


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
        self._native = native.choose(config.encoder_backend)
        self._integer_features = {
            table: [
                (position, f.columns[0], int(self._seeds[f.space]), f.offset, int(self.missing_key(f)))
                for position, f in enumerate(features)
                if not f.cross and f.bucketize is None and f.type != "string"
            ]
            for table, features in self._singles.items()
        }
        """Per table: position, column, seed, offset and missing key of what the library may take, which is asked of
        every block."""
        self._several = [f for f in config.sparse if f.multi_valued]

    def encode(self, columns: dict[str, pa.Array], into: Rows, at: slice, block: int = 0) -> dict[int, str]:
        """Encodes block number `block` into rows `at` of `into`. Returns why rows are bad, by position in the block.

        Blocks may be encoded at the same time in several threads.

        A column that is absent from `columns` is treated as its feature declares.
        """
        config = self._config
        columns = {name: simple(array) for name, array in columns.items()}
        num_rows = at.stop - at.start
        reasons: dict[int, str] = {}
        bad = into.bad_N[at]

        def reject(mask: Bool, column: str, array: pa.Array, why: str) -> None:
            fresh = np.flatnonzero(mask & ~bad)
            for row in fresh.tolist():
                reasons[row] = f"column {column!r} is {arrow_arrays.shown(array, row)}: {why}"
            bad[fresh] = True

        for position, column in enumerate(config.labels):
            click_N = None if position == 0 else into.labels_NL[at, 0]
            into.labels_NL[at, position] = self._label(columns[column], column, click_N, reject)
        position = 0
        for dense in config.dense:
            self._dense(columns, dense, into.dense_ND[at, position : position + len(dense.columns)], reject)
            position += len(dense.columns)
        for table, features in self._singles.items():
            if features:
                self._single_table(features, columns, into.singles[table][at], reject)
        for feature in self._several:
            into.lists[feature.name][block] = self.list_keys(feature, columns, num_rows, reject)
        if config.sample_weight is not None and into.weight_N is not None:
            self._sample_weight(columns[config.sample_weight], config.sample_weight, into.weight_N[at], reject)
        for column, values_N in into.slice_metrics_by.items():
            values_N[at] = arrow_arrays.texts(columns[column])
        if config.group is not None and into.group_N is not None:
            into.group_N[at] = self._group(columns[config.group])
        return reasons

    @staticmethod
    def _sample_weight(array: pa.Array, column: str, out: Array, reject: Reject) -> None:
        values, mask = numbers(array)
        with np.errstate(over="ignore"):
            out[:] = values
        wrong = ~np.isfinite(out) | (values < 0)
        if mask is not None:
            wrong |= mask
        if wrong.any():
            reject(wrong, column, array, "a sample weight must be finite and not negative")

    def _group(self, array: pa.Array) -> UInt64:
        group, _ = self._value_keys(array, self._group_seed, None, 0)
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

    def _label(self, array: pa.Array, column: str, click_N: Array | None, reject: Reject) -> Array:
        """Labels [N]; `click_N` is the first label where this is another one."""
        values, mask = numbers(array)
        rule = self._config.label_rule
        if mask is not None and rule.null_without_click == "negative" and click_N is not None:
            idle = mask & (click_N == 0)
            values, mask = np.where(idle, 0, values), mask & ~idle
            decided: Bool | None = idle
        else:
            decided = None
        result: Array
        if rule.positive is not None or rule.at_least is not None:
            result = values == rule.positive if rule.positive is not None else values >= rule.at_least
            if decided is not None:
                result &= ~decided
            wrong, allowed = np.zeros(values.shape, dtype=bool), ""
        elif rule.soft:
            result, wrong = values, ~((values >= 0) & (values <= 1))
            allowed = "label_rule: {soft: true} takes numbers from 0 to 1"
        else:
            result, wrong = values, (values != 0) & (values != 1)
            allowed = (
                "a label is 0 or 1 (else declare label_rule: {positive: VALUE}, {at_least: VALUE} or {soft: true})"
            )
        if mask is not None and mask.any():
            remedy = ""
            if click_N is not None:
                remedy = (
                    "; if null means that there was nothing to follow (a conversion without a click), declare label: "
                    "{null_without_click: negative}, which makes it 0 where the first label is 0"
                )
            reject(mask, column, array, f"a label must not be null{remedy}")
            wrong = wrong & ~mask
        if wrong.any():
            reject(wrong, column, array, allowed)
        return result

    def dense_values(
        self, columns: dict[str, pa.Array], block: DenseBlock, num_rows: int, absent: Bool | None = None
    ) -> Array:
        """Values [N, D] of a block of columns after fill, transform and clip. Marks filled ones in `absent`."""
        read = [numbers(columns[c]) if c in columns else None for c in block.columns]
        # What is only moved can stay in 32 bits. What is computed is so in 64, whatever the files have.
        exact = block.transform != "none" or block.standardise or any(r and r[0].dtype == np.float64 for r in read)
        values = np.empty((num_rows, len(read)), dtype=np.float64 if exact else np.float32)
        for position, got in enumerate(read):
            if got is None:
                values[:, position] = block.absent_column
                continue
            with np.errstate(invalid="ignore"):  # a signalling NaN
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
        if self._native is not None and _is_only_moved(block):
            described = [
                native.number_column(simple(columns[column]), block.fill, position) if column in columns else None
                for position, column in enumerate(block.columns)
            ]
            known = [each for each in described if each is not None]
            # What cannot be used is looked for again below, to be named.
            if len(known) == len(block.columns) and self._native.float32(known, out):
                return
        absent = np.zeros(out.shape, dtype=bool)
        values = self.dense_values(columns, block, out.shape[0], absent)
        with np.errstate(over="ignore", invalid="ignore"):
            if block.standardise:
                mean, scale = self._fitted.mean_and_scale(block)
                values = (values - mean) * scale
            out[:] = values
        wrong = ~np.isfinite(out)
        if block.fill is None:
            wrong |= absent
        if wrong.any():
            for position in np.flatnonzero(wrong.any(axis=0)).tolist():
                column = block.columns[position]
                shown = columns.get(column, pa.nulls(out.shape[0]))
                why = "not a finite number in 32 bits after fill, transform, clip and standardise"
                reject(wrong[:, position], column, shown, why)

    def _single_table(
        self, features: list[SparseFeature], columns: dict[str, pa.Array], out: UInt64, reject: Reject
    ) -> None:
        """Writes keys [N, F1] into `out`. Plain integers of all features are mixed together, in one go."""
        done = self._native_integers(features, columns, out) if self._native is not None else frozenset[int]()
        together: list[int] = []
        gaps: list[tuple[int, Bool]] = []
        for position, feature in enumerate(features) if len(done) < len(features) else ():
            array = columns.get(feature.columns[0])
            if position in done or array is None or not _is_plain_integer(feature, array.type):
                continue
            together.append(position)
            values = arrow_arrays.integers(array)
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
            if position not in together and position not in done:
                out[:, position] = self.single_keys(feature, columns, out.shape[0], reject)
            if feature.vocabulary is not None:
                out[:, position] = self._fitted.known(feature, out[:, position])

    def _native_integers(
        self, features: list[SparseFeature], columns: dict[str, pa.Array], out: UInt64
    ) -> frozenset[int]:
        """Writes keys of plain integers into `out` [N, F1]; which of the features are done."""
        assert self._native is not None
        described = []
        for position, name, seed, offset, missing in self._integer_features[features[0].table]:
            column = native.integer_column(columns[name], seed, offset, missing, position) if name in columns else None
            if column is not None:
                described.append(column)
        if described:
            self._native.integer_keys(described, out)
        return frozenset(column[-1] for column in described)

    def missing_key(self, feature: SparseFeature) -> np.uint64:
        """What stands for null: a key of its own, or 0 for no feature."""
        return self._missing[feature.space] if feature.null_policy == "own_key" else np.uint64(0)

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
            array = simple(columns[column])
            if feature.bucketize is not None:
                values, mask = numbers(array)
                result = keys.integer_keys(self._bucket(feature, values).astype(np.int64).view(np.uint64), seed)
            else:
                mask = nulls(array)
                part_seed = self._column_seeds[column] if feature.cross else seed
                part, wrong = self._value_keys(array, part_seed, feature.type, feature.offset)
                result = keys.combine(result, part) if feature.cross else part
                if wrong is not None:
                    reject(wrong, column, array, _no_integer(feature))
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
        self, array: pa.Array, seed: np.uint64, declared: str | None, offset: int
    ) -> tuple[UInt64, Bool | None]:
        """Keys of the values of a simple array; a null's key may be anything. And which values, declared as integers,
        are none (None: all are).
        """
        kind = array.type
        if pat.is_dictionary(kind):
            return self._word_keys(array, seed, declared, offset)
        if pat.is_null(kind):
            return np.zeros(len(array), dtype=np.uint64), None
        if declared == "string" and not is_text(kind):
            array = array.cast(pa.string())
        if declared == "integer" and is_text(kind):
            bits, wrong = parse_integers(array)
            return keys.integer_keys(bits + _modulo(offset), seed), wrong
        if is_text(array.type):
            found = None if self._native is None else self._native.texts(array, int(seed))
            return text_keys(array, seed) if found is None else found, None
        if pat.is_decimal(kind):
            return _decimal_keys(array, seed, declared, offset)
        if pat.is_timestamp(kind) or pat.is_time(kind):
            return _time_keys(array, seed), None
        column = None if self._native is None else native.integer_column(array, int(seed), offset)
        if self._native is not None and column is not None:
            result = np.empty((len(array), 1), dtype=np.uint64)
            self._native.integer_keys([column], result)
            return result[:, 0], None
        return keys.integer_keys(patterns(array) + _modulo(offset), seed), None

    def _word_keys(
        self, array: pa.Array, seed: np.uint64, declared: str | None, offset: int
    ) -> tuple[UInt64, Bool | None]:
        """`_value_keys` of a dictionary: of every word once, or only of those that occur where there are more."""
        words = array.dictionary
        if len(words) == 0:
            return np.zeros(len(array), dtype=np.uint64), None
        if self._native is not None:
            if len(words) > len(array) and is_text(words.type) and declared != "integer":
                found = self._native.picked_texts(array, int(seed))
                if found is not None:
                    return found, None
            elif len(words) <= len(array):
                word_keys, wrong = self._value_keys(words, seed, declared, offset)
                found = self._native.picked(array, word_keys) if wrong is None else None
                if found is not None:
                    return found, None
        codes, gaps = _codes(array)
        if len(words) > len(array):
            used, codes = np.unique(codes, return_inverse=True)
            words = words.take(pa.array(used))
        word_keys, wrong = self._value_keys(words, seed, declared, offset)
        if wrong is not None:
            wrong = wrong[codes] if gaps is None else wrong[codes] & ~gaps
        return word_keys[codes], wrong if wrong is not None and wrong.any() else None

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
        lists = pa.nulls(num_rows) if lists is None else simple(lists)
        if pat.is_null(lists.type):
            lists = pa.nulls(num_rows, pa.list_(pa.null()))
        values, starts, lengths = list_parts(lists)
        value_keys, unparsed = self._value_keys(values, self._seeds[feature.space], feature.type, feature.offset)
        value_gaps = nulls(values)
        if value_gaps is not None:
            value_keys[value_gaps] = 0
        if feature.vocabulary is not None and vocabulary:
            value_keys = self._fitted.known(feature, value_keys)
        if self._native is not None and unparsed is None and feature.weights is None:
            keys_, offsets, truncated = self._native.lists(
                *(value_keys, starts, lengths),
                most=feature.max_length,
                last=feature.truncate == "last",
                missing=int(self.missing_key(feature)),
            )
            return Lists(keys_, offsets, None, truncated)
        row, at = ragged(starts, lengths)
        if unparsed is not None:
            reject(np.bincount(row, unparsed[at], num_rows) > 0, column, lists, _no_integer(feature))
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
            if feature.truncate == "last":
                place = np.repeat(counts, counts) - 1 - place
            truncated = int((place >= feature.max_length).sum())
            keep(place < feature.max_length)
            counts = np.minimum(counts, feature.max_length)
        empty = np.flatnonzero(counts == 0)
        if feature.null_policy == "own_key" and empty.size:
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
        values, starts, num_weights = list_parts(lists)
        raw, gaps = numbers(values)
        with np.errstate(over="ignore"):
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


def _no_integer(feature: SparseFeature) -> str:
    return f"feature {feature.name!r} is declared `type: integer`, from -2^63 to 2^64 - 1"


def _is_only_moved(block: DenseBlock) -> bool:
    """Whether the numbers of a block become float32 and nothing else, nulls aside."""
    with np.errstate(over="ignore"):
        usable = block.fill is None or bool(np.isfinite(np.float32(block.fill)))
    return usable and block.transform == "none" and block.clip is None and not block.standardise


def _modulo(offset: int) -> np.uint64:
    return np.uint64(offset & 0xFFFFFFFFFFFFFFFF)


def _is_plain_integer(feature: SparseFeature, kind: pa.DataType) -> bool:
    whole = pat.is_integer(kind) or pat.is_boolean(kind) or pat.is_date(kind)
    return whole and not feature.cross and feature.bucketize is None and feature.type != "string"


def text_keys(array: pa.Array, seed: np.uint64) -> UInt64:
    """Keys of text or bytes; nulls hold anything."""
    return keys.string_keys(*arrow_arrays.text_bytes(array), seed)


def parse_integers(array: pa.Array) -> tuple[UInt64, Bool | None]:
    """Integers in text as 64-bit patterns, and which texts are none (None: all are). Nulls hold anything."""
    data, starts, ends = arrow_arrays.text_bytes(array)
    lengths = ends - starts
    bits = np.zeros(len(array), dtype=np.uint64)
    gaps = nulls(array)
    # Digits alone, one place after the other. What is longer, has a sign or blanks, or is no number comes below.
    easy = (lengths > 0) & (lengths <= _FAST_DIGITS)
    if gaps is not None:
        easy &= ~gaps
    for place in range(int(lengths[easy].max(initial=0))):
        here = np.flatnonzero(easy & (lengths > place))
        digit = data[starts[here] + place] - np.uint8(ord("0"))
        bits[here] = bits[here] * np.uint64(10) + digit
        easy[here[digit > 9]] = False
    left = ~easy if gaps is None else ~easy & ~gaps
    wrong = np.zeros(len(array), dtype=bool)
    for row in np.flatnonzero(left).tolist():
        number = parse_integer(data[starts[row] : ends[row]].tobytes())
        wrong[row] = number is None
        bits[row] = (number or 0) & 0xFFFFFFFFFFFFFFFF
    return bits, wrong if wrong.any() else None


def parse_integer(text: bytes) -> int | None:
    """The integer that a text is, if it is one that has a key."""
    found = INTEGER.fullmatch(text)
    if found is None:
        return None
    number = int(found[2]) * (-1 if found[1] == b"-" else 1)
    return number if -(1 << 63) <= number < 1 << 64 else None


def _decimal_keys(array: pa.Array, seed: np.uint64, declared: str | None, offset: int) -> tuple[UInt64, Bool | None]:
    """Keys of decimals: of integers as integers, of others as text; those are wrong where integers are declared."""
    values, gaps = arrow_arrays.Decimals(array), nulls(array)
    whole, easy = values.integral()
    bits = whole.view(np.uint64).copy()
    others: list[int] = []
    for row in np.flatnonzero(~easy if gaps is None else ~easy & ~gaps).tolist():
        number = values.integer(row)
        if number is not None and -(1 << 63) <= number < 1 << 64:
            bits[row] = number & 0xFFFFFFFFFFFFFFFF
        else:
            others.append(row)
    result = keys.integer_keys(bits + _modulo(offset), seed)
    if not others:
        return result, None
    if declared == "integer":
        wrong = np.zeros(len(array), dtype=bool)
        wrong[others] = True
        return result, wrong
    result[others] = text_keys(pa.array([values.text(row) for row in others]), seed)
    return result, None


def _time_keys(array: pa.Array, seed: np.uint64) -> UInt64:
    """Keys of timestamps and times of day: of their microseconds; nanoseconds beyond are combined in."""
    values = arrow_arrays.raw(array, arrow_arrays.numpy_dtype(array.type)).astype(np.int64)
    per_unit = arrow_arrays.UNITS[array.type.unit]
    if per_unit >= 1000:
        return keys.integer_keys((values * np.int64(per_unit // 1000)).view(np.uint64), seed)
    micros, rest = np.divmod(values, np.int64(1000))
    result = keys.integer_keys(micros.view(np.uint64), seed)
    odd = rest != 0
    if odd.any():
        result[odd] = keys.combine(result[odd], rest[odd].view(np.uint64))
    return result
