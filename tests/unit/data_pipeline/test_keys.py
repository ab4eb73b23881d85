"""Keys: stable forever, exact, never 0, well spread (S4, S5)."""

from __future__ import annotations

import datetime as dt
import decimal

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.data_pipeline import keys
from tests.support import reference_keys
from tests.support.parquet_files import keys_by_row, read_columns

BIG = [0, 1, -1, 2**31, -(2**31), 2**53 + 1, -(2**63), 2**63 - 1, 123456789012345678]


def test_golden_values_never_change():
    assert int(keys.space_seed("item")) == 0x5FE193BB4B6B9CD0
    assert (
        keys.integer_keys(np.array([0, 1, 2**64 - 1], dtype=np.uint64), keys.space_seed("item")).tolist()
        == GOLDEN_INTEGERS
    )
    assert int(keys.special_key("item", "missing")) == GOLDEN_MISSING


GOLDEN_INTEGERS = [9408286198084499463, 16373778657101374795, 18359614607529422092]
GOLDEN_MISSING = 17779282441341795119


@given(st.lists(st.binary(max_size=130), max_size=30), st.integers(0, 2**64 - 1))
def test_strings_are_xxh64(strings, seed):
    data = np.frombuffer(b"".join(strings) or b"\0", dtype=np.uint8)
    lengths = np.array([len(s) for s in strings], dtype=np.int64)
    got = keys.xxh64(data, np.cumsum(lengths) - lengths, lengths, np.uint64(seed))
    assert got.tolist() == [xxhash.xxh64_intdigest(s, seed) for s in strings]


def test_long_strings_are_xxh64_too():
    strings = [bytes([n % 251]) * n for n in (0, 31, 512, 513, 600, 5, 40_000)]
    data, lengths = np.frombuffer(b"".join(strings), dtype=np.uint8), np.array([len(s) for s in strings])
    got = keys.xxh64(data, np.cumsum(lengths) - lengths, lengths, np.uint64(7))
    assert got.tolist() == [xxhash.xxh64_intdigest(s, 7) for s in strings]


@given(st.lists(st.integers(0, 30), max_size=300))
def test_unique_keys_finds_positions(small):
    values = np.array(small, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    unique, index = keys.unique_keys(values)
    assert sorted(unique.tolist()) == sorted(set(values.tolist()) - {0})
    assert np.append(np.uint64(0), unique)[index].tolist() == values.tolist()
    assert index.dtype == np.int32


def test_unique_keys_survives_keys_that_all_share_their_upper_bits():
    values = np.concatenate([np.arange(5000, dtype=np.uint64)] * 2)
    unique, index = keys.unique_keys(values)
    assert unique.size == 4999
    assert np.append(np.uint64(0), unique)[index].tolist() == values.tolist()


@given(st.integers(0, 2**64 - 1))
def test_no_value_is_key_zero(value):
    seed = keys.space_seed("s")
    assert keys.integer_keys(np.array([value], dtype=np.uint64), seed)[0] != 0
    assert keys.integer_keys(np.array([int(seed)], dtype=np.uint64), seed)[0] == 0x9E3779B97F4A7C15


@pytest.mark.parametrize("stride", [1, 2, 1000, 2**32, 2**52])
@pytest.mark.parametrize("num_shards", [2, 3, 8, 48])
def test_structured_ids_spread_evenly_over_servers(stride, num_shards):
    ids = (np.arange(4000, dtype=np.uint64) * np.uint64(stride)) & np.uint64(2**64 - 1)
    made = keys.integer_keys(ids, keys.space_seed("item"))
    counts = np.bincount((made % np.uint64(num_shards)).astype(np.int64), minlength=num_shards)
    expected = 4000 / num_shards
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)
    assert np.unique(made).size == np.unique(np.arange(4000, dtype=np.uint64) * np.uint64(stride)).size


def read_keys(tmp_path, array: pa.Array, **feature) -> list[int]:
    """One key per row; 0 where there is no feature."""
    batches = read_columns(tmp_path, {"v": array}, sparse=[{"name": "v", **feature}])
    return [row[0] if row else 0 for row in keys_by_row(batches, "v")]


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.int32(), pa.int16(), pa.int8(), pa.uint64(), pa.uint32(), pa.uint16(), pa.uint8()]
)
def test_integers_of_every_width_are_the_same_value(tmp_path, kind):
    bits = kind.bit_width
    low, high = (0, 2**bits - 1) if pa.types.is_unsigned_integer(kind) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    values = [v for v in [*BIG, low, high, 5] if low <= v <= high] + [None]
    assert read_keys(tmp_path, pa.array(values, kind)) == [
        0 if v is None else reference_keys.key("v", v) for v in values
    ]


def test_unsigned_above_2_63_shares_the_key_of_its_signed_pattern(tmp_path):
    unsigned = read_keys(tmp_path, pa.array([2**64 - 1, 2**63], pa.uint64()))
    signed = read_keys(tmp_path, pa.array([-1, -(2**63)], pa.int64()))
    assert unsigned == signed


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string())]
)
def test_strings_and_bytes(tmp_path, kind):
    values = ["", "a", "Ünïcode 漢字", "x" * 31, "x" * 32, "y" * 100, None, "a"]
    raw = [v.encode() if v is not None and "binary" in str(kind) else v for v in values]
    assert read_keys(tmp_path, pa.array(raw, kind)) == [0 if v is None else reference_keys.key("v", v) for v in values]


