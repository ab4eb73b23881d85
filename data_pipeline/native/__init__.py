"""The hot loops of reading in C++: hashing from Arrow's memory, gathering rows, unique keys. NumPy is the reference.

Compiled once on each machine, as the tables and operators are. Calls go through ctypes, which lets go of the
interpreter's lock: several threads encode and assemble at the same time. `data.encoder_backend` chooses; results are
the same to the bit and in the same order, so it may change at any restart.

Whatever these functions do not take (decimals, times, text that is to be integers, weights of ids, transforms) stays
with NumPy, and so does every message about a bad row.

Legend of shapes: N rows, F features of a table, U distinct keys.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from paddlewheel import compiled
from paddlewheel.data_pipeline.errors import DataError

Backend = Literal["auto", "native", "numpy"]
UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

_SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",  # plain instructions of any processor: memory and the latency of products bind, not the width of vectors
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wl,-z,defs",
)
_KINDS = {
    pa.bool_().id: 0,
    **{kind.id: kind.bit_width // 8 for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
    **{kind.id: -kind.bit_width // 8 for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.date32())},
    pa.date64().id: -64,
}
"""How rows.h calls a type of integers, by Arrow's number of the type."""
_NUMBER_KINDS = {**_KINDS, pa.float32().id: 132, pa.float64().id: 164}
_OFFSETS = {pa.string().id: 4, pa.binary().id: 4, pa.large_string().id: 8, pa.large_binary().id: 8}
_FIXED = pa.binary(1).id
_LOG = logging.getLogger(__name__)

Column = tuple[int, ...]
"""A PwColumn of rows.h."""


class NativeError(ValueError):
    """The library cannot be had here; the message says why and what helps."""


def build() -> Path:
    """Compile the library (some seconds) unless it is there; many processes may call this at once.

    It goes beside this file where that is writable, else below $XDG_CACHE_HOME (or ~/.cache).

    Raises:
        NativeError: no compiler, no place to write to, or the compiler's error.
    """
    arguments = [*_FLAGS, str(_SOURCES / "rows.cc")]
    return compiled.build(_places(), arguments, "the encoder", NativeError)


def choose(backend: Backend) -> Library | None:
    """What `data.encoder_backend` means on this machine: the library, or None for NumPy.

    Raises:
        NativeError: the job insists on what cannot be had.
    """
    if backend == "numpy":
        return None
    try:
        return load()
    except NativeError as error:
        if backend == "native":
            raise NativeError(f"data.encoder_backend: native, but: {error} Or set it to auto or numpy.") from error
        _warn_once(str(error))
        return None


@cache
def _warn_once(why: str) -> None:
    _LOG.warning("rows are encoded by NumPy, with more CPU time and less parallelism: %s", why)


def load() -> Library:
    """The loaded library, compiled if need be.

    Raises:
        NativeError: as `build`, or the library does not load.
    """
    found = _loaded()
    if isinstance(found, NativeError):
        raise NativeError(str(found))
    return found


@cache
def _loaded() -> Library | NativeError:
    """Or why there is none: asked once, for every batch would ask."""
    try:
        path = build()
    except NativeError as error:
        return error
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        return NativeError(f"{path} does not load: {error}. Delete it to have it built anew.")


