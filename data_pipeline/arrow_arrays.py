"""Arrow columns of every encoding -> the few layouts that the encoder knows, and any value as text for messages.

Shapes: N rows of a column, V values of all its lists.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

UNITS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
"""Nanoseconds of a unit of time."""
_MS_PER_DAY = 86_400_000
_NS_PER_DAY = 86_400 * 10**9
_SIMPLE_IDS = frozenset(
    kind.id
    for kind in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.date32(), pa.date64(), pa.string(), pa.binary()),
        *(pa.large_string(), pa.large_binary(), pa.list_(pa.int8()), pa.large_list(pa.int8())),
    )
)
"""Types that are as `simple` wants them, by Arrow's number: the question is asked of each column of each block."""
_LIST_IDS = frozenset(make(pa.int8()).id for make in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)) | {
    pa.list_(pa.int8(), 1).id
}
_TEXT_IDS = frozenset(
    kind.id
    for kind in (
        *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
        pa.binary(1),
    )
)


def storage(kind: pa.DataType) -> pa.DataType:
    """The type of the values themselves, without dictionary, run-end encoding and extension types around it."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pat.is_dictionary(kind) or pat.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def is_list(kind: pa.DataType) -> bool:
    """Whether a row holds a list, in any of Arrow's layouts for lists."""
    return kind.id in _LIST_IDS


def is_text(kind: pa.DataType) -> bool:
    """Text or bytes, in any layout."""
    return kind.id in _TEXT_IDS


def simple(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The same values as a plain array, a list array, or a dictionary of plain words without nulls among them.

    Extension types become their storage; views and run-end encodings are unpacked. What lists hold stays as it is.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    kind = array.type
    if kind.id in _SIMPLE_IDS:
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return simple(array.storage)
    if pat.is_run_end_encoded(kind):
        ends = array.run_ends.to_numpy()
        runs = np.searchsorted(ends, np.arange(array.offset, array.offset + len(array)), side="right")
        return simple(array.values).take(pa.array(runs))
    if pat.is_dictionary(kind):
        words = simple(array.dictionary)
        if pat.is_dictionary(words.type) or pat.is_null(words.type) or is_list(words.type) or words.null_count:
            return simple(words.take(array.indices))
        same = words.type == kind.value_type
        return array if same else pa.DictionaryArray.from_arrays(array.indices, words)
    if pat.is_string_view(kind):
        return array.cast(pa.large_string())
    if pat.is_binary_view(kind):
        return array.cast(pa.large_binary())
    if pat.is_list_view(kind) or pat.is_large_list_view(kind):
        lengths = array.sizes.to_numpy().astype(np.int64)
        gaps = nulls(array)
        if gaps is not None:
            lengths = np.where(gaps, 0, lengths)
        _, at = ragged(array.offsets.to_numpy().astype(np.int64), lengths)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]))
        mask = None if gaps is None else pa.array(gaps, pa.bool_())
        return pa.LargeListArray.from_arrays(offsets, simple(array.values).take(pa.array(at)), mask=mask)
    return array


def plain(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """As `simple`, but without a dictionary."""
    array = simple(array)
    return array.dictionary.take(array.indices) if pat.is_dictionary(array.type) else array


def nulls(array: pa.Array) -> Bool | None:
    """Mask of the nulls of a simple array, or None if there is none."""
    if array.null_count == 0:
        return None
    mask: Bool = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def ragged(starts: Array, lengths: Array) -> tuple[Array, Array]:
    """For lists that start at `starts`: the row and the place of every element, row by row."""
    row = np.repeat(np.arange(lengths.size), lengths)
    at = np.arange(row.size) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return row, at


def list_parts(array: pa.Array) -> tuple[pa.Array, Int64, Int64]:
    """Values [V] of a list array, simple, and per row where it starts in them and its length (0 for null).

    A column of single values is one of lists of one.
    """
    array = simple(array)
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
    return simple(values), starts, lengths if gaps is None else np.where(gaps, 0, lengths)


def raw(array: pa.Array, dtype: Any) -> Array:
    """Values of a fixed-width array without a copy and without a detour through float; nulls hold anything."""
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), dtype=dtype)
    values: Array = np.frombuffer(buffer, dtype=dtype)
    return values[array.offset : array.offset + len(array)]


