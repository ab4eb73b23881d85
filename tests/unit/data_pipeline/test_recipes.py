"""From raw files to Parquet: exact values, exact splits, all or nothing, restartable."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.recipes import avazu, criteo, csv, delimited, movielens, preparation
from paddlewheel.data_pipeline.recipes.preparation import Split
from tests.support.parquet_files import load


def criteo_lines(num_rows: int, start: int = 0) -> list[str]:
    lines = []
    for row in range(start, start + num_rows):
        dense = [str(row)] + ["" if (row + i) % 3 == 0 else str(row * i - 2) for i in range(12)]
        sparse = ["" if (row + i) % 5 == 0 else f"{(row * 2654435761 + i) % 2**32:08x}" for i in range(26)]
        lines.append("\t".join([str(row % 2), *dense, *sparse]))
    return lines


def rows_in(folder: Path) -> list[dict]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_criteo_values_are_exact_and_every_row_is_there_once(tmp_path):
    lines = criteo_lines(500)
    (tmp_path / "day_0.gz").write_bytes(gzip.compress("\n".join(lines[:300]).encode() + b"\n"))
    (tmp_path / "day_1").write_text("\n".join(lines[300:]))
    counts = criteo.prepare([tmp_path / "day_0.gz", tmp_path / "day_1"], tmp_path / "out", Split("random", 0.2, 7))
    train, evaluation = rows_in(tmp_path / "out" / "train"), rows_in(tmp_path / "out" / "eval")
    assert counts == {"train_rows": len(train), "eval_rows": len(evaluation)}
    assert 60 < len(evaluation) < 140
    found = {row["I1"]: row for row in train + evaluation}
    assert sorted(found) == list(range(500))
    for number, line in enumerate(lines):
        fields = line.split("\t")
        row = found[number]
        assert row["label"] == int(fields[0])
        assert [row[c] for c in criteo.DENSE] == [int(f) if f else None for f in fields[1:14]]
        assert [row[c] for c in criteo.SPARSE] == [int(f, 16) if f else None for f in fields[14:]]
    again = criteo.prepare([tmp_path / "day_0.gz", tmp_path / "day_1"], tmp_path / "again", Split("random", 0.2, 7))
    assert again == counts
    assert rows_in(tmp_path / "again" / "eval") == evaluation
    criteo.prepare([tmp_path / "day_0.gz", tmp_path / "day_1"], tmp_path / "other", Split("random", 0.2, 8))
    assert rows_in(tmp_path / "other" / "eval") != evaluation


def test_splits_by_order_and_by_permutation(tmp_path):
    (tmp_path / "raw").write_text("\n".join(criteo_lines(200)) + "\n")
    criteo.prepare([tmp_path / "raw"], tmp_path / "order", Split("order", 0.25))
    assert [r["I1"] for r in rows_in(tmp_path / "order" / "eval")] == list(range(150, 200))
    criteo.prepare([tmp_path / "raw"], tmp_path / "mixed", Split("permutation", seed=0, train_rows=120))
    expected = np.random.RandomState(0).permutation(200)
    assert [r["I1"] for r in rows_in(tmp_path / "mixed" / "train")] == sorted(expected[:120].tolist())
    assert [r["I1"] for r in rows_in(tmp_path / "mixed" / "eval")] == sorted(expected[120:].tolist())


@pytest.mark.data
def test_the_public_criteo_sample_reads_as_a_job(shared_data, tmp_path):
    raw = shared_data / "criteo" / "criteo_sample.tsv.gz"
    counts = criteo.prepare([raw], tmp_path / "out", Split("permutation", seed=0, train_rows=12_000))
    assert counts == {"train_rows": 12_000, "eval_rows": 3_433}
    config = DataConfig(**criteo.data_section(tmp_path / "out"), threads=0)
    batches = load(Dataset.open(config.train, config))
    assert sum(b.num_rows for b in batches) == 12_000
    assert all(np.isfinite(b.dense_BD).all() for b in batches)
    with gzip.open(raw, "rt") as lines:
        labels = [line.split("\t", 1)[0] for line in lines]
    order = np.random.RandomState(0).permutation(len(labels))
    expected = sum(labels[i] == "1" for i in order[:12_000])
    assert sum(float(b.labels_BL.sum()) for b in batches) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t2\t3", "line 4: Expected 40 columns, got 3"),
        ("x" + criteo_lines(1)[0][1:], "label"),
        (criteo_lines(2)[1][:-8] + "notahexx", "not a hexadecimal"),
    ],
)
def test_a_malformed_line_is_refused_and_nothing_appears(tmp_path, line, message):
    (tmp_path / "raw").write_text("\n".join([*criteo_lines(3), line]) + "\n")
    with pytest.raises(DataError, match=f"raw.*{message}|{message}"):
        criteo.prepare([tmp_path / "raw"], tmp_path / "out", Split())
    assert not (tmp_path / "out" / "train").exists()


def test_a_truncated_archive_is_refused(tmp_path):
    (tmp_path / "raw.gz").write_bytes(gzip.compress("\n".join(criteo_lines(2000)).encode())[:-2000])
    with pytest.raises(DataError, match=r"raw\.gz: "):
        criteo.prepare([tmp_path / "raw.gz"], tmp_path / "out", Split())


def test_an_interrupted_run_goes_on_with_the_parts_that_are_missing(tmp_path, monkeypatch):
    for day in range(3):
        (tmp_path / f"day_{day}").write_text("\n".join(criteo_lines(100, 100 * day)) + "\n")
    sources = [tmp_path / f"day_{day}" for day in range(3)]
    read: list[str] = []
    original = delimited.read

    def failing(source, advance, **more):
        read.append(source.name)
        if source.name == "day_2" and len(read) <= 3:
            raise OSError("the disk went away")
        yield from original(source, advance, **more)

    monkeypatch.setattr(delimited, "read", failing)
    with pytest.raises(OSError, match="the disk went away"):
        criteo.prepare(sources, tmp_path / "out", Split("random", 0.3), threads=1)
    assert not (tmp_path / "out" / "train").exists()
    criteo.prepare(sources, tmp_path / "out", Split("random", 0.3), threads=1)
    assert read == ["day_0", "day_1", "day_2", "day_2"]
    assert sorted(r["I1"] for part in ("train", "eval") for r in rows_in(tmp_path / "out" / part)) == list(range(300))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["eval", "prepared.json", "train"]
    criteo.prepare(sources, tmp_path / "out", Split("random", 0.4), threads=1)
    assert json.loads((tmp_path / "out" / "prepared.json").read_text())["split"]["eval_fraction"] == 0.4


def test_a_target_that_holds_other_files_is_left_alone(tmp_path):
    (tmp_path / "raw").write_text("\n".join(criteo_lines(10)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.doc").write_text("precious")
    with pytest.raises(DataError, match="holds other files"):
        criteo.prepare([tmp_path / "raw"], tmp_path / "out", Split())
    with pytest.raises(DataError, match="nowhere: does not exist"):
        criteo.prepare([tmp_path / "nowhere"], tmp_path / "new", Split())


@pytest.mark.parametrize(
    "values", [{"eval_fraction": 0.0}, {"eval_fraction": 1.0}, {"kind": "random", "train_rows": 5}]
)
def test_splits_that_cannot_be(values):
    with pytest.raises(DataError):
        Split(**values)
    with pytest.raises(DataError, match="one part empty"):
        Split("order", train_rows=10).whole(10)


def test_progress_counts_bytes_up_to_all(tmp_path):
    (tmp_path / "raw").write_text("\n".join(criteo_lines(3000)) + "\n")
    for split, passes in ((Split(), 1), (Split("order"), 2)):
        ticks: list[tuple[int, int]] = []
        criteo.prepare(
            [tmp_path / "raw"], tmp_path / split.kind, split, on_progress=lambda d, t, ticks=ticks: ticks.append((d, t))
        )
        size = (tmp_path / "raw").stat().st_size
        assert ticks[-1] == (passes * size, passes * size)
        assert [t[0] for t in ticks] == sorted(t[0] for t in ticks)


def test_hexadecimal_text_of_every_length():
    import pyarrow as pa

    values = ["0", "f", "FF", "7fffffffffffff", "fffffffffffffff", None, "05db9164"]
    expected = [int(v, 16) if v else None for v in values]
    assert delimited.hex_to_int64(pa.array(values), "x").to_pylist() == expected
    assert delimited.hex_to_int64(pa.array(["aa", *values]).slice(1), "x").to_pylist() == expected
    for wrong in ("", "xyz", "f" * 16):
        with pytest.raises(DataError, match=r"x: .* is not a hexadecimal"):
            delimited.hex_to_int64(pa.array([wrong]), "x")


def test_avazu(tmp_path):
    head = ["id", "click", "hour", "C1", "banner_pos", *avazu.HEX[:6], "device_id", "device_ip", "device_model"]
    head += ["device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22))]
    lines = [",".join(head)]
    for row in range(100):
        stamp = 14102100 + row // 5 if row < 100 else 0
        lines.append(
            ",".join(
                [
                    f"{row}",
                    str(row % 2),
                    str(stamp),
                    "1005",
                    "0",
                    *[f"{row + i:08x}" for i in range(9)],
                    "1",
                    "0",
                    *["7"] * 8,
                ]
            )
        )
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
    avazu.prepare([tmp_path / "train.csv"], tmp_path / "out", Split("order", 0.1))
    rows = rows_in(tmp_path / "out" / "train")
    assert len(rows) == 90
    assert str(rows[0]["time"]) == "2014-10-21 00:00:00"
    assert (rows[0]["weekday"], rows[7]["hour_of_day"], rows[3]["site_id"]) == (1, 1, 3)
    config = DataConfig(**avazu.data_section(tmp_path / "out"), threads=0)
    assert sum(b.num_rows for b in load(Dataset.open(config.train, config))) == 90
    (tmp_path / "bad.csv").write_text("\n".join([lines[0], lines[1].replace("14102100", "14139925")]) + "\n")
    with pytest.raises(DataError, match="not all values are YYMMDDHH"):
        avazu.prepare([tmp_path / "bad.csv"], tmp_path / "bad", Split("random"))


def test_csv_of_any_kind(tmp_path):
    (tmp_path / "a.csv").write_text(
        'click;user;tags;ids;hash;extra\n1;"a;b";x|y;1|2;ff;z\n0;c;;;;\n1;d;z;3;0a;\n0;e;q;4;01;\n'
    )
    schema = csv.parse_schema("click:int8, user:string, tags:list<string>, ids:list<int64>, hash:hex")
    csv.prepare([tmp_path / "a.csv"], tmp_path / "out", Split("order", 0.25), schema, delimiter=";")
    rows = rows_in(tmp_path / "out" / "train")
    assert rows == [
        {"click": 1, "user": "a;b", "tags": ["x", "y"], "ids": [1, 2], "hash": 255},
        {"click": 0, "user": "c", "tags": None, "ids": None, "hash": None},
        {"click": 1, "user": "d", "tags": ["z"], "ids": [3], "hash": 10},
    ]
    (tmp_path / "b.csv").write_text("click;user;tags;ids;hash\n1;a;x;1|b;ff\n")
    with pytest.raises(DataError, match=r"b\.csv, column ids: "):
        csv.prepare([tmp_path / "b.csv"], tmp_path / "bad", Split(), schema, delimiter=";")
    with pytest.raises(DataError, match=r"b\.csv: .*nothing"):
        csv.prepare([tmp_path / "b.csv"], tmp_path / "bad", Split(), {"nothing": "int8"}, delimiter=";")


@pytest.mark.parametrize("text", ["", "a", "a:int7", "a:int8,a:int8", ":int8", "a:list<list<int8>>"])
def test_schemas_that_cannot_be(text):
    with pytest.raises(DataError, match="schema: "):
        csv.parse_schema(text)


@pytest.mark.data
def test_movielens_100k(shared_data, tmp_path):
    counts = movielens.prepare(shared_data / "movielens-100k", tmp_path / "out")
    assert counts == {"train_rows": 90_000, "eval_rows": 10_000}
    train, evaluation = rows_in(tmp_path / "out" / "train"), rows_in(tmp_path / "out" / "eval")
    assert max(r["time"] for r in train) <= min(r["time"] for r in evaluation)
    everything = train + evaluation
    assert all((r["rating"] >= 4) == (r["click"] == 1) for r in everything)
    by_user = sorted((r for r in everything if r["user"] == 405), key=lambda r: r["time"])
    for row in by_user:
        liked = [r for r in by_user if r["time"] < row["time"] and r["click"]]
        assert sorted(row["history"]) == sorted(r["item"] for r in liked)[-50:] or len(liked) > 50
        assert set(row["history"]) <= {r["item"] for r in liked}
        assert len(row["history"]) == min(50, len(liked))
    assert train[0]["genres"]
    config = DataConfig(**movielens.data_section(tmp_path / "out"), threads=0)
    batches = load(Dataset.open(config.train, config))
    assert sum(b.num_rows for b in batches) == 90_000
    assert batches[0].tables["item"].index["history"].ndim == 2


def test_movielens_1m_layout(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "ratings.dat").write_text(
        "".join(f"{1 + i % 3}::{1 + i % 2}::{1 + i % 5}::{978300000 + i}\n" for i in range(40))
    )
    (raw / "movies.dat").write_bytes(
        "1::Toy Story (1995)::Animation|Comedy\n2::Amélie (2001)::Romance\n".encode("latin-1")
    )
    (raw / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n3::M::25::15::55117\n")
    movielens.prepare(raw, tmp_path / "out", eval_fraction=0.25)
    rows = rows_in(tmp_path / "out" / "train")
    assert (rows[0]["genres"], rows[0]["year"], rows[1]["genres"]) == (["Animation", "Comedy"], 1995, ["Romance"])
    (raw / "users.dat").unlink()
    with pytest.raises(DataError, match=r"users\.dat is missing"):
        movielens.prepare(raw, tmp_path / "out2")
    (raw / "users.dat").write_text("1::F::1::10\n")
    with pytest.raises(DataError, match=r"users\.dat, line 1: 4 fields, 5 are expected"):
        movielens.prepare(raw, tmp_path / "out2")
    with pytest.raises(DataError, match=r"neither u\.data"):
        movielens.prepare(tmp_path, tmp_path / "out2")


def test_row_groups_have_a_good_size(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_ROW_GROUP_ROWS", 100)
    (tmp_path / "raw").write_text("\n".join(criteo_lines(1000)) + "\n")
    criteo.prepare([tmp_path / "raw"], tmp_path / "out", Split("order", 0.25))
    meta = pq.read_metadata(tmp_path / "out" / "train" / "part-00000.parquet")
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [100] * 7 + [50]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file whose reads fail is one of Linux' /proc")
def test_a_read_that_the_system_refuses_names_its_file(tmp_path):
    with pytest.raises(OSError, match="/proc/self/mem"):
        criteo.prepare([Path("/proc/self/mem")], tmp_path / "out", Split("random", 0.2, 7))