class Library:
    """The functions of rows.h on NumPy and Arrow arrays. Calls may come from any thread, several at once.

    Raises:
        DataError: from any function: an offset, a code or a place points outside its memory.
    """

    def __init__(self, path: Path) -> None:
        code = ctypes.CDLL(str(path))
        pointer, number, unsigned = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64

        def function(name: str, *arguments: Any) -> Any:
            found = getattr(code, name)
            found.argtypes, found.restype = arguments, number
            return found

        self._integers = function("pw_integers", number, pointer, number, pointer, number)
        self._numbers = function("pw_numbers", number, pointer, number, pointer, number)
        self._texts = function("pw_texts", pointer, unsigned, pointer)
        self._picked_texts = function("pw_picked_texts", number, pointer, pointer, unsigned, pointer)
        self._picked = function("pw_picked", number, pointer, pointer, number, pointer)
        self._lists = function(
            *("pw_lists", number, pointer, number, pointer, pointer, number, number, unsigned, pointer),
            *(number, pointer),
        )
        self._gather = function("pw_gather", pointer, number, number, pointer, number, pointer)
        self._gather_lists = function(
            "pw_gather_lists", pointer, number, number, pointer, number, pointer, number, pointer, number
        )
        self._pad = function("pw_pad", pointer, number, pointer, number, number, pointer)
        self._unique = function("pw_unique", pointer, number, pointer, pointer)

    def integer_keys(self, columns: Sequence[Column], out_NF: UInt64) -> None:
        """Keys of `integer_column`s, each into its column of a C-contiguous array."""
        assert out_NF.flags.c_contiguous
        rows, stride = out_NF.shape
        assert all(column[9] < stride for column in columns)
        _checked(self._integers(rows, _packed(columns), len(columns), _address(out_NF), stride))

    def float32(self, columns: Sequence[Column], out: Float32) -> bool:
        """Numbers of `number_column`s into columns of an array whose rows are contiguous; whether all can be used."""
        rows = out.shape[0]
        if rows == 0:
            return True  # NumPy gives an empty array any strides
        assert out.strides[1] == out.itemsize
        stride = out.strides[0] // out.itemsize
        assert out.dtype == np.float32
        assert all(column[9] < out.shape[1] for column in columns)
        return bool(_checked(self._numbers(rows, _packed(columns), len(columns), _address(out), stride)) == 0)

    def texts(self, array: pa.Array, seed: int) -> UInt64 | None:
        """Keys [N] of text or bytes; None for a layout that stays with NumPy."""
        text = _text(array)
        if text is None:
            return None
        out = np.empty(len(array), np.uint64)
        _checked(self._texts(_packed([text]), seed, _address(out)))
        return out

    def picked_texts(self, array: pa.DictionaryArray, seed: int) -> UInt64 | None:
        """Keys [N] of a dictionary of text, 0 for null, hashed row by row."""
        text, codes = _text(array.dictionary), integer_column(array.indices)
        if text is None or codes is None:
            return None
        out = np.empty(len(array), np.uint64)
        _checked(self._picked_texts(len(array), _packed([codes]), _packed([text]), seed, _address(out)))
        return out

    def picked(self, array: pa.DictionaryArray, words: UInt64) -> UInt64 | None:
        """Keys [N] of a dictionary whose words have these keys, 0 for null."""
        codes = integer_column(array.indices)
        if codes is None:
            return None
        out = np.empty(len(array), np.uint64)
        words = np.ascontiguousarray(words)
        _checked(self._picked(len(array), _packed([codes]), _address(words), len(words), _address(out)))
        return out

    def lists(
        self, keys: UInt64, starts: Int64, lengths: Int64, *, most: int, last: bool, missing: int
    ) -> tuple[UInt64, Int64, int]:
        """Ids that are not 0, cut to `most` of each row; offsets [N + 1]; how many were cut off."""
        rows = len(starts)
        assert len(lengths) == rows
        out = np.empty(int(lengths.sum()) + rows + 1, np.uint64)
        offsets = np.empty(rows + 1, np.int64)
        keys = np.ascontiguousarray(keys)
        starts, lengths = np.ascontiguousarray(starts), np.ascontiguousarray(lengths)
        cut = _checked(
            self._lists(
                *(rows, _address(keys), len(keys), _address(starts), _address(lengths), most, last, missing),
                *(_address(out), len(out), _address(offsets)),
            )
        )
        return out[: offsets[-1]].copy(), offsets, cut

    def gather(self, pieces: Iterable[tuple[npt.NDArray[Any], Int64]], out: npt.NDArray[Any]) -> None:
        """Rows of C-contiguous arrays, one piece after the other, into `out`."""
        assert out.flags.c_contiguous
        base, row_bytes, room = _address(out), out.strides[0], len(out)
        for array, at in pieces:
            assert array.flags.c_contiguous
            assert (array.dtype, array.shape[1:]) == (out.dtype, out.shape[1:])
            assert len(at) <= room
            places = np.ascontiguousarray(at, np.int64)
            _checked(self._gather(_address(array), len(array), row_bytes, _address(places), len(at), base))
            base += row_bytes * len(at)
            room -= len(at)

    def gather_lists(self, items: npt.NDArray[Any], offsets: Int64, at: Int64, out: npt.NDArray[Any]) -> None:
        """Items of the lists at these places, which fill `out`."""
        assert items.dtype == out.dtype
        items, offsets, at = map(np.ascontiguousarray, (items, offsets, at))
        _checked(
            self._gather_lists(
                *(_address(items), len(items), items.itemsize, _address(offsets), len(offsets) - 1),
                *(_address(at), len(at), _address(out), len(out)),
            )
        )

    def pad(self, flat: npt.NDArray[Any], lengths: Int64, width: int) -> npt.NDArray[Any]:
        """[N, width], left-aligned, 0 where there is nothing; items of 4 bytes."""
        assert flat.itemsize == 4
        out = np.empty((len(lengths), width), flat.dtype)
        flat, lengths = np.ascontiguousarray(flat), np.ascontiguousarray(lengths)
        _checked(self._pad(_address(flat), len(flat), _address(lengths), len(lengths), width, _address(out)))
        return out

    def unique(self, keys: UInt64) -> tuple[UInt64, Int32]:
        """As `keys.unique_keys`."""
        keys = np.ascontiguousarray(keys)
        unique, positions = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
        count = self._unique(_address(keys), len(keys), _address(unique), _address(positions))
        if count < 0:
            raise MemoryError(f"no memory for the unique keys of {len(keys)}")
        return unique[:count].copy(), positions