def numpy_dtype(kind: pa.DataType) -> Any:
    """How NumPy calls a number type; times are integers as stored. (Arrow's own answer needs pandas.)"""
    letter = "f" if pat.is_floating(kind) else "u" if pat.is_unsigned_integer(kind) else "i"
    return np.dtype(f"{letter}{kind.bit_width // 8}")


def integers(array: pa.Array) -> Array:
    """Integers, booleans as 0 and 1, dates as days since 1970; nulls hold anything."""
    kind = array.type
    if pat.is_boolean(kind):
        return raw(array.cast(pa.uint8()), np.uint8)
    values = raw(array, numpy_dtype(kind))
    return values // _MS_PER_DAY if pat.is_date64(kind) else values


def text_bytes(array: pa.Array) -> tuple[npt.NDArray[np.uint8], Int64, Int64]:
    """The bytes of an array of text or bytes, and where each value starts and ends in them; nulls lie anywhere."""
    kind = array.type
    if len(array) == 0:
        nothing = np.zeros(0, dtype=np.int64)
        return np.zeros(8, dtype=np.uint8), nothing, nothing
    if pat.is_fixed_size_binary(kind):
        starts = (np.arange(len(array), dtype=np.int64) + array.offset) * kind.byte_width
        ends = starts + kind.byte_width
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
    return data, starts, ends


class Decimals:
    """A decimal array as unscaled integers, exactly. (Python's decimal rounds to the digits of its context.)"""

    def __init__(self, array: pa.Array) -> None:
        width = array.type.bit_width // 8
        self.scale: int = array.type.scale
        self._bytes = raw(array, np.dtype(f"V{width}"))
        if width <= 8:
            self.small = self._bytes.view(f"<i{width}").astype(np.int64)
            """Unscaled values [N] of the rows that are not `wide`."""
            self.wide: Bool = np.zeros(self.small.size, dtype=bool)
            """Rows whose unscaled value does not fit into 64 bits."""
        else:
            limbs = np.ascontiguousarray(self._bytes).view("<i8").reshape(-1, width // 8)
            self.small = limbs[:, 0]
            self.wide = (limbs[:, 1:] != (self.small >> np.int64(63))[:, None]).any(axis=1)

    def unscaled(self, row: int) -> int:
        """The value of a row times 10^scale."""
        return int.from_bytes(self._bytes[row].tobytes(), "little", signed=True)

    def integral(self) -> tuple[Int64, Bool]:
        """Values [N], and where they are right: integers of at most 64 bits with a scale of 0 to 18. Others may be
        integers, too.
        """
        if not 0 <= self.scale <= 18:
            return np.zeros_like(self.small), (self.small == 0) & ~self.wide
        whole = self.small // np.int64(10**self.scale)
        return whole, (whole * np.int64(10**self.scale) == self.small) & ~self.wide

    def floats(self, gaps: Bool | None) -> npt.NDArray[np.float64]:
        """The nearest float64 of each value [N]; nulls hold anything."""
        easy = (np.abs(self.small) <= 1 << 53) & ~self.wide & (0 <= self.scale <= 22)
        values: npt.NDArray[np.float64] = self.small / np.float64(10.0 ** max(0, min(self.scale, 22)))
        for row in np.flatnonzero(~easy if gaps is None else ~easy & ~gaps).tolist():
            values[row] = self.unscaled(row) * 10 ** max(0, -self.scale) / 10 ** max(0, self.scale)
        return values

    def integer(self, row: int) -> int | None:
        """The value of a row if it is an integer."""
        if self.scale <= 0:
            return int(self.unscaled(row) * 10**-self.scale)
        whole, rest = divmod(self.unscaled(row), 10**self.scale)
        return whole if rest == 0 else None

    def text(self, row: int) -> str:
        """The value of a row in full, without an exponent and without trailing zeros."""
        return decimal_text(self.unscaled(row), self.scale)


def decimal_text(unscaled: int, scale: int) -> str:
    """`unscaled` / 10^scale as text, without an exponent and without trailing zeros."""
    if scale <= 0:
        return str(unscaled * 10**-scale)
    digits = str(abs(unscaled)).rjust(scale + 1, "0")
    fraction = digits[-scale:].rstrip("0")
    return ("-" if unscaled < 0 else "") + digits[:-scale] + ("." + fraction if fraction else "")


def nanoseconds(array: pa.Array, row: int) -> int:
    """Time, timestamp, duration or date of a row in nanoseconds (since midnight, since 1970), whatever its unit."""
    kind = array.type
    if pat.is_date(kind):
        return int(integers(array)[row]) * _NS_PER_DAY
    return int(raw(array, numpy_dtype(kind))[row]) * UNITS[kind.unit]


def shown(array: pa.Array, row: int) -> str:
    r"""A value for a message: `'text'`, `b'\\xff'`, `5`, `[1, 2]`, `None`. Never fails, whatever the bytes are."""
    array = array.slice(row, 1)
    values, _, lengths = list_parts(array)
    if is_list(storage(array.type)):
        if array.null_count:
            return "None"
        start = int(list_parts(array)[1][0])
        few = [shown(values, start + place) for place in range(min(int(lengths[0]), 20))]
        return f"[{', '.join(few)}{', ...' if lengths[0] > len(few) else ''}]"
    values = plain(values)
    text = text_of(values, 0)
    if text is None:
        return "None"
    if is_text(values.type):
        found = _bytes_of(values, 0)
        try:
            return _cut(repr(found.decode()) if not _is_binary(values.type) else repr(found))
        except UnicodeDecodeError:
            return _cut(repr(found))
    return text


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pat.is_binary(kind) or pat.is_large_binary(kind) or pat.is_fixed_size_binary(kind))


