"""The library in C++ and NumPy give the same bits, and damaged numbers are refused before they are used."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.data_pipeline import DataError, keys, native
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.encoded_rows import Rows
from paddlewheel.data_pipeline.encoder import Encoder
from paddlewheel.data_pipeline.statistics import Fitted
from tests.support.any_columns import columns, features
from tests.support.parquet_files import load, write

SOURCES = Path(native.__file__).parent


def assert_same(left: object, right: object, where: str = "batch") -> None:
    """To the bit, dataclasses and containers included."""
    assert type(left) is type(right), where
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert left.tolist() == right.tolist() if left.dtype == object else left.tobytes() == right.tobytes(), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for name, value in left.items():
            assert_same(value, right[name], f"{where}.{name}")
    elif isinstance(left, list | tuple) and not hasattr(left, "_fields"):
        assert len(left) == len(right), where
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif hasattr(left, "__dataclass_fields__"):
        assert_same(vars(left), vars(right), where)
    else:
        assert left == right, where


def encoded_by_both(config: dict, table: dict[str, pa.Array], num_rows: int) -> None:
    found = []
    for backend in ("native", "numpy"):
        job = DataConfig(**config, encoder_backend=backend)
        into = Rows.empty(job, num_rows)
        reasons = Encoder(job, Fitted.load(job)).encode(dict(table), into, slice(0, num_rows))
        good = ~into.bad_N  # what a bad row holds is never read
        into.labels_NL, into.dense_ND = into.labels_NL[good], into.dense_ND[good]
        into.singles = {name: each[good] for name, each in into.singles.items()}
        found.append((reasons, into))
    assert_same(found[0], found[1])


@pytest.mark.needs("g++")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_column_has_the_same_keys_with_both(data):
    array, values, _ = data.draw(columns())
    feature = features(data.draw, array)
    start = data.draw(st.integers(0, len(values)))
    array = array.slice(start)
    table = {"click": pa.array(np.zeros(len(array), np.int8)), "v": array}
    policy = data.draw(st.sampled_from(["zero", "own_key"]))
    sparse = {"name": "v", "null_policy": policy, **feature}
    encoded_by_both({"labels": "click", "sparse": [sparse], "on_bad_row": "skip"}, table, len(array))


@pytest.mark.needs("g++")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_lists_are_cut_and_filled_the_same_with_both(data):
    ids = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 3))
    rows = data.draw(st.lists(st.one_of(st.none(), st.lists(ids, max_size=6)), max_size=12))
    array = pa.array(rows, data.draw(st.sampled_from([pa.list_(pa.int64()), pa.large_list(pa.int64())])))
    array = array.slice(data.draw(st.integers(0, len(rows))))
    sparse = {
        "name": "v",
        "max_length": data.draw(st.integers(1, 4)),
        "truncate": data.draw(st.sampled_from(["first", "last"])),
        "null_policy": data.draw(st.sampled_from(["zero", "own_key"])),
    }
    table = {"click": pa.array(np.zeros(len(array), np.int8)), "v": array}
    encoded_by_both({"labels": "click", "sparse": [sparse]}, table, len(array))


@pytest.mark.needs("g++")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_numbers_are_the_same_with_both_and_so_is_what_is_said_of_bad_ones(data):
    kinds = [pa.float32(), pa.float64(), pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.bool_()]
    kinds = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    num_rows = data.draw(st.integers(0, 150))
    table = {"click": pa.array(np.zeros(num_rows, np.int8))}
    for number, kind in enumerate(kinds):
        random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        patterns = random.integers(0, 256, (num_rows + 3) * 8, np.uint8)
        if data.draw(st.booleans()):
            patterns &= np.uint8(0x3F)  # no exponent of infinities and NaN
        values = pa.Array.from_buffers(kind, num_rows + 3, [None, pa.py_buffer(patterns.tobytes())])
        if data.draw(st.booleans()):
            mask = random.integers(0, 2, num_rows + 3).astype(bool)
            values = pa.Array.from_buffers(kind, len(values), [pa.array(mask).buffers()[1], values.buffers()[1]])
        table[f"d{number}"] = values.slice(data.draw(st.integers(0, 3)), num_rows)
    dense = {"columns": [f"d{n}" for n in range(len(kinds))], "fill": data.draw(st.sampled_from([None, 0.0, 0.1]))}
    encoded_by_both({"labels": "click", "dense": dense, "on_bad_row": "skip"}, table, num_rows)


@pytest.mark.needs("g++")
@settings(max_examples=80, deadline=None)
@given(st.integers(0, 3000), st.sampled_from([1, 3, 100, 10**6]), st.integers(0, 2**32))
def test_unique_keys_come_in_the_same_order(count, distinct, seed):
    random = np.random.default_rng(seed)
    found = random.integers(0, distinct, count).astype(np.uint64)  # 0 is no key; others are not mixed, so slots collide
    assert_same(native.load().unique(found), keys.unique_keys(found))
    mixed = keys.integer_keys(found.copy(), np.uint64(seed))
    assert_same(native.load().unique(mixed), keys.unique_keys(mixed))


@pytest.mark.needs("g++")
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_batches_are_the_same_with_both(tmp_path, threads):
    random = np.random.default_rng(threads)
    num_rows = 5000
    table = {
        "click": pa.array(random.integers(0, 2, num_rows).astype(np.int8)),
        "n": pa.array(np.where(random.random(num_rows) < 0.01, np.inf, random.random(num_rows)).astype(np.float32)),
        "i": pa.array([None if v % 7 == 0 else v for v in random.integers(0, 1000, num_rows).tolist()]),
        "s": pa.array([f"word {v}" for v in random.integers(0, 300, num_rows)]),
        "d": pa.array([f"word {v}" for v in random.integers(0, 300, num_rows)]).dictionary_encode(),
        "l": pa.array([list(range(v, v + v % 6)) for v in random.integers(0, 100, num_rows).tolist()]),
        "w": pa.array([[0.5] * (v % 4) for v in range(num_rows)]),
        "x": pa.array([list(range(v % 4)) for v in range(num_rows)]),
    }
    write(tmp_path / "a.parquet", table, row_group_rows=1500)
    sparse = [{"name": n} for n in "isd"] + [
        {"name": "l", "max_length": 4, "null_policy": "own_key"},
        {"name": "x", "weights": "w", "max_length": 3, "pooling": "sum"},
    ]
    found = []
    for backend in ("native", "numpy"):
        config = DataConfig(
            labels="click", dense={"columns": ["n"]}, sparse=sparse, batch_rows=333, threads=threads,
            on_bad_row="skip", encoder_backend=backend,
        )  # fmt: skip
        found.append(load(Dataset.open(str(tmp_path), config)))
    assert len(found[0]) > 10
    assert_same(*found)


def column(values: np.ndarray, **changed: int) -> tuple[int, ...]:
    address = values.__array_interface__["data"][0]
    made = {"values": address, "bytes": values.nbytes, "validity": 0, "validity_bytes": 0, "offset": 0, "kind": -8,
            "seed": 1, "add": 0, "missing": 0, "position": 0} | changed  # fmt: skip
    return tuple(made.values())


@pytest.mark.needs("g++")
@pytest.mark.parametrize("damage", [
    {"bytes": 79}, {"offset": 1}, {"offset": -1}, {"offset": 2**62}, {"kind": 7}, {"bytes": -1},
    {"validity": 1, "validity_bytes": 1},
])  # fmt: skip
def test_a_column_that_is_shorter_than_its_rows_is_refused(damage):
    values = np.arange(10)
    out = np.zeros((10, 1), np.uint64)
    if "validity" in damage:
        damage = damage | {"validity": values.__array_interface__["data"][0]}
    native.load().integer_keys([column(values)], out)
    with pytest.raises(DataError, match="points outside of its memory"):
        native.load().integer_keys([column(values, **damage)], out)


@pytest.mark.needs("g++")
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 14), min_size=2, max_size=8), st.booleans())
def test_offsets_are_looked_at_before_they_are_followed(offsets, large):
    # Not as an Array of Arrow's: that looks for some of it, but not when it decodes a file.
    places, data = np.array(offsets, np.int64 if large else np.int32), np.frombuffer(b"twelve bytes", np.uint8)
    out = np.zeros(len(offsets) - 1, np.uint64)
    addresses = [each.__array_interface__["data"][0] for each in (data, places, out)]
    text = native._packed([(addresses[0], 12, addresses[1], places.nbytes, 0, places.itemsize, len(out))])
    result = native.load()._texts(text, 5, addresses[2])
    if offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= 12:
        assert result == 0
        assert out.tolist() == [xxhash.xxh64_intdigest(b"twelve bytes"[a:b], 5) for a, b in itertools.pairwise(offsets)]
    else:
        assert result == -1


@pytest.mark.needs("g++")
@pytest.mark.parametrize("code", [3, -1, 127, -128])
def test_codes_beyond_the_words_are_refused(code):
    indices = pa.array([0, 2, code], pa.int8())
    array = pa.DictionaryArray.from_arrays(indices, pa.array(["a", "b", "c"]), safe=False)
    for call in (
        lambda: native.load().picked(array, np.arange(3, dtype=np.uint64)),
        lambda: native.load().picked_texts(array, 5),
    ):
        with pytest.raises(DataError, match="points outside of its memory"):
            call()


@pytest.mark.needs("g++")
def test_lists_and_places_beyond_their_arrays_are_refused():
    library, ids = native.load(), np.arange(1, 5, dtype=np.uint64)
    place = np.array([0], np.int64)
    for starts, lengths in (([0], [5]), ([4], [1]), ([-1], [1]), ([2**62], [2])):
        with pytest.raises(DataError):
            library.lists(ids, np.array(starts), np.array(lengths), most=9, last=False, missing=0)
    for at in ([4], [-1], [2**62]):
        with pytest.raises(DataError):
            library.gather([(ids, np.array(at))], np.empty(1, np.uint64))
    for offsets in ([0, 5], [3, 2], [-1, 1], [0, 1]):
        with pytest.raises(DataError):
            library.gather_lists(ids, np.array(offsets), place, np.empty(2, np.uint64))
    for lengths in ([5], [-1], [2]):
        with pytest.raises(DataError):
            library.pad(np.arange(3, dtype=np.int32), np.array(lengths), 4)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_without_a_compiler_numpy_does_the_work_and_says_so(tmp_path):
    """Beside the sources nothing may be built: a copy of them without a library, and a cache that is empty."""
    code = (
        "from pathlib import Path; from paddlewheel.data_pipeline import native; "
        f"native._places = lambda: [Path({str(tmp_path / 'rows.so')!r})]; "
        "print(native.choose('auto'), native.choose('numpy')); native.choose('native')"
    )
    done = run(code, CXX="no-such-compiler")
    assert done.stdout == "None None\n", done.stderr
    assert "rows are encoded by NumPy" in done.stderr
    assert "data.encoder_backend: native, but: no C++ compiler was found. Install one" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.needs("g++")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_damaged_input_in_many_threads_under_sanitizers(tmp_path, sanitizers):
    program = tmp_path / "rows_test"
    flags = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    sources = [str(SOURCES / name) for name in ("rows.cc", "rows_test.cc")]
    subprocess.run(["g++", *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