def integer_column(array: pa.Array, seed: int = 0, add: int = 0, missing: int = 0, position: int = 0) -> Column | None:
    """Integers, booleans or dates in Arrow's memory; None for another layout."""
    kind = _KINDS.get(array.type.id)
    return None if kind is None else _column(array, kind, seed, add, missing, position)


def number_column(array: pa.Array, fill: float | None, position: int) -> Column | None:
    """Numbers in Arrow's memory and what null and NaN become; None for another layout."""
    kind = _NUMBER_KINDS.get(array.type.id)
    if kind is None:
        return None
    bits = 0 if fill is None else int(np.float32(fill).view(np.uint32))
    return _column(array, kind, int(fill is not None), bits, 0, position)


def _column(array: pa.Array, kind: int, seed: int, add: int, missing: int, position: int) -> Column | None:
    validity, values = array.buffers()
    if values is None:
        return None
    bits, size = (0, 0) if validity is None else (validity.address, validity.size)
    return (values.address, values.size, bits, size, array.offset, kind, seed, add, missing, position)


def _text(array: pa.Array) -> Column | None:
    """A PwText of rows.h."""
    buffers, kind = array.buffers(), array.type
    if kind.id == _FIXED:
        data = buffers[1]
        if data is None or kind.byte_width == 0:
            return None
        return (data.address, data.size, 0, 0, array.offset, -kind.byte_width, len(array))
    width = _OFFSETS.get(kind.id)
    if width is None or buffers[1] is None:
        return None
    data, size = (0, 0) if buffers[2] is None else (buffers[2].address, buffers[2].size)
    return (data, size, buffers[1].address, buffers[1].size, array.offset, width, len(array))


def _packed(columns: Sequence[Column]) -> Any:
    flat = [word for column in columns for word in column]
    return (ctypes.c_uint64 * len(flat))(*flat)  # negative numbers become their patterns


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _checked(result: int) -> int:
    if result < 0:
        raise DataError(
            "an offset, a code of a dictionary or a length in a column points outside of its memory: the file is "
            "damaged, or was written by a faulty program. Write it anew"
        )
    return result


def _places() -> list[Path]:
    return compiled.places("rows", _SOURCES, (_SOURCES / "rows.cc", _SOURCES / "rows.h"), _FLAGS)
