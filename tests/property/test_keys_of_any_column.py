"""A key is a function of key space and value alone, whatever type, unit, encoding and neighbours a column has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.encoded_rows import Rows
from paddlewheel.data_pipeline.encoder import Encoder
from paddlewheel.data_pipeline.schema import agree, check_file
from paddlewheel.data_pipeline.statistics import Fitted
from tests.support import key_oracle
from tests.support.any_columns import ENCODINGS, FAMILIES, TEXT_TYPES, columns, encoded, features
from tests.support.key_oracle import Value
from tests.support.parquet_files import keys_by_row, load, write


def container(array: pa.Array, lengths: list[int | None], how: str) -> pa.Array:
    """Lists of these lengths over the values, which come one after the other; None is a null list."""
    sizes = [n or 0 for n in lengths]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    mask = pa.array([n is None for n in lengths], pa.bool_())
    if how == "list":
        return pa.ListArray.from_arrays(pa.array(offsets), array, mask=mask)
    if how == "large list":
        return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), array, mask=mask)
    view = pa.ListViewArray if how == "list view" else pa.LargeListViewArray
    wide = np.int32 if how == "list view" else np.int64
    return view.from_arrays(pa.array(offsets[:-1].astype(wide)), pa.array(np.array(sizes, wide)), array, mask=mask)


@pytest.fixture(autouse=True, params=["numpy", pytest.param("native", marks=pytest.mark.needs("g++"))])
def backend(request, monkeypatch):
    """Every rule holds for both ways to encode."""
    monkeypatch.setattr(DataConfig.model_fields["encoder_backend"], "default", request.param)
    DataConfig.model_rebuild(force=True)
    yield request.param
    monkeypatch.undo()
    DataConfig.model_rebuild(force=True)


def made_keys(array: pa.Array | pa.ChunkedArray, feature: dict, policy: str = "skip") -> list[list[int] | None]:
    """Keys of each row as the encoder makes them; None for a bad row."""
    config = DataConfig(labels="click", sparse=[{"name": "v", **feature}], on_bad_row=policy)
    num_rows = len(array)
    into = Rows.empty(config, num_rows)
    click = pa.array(np.zeros(num_rows, np.int8))
    reasons = Encoder(config, Fitted.load(config)).encode({"click": click, "v": array}, into, slice(0, num_rows))
    assert sorted(reasons) == np.flatnonzero(into.bad_N).tolist()
    if "max_length" in feature:
        lists = into.lists["v"][0]
        rows = [lists.keys[a:b].tolist() for a, b in zip(lists.offsets[:-1], lists.offsets[1:], strict=True)]
    else:
        rows = [[key] if key else [] for key in into.singles["default"][:, 0].tolist()]
    return [None if bad else row for row, bad in zip(rows, into.bad_N.tolist(), strict=True)]


def expected_key(value: Value | None, feature: dict) -> list[int] | None:
    """By the oracle: no key for null, None for a bad row."""
    if value is None:
        return []
    key = key_oracle.value_key(value, key_oracle.space_seed("v"), feature.get("type"), feature.get("offset", 0))
    return None if key is None else [key]


@settings(max_examples=150)
@given(st.data())
def test_the_key_of_a_value_is_that_of_the_written_rules(data):
    array, values, _ = data.draw(columns())
    feature = features(data.draw, array)
    # the same column beside other rows: sliced out, and in chunks
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    for got, rows in ((array, values), (array.slice(start, stop - start), values[start:stop])):
        assert made_keys(got, feature) == [expected_key(v, feature) for v in rows]
    if not pa.types.is_run_end_encoded(array.type):  # Arrow cannot join those
        chunked = pa.chunked_array([array.slice(0, start), array.slice(start)])
        assert made_keys(chunked, feature) == [expected_key(v, feature) for v in values]


@settings(max_examples=120)
@given(st.data())
def test_ids_of_a_list_have_the_keys_of_single_ones(data):
    array, values, _ = data.draw(columns())
    feature = {**features(data.draw, array), "max_length": 50}
    lengths: list[int | None] = []
    left = len(values)
    while left:
        lengths.append(data.draw(st.one_of(st.none(), st.integers(0, left))))
        left -= lengths[-1] or 0
        if lengths[-1] is None and len(lengths) > 30:
            lengths[-1], left = left, 0
    how = data.draw(st.sampled_from(["list", "large list", "list view", "large list view"]))
    lists = container(array, lengths, how)
    rows, at = [], 0
    for length in lengths:
        rows.append(values[at : at + (length or 0)])
        at += length or 0
    expected = []
    for row in rows:
        made = [expected_key(v, feature) for v in row]
        expected.append(None if any(m is None for m in made) else [k for m in made for k in m])
    start = data.draw(st.integers(0, len(lengths)))
    assert made_keys(lists, feature) == expected
    assert made_keys(lists.slice(start), feature) == expected[start:]


@settings(max_examples=40)
@given(st.data())
def test_fixed_size_lists_too(data):
    array, values, _ = data.draw(columns())
    if len(values) % 2 or pa.types.is_run_end_encoded(array.type):
        return
    feature = {**features(data.draw, array), "max_length": 2}
    lists = pa.FixedSizeListArray.from_arrays(array, 2)
    made = [expected_key(v, feature) for v in values]
    pairs = [None if None in (a, b) else a + b for a, b in zip(made[::2], made[1::2], strict=True)]
    start = data.draw(st.integers(0, len(pairs)))
    assert made_keys(lists.slice(start), feature) == pairs[start:]


@settings(max_examples=60)
@given(st.data())
def test_a_row_is_good_or_bad_by_itself(data):
    texts = st.one_of(
        st.sampled_from([b"0x1F", b"7", b" -8 ", b"+5", b"", b"\xff", b"18446744073709551615", b"18446744073709551616",
                         b"-9223372036854775808", b"-9223372036854775809", b"1e3", b"1.0", b"0" * 5000 + b"3",
                         "\u0663".encode(), "\u00a07".encode(), b"9" * 5000, b"--1", b"- 1", b"1_0", b"\x0b7\x0c"]),
        st.integers(-(2**65), 2**65).map(lambda n: str(n).encode()),
    )  # fmt: skip
    values = [None if t is None else Value("text", text=t) for t in data.draw(st.lists(st.one_of(st.none(), texts)))]
    kind = data.draw(st.sampled_from(TEXT_TYPES))
    array = encoded(kind, values, data.draw(st.sampled_from(ENCODINGS)), [])
    feature = {"type": "integer", "offset": data.draw(st.sampled_from([0, 1000]))}
    assert made_keys(array, feature) == [expected_key(v, feature) for v in values]


@settings(max_examples=60)
@given(st.data())
def test_a_cross_is_made_of_the_keys_of_its_parts(data):
    (a, left, _), (b, right, _) = data.draw(columns()), data.draw(columns())
    num_rows = min(len(left), len(right))
    config = DataConfig(labels="click", sparse=[{"name": "v", "cross": ["a", "b"]}])
    into = Rows.empty(config, num_rows)
    columns_ = {"click": pa.array([0] * num_rows, pa.int8()), "a": a.slice(0, num_rows), "b": b.slice(0, num_rows)}
    Encoder(config, Fitted.load(config)).encode(columns_, into, slice(0, num_rows))
    pairs = zip(left, right, strict=False)
    seed = key_oracle.space_seed("v")
    expected = [0 if x is None or y is None else key_oracle.cross_key([("a", x), ("b", y)], seed) for x, y in pairs]
    assert into.singles["default"][:, 0].tolist() == expected


@settings(max_examples=60)
@given(st.data())
def test_two_files_that_agree_never_give_one_value_two_keys(data):
    """Files of any two types: either they are refused, or every value that both can hold has one key."""
    (_, types), (_, others) = (FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))] for _ in range(2))
    here, there = data.draw(st.sampled_from(types)), data.draw(st.sampled_from(others))
    declared = data.draw(st.sampled_from([None, "integer", "string"]))
    feature = {"type": declared}
    config = DataConfig(labels="click", sparse=[{"name": "v", **feature}])
    files = []
    for kind in (here, there):
        try:
            files.append(check_file("x", pa.schema([("click", pa.int8()), ("v", kind)]), {}, config))
        except DataError:
            return
    try:
        agree("a", files[0], "b", files[1], config)
    except DataError:
        return
    # The texts of a value are equal, so its keys must be: what looks the same to a person is the same id.
    for text in ("5", "0", "1", "true", "12345"):
        keys = {tuple(map(tuple, [k or [] for k in made_keys(pa.array([v], kind), feature)]))
                for kind in (here, there) for v in written(kind, text)}  # fmt: skip
        assert len(keys - {((),)}) <= 1, (here, there, declared, text)


def written(kind: pa.DataType, text: str) -> list[object]:
    """The value of a type that a person would write so, if there is one."""
    t = pa.types
    if t.is_boolean(kind):
        return {"true": [True], "0": [False], "1": [True]}.get(text, [])
    if kind in TEXT_TYPES:
        return [text.encode() if "binary" in str(kind) else text]
    if t.is_integer(kind) and text.isdigit():
        return [int(text)] if int(text) < 1 << (kind.bit_width - 1) else []
    return []


ONLY_IN_MEMORY = ("run_end", "decimal32(9, -", "decimal128(38, -", "decimal256(76, -")


@settings(max_examples=60)
@given(st.data())
def test_keys_are_the_same_from_files(tmp_path_factory, data):
    array, values, _ = data.draw(columns())
    if not values or any(word in str(array.type) for word in ONLY_IN_MEMORY):
        return
    if pa.types.is_date64(array.type) or (pa.types.is_timestamp(array.type) and array.type.unit == "s"):
        return  # a file has neither
    if pa.types.is_dictionary(array.type) and not pa.types.is_string(array.type.value_type):
        return
    folder = tmp_path_factory.mktemp("file")
    feature = features(data.draw, array)
    rows = data.draw(st.integers(1, 5))
    write(folder / "a.parquet", {"click": pa.array([0] * len(values), pa.int8()), "v": array}, row_group_rows=rows)
    if pq.read_schema(folder / "a.parquet").field("v").type.id != array.type.id:
        return
    config = DataConfig(
        labels="click", sparse=[{"name": "v", **feature}], threads=0, shuffle={"enabled": False}, on_bad_row="skip"
    )
    expected = [made for v in values if (made := expected_key(v, feature)) is not None]
    assert keys_by_row(load(Dataset.open(str(folder), config)), "v") == expected


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.struct([("a", pa.int64())]), pa.list_(pa.list_(pa.int64()))])
def test_what_cannot_be_an_id_is_refused_with_what_can(kind):
    config = DataConfig(labels="click", sparse=[{"name": "v", "max_length": 3}])
    with pytest.raises(DataError, match=r"'v' .*cannot be an id \(integer, .*time, timestamp.*int64"):
        check_file("x", pa.schema([("click", pa.int8()), ("v", kind)]), {}, config)
