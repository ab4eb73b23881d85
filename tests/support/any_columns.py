"""Columns of every type, unit and encoding for property tests, with what their values mean."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.schema import check_file
from tests.support.key_oracle import Value

DAY_NS = 86_400 * 10**9
UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def fixed_width(kind: pa.DataType, values: list[int | None], width: int) -> pa.Array:
    """An array of any fixed-width type from the integers that it stores; garbage lies below its nulls."""
    raw = b"".join((77 if v is None else v).to_bytes(width, "little", signed=(v or 0) < 0) for v in values)
    bits = np.packbits(np.array([v is not None for v in values], bool), bitorder="little").tobytes()
    return pa.Array.from_buffers(kind, len(values), [pa.py_buffer(bits), pa.py_buffer(raw)])


INTEGER_TYPES = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
DECIMAL_TYPES = [
    *(pa.decimal32(9, s) for s in (0, 2, 9)), *(pa.decimal64(18, s) for s in (0, 1, 18)),
    *(pa.decimal128(38, s) for s in (-3, 0, 2, 17, 18, 19, 38)), *(pa.decimal256(76, s) for s in (-2, 0, 2, 40, 76)),
]  # fmt: skip
TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]


def storable(kind: pa.DataType, value: Value | None) -> bool:
    """Whether a type can hold a value exactly."""
    return value is None or stored(kind, value) is not None


def stored(kind: pa.DataType, value: Value) -> int | bytes | None:
    """What a column of a type stores for a value; None if it cannot hold it."""
    t = pa.types
    if value.kind == "text":
        if t.is_fixed_size_binary(kind):
            return value.text if len(value.text) == kind.byte_width else None
        return value.text
    number, rest = value.number, 0
    if value.kind == "boolean" and t.is_boolean(kind):
        return number
    if t.is_decimal(kind):
        if value.kind == "decimal":
            number, rest = divmod(number * 10 ** max(0, kind.scale), 10**value.scale)
        else:
            number *= 10 ** max(0, kind.scale)
        if kind.scale < 0:
            number, more = divmod(number, 10**-kind.scale)
            rest += more
        return number if rest == 0 and abs(number) < 10**kind.precision else None
    if value.kind == "decimal":
        number, rest = divmod(number, 10**value.scale)
    elif t.is_time(kind) or t.is_timestamp(kind):
        number, rest = divmod(number, UNIT_NS[kind.unit])
    elif t.is_date64(kind):
        number *= 86_400_000
    signed = not t.is_unsigned_integer(kind)
    low, high = (-(1 << (kind.bit_width - 1)), 1 << (kind.bit_width - 1)) if signed else (0, 1 << kind.bit_width)
    return number if rest == 0 and low <= number < high else None


def column(kind: pa.DataType, values: list[Value | None]) -> pa.Array:
    """A plain array of a type that holds the values."""
    if pa.types.is_boolean(kind):
        return pa.array([None if v is None else bool(v.number) for v in values], kind)
    held = [None if v is None else stored(kind, v) for v in values]
    if (
        (values and any(isinstance(h, bytes) for h in held))
        or kind in TEXT_TYPES
        or pa.types.is_fixed_size_binary(kind)
    ):
        if pa.types.is_fixed_size_binary(kind):
            return pa.array(held, kind)
        large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        array = pa.array(held, pa.large_binary() if large else pa.binary())  # bytes that are no UTF-8, too
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return array.view(kind)
        if pa.types.is_string_view(kind):
            return pa.Array.from_buffers(kind, len(array), array.cast(pa.binary_view()).buffers(), array.null_count)
        return array.cast(kind)
    return fixed_width(kind, held, kind.bit_width // 8)


whole = st.one_of(st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]), st.integers(-130, 260),
                  st.integers(-(2**63), 2**64 - 1))  # fmt: skip
FAMILIES = {
    "integer": (
        st.one_of(
            whole.map(lambda n: Value("integer", n)),
            st.tuples(st.integers(-(10**30), 10**30), st.integers(0, 12)).map(lambda p: Value("decimal", *p)),
            st.tuples(st.integers(-99, 99), st.integers(0, 3)).map(lambda p: Value("decimal", *p)),
            st.sampled_from([0, 1]).map(lambda n: Value("boolean", n)),
        ),
        [*INTEGER_TYPES, *DECIMAL_TYPES],
    ),
    "boolean": (
        st.sampled_from([0, 1]).map(lambda n: Value("boolean", n)),
        [pa.bool_(), *INTEGER_TYPES, *DECIMAL_TYPES],
    ),
    "date": (
        st.one_of(st.integers(-9, 9), st.integers(-(2**31), 2**31 - 1)).map(lambda n: Value("date", n)),
        [pa.date32(), pa.date64()],
    ),
    "time": (
        st.one_of(st.integers(0, 86_399).map(lambda s: s * 10**9), st.integers(0, 86_399_999).map(lambda s: s * 10**6),
                  st.integers(0, DAY_NS - 1)).map(lambda n: Value("time", n)),
        [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")],
    ),
    "timestamp": (
        st.one_of(st.integers(-(2**62), 2**62), st.integers(-(2**40), 2**40).map(lambda n: n * 10**9),
                  st.integers(-(2**50), 2**50).map(lambda n: n * 10**3)).map(lambda n: Value("timestamp", n)),
        [pa.timestamp(u, z) for u in UNIT_NS for z in (None, "UTC", "Europe/Berlin")],
    ),
    "text": (
        st.one_of(st.binary(max_size=40), st.text(max_size=9).map(str.encode), st.sampled_from([b"", b"7", b"07"]),
                  st.binary(min_size=5, max_size=5)).map(lambda b: Value("text", text=b)),
        [*TEXT_TYPES, pa.binary(5)],
    ),
}  # fmt: skip


def encoded(kind: pa.DataType, values: list[Value | None], how: str, order: list[int]) -> pa.Array:
    """The values in a type and an encoding. `order` shuffles the words of a dictionary."""
    array = column(kind, values)
    if how == "dictionary":
        # words in any order, each perhaps twice, some never used; nulls among the indices or among the words
        picks = [i % max(1, len(array)) for i in order] + list(range(len(array)))
        place = {pick: at for at, pick in enumerate(picks)}
        return pa.DictionaryArray.from_arrays(
            pa.array([place[i] for i in range(len(array))], pa.uint16()), column(kind, [values[pick] for pick in picks])
        )
    if how == "dictionary without null words":
        kept = [value for value in values if value is not None]
        at = iter(range(len(kept)))
        places = [None if value is None else next(at) for value in values]
        return pa.DictionaryArray.from_arrays(pa.array(places, pa.int8()), column(kind, kept))
    if how == "run-end":
        ends = pa.array(range(1, len(array) + 1), pa.int32())
        try:
            return pa.RunEndEncodedArray.from_arrays(ends, array)
        except pa.ArrowInvalid:  # this one way asks that text is UTF-8
            return array
    if how == "extension" and kind == pa.string():
        return pa.ExtensionArray.from_storage(pa.json_(pa.string()), array)
    if how == "extension" and kind == pa.int8():
        return pa.ExtensionArray.from_storage(pa.bool8(), array)
    return array


ENCODINGS = ["plain", "dictionary", "dictionary without null words", "run-end", "extension"]


@st.composite
def columns(draw):
    """A column of any type that can hold its values, in any encoding, and what its values mean."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    some, types = FAMILIES[family]
    values = draw(st.lists(st.one_of(st.none(), some), max_size=12))
    kinds = [kind for kind in types if all(storable(kind, v) for v in values)]
    if not kinds:  # not all fit into one type: those that fit into the first value's
        kind = draw(st.sampled_from(types))
        values = [v for v in values if storable(kind, v)]
    else:
        kind = draw(st.sampled_from(kinds))
    if kind in INTEGER_TYPES:  # which hold integers, whatever is meant by them
        values = [v and Value("integer", v.number // 10**v.scale) for v in values]
    order = draw(st.lists(st.integers(0, 11), max_size=6)) if values else []
    return encoded(kind, values, draw(st.sampled_from(ENCODINGS)), order), values, family


def accepted(kind: pa.DataType, feature: dict) -> bool:
    """Whether a job may read a column so."""
    config = DataConfig(labels="click", sparse=[{"name": "v", **feature}])
    try:
        check_file("x", pa.schema([("click", pa.int8()), ("v", kind)]), {}, config)
    except DataError:
        return False
    return True


def features(draw, array: pa.Array) -> dict:
    """Some way in which a job may read the column."""
    feature = {
        "type": draw(st.sampled_from([None, "integer", "string"])),
        "offset": draw(st.sampled_from([0, 0, 1000, -5, 2**63])),
    }
    if feature["type"] == "string":
        feature["offset"] = 0
    if not accepted(array.type, feature):
        feature = {"type": None, "offset": 0}
    assert accepted(array.type, feature), array.type
    return feature
