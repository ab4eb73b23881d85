"""The documented key mapping, one value at a time, with Python integers and the xxhash library."""

from __future__ import annotations

import xxhash

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def seed(space: str) -> int:
    return xxhash.xxh64_intdigest(space.encode(), 0)


def key(space: str, value: int | str | bytes) -> int:
    """Key of an integer or a string in a key space."""
    if isinstance(value, int):
        result = mix((value & MASK) ^ seed(space))
    else:
        raw = value.encode() if isinstance(value, str) else value
        result = xxhash.xxh64_intdigest(raw, seed(space))
    return result or 0x9E3779B97F4A7C15


def special(space: str, what: str) -> int:
    return key(space, f"\x00paddlewheel:{what}")


def cross(space: str, parts: list[tuple[str, int | str]]) -> int:
    """Key of a cross of (column, value) pairs."""
    result = seed(space)
    for column, value in parts:
        folded = mix(result)
        turned = ((folded << 23) | (folded >> 41)) & MASK
        result = mix((turned + key(column, value) * 0x9E3779B185EBCA87) & MASK)
    return result
