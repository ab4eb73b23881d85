"""Columns of every kind become exact keys and finite numbers, or are refused with a name (P12, P13, P17, P18)."""

from __future__ import annotations

import math

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
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.data_pipeline.statistics import Fitted
from tests.support import reference_keys
from tests.support.parquet_files import keys_by_row, load, read_columns, write

LISTS = [[1, 2], [], None, [None, 3], [2**53 + 1], [5, 5, 5, 5, 5]]


def test_ids_beside_nulls_stay_exact(tmp_path):  # P12
    ids = [2**53 + 1, None, 2**63 - 1, -(2**63)]
    batches = read_columns(tmp_path, {"v": pa.array(ids, pa.int64())}, sparse=[{"name": "v"}])
    assert keys_by_row(batches, "v") == [[reference_keys.key("v", i)] if i is not None else [] for i in ids]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.int64()),
        pa.list_(pa.int32()),
        pa.list_(pa.dictionary(pa.int32(), pa.int64())),
    ],
)
def test_multi_valued(tmp_path, kind):  # P13
    lists = [
        [v if v is None or kind != pa.list_(pa.int32()) else min(v, 2**31 - 1) for v in row] if row else row
        for row in LISTS
    ]
    batches = read_columns(tmp_path, {"v": pa.array(lists, kind)}, sparse=[{"name": "v", "max_length": 3}])
    expected = [[reference_keys.key("v", i) for i in row or [] if i is not None][:3] for row in lists]
    assert keys_by_row(batches, "v") == expected
    index = batches[0].tables["default"].index["v"]
    assert index.shape == (len(lists), 3)
    assert index.dtype == np.int32
    assert all((row[np.argmin(row) :] == 0).all() for row in index if (row == 0).any()), "ids are left-aligned"


def test_fixed_size_lists_and_strings(tmp_path):
    columns = {"v": pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2)), "s": pa.array([["a", ""], [], ["b"]])}
    sparse = [{"name": "v", "max_length": 2}, {"name": "s", "max_length": 2}]
    batches = read_columns(tmp_path, columns, sparse=sparse)
    assert keys_by_row(batches, "v") == [[reference_keys.key("v", i) for i in row] for row in ([1, 2], [], [3])]
    assert keys_by_row(batches, "s") == [[reference_keys.key("s", i) for i in row] for row in (["a", ""], [], ["b"])]


def test_keep_last_and_truncation_is_counted(tmp_path):
    write(tmp_path / "d.parquet", {"click": [0, 1], "v": pa.array([[1, 2, 3, 4], [5]])})
    config = DataConfig(labels="click", sparse=[{"name": "v", "max_length": 3, "truncate": "last"}], threads=0)
    dataset = Dataset.open(str(tmp_path), config)
    with Loader(dataset, config, dataset.slices(), seed=0, epoch=0, training=False) as loader:
        batches = list(loader)
        assert loader.counters["truncated_ids.v"] == 1
    assert keys_by_row(batches, "v") == [[reference_keys.key("v", i) for i in row] for row in ([2, 3, 4], [5])]


def test_a_batch_of_nothing_but_empty_lists(tmp_path):  # P13
    for empties in (
        pa.array([[], [], []], pa.list_(pa.int64())),
        pa.array([None] * 3, pa.list_(pa.int64())),
        pa.nulls(3),
    ):
        batches = read_columns(tmp_path, {"v": empties}, sparse=[{"name": "v", "max_length": 5}])
        assert batches[0].tables["default"].keys_U.size == 0
        assert batches[0].tables["default"].index["v"].tolist() == [[0], [0], [0]]


def test_a_scalar_column_as_a_list_of_one(tmp_path):
    batches = read_columns(tmp_path, {"v": pa.array([4, None])}, sparse=[{"name": "v", "max_length": 2}])
    assert keys_by_row(batches, "v") == [[reference_keys.key("v", 4)], []]


