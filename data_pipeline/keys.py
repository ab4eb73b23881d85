"""From values to 64-bit keys. This mapping is part of the model format: it never changes.

A key is a function of (key space, value) and nothing else: not of the table, the file, the platform or the numpy
version.

- The seed of a key space is XXH64 of its UTF-8 name.
- Integers, booleans (0, 1), dates (days): the value as a 64-bit two's complement pattern, xor the seed, through the
  finaliser of splitmix64, which is a bijection. So integers of one space never collide with each other. -1 as int64
  and 2^64 - 1 as uint64 are the same pattern and the same key: systems without unsigned integers store hashed ids that
  way.
- Timestamps, times of day: microseconds since 1970 UTC, since midnight as an integer, whatever unit the file has;
  nanoseconds beyond are combined in.
- Strings and bytes: XXH64 of the bytes with the seed of the space. Any language has this function.
- Decimals: an integral value within 64 bits is that integer, else the text in full without trailing zeros, whatever
  the scale.
- A cross: keys of its parts in their own spaces, folded with splitmix64.
- 0 is padding in the parameter server; the one value that would map to it gets a fixed other key.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

UInt64 = npt.NDArray[np.uint64]

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("data_pipeline.keys needs a little-endian machine")

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_INSTEAD_OF_ZERO = np.uint64(0x9E3779B97F4A7C15)
_U = np.uint64
_HUGE_BYTES = 512


def mix(bits: UInt64) -> UInt64:
    """The finaliser of splitmix64, in place. A bijection of 64-bit patterns. (Steele, Lea, Flood 2014, variant 13)"""
    scratch = np.empty_like(bits)
    for shift, factor in ((30, _M1), (27, _M2)):
        np.right_shift(bits, _U(shift), out=scratch)
        np.bitwise_xor(bits, scratch, out=bits)
        np.multiply(bits, factor, out=bits)
    np.right_shift(bits, _U(31), out=scratch)
    np.bitwise_xor(bits, scratch, out=bits)
    return bits


def _no_zero(keys: UInt64) -> UInt64:
    if not keys.all():
        keys[keys == 0] = _INSTEAD_OF_ZERO
    return keys


def space_seed(space: str) -> np.uint64:
    """Seed of a key space."""
    raw = np.frombuffer(space.encode(), dtype=np.uint8)
    return _U(xxh64(raw, np.array([0]), np.array([raw.size]), _U(0))[0])


def integer_keys(patterns: UInt64, seed: Any) -> UInt64:
    """Keys of 64-bit patterns, in place. `seed` may be an array that broadcasts over the last axis."""
    np.bitwise_xor(patterns, seed, out=patterns)
    return _no_zero(mix(patterns))


def string_keys(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], seed: np.uint64
) -> UInt64:
    """Keys of the byte strings `data[starts[i]:ends[i]]`."""
    return _no_zero(xxh64(data, starts, ends - starts, seed))


def combine(first: UInt64, second: UInt64) -> UInt64:
    """Keys of pairs of keys; order matters."""
    return _no_zero(mix(_rotl(mix(first.copy()), 23) + second * _P1))


def special_key(space: str, what: str) -> np.uint64:
    """Key of a state that is no value: `missing` or `rare`."""
    raw = np.frombuffer(f"\x00paddlewheel:{what}".encode(), dtype=np.uint8)
    return _U(string_keys(raw, np.array([0]), np.array([raw.size]), space_seed(space))[0])


def unique_keys(keys_N: UInt64) -> tuple[UInt64, npt.NDArray[np.int32]]:
    """Distinct non-zero keys, and for every key 1 + its position among them (0 for key 0).

    Without sorting: keys are well mixed, so their upper bits are a hash. All keys write their place into a table, the
    last one wins; keys that then read another key's place try again with another hash.
    """
    bits = max(10, int(4 * keys_N.size).bit_length())
    shift = np.uint64(64 - bits)
    table = np.empty(1 << bits, dtype=np.int64)
    slot = (keys_N >> shift).view(np.int64)
    places = np.arange(keys_N.size, dtype=np.int64)
    table[slot] = places
    winner = table.take(slot)
    lost = np.flatnonzero(keys_N.take(winner) != keys_N)
    factor = 0x9E3779B97F4A7C15
    while lost.size:
        keys = keys_N[lost]
        slot = ((keys * np.uint64(factor)) >> shift).view(np.int64)
        table[slot] = lost
        winner[lost] = table[slot]
        lost = lost[keys_N[winner[lost]] != keys]
        factor = (factor * 0xD1342543DE82EF95 + 2) & 0xFFFFFFFFFFFFFFFF | 1
    first = np.flatnonzero((winner == places) & (keys_N != 0))
    rank = np.zeros(keys_N.size, dtype=np.int32)
    rank[first] = np.arange(1, first.size + 1, dtype=np.int32)
    return keys_N[first], rank.take(winner)


def _rotl(x: UInt64, bits: int) -> UInt64:
    return (x << _U(bits)) | (x >> _U(64 - bits))


def _words(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], dtype: str) -> UInt64:
    width = np.dtype(dtype).itemsize
    every = np.ndarray((data.size - width + 1,), dtype=dtype, buffer=data, strides=(1,))
    return every[at].astype(np.uint64, copy=False)


def xxh64(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], seed: np.uint64
) -> UInt64:
    """XXH64 of many byte strings at once: `data[starts[i]:starts[i] + lengths[i]]`. (xxHash specification 0.1.1)"""
    with np.errstate(over="ignore"):
        starts = starts.astype(np.int64, copy=True)
        left = lengths.astype(np.int64, copy=True)
        huge = np.flatnonzero(left > _HUGE_BYTES)
        left[huge] = 0  # a word at a time of a few long strings would take NumPy long; the library hashes them below
        acc = np.full(starts.shape, seed + _P5, dtype=np.uint64)
        long = np.flatnonzero(left >= 32)
        if long.size:
            acc[long] = _stripes(data, starts, left, long, seed)
        acc += lengths.astype(np.uint64)

        def rounds(width: int, dtype: str) -> None:
            while True:
                todo = left >= width
                if not todo.any():
                    return
                rows: Any = slice(None) if todo.all() else np.flatnonzero(todo)
                word = _words(data, starts[rows], dtype)
                if width == 8:
                    acc[rows] = _rotl(acc[rows] ^ (_rotl(word * _P2, 31) * _P1), 27) * _P1 + _P4
                elif width == 4:
                    acc[rows] = _rotl(acc[rows] ^ (word * _P1), 23) * _P2 + _P3
                else:
                    acc[rows] = _rotl(acc[rows] ^ (word * _P5), 11) * _P1
                starts[rows] += width
                left[rows] -= width

        rounds(8, "<u8")
        rounds(4, "<u4")
        rounds(1, "u1")
        acc ^= acc >> _U(33)
        acc *= _P2
        acc ^= acc >> _U(29)
        acc *= _P3
        acc ^= acc >> _U(32)
        for row in huge.tolist():
            acc[row] = xxhash.xxh64_intdigest(data[starts[row] : starts[row] + lengths[row]].tobytes(), int(seed))
        return acc


def _stripes(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    left: npt.NDArray[np.int64],
    rows: npt.NDArray[np.intp],
    seed: np.uint64,
) -> UInt64:
    """The 32-byte stripes of the strings `rows`; advances `starts` and `left` past them."""
    lanes = [np.full(rows.shape, s, dtype=np.uint64) for s in (seed + _P1 + _P2, seed + _P2, seed, seed - _P1)]
    todo = np.arange(rows.size)
    while todo.size:
        which = rows[todo]
        for number, lane in enumerate(lanes):
            word = _words(data, starts[which] + 8 * number, "<u8")
            lane[todo] = _rotl(lane[todo] + word * _P2, 31) * _P1
        starts[which] += 32
        left[which] -= 32
        todo = todo[left[which] >= 32]
    merged = _rotl(lanes[0], 1) + _rotl(lanes[1], 7) + _rotl(lanes[2], 12) + _rotl(lanes[3], 18)
    for lane in lanes:
        merged = (merged ^ (_rotl(lane * _P2, 31) * _P1)) * _P1 + _P4
    return merged
