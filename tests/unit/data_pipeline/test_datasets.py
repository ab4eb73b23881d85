"""What counts as data, and what is refused before anything starts (P5-P11, P14, S12)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from tests.support import reference_keys
from tests.support.parquet_files import keys_by_row, load, numbered, numbered_config, rows_of, write

CONFIG = DataConfig(labels="click", sparse=[{"name": "v"}], threads=0, shuffle={"enabled": False})


def open_files(root: Path, config: DataConfig = CONFIG, **files) -> Dataset:
    for name, column in files.items():
        write(root / f"{name}.parquet", {"click": [0] * len(column), "v": column})
    return Dataset.open(str(root), config)


@pytest.mark.parametrize("extra", [True, False])
def test_second_file_has_another_column_or_lacks_one(tmp_path, extra):  # P5
    write(tmp_path / "a.parquet", {"click": [0], "v": [1]})
    write(tmp_path / "b.parquet", {"click": [0], "v": [1], "new": [3]} if extra else {"click": [0], "w": [3]})
    if extra:
        assert Dataset.open(str(tmp_path), CONFIG).num_rows == 2
    else:
        with pytest.raises(DataError, match=r"b\.parquet: has no column 'v'; it has 'click', 'w'"):
            Dataset.open(str(tmp_path), CONFIG)


def test_an_absent_column_takes_its_declared_default(tmp_path):  # P5
    write(tmp_path / "a.parquet", {"click": [0], "v": [1], "d": [2.0], "l": [[1]], "k": [5]})
    write(tmp_path / "b.parquet", {"click": [1]})
    config = DataConfig(
        labels="click",
        sparse=[
            {"name": "v", "absent_column": "missing"},
            {"name": "l", "absent_column": "missing", "max_length": 2},
            {"name": "k", "absent_column": "missing", "null_policy": "own_key"},
        ],
        dense={"columns": ["d"], "absent_column": -1.0},
        threads=0,
        shuffle={"enabled": False},
    )
    dataset = Dataset.open(str(tmp_path), config)
    assert dataset.absent_columns == {"d": 1, "k": 1, "l": 1, "v": 1}
    batches = load(dataset)
    assert batches[0].dense_BD.tolist() == [[2.0], [-1.0]]
    assert keys_by_row(batches, "v") == [[reference_keys.key("v", 1)], []]
    assert keys_by_row(batches, "l") == [[reference_keys.key("l", 1)], []]
    assert keys_by_row(batches, "k")[1] == [reference_keys.special("k", "missing")]


def test_integers_widen_from_file_to_file(tmp_path):  # P6
    dataset = open_files(
        tmp_path, a=pa.array([7], pa.int32()), b=pa.array([7, 2**31 + 5], pa.int64()), c=pa.array([7], pa.uint8())
    )
    seven = reference_keys.key("v", 7)
    assert keys_by_row(load(dataset), "v") == [[seven], [seven], [reference_keys.key("v", 2**31 + 5)], [seven]]


@pytest.mark.parametrize("first", [pa.nulls(2), pa.array([None, None], pa.int32())])
def test_an_all_null_first_file_decides_nothing(tmp_path, first):  # P7
    dataset = open_files(tmp_path, a=first, b=pa.array(["x"]) if first.type == pa.null() else pa.array([5]))
    expected = reference_keys.key("v", "x" if first.type == pa.null() else 5)
    assert keys_by_row(load(dataset), "v") == [[], [], [expected]]


def test_a_first_file_of_empty_lists_decides_nothing(tmp_path):  # P7
    config = DataConfig(labels="click", sparse=[{"name": "v", "max_length": 3}], threads=0, shuffle={"enabled": False})
    dataset = open_files(tmp_path, config, a=pa.array([[], []], pa.list_(pa.null())), b=pa.array([["x"]]))
    assert keys_by_row(load(dataset), "v") == [[], [], [reference_keys.key("v", "x")]]


def test_one_value_never_gets_two_keys(tmp_path):
    with pytest.raises(
        DataError, match=r"column 'v' is int64 in .*a\.parquet and string in .*b\.parquet.*type: integer"
    ):
        open_files(tmp_path, a=pa.array([5]), b=pa.array(["5"]))
    declared = DataConfig(
        labels="click", sparse=[{"name": "v", "type": "integer"}], threads=0, shuffle={"enabled": False}
    )
    assert keys_by_row(load(Dataset.open(str(tmp_path), declared)), "v") == [[reference_keys.key("v", 5)]] * 2


def test_training_and_evaluation_data_agree_on_keys(tmp_path):
    train = open_files(tmp_path / "train", a=pa.nulls(1), b=pa.array([5], pa.int32()))
    train.agree_with(open_files(tmp_path / "same", a=pa.array([5], pa.int64())))
    with pytest.raises(DataError, match=r"column 'v' is int32 in .*b\.parquet and string in .*a\.parquet"):
        train.agree_with(open_files(tmp_path / "other", a=pa.array(["5"])))


@pytest.mark.parametrize(
    ("column", "feature", "message"),
    [
        (pa.array([1.5]), {}, "ids as floats are not exact above 2\\^53"),
        (pa.array([[1]]), {}, "a list; give the feature `max_length`"),
        (pa.array([[1.0]]), {"max_length": 3}, "floats"),
        (pa.array([{"a": 1}]), {}, "cannot be an id"),
        (pa.array(["a"]), {"offset": 5}, "offset needs integers"),
        (pa.array(["a"]), {"bucketize": {}}, "bucketize needs a number"),
    ],
)
def test_columns_of_a_wrong_type_are_refused_by_name(tmp_path, column, feature, message):
    config = DataConfig(labels="click", sparse=[{"name": "v", **feature}])
    with pytest.raises(DataError, match=rf"a\.parquet: column 'v' of feature 'v' is .*{message}"):
        open_files(tmp_path, config, a=column)


@pytest.mark.parametrize("where", ["labels", "dense", "sample_weight"])
def test_text_where_a_number_is_needed_is_refused(tmp_path, where):
    write(tmp_path / "a.parquet", {"click": [1], "v": [1], "text": ["a"]})
    value = {"labels": ["click", "text"], "dense": {"columns": ["text"]}, "sample_weight": "text"}[where]
    with pytest.raises(DataError, match=r"a\.parquet: column 'text' is string, a number is needed"):
        Dataset.open(str(tmp_path), DataConfig(**{"labels": "click", "sparse": [{"name": "v"}], where: value}))


@pytest.mark.parametrize(("wrong", "right"), [("clik", "click"), ("CLICK", "click"), ("user_ID", "user_id")])
def test_a_misspelt_column_names_the_nearest(tmp_path, wrong, right):  # P11
    write(tmp_path / "a.parquet", {"click": [1], "user_id": [1]})
    sparse = [{"name": "u", "column": wrong if right == "user_id" else "user_id"}]
    labels = wrong if right == "click" else "click"
    with pytest.raises(DataError, match=rf"a\.parquet: has no column '{wrong}'; the nearest are '{right}'"):
        Dataset.open(str(tmp_path), DataConfig(labels=labels, sparse=sparse))


def test_columns_that_differ_only_in_case_are_refused(tmp_path):
    write(tmp_path / "a.parquet", {"click": [1], "v": [1], "V": [2]})
    with pytest.raises(DataError, match="'v' and 'V' differ in nothing but case"):
        Dataset.open(str(tmp_path), CONFIG)


def test_a_column_name_with_dots(tmp_path):
    write(tmp_path / "a.parquet", {"click": [1], "a.b": [5], "a": [6]})
    config = DataConfig(
        labels="click", sparse=[{"name": "v", "column": "a.b"}, {"name": "w", "column": "a"}], threads=0
    )
    batches = load(Dataset.open(str(tmp_path), config))
    assert keys_by_row(batches, "v") == [[reference_keys.key("v", 5)]]
    assert keys_by_row(batches, "w") == [[reference_keys.key("w", 6)]]


@pytest.mark.data
def test_folders_written_by_spark(shared_data):  # P8
    root = shared_data / "parquet-spark" / "split"
    config = DataConfig(
        labels="num",
        label_rule={"at_least": 0},
        threads=0,
        sparse=[{"name": "cat"}, {"name": "catnum", "type": "integer"}],
    )
    dataset = Dataset.open(str(root), config)
    assert dataset.num_rows == 2000
    assert len(dataset.files) == len([p for p in root.rglob("*.parquet") if not p.name.startswith((".", "_"))])
    batches = load(dataset)
    cats = {k for row in keys_by_row(batches, "cat") for k in row}
    assert cats == {reference_keys.key("cat", c) for c in ("fred", "freda")}
    assert {k for row in keys_by_row(batches, "catnum") for k in row} == {
        reference_keys.key("catnum", i) for i in (1, 2, 3)
    }


@pytest.mark.data
def test_a_spark_folder_with_empty_row_groups(shared_data):  # P8, P14
    root = shared_data / "parquet-spark" / "spark-date-empty-rg.parq"
    config = DataConfig(labels="id", label_rule={"at_least": 0}, sparse=[{"name": "Date"}], threads=0)
    dataset = Dataset.open(str(root), config)
    assert len(dataset.files) == 3
    assert sum(b.num_rows for b in load(dataset)) == dataset.num_rows == 2
    (day,) = {k for row in keys_by_row(load(dataset), "Date")[:1] for k in row}
    assert day in {reference_keys.key("Date", d) for d in range(30_000)}


def test_partitions_hidden_files_and_odd_names(tmp_path):  # P8, P10
    numbered(tmp_path / "day=2024-01-01" / "hr=00" / "part 0 日本.parquet", 0, 3)
    numbered(tmp_path / "day=2024-01-01" / "hr=07" / "中文" / "x%20y.parquet", 3, 3)
    numbered(tmp_path / "day=__HIVE_DEFAULT_PARTITION__" / "hr=a%2Fb" / "000000_0", 6, 3)
    for junk in (
        "_SUCCESS",
        "_metadata",
        ".part.crc",
        "day=2024-01-01/.hidden.parquet",
        "notes.txt",
        "_temporary/x.parquet",
    ):
        (tmp_path / junk).parent.mkdir(exist_ok=True)
        (tmp_path / junk).write_text("not data")
    config = numbered_config(sparse=[{"name": "hr", "type": "string"}, {"name": "day"}], shuffle={"enabled": False})
    batches = load(Dataset.open(str(tmp_path), config))
    assert rows_of(batches) == list(range(9))
    assert keys_by_row(batches, "hr") == [[reference_keys.key("hr", h)] for h in ("00", "07", "a/b") for _ in range(3)]
    assert keys_by_row(batches, "day")[-1] == []
    assert keys_by_row(batches, "day")[0] == [reference_keys.key("day", "2024-01-01")]
    ints = numbered_config(sparse=[{"name": "hr", "type": "integer"}], shuffle={"enabled": False})
    folder = str(tmp_path / "day=2024-01-01")
    assert keys_by_row(load(Dataset.open(folder, ints)), "hr")[5] == [reference_keys.key("hr", 7)]
    plain = numbered_config(sparse=[{"name": "hr"}], partitions="none")
    with pytest.raises(DataError, match="has no column 'hr'"):
        Dataset.open(str(tmp_path), plain)


def test_links_are_followed_and_nothing_is_read_twice(tmp_path):  # P10
    numbered(tmp_path / "real" / "a.parquet", 0, 5)
    numbered(tmp_path / "real" / "b.parquet", 5, 5)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "again.parquet").symlink_to(tmp_path / "real" / "a.parquet")
    paths = [str(tmp_path / "data"), str(tmp_path / "real"), str(tmp_path / "real" / "*.parquet")]
    for given in (paths[:1], paths, paths[::-1]):
        assert sorted(rows_of(load(Dataset.open(given, numbered_config())))) == list(range(10))


def test_dangling_and_circular_links_are_refused(tmp_path):
    numbered(tmp_path / "a.parquet", 0, 5)
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.parquet: is a link whose target is gone"):
        Dataset.open(str(tmp_path), numbered_config())
    with pytest.raises(DataError, match=r"gone\.parquet: is a link whose target is gone"):
        Dataset.open(str(tmp_path / "gone.parquet"), numbered_config())
    (tmp_path / "gone.parquet").unlink()
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(DataError, match="leads back"):
        Dataset.open(str(tmp_path), numbered_config())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "does not exist"),
        ("empty", "0 data files"),
        ("*.nothing", "no file matches"),
        ("rowless", "0 rows in 1 files"),
    ],
)
def test_paths_without_data(tmp_path, path, message):  # S12
    (tmp_path / "empty").mkdir()
    write(tmp_path / "rowless" / "a.parquet", {"click": pa.array([], pa.int8()), "v": pa.array([], pa.int8())})
    with pytest.raises(DataError, match=message):
        Dataset.open(str(tmp_path / path), CONFIG)
    with pytest.raises(DataError, match="no data path"):
        Dataset.open((), CONFIG)


def test_delta_lake_folders_are_refused_with_a_hint(tmp_path):
    numbered(tmp_path / "a.parquet", 0, 5)
    (tmp_path / "_delta_log").mkdir()
    with pytest.raises(DataError, match=r"Delta Lake table.*Export"):
        Dataset.open(str(tmp_path), numbered_config())


def test_globs_roots_and_single_files(tmp_path):
    for i in range(4):
        numbered(tmp_path / f"d{i % 2}" / f"f{i}.parquet", 10 * i, 10)
    os.chdir(tmp_path)
    config = numbered_config(shuffle={"enabled": False})
    assert rows_of(load(Dataset.open(str(tmp_path / "d*" / "f[01].parquet"), config))) == list(range(20))
    assert len(rows_of(load(Dataset.open([str(tmp_path / "d0"), str(tmp_path / "d1")], config)))) == 40
    assert rows_of(load(Dataset.open("d0/f0.parquet", config))) == list(range(10))
    assert rows_of(load(Dataset.open(f"file://{tmp_path}/d0/f2.parquet", config))) == list(range(20, 30))
    assert len(rows_of(load(Dataset.open(str(tmp_path / "**" / "*.parquet"), config)))) == 40


@pytest.mark.data
def test_empty_row_groups(shared_data):  # P14
    config = DataConfig(
        labels="a",
        label_rule={"at_least": 0},
        dense={"columns": ["a2"], "absent_column": 0.0},
        threads=0,
        on_bad_row="skip",
    )
    for number, rows in ((2, 4), (3, 5)):
        dataset = Dataset.open(str(shared_data / "parquet-bad" / f"test-empty-row-group_{number}.parquet"), config)
        assert sum(b.num_rows for b in load(dataset)) == dataset.num_rows == rows
    with pytest.raises(DataError, match="0 rows"):
        Dataset.open(str(shared_data / "parquet-bad" / "test-empty-row-group_1.parquet"), config)


def test_a_file_without_row_groups_among_others(tmp_path):  # P14
    numbered(tmp_path / "a.parquet", 0, 5)
    pq.ParquetWriter(tmp_path / "b.parquet", pq.read_schema(tmp_path / "a.parquet")).close()
    numbered(tmp_path / "c.parquet", 5, 5)
    assert sorted(rows_of(load(Dataset.open(str(tmp_path), numbered_config())))) == list(range(10))


def test_the_fingerprint_is_the_content_not_the_place(tmp_path):
    for i in range(3):
        numbered(tmp_path / "one" / f"f{i}.parquet", 10 * i, 10)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one = Dataset.open(str(tmp_path / "one"), numbered_config()).fingerprint
    assert Dataset.open(str(tmp_path / "two"), numbered_config()).fingerprint == one
    numbered(tmp_path / "two" / "f2.parquet", 20, 11)
    assert Dataset.open(str(tmp_path / "two"), numbered_config()).fingerprint != one


def test_three_thousand_files_are_checked_in_seconds(tmp_path):
    numbered(tmp_path / "f0.parquet", 0, 10)
    for i in range(1, 3000):
        os.link(tmp_path / "f0.parquet", tmp_path / f"f{i}.parquet")
    ticks: list[tuple[int, int]] = []
    dataset = Dataset.open(
        str(tmp_path), numbered_config(), on_progress=lambda done, total: ticks.append((done, total))
    )
    assert dataset.num_rows == 30_000
    assert ticks[0] == (1, 3000)
    assert ticks[-1] == (3000, 3000)
    assert np.all(np.diff([t[0] for t in ticks]) >= 0)


def test_case_variants_of_columns_that_the_job_does_not_read_are_taken(tmp_path):
    write(tmp_path / "a.parquet", {"click": [1], "v": [1], "note": [1], "Note": [2]})
    assert Dataset.open(str(tmp_path), CONFIG).num_rows == 1
    with pytest.raises(DataError, match="'note' and 'Note' differ in nothing but case, and the job reads 'Note'"):
        Dataset.open(str(tmp_path), DataConfig(labels="click", sparse=[{"name": "Note"}]))


def test_two_columns_of_one_name_are_refused_only_if_the_job_reads_them(tmp_path):
    kinds = [("click", pa.int8()), ("v", pa.int64()), ("x", pa.int64()), ("x", pa.int64())]
    table = pa.Table.from_arrays([pa.array([1], kind) for _, kind in kinds], schema=pa.schema(kinds))
    write(tmp_path / "a.parquet", table)
    assert keys_by_row(load(Dataset.open(str(tmp_path), CONFIG)), "v") == [[reference_keys.key("v", 1)]]
    with pytest.raises(DataError, match="has 2 columns 'x'; rename all but one"):
        Dataset.open(str(tmp_path), DataConfig(labels="click", sparse=[{"name": "x"}]))


def test_folders_above_the_data_give_no_columns(tmp_path):
    root = tmp_path / "v=77" / "x"
    write(root / "a.parquet", {"click": [0, 1, 1], "v": [5, 6, 7]})
    expected = [[reference_keys.key("v", i)] for i in (5, 6, 7)]
    for path in (root, root / "a.parquet", root / "*.parquet"):
        assert keys_by_row(load(Dataset.open(str(path), CONFIG)), "v") == expected
    only = DataConfig(labels="click", sparse=[{"name": "w"}])
    write(tmp_path / "w=1" / "a.parquet", {"click": [0, 1]})
    with pytest.raises(DataError, match=r"has no column 'w'; a folder w=\.\.\. lies above the path"):
        Dataset.open(str(tmp_path / "w=1"), only)
    write(tmp_path / "data" / "w=1" / "a.parquet", {"click": [0, 1]})
    for path in (tmp_path / "data", tmp_path / "data" / "w=*"):
        assert Dataset.open(str(path), only).num_rows == 2


def test_a_name_that_is_both_folder_and_column_is_refused(tmp_path):
    write(tmp_path / "v=1" / "a.parquet", {"click": [0], "v": [1]})
    with pytest.raises(DataError, match=r"column 'v' is in the file, and the folder v=1 gives it, too\. Rename one"):
        Dataset.open(str(tmp_path), CONFIG)
    plain = CONFIG.model_copy(update={"partitions": "none"})
    assert Dataset.open(str(tmp_path), plain).num_rows == 1
    write(tmp_path / "other" / "day=1" / "a.parquet", {"click": [0], "v": [1], "day": [1]})
    assert Dataset.open(str(tmp_path / "other"), CONFIG).num_rows == 1, "not one that the job reads"


def test_labels_and_numbers_may_lie_in_the_names_of_folders(tmp_path):
    for label, price in (("0", "1.5"), ("1", "-2"), ("true", "__HIVE_DEFAULT_PARTITION__")):
        write(tmp_path / f"label={label}" / f"price={price}" / "a.parquet", {"v": [1, 2]})
    config = DataConfig(
        labels="label", sparse=[{"name": "v"}, {"name": "b", "column": "price", "bucketize": {}}], threads=0,
        dense={"columns": ["price"], "fill": 9}, shuffle={"enabled": False},
    )  # fmt: skip
    (batch,) = load(Dataset.open(str(tmp_path), config))
    assert batch.labels_BL[:, 0].tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.dense_BD[:, 0].tolist() == [1.5, 1.5, -2, -2, 9, 9]
    assert keys_by_row([batch], "b")[0] == [reference_keys.key("b", 1)]
    write(tmp_path / "label=maybe" / "price=1" / "a.parquet", {"v": [1, 2]})
    with pytest.raises(DataError, match="'label' comes from the folder label=maybe, and a number is needed: rename"):
        Dataset.open(str(tmp_path), config)


TABLES = {
    "Delta Lake": ("_delta_log/00000000000000000000.json", "a.parquet"),
    "Hudi": (".hoodie/hoodie.properties", "a.parquet"),
    "Iceberg": ("metadata/v2.metadata.json", "data/a.parquet"),
    "Iceberg table": ("metadata/00001-ab.gz.metadata.json", "data/day=1/a.parquet"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_with_old_versions_of_files_are_refused(tmp_path, name):
    sign, data = TABLES[name]
    table = tmp_path / "lake" / "table"
    file = write(table / data, {"click": [0], "v": [1]})
    (table / sign).parent.mkdir(parents=True)
    (table / sign).write_text("{}")
    for path in {tmp_path / "lake", table, file.parent, table / "**" / "*.parquet"}:
        with pytest.raises(DataError, match=rf"an? (Apache )?{name}.*older versions.*its current files one by one"):
            Dataset.open(str(path), CONFIG)
        with pytest.raises(DataError, match="older versions"):
            Dataset.open("file://" + str(path), CONFIG)
    assert Dataset.open(str(file), CONFIG).num_rows == 1, "a file that is given by name is read"


def test_a_folder_called_metadata_is_no_table(tmp_path):
    write(tmp_path / "metadata" / "a.parquet", {"click": [0], "v": [1]})
    assert Dataset.open(str(tmp_path), CONFIG).num_rows == 1


def test_remote_tables_with_old_versions_of_files_are_refused(tmp_path):
    """The code for object stores, on Arrow's local file system."""
    from pyarrow import fs

    from paddlewheel.data_pipeline.files import _refuse_remote_table

    for name, (sign, data) in TABLES.items():
        table = tmp_path / name
        write(table / data, {"click": [0], "v": [1]})
        (table / sign).parent.mkdir(parents=True)
        (table / sign).write_text("{}")
        local = fs.LocalFileSystem()
        for root in (table, (table / data).parent):
            infos = local.get_file_info(fs.FileSelector(str(root), recursive=True))
            with pytest.raises(DataError, match=rf"{name}.*older versions"):
                _refuse_remote_table("s3://b/t", local, str(root), infos)
    write(tmp_path / "plain" / "a.parquet", {"click": [0]})
    infos = local.get_file_info(fs.FileSelector(str(tmp_path / "plain"), recursive=True))
    _refuse_remote_table("s3://b/t", local, str(tmp_path / "plain"), infos)