@given(
    st.lists(
        st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(-5, 5)), max_size=6)), min_size=1, max_size=30
    ),
    st.data(),
)
@settings(max_examples=60)
def test_a_sliced_arrow_array_gives_what_its_rows_say(rows, data):  # P13
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    sliced = pa.array(rows, pa.list_(pa.int64())).slice(start, stop - start)
    config = DataConfig(labels="click", sparse=[{"name": "v", "max_length": 4}])
    into = Rows.empty(config, stop - start)
    labels = pa.array([0] * len(rows)).slice(start, stop - start)
    Encoder(config, Fitted.load(config)).encode({"v": sliced, "click": labels}, into, slice(0, stop - start))
    lists = into.lists["v"][0]
    got = [lists.keys[a:b].tolist() for a, b in zip(lists.offsets[:-1], lists.offsets[1:], strict=True)]
    assert got == [[reference_keys.key("v", i) for i in row or [] if i is not None][:4] for row in rows[start:stop]]


def test_weights_go_with_their_ids(tmp_path):
    columns = {"v": pa.array([[1, None, 3], [], [4]]), "w": pa.array([[0.5, 9.0, 2.0], None, [1.5]])}
    batches = read_columns(
        tmp_path, columns, sparse=[{"name": "v", "max_length": 4, "weights": "w", "pooling": "mean"}]
    )
    assert batches[0].tables["default"].weights["v"].tolist() == [[0.5, 2.0], [0.0, 0.0], [1.5, 0.0]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [([[1.0]], "as long as"), ([[1.0, math.inf]], "finite"), ([[1.0, None]], "finite"), ([None], "as long as")],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, weights, message):
    columns = {"v": pa.array([[1, 2]]), "w": pa.array(weights, pa.list_(pa.float64()))}
    with pytest.raises(DataError, match=rf"data\.parquet: row 0: column 'w'.*{message}"):
        read_columns(tmp_path, columns, sparse=[{"name": "v", "max_length": 4, "weights": "w"}])


def test_dense_order_is_fill_transform_clip(tmp_path):  # P17
    columns = {"a": pa.array([-3.0, None, math.nan, 1e30]), "b": pa.array([3, None, -2, 2**60])}
    dense = [
        {"columns": ["b"], "transform": "log1p", "fill": 1.0},
        {"columns": ["a"], "fill": 7.0, "clip": [-1.0, 8.0]},
    ]
    batch = read_columns(tmp_path, columns, dense=dense)[0]
    assert batch.dense_BD.dtype == np.float32
    np.testing.assert_allclose(
        batch.dense_BD,
        [[math.log1p(3), -1], [math.log1p(1), 7], [-math.log1p(2), 7], [math.log1p(2**60), 8]],
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.decimal128(9, 2)]
)
def test_dense_columns_of_every_numeric_type(tmp_path, kind):
    values = pa.array([1.0, 0.0, None]).cast(kind)
    batch = read_columns(tmp_path, {"a": values}, dense={"columns": ["a"], "fill": -1.0})[0]
    assert batch.dense_BD.ravel().tolist() == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, 1e300])
def test_what_is_not_finite_is_refused_with_column_and_row(tmp_path, bad):  # P17
    columns = {"a": pa.array([1.0] * 5 + [bad] + [1.0] * 4)}
    with pytest.raises(DataError, match=r"data\.parquet: row 5: column 'a' is .*not a finite number.*1 of 10 rows"):
        read_columns(tmp_path, columns, dense={"columns": ["a"]})
    assert len(read_columns(tmp_path, columns, dense={"columns": ["a"], "clip": [-9, 9]})[0].dense_BD) == 10


def test_a_missing_number_without_fill_is_refused(tmp_path):
    with pytest.raises(DataError, match="row 1: column 'a' is None"):
        read_columns(tmp_path, {"a": pa.array([1.0, None])}, dense={"columns": ["a"], "fill": None})


def test_bad_rows_are_left_out_and_the_others_still_fill_the_batches(tmp_path):  # P17
    values = [math.inf if i % 10 == 3 else float(i) for i in range(100)]
    write(tmp_path / "d.parquet", {"click": [0] * 100, "a": values})
    config = DataConfig(labels="click", dense={"columns": ["a"]}, on_bad_row="skip", batch_rows=16, threads=0)
    dataset = Dataset.open(str(tmp_path), config)
    for training in (True, False):
        with Loader(dataset, config, dataset.slices(), seed=0, epoch=0, training=training) as loader:
            batches = list(loader)
            assert loader.counters["skipped_rows"] == loader.counters["bad_rows"] == 10
            assert loader.state() == {0: 100}
        assert sorted(v for b in batches for v in b.dense_BD[:, 0]) == [v for v in values if v != math.inf]
        assert [b.num_rows for b in batches] == [16] * 5 + [10]
        assert all(np.isfinite(b.dense_BD).all() for b in batches)