def _bytes_of(array: pa.Array, row: int) -> bytes:
    data, starts, ends = text_bytes(array)
    return data[starts[row] : ends[row]].tobytes()


def _cut(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


def text_of(array: pa.Array, row: int) -> str | None:
    r"""The value of a row of a plain array as text, the same for a value in every type that holds it; None for null.

    Bytes that are no UTF-8 are escaped (`K\\xf6ln`). Times are ISO 8601 in UTC, with as many digits as they need.
    """
    if pat.is_null(array.type) or not array.is_valid()[row].as_py():
        return None
    return _text_of_valid(array, row)


def texts(array: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.object_]:
    """`text_of` for all rows [N] of a column that holds no lists; every distinct word of a dictionary once."""
    array = simple(array)
    result = np.empty(len(array), dtype=object)
    if pat.is_dictionary(array.type):
        codes = integers(array.indices)
        valid = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
        used, where = np.unique(codes[valid], return_inverse=True)
        words = np.array([_text_of_valid(array.dictionary, int(code)) for code in used] + [None], dtype=object)
        result[valid] = words[where]
    elif not pat.is_null(array.type):
        for row in np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False)).tolist():
            result[row] = _text_of_valid(array, row)
    return result


def _text_of_valid(array: pa.Array, row: int) -> str:
    kind = array.type
    if is_text(kind):
        return _bytes_of(array, row).decode(errors="backslashreplace")
    if pat.is_decimal(kind):
        return Decimals(array.slice(row, 1)).text(0)
    if pat.is_boolean(kind):
        return "true" if array[row].as_py() else "false"
    if pat.is_integer(kind):
        return str(int(integers(array)[row]))
    if pat.is_floating(kind):
        return number_text(float(str(raw(array, numpy_dtype(kind))[row])))  # 0.1 in 32 bits is 0.1, too
    if pat.is_date(kind):
        return _day_text(int(integers(array)[row]))
    if pat.is_timestamp(kind):
        day, rest = divmod(nanoseconds(array, row), _NS_PER_DAY)
        return f"{_day_text(day)} {_clock_text(rest)}"
    if pat.is_time(kind) or pat.is_duration(kind):
        return _clock_text(nanoseconds(array, row))
    return f"a {kind}"


def number_text(value: float) -> str:
    """A float as short as it can be: `0.1`, `3`, `1e+300`, `nan`."""
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(value)


def _day_text(days: int) -> str:
    try:
        return (dt.date(1970, 1, 1) + dt.timedelta(days)).isoformat()
    except OverflowError:
        return f"1970-01-01 {days:+d} days"  # before the year 1 or after 9999


def _clock_text(nanos: int) -> str:
    sign, nanos = ("-" if nanos < 0 else ""), abs(nanos)
    seconds, rest = divmod(nanos, 10**9)
    fraction = f".{rest:09d}".rstrip("0").rstrip(".")
    return f"{sign}{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{fraction}"