def test_a_name_that_is_no_utf8_is_refused(tmp_path):
    file = write(tmp_path / "a.parquet", {"click": [0], "v": [1]})
    odd = os.fsencode(tmp_path) + b"/b\xff.parquet"
    shutil.copy(file, odd)
    with pytest.raises(DataError, match=r"b\\xff\.parquet.*the name is no UTF-8; rename"):
        Dataset.open(str(tmp_path), CONFIG)


def test_evaluation_files_inside_the_training_data_are_found(tmp_path):
    write(tmp_path / "all" / "a.parquet", {"click": [0], "v": [1]})
    inside = write(tmp_path / "all" / "eval" / "b.parquet", {"click": [0], "v": [2]})
    outside = write(tmp_path / "apart" / "c.parquet", {"click": [0], "v": [3]})
    os.link(inside, tmp_path / "apart" / "hard.parquet")
    (tmp_path / "apart" / "soft.parquet").symlink_to(inside)
    train = Dataset.open(str(tmp_path / "all"), CONFIG)
    for paths, shared in (
        (tmp_path / "all" / "eval", ["b.parquet"]),
        (inside, ["b.parquet"]),
        (outside, []),
        (tmp_path / "apart", ["hard.parquet"]),
    ):
        evaluation = Dataset.open(str(paths), CONFIG)
        found = [Path(name).name for name in evaluation.files_shared_with(train)]
        assert [name for name in found if name != "soft.parquet"] == shared