def test_only_bad_rows_at_the_end_still_count_as_done(tmp_path):
    write(tmp_path / "d.parquet", {"click": [0, 1, 5, 5]})
    write(tmp_path / "d.parquet", {"click": [0, 1, 5, 5], "v": [1, 2, 3, 4]})
    config = DataConfig(
        labels="click", sparse=[{"name": "v"}], on_bad_row="skip", batch_rows=2, threads=0, shuffle={"enabled": False}
    )
    dataset = Dataset.open(str(tmp_path), config)
    with Loader(dataset, config, dataset.slices(), seed=0, epoch=0) as loader:
        assert [b.num_rows for b in loader] == [2]
        assert loader.state() == {0: 4}


def test_quarantine_keeps_the_rows_with_place_and_reason(tmp_path):
    write(tmp_path / "in" / "d.parquet", {"click": pa.array([0, 2, 1, None]), "v": ["a", "b", "c", "d"]})
    config = DataConfig(
        labels="click",
        sparse=[{"name": "v"}],
        on_bad_row="quarantine",
        quarantine_directory=str(tmp_path / "bad"),
        threads=0,
    )
    dataset = Dataset.open(str(tmp_path / "in"), config)
    for _ in range(2):  # the second time replaces the first
        assert sum(b.num_rows for b in load(dataset)) == 2
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "bad").to_pylist()
    assert [(r["_row"], r["v"], r["click"]) for r in rows] == [(1, "b", 2), (3, "d", None)]
    assert all(r["_file"].endswith("d.parquet") and "label" in r["_reason"] for r in rows)


@pytest.mark.parametrize("values", [[-1, 1], [0, 0.5], [0, 2], [1, None], [1, math.nan]])
def test_labels_that_are_not_0_or_1_are_refused(tmp_path, values):  # P18
    write(tmp_path / "d.parquet", {"click": pa.array(values), "v": [1, 2]})
    config = DataConfig(labels="click", sparse=[{"name": "v"}], threads=0)
    null = values[1] is None or math.isnan(values[1])
    why = "a label must not be null" if null else r"a label is 0 or 1 \(else declare"
    with pytest.raises(DataError, match=rf"d\.parquet: row [01]: column 'click' is .*: {why}.*1 of 2 rows"):
        load(Dataset.open(str(tmp_path), config))


def test_a_conversion_that_is_null_without_a_click_is_told_and_can_be_declared(tmp_path):
    columns = {
        "click": pa.array([0, 1, 0, 1], pa.int8()),
        "buy": pa.array([None, 1, 0, None], pa.int8()),
        "v": [1, 2, 3, 4],
    }
    write(tmp_path / "d.parquet", columns)
    job = {"labels": ["click", "buy"], "sparse": [{"name": "v"}], "threads": 0, "shuffle": {"enabled": False}}
    with pytest.raises(DataError, match=r"'buy' is None: a label must not be null; .*null_without_click: neg") as e:
        load(Dataset.open(str(tmp_path), DataConfig(**job)))
    assert "positive" not in str(e.value), "no remedy that does not help"
    for rule in ({}, {"positive": 1}, {"at_least": 0.5}, {"soft": True}):
        config = DataConfig(**job, label_rule={"null_without_click": "negative", **rule}, on_bad_row="skip")
        (batch,) = load(Dataset.open(str(tmp_path), config))
        assert batch.labels_BL.tolist() == [[0, 0], [1, 1], [0, 0]], "a null after a click stays a bad row"