def test_fixed_size_bytes(tmp_path):
    assert read_keys(tmp_path, pa.array([b"abcd", None, b"\0\0\0\0"], pa.binary(4))) == [
        reference_keys.key("v", b"abcd"),
        0,
        reference_keys.key("v", b"\0\0\0\0"),
    ]


def test_booleans_dates_times(tmp_path):
    assert read_keys(tmp_path, pa.array([True, False, None])) == [
        reference_keys.key("v", 1),
        reference_keys.key("v", 0),
        0,
    ]
    day = dt.date(2020, 2, 3)
    assert read_keys(tmp_path, pa.array([day])) == [reference_keys.key("v", (day - dt.date(1970, 1, 1)).days)]
    assert read_keys(tmp_path, pa.array([7], pa.time64("us"))) == [reference_keys.key("v", 7)]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_a_timestamp_is_the_same_in_every_unit(tmp_path, unit):
    moment = dt.datetime(2021, 5, 6, 7, 8, 9, 123000)  # noqa: DTZ001 -- Parquet has no zone here
    micros = int((moment - dt.datetime(1970, 1, 1)) / dt.timedelta(microseconds=1))  # noqa: DTZ001
    assert read_keys(tmp_path, pa.array([moment, None], pa.timestamp(unit))) == [reference_keys.key("v", micros), 0]


def test_nanoseconds_are_not_lost(tmp_path):
    near = read_keys(tmp_path, pa.array([1000, 1001, 1002], pa.timestamp("ns")))
    assert len(set(near)) == 3
    assert near[0] == reference_keys.key("v", 1)


def test_decimals_are_their_value(tmp_path):
    d = decimal.Decimal
    got = read_keys(tmp_path, pa.array([d("18446744073709551615"), d("-3"), None], pa.decimal128(20, 0)))
    assert got == [reference_keys.key("v", 2**64 - 1), reference_keys.key("v", -3), 0]
    got = read_keys(tmp_path, pa.array([d("1.50"), d("2.00"), None], pa.decimal128(10, 2)))
    assert got == [reference_keys.key("v", "1.5"), reference_keys.key("v", 2), 0]
    huge = d(10) ** 30
    assert read_keys(tmp_path, pa.array([huge], pa.decimal128(38, 0))) == [reference_keys.key("v", str(10**30))]


def test_declared_types_override_what_the_file_has(tmp_path):
    assert read_keys(tmp_path, pa.array([7, None]), type="string") == [reference_keys.key("v", "7"), 0]
    text = pa.array(["7", " -8 ", "18446744073709551615", None, "00"])
    assert read_keys(tmp_path, text, type="integer") == [
        *(reference_keys.key("v", v) for v in (7, -8, 2**64 - 1)),
        0,
        reference_keys.key("v", 0),
    ]


def test_key_spaces_keep_equal_values_apart_and_shared_ones_together(tmp_path):
    columns = {"a": pa.array([5]), "b": pa.array([5]), "c": pa.array([5])}
    sparse = [
        {"name": "a"},
        {"name": "b", "table": "item"},
        {"name": "c", "table": "item"},
        {"name": "d", "column": "a", "key_space": "x"},
    ]
    batches = read_columns(tmp_path, columns, sparse=sparse)
    found = {f: keys_by_row(batches, f)[0][0] for f in "abcd"}
    assert found == {
        "a": reference_keys.key("a", 5), "b": reference_keys.key("item", 5), "c": reference_keys.key("item", 5),
        "d": reference_keys.key("x", 5),
    }  # fmt: skip


def test_offset_is_added_before_the_key_is_made(tmp_path):
    assert read_keys(tmp_path, pa.array([0, 5, -1]), offset=1000) == [
        reference_keys.key("v", v) for v in (1000, 1005, 999)
    ]


def test_a_cross_is_the_joint_value_and_null_in_any_part_is_no_feature(tmp_path):
    columns = {"a": pa.array([1, 1, None, 2]), "b": pa.array(["x", "y", "x", None])}
    batches = read_columns(tmp_path, columns, sparse=[{"name": "ab", "cross": ["a", "b"]}])
    assert keys_by_row(batches, "ab") == [
        [reference_keys.cross("ab", [("a", 1), ("b", "x")])],
        [reference_keys.cross("ab", [("a", 1), ("b", "y")])],
        [],
        [],
    ]


def test_missing_as_a_key_of_its_own(tmp_path):
    assert read_keys(tmp_path, pa.array([None, 3]), null_policy="own_key") == [
        reference_keys.special("v", "missing"),
        reference_keys.key("v", 3),
    ]


def test_value_zero_is_a_real_feature(tmp_path):
    batches = read_columns(tmp_path, {"v": pa.array([0, None, 0])}, sparse=[{"name": "v"}])
    table = batches[0].tables["default"]
    assert table.keys_U.size == 1
    assert table.single_BF.tolist() == [[1], [0], [1]]