def test_a_type_of_one_feature_does_not_hide_the_disagreement_of_another(tmp_path):
    typed = {"name": "txt", "column": "v", "type": "string"}
    for more in ({"sparse": [{"name": "raw", "column": "v"}, typed]}, {"sparse": [typed], "group": "v"}):
        config = DataConfig(labels="click", threads=0, **more)
        with pytest.raises(DataError, match=r"column 'v' is int64 in .*a\.parquet and string in .*b\.parquet"):
            open_files(tmp_path, config, a=pa.array([5]), b=pa.array(["5"]))


@pytest.mark.parametrize(
    ("declared", "kinds", "agree"),
    [
        (None, ("a uuid", "its text"), False),
        (None, ("a uuid", "its bytes"), True),
        ("string", ("a uuid", "its text"), False),
        ("string", ("true", "1"), False),
        ("string", ("true", "'true'"), True),
        (None, ("true", "1"), True),
        (None, ("a date", "its text"), False),
        (None, ("a date", "a time"), False),
    ],
)
def test_files_agree_only_if_equal_ids_have_equal_keys(tmp_path, declared, kinds, agree):
    columns = {
        "a uuid": pa.array([bytes(16)], pa.uuid()), "its bytes": pa.array([bytes(16)]), "its text": pa.array(["x"]),
        "true": pa.array([True]), "1": pa.array([1]), "'true'": pa.array(["true"]),
        "a date": pa.array([1], pa.int32()).cast(pa.date32()), "a time": pa.array([1], pa.timestamp("us")),
    }  # fmt: skip
    config = DataConfig(labels="click", sparse=[{"name": "v", "type": declared}], threads=0)
    files = {"a": columns[kinds[0]], "b": columns[kinds[1]]}
    if agree:
        made = keys_by_row(load(open_files(tmp_path, config, **files)), "v")
        assert made[0] == made[1]
    else:
        with pytest.raises(DataError, match="the same value would get two keys"):
            open_files(tmp_path, config, **files)


@pytest.mark.parametrize("column", [pa.array([[1]]), pa.array([1.5])])
def test_a_group_is_one_id_a_row(tmp_path, column):
    config = DataConfig(labels="click", sparse=[{"name": "click2", "absent_column": "missing"}], group="v")
    with pytest.raises(DataError, match=r"'v' is .*, one integer or string a row is needed"):
        open_files(tmp_path, config, a=column)