def test_a_null_click_is_never_declared_away(tmp_path):
    columns = {"click": pa.array([None, 1], pa.int8()), "buy": [0, 1], "v": [1, 2]}
    write(tmp_path / "d.parquet", columns)
    label = {"null_without_click": "negative"}
    config = DataConfig(labels=["click", "buy"], label_rule=label, sparse=[{"name": "v"}], threads=0, on_bad_row="skip")
    assert [batch.num_rows for batch in load(Dataset.open(str(tmp_path), config))] == [1]


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ({"positive": 1}, [-1, 1, 2], [0, 1, 0]),
        ({"at_least": 4}, [3, 4, 5], [0, 1, 1]),
        ({"soft": True}, [0.25, 0.0, 1.0], [0.25, 0, 1]),
        ({}, [True, False, True], [1, 0, 1]),
    ],
)
def test_labels_are_accepted_where_declared(tmp_path, rule, values, expected):  # P18
    write(tmp_path / "d.parquet", {"click": values, "v": [1, 2, 3]})
    config = DataConfig(labels="click", label_rule=rule, sparse=[{"name": "v"}], threads=0)
    dataset = Dataset.open(str(tmp_path), config)
    with Loader(dataset, config, dataset.slices(), seed=0, epoch=0, training=False) as loader:
        assert next(loader).labels_BL.ravel().tolist() == expected


@pytest.mark.parametrize("rule", [{"positive": 1}, {"at_least": 4}, {"soft": True}])
def test_no_rule_accepts_a_missing_label(tmp_path, rule):  # P18
    write(tmp_path / "d.parquet", {"click": pa.array([1.0, None]), "v": [1, 2]})
    config = DataConfig(labels="click", label_rule=rule, sparse=[{"name": "v"}], threads=0)
    with pytest.raises(DataError, match="row 1: column 'click' is None"):
        load(Dataset.open(str(tmp_path), config))


def test_several_labels_sample_weight_and_group(tmp_path):
    columns = {"buy": [1, 0], "w": [0.5, 2.0], "user": pa.array([7, None]), "v": [1, 2]}
    batch = read_columns(
        tmp_path, columns, labels=["click", "buy"], sample_weight="w", group="user", sparse=[{"name": "v"}]
    )[0]
    assert batch.labels_BL.tolist() == [[0, 1], [1, 0]]
    assert batch.sample_weight_B.tolist() == [0.5, 2.0]
    assert batch.group_B.tolist() == [reference_keys.key("group", 7), 0]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, None])
def test_bad_sample_weights_are_refused(tmp_path, weight):
    with pytest.raises(DataError, match="column 'w'"):
        read_columns(tmp_path, {"w": pa.array([1.0, weight]), "v": [1, 2]}, sample_weight="w", sparse=[{"name": "v"}])


def test_bucketize(tmp_path):
    columns = {"a": pa.array([-2.0, 0.5, 2.0, 100.0, None, math.inf])}
    sparse = [
        {"name": "edges", "column": "a", "bucketize": {"kind": "boundaries", "boundaries": [0, 1, 2]}},
        {"name": "log", "column": "a", "bucketize": {"kind": "log_square"}, "null_policy": "own_key"},
    ]
    batches = read_columns(tmp_path, columns, sparse=sparse)
    assert keys_by_row(batches, "edges") == [
        [reference_keys.key("edges", b)] if b is not None else [] for b in (0, 1, 3, 3, None, 3)
    ]
    log = [-2, 0, 2, math.floor(math.log(100) ** 2), None, math.floor(math.log(1e15) ** 2)]
    assert keys_by_row(batches, "log") == [
        [reference_keys.key("log", b) if b is not None else reference_keys.special("log", "missing")] for b in log
    ]


def test_text_that_is_no_integer_is_a_bad_row(tmp_path):
    for columns, feature in (
        ({"v": pa.array(["1", "x", "9" * 30])}, {}),
        ({"v": pa.array([["1"], ["x"], ["9" * 30, "1"]])}, {"max_length": 2}),
        ({"v": pa.array(["1", "x", "9" * 30]).dictionary_encode()}, {}),
    ):
        with pytest.raises(DataError, match=r"row 1: column 'v' is .*declared `type: integer`.*2 of 3"):
            read_columns(tmp_path, columns, sparse=[{"name": "v", "type": "integer", **feature}])


