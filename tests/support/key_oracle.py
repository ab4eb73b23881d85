"""Keys of single values as trainer/serving/EXPORT.md says, in Python integers. Written from that page; shares no code.

A value is given by what it means, not by how a column stores it: see `Value`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import xxhash

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Value:
    """One value.

    Attributes:
        kind: what it is.
        number: the integer, 0 or 1 of a boolean, days of a date, nanoseconds of a time, or the digits of a decimal.
        scale: of a decimal: it is number / 10^scale.
        text: the bytes of a text.
    """

    kind: Literal["integer", "boolean", "date", "time", "timestamp", "decimal", "text"]
    number: int = 0
    scale: int = 0
    text: bytes = b""


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def not_zero(key: int) -> int:
    return key or 0x9E3779B97F4A7C15


def combine(a: int, b: int) -> int:
    folded = mix(a)
    rotated = (folded << 23 | folded >> 41) & MASK
    return not_zero(mix((rotated + b * 0x9E3779B185EBCA87) & MASK))


def space_seed(space: str) -> int:
    return xxhash.xxh64_intdigest(space.encode(), 0)


def integer_key(value: int, seed: int) -> int:
    return not_zero(mix((value & MASK) ^ seed))


def text_key(text: bytes, seed: int) -> int:
    return not_zero(xxhash.xxh64_intdigest(text, seed))


def decimal_text(number: int, scale: int) -> str:
    whole, fraction = divmod(abs(number), 10**scale)
    text = str(whole)
    if fraction:
        digits = str(fraction)
        text += "." + ("0" * (scale - len(digits)) + digits).rstrip("0")
    return "-" + text if number < 0 else text


def read_integer(text: bytes) -> int | None:
    """`type: integer` for a text; None where it is none."""
    letters = text.strip(b" \t\n\v\f\r")
    sign = -1 if letters[:1] == b"-" else 1
    digits = letters[1:] if letters[:1] in (b"+", b"-") else letters
    if not digits or any(letter not in b"0123456789" for letter in digits):
        return None
    number = 0
    for letter in digits:
        number = min(number * 10 + letter - 48, 1 << 70)
    number *= sign
    return number if -(1 << 63) <= number < 1 << 64 else None


def value_key(value: Value, seed: int, value_type: str | None = None, offset: int = 0) -> int | None:
    """The key of a value; None where the row cannot be scored."""
    if value_type == "string" and value.kind in ("integer", "boolean"):
        text = str(value.number) if value.kind == "integer" else "true" if value.number else "false"
        return text_key(text.encode(), seed)
    if value.kind == "text":
        if value_type != "integer":
            return text_key(value.text, seed)
        number = read_integer(value.text)
        return None if number is None else integer_key(number + offset, seed)
    if value.kind == "decimal":
        whole, rest = divmod(value.number, 10**value.scale)
        if rest == 0 and -(1 << 63) <= whole < 1 << 64:
            return integer_key(whole + offset, seed)
        return None if value_type == "integer" else text_key(decimal_text(value.number, value.scale).encode(), seed)
    if value.kind in ("time", "timestamp"):
        micros, nanos = divmod(value.number, 1000)
        key = integer_key(micros, seed)
        return combine(key, nanos) if nanos else key
    return integer_key(value.number + offset, seed)


def cross_key(values: list[tuple[str, Value]], seed: int) -> int:
    """The key of a cross of (column, value) pairs."""
    key = seed
    for column, value in values:
        part = value_key(value, space_seed(column))
        assert part is not None
        key = combine(key, part)
    return key