def test_dictionaries_and_several_tables(tmp_path):
    words = pa.DictionaryArray.from_arrays(pa.array([0, None, None, 1], pa.int8()), pa.array(["a", "b"]))
    batches = read_columns(
        tmp_path, {"v": words, "u": pa.array([1, 2, 3, 4])}, sparse=[{"name": "v", "table": "t"}, {"name": "u"}]
    )
    assert keys_by_row(batches, "v") == [[reference_keys.key("t", "a")], [], [], [reference_keys.key("t", "b")]]
    assert list(batches[0].tables) == ["t", "default"]
    assert batches[0].tables["default"].single_names == ("u",)


def test_a_job_without_single_valued_or_without_sparse_features(tmp_path):
    batch = read_columns(tmp_path, {"v": pa.array([[1], [2, 3]])}, sparse=[{"name": "v", "max_length": 2}])[0]
    assert batch.tables["default"].single_BF.shape == (2, 0)
    assert batch.dense_BD.shape == (2, 0)
    assert read_columns(tmp_path, {"a": [1.0, 2.0]}, dense={"columns": ["a"]})[0].tables == {}


ODD = {
    "no UTF-8": pa.array([b"\xff", b"5", b"\xfe"]).view(pa.string()),
    "views": pa.array(["x", "5", "y"], pa.string_view()),
    "list views": pa.array([["x"], ["5"], ["y", "6"]], pa.list_view(pa.string())),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", "5", "x"])),
    "dictionary": pa.array(["x", "5", "y"]).dictionary_encode(),
}


@pytest.mark.parametrize("what", sorted(ODD))
@pytest.mark.parametrize("policy", ["fail", "skip", "quarantine"])
def test_bad_rows_of_every_layout_are_told_left_out_or_kept(tmp_path, what, policy):
    write(tmp_path / "in" / "d.parquet", {"click": [0, 1, 0], "v": ODD[what]})
    config = DataConfig(
        labels="click", sparse=[{"name": "v", "type": "integer", "max_length": 3}], threads=0, on_bad_row=policy,
        quarantine_directory=str(tmp_path / "bad"), slice_metrics_by=[] if "list" in what else ["v"],
    )  # fmt: skip
    dataset = Dataset.open(str(tmp_path / "in"), config)
    if policy == "fail":
        with pytest.raises(
            DataError, match=r"d\.parquet: row 0: column 'v' is .*declared `type: integer`.*2 of 3 rows"
        ):
            load(dataset)
        return
    assert keys_by_row(load(dataset), "v") == [[reference_keys.key("v", 5)]]
    if policy == "quarantine":
        (kept,) = (tmp_path / "bad").glob("*.parquet")
        assert pq.read_table(kept)["_row"].to_pylist() == [0, 2]


def test_large_bad_rows_are_kept_in_one_file_a_block_however_they_are_read(tmp_path):
    """Rows of 200 kB are read in many pieces; the quarantine's file is still named by the block, and so replaced."""
    words = pa.array([letter * 200_000 for letter in "57x"])
    column = pa.DictionaryArray.from_arrays(pa.array([i % 3 for i in range(300)], pa.int32()), words).cast(pa.string())
    write(
        tmp_path / "in" / "d.parquet",
        {"click": [0] * 300, "v": column, "tag": pa.array([["a"]] * 300)},
        store_schema=False,
    )
    config = DataConfig(
        labels="click", sparse=[{"name": "v", "type": "integer"}, {"name": "tag", "max_length": 2}], threads=0,
        on_bad_row="quarantine", quarantine_directory=str(tmp_path / "bad"), memory_bytes=16 << 20,
    )  # fmt: skip
    dataset = Dataset.open(str(tmp_path / "in"), config)
    for _ in range(2):
        with Loader(dataset, config, dataset.slices(), seed=0, epoch=0) as loader:
            assert sum(batch.num_rows for batch in loader) == 0
            assert loader.counters["bad_rows"] == 300
    rows = [
        row for file in sorted((tmp_path / "bad").glob("*.parquet")) for row in pq.read_table(file)["_row"].to_pylist()
    ]
    assert sorted(rows) == list(range(300))
