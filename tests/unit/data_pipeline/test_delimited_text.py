"""Text as other systems write it: read exactly, or refused with the line, what was found, and the option that helps."""

from __future__ import annotations

import bz2
import csv as python_csv
import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.recipes import criteo, csv, delimited, libsvm
from paddlewheel.data_pipeline.recipes.delimited import Format, Notes
from paddlewheel.data_pipeline.recipes.preparation import Split
from paddlewheel.deploy.cli import run
from tests.support.parquet_files import load

LAST = Split("order", 0.4)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [
        row
        for part in ("train", "eval")
        for path in sorted((folder / part).glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def prepared(
    folder: Path, text: str | bytes, schema: str, *, name: str = "rows.csv", **more: Any
) -> list[dict[str, Any]]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    csv.prepare([folder / name], folder / "out", LAST, csv.parse_schema(schema), **more)
    return rows_in(folder / "out")


def refusal(folder: Path, text: str | bytes, schema: str, *, name: str = "rows.csv", **more: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepared(folder, text, schema, name=name, **more)
    return str(caught.value)


@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, bz2.compress, lambda b: pa.compress(b, "zstd", asbytes=True)],
    ids=["plain", "gz", "bz2", "zst"],
)
def test_line_breaks_in_quotes_are_values_wherever_a_block_ends(tmp_path: Path, monkeypatch, pack: Any) -> None:
    lines = [f'{i % 2},{i},"first {i}\r\nsecond, ""{i}""\n"' for i in range(3000)]
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 1000)
    text = ("click,user,text\n" + "\n".join(lines) + "\n").encode()
    rows = prepared(tmp_path, pack(text), "click:int8, user:int64, text:string", name="rows.data")
    assert [row["user"] for row in rows] == list(range(3000))
    assert [row["text"] for row in rows] == [f'first {i}\r\nsecond, "{i}"\n' for i in range(3000)]


@given(
    table=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.text(st.sampled_from('ab ,;"\n\r|é'), max_size=6)), min_size=2
    )
)
def test_what_pythons_csv_writes_is_read_exactly(tmp_path_factory: pytest.TempPathFactory, table: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("csv")
    out = io.StringIO()
    writer = python_csv.writer(out, quoting=python_csv.QUOTE_ALL)
    writer.writerows([("number", "text"), *table])
    rows = prepared(folder, out.getvalue().encode(), "number:int64, text:string")
    assert [(row["number"], row["text"] or "") for row in rows] == table


def test_a_quote_that_is_never_closed_does_not_swallow_the_file(tmp_path: Path) -> None:
    text = 'click,text\n1,a\n1,"abc\n0,x\n1,y\n0,z\n'
    message = refusal(tmp_path, text, "click:int8, text:string")
    assert "rows.csv, line 3: a quote is opened and never closed" in message
    assert "--no-quotes" in message
    rows = prepared(tmp_path, text, "click:int8, text:string", form=Format(quoted=False))
    assert [row["text"] for row in rows] == ["a", '"abc', "x", "y", "z"]


def test_quotes_inside_a_field_are_inches(tmp_path: Path) -> None:
    rows = prepared(tmp_path, 'click,text\n1,5" pipe\n0,x\n0,"a""b"\n', "click:int8, text:string")
    assert [row["text"] for row in rows] == ['5" pipe', "x", 'a"b']


def test_a_quoted_value_longer_than_a_block_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 100)
    message = refusal(tmp_path, 'click,text\n1,a\n1,"' + "x\n" * 500 + '"\n', "click:int8, text:string")
    assert "line 3: a quote is opened and not closed" in message


@pytest.mark.parametrize("word", ["NULL", "\\N", "NA", "nan", "None", "?", "-", "(null)"])
def test_words_for_null_are_named_with_the_option_and_read_with_it(tmp_path: Path, word: str) -> None:
    text = f"click,user,price,city\n0,{word},{word},{word}\n1,1,0.5,c\n0,2,0.25,c\n"
    schema = "click:int8, user:int64, price:float32, city:string"
    message = refusal(tmp_path, text, schema)
    assert "rows.csv, line 2, column 'user' (field 2)" in message
    assert f"--null '{word}'" in message
    rows = prepared(tmp_path, text, schema, form=Format(nulls=(word,)))
    assert rows[0] == {"click": 0, "user": None, "price": None, "city": None}
    assert rows[1] == {"click": 1, "user": 1, "price": 0.5, "city": "c"}


def test_a_word_for_null_in_a_text_column_is_remarked(tmp_path: Path) -> None:
    notes = Notes()
    prepared(tmp_path, "click,city\n1,NULL\n0,x\n0,y\n", "click:int8, city:string", notes=notes)
    (line,) = notes.lines()
    assert "column 'city': 'NULL' is taken as a value" in line
    assert "--null 'NULL'" in line
    notes = Notes()
    form = Format(nulls=("NULL",))
    prepared(tmp_path, "click,city\n1,NULL\n0,x\n0,y\n", "click:int8, city:string", form=form, notes=notes)
    assert list(notes.lines()) == []


def test_empty_parts_of_lists_are_left_out_for_every_type(tmp_path: Path) -> None:
    text = "click,tags\n1,1||2|\n0,\n1,|\n0,||\n1,3\n"
    texts = prepared(tmp_path, text, "click:int8, tags:list<string>")
    assert [row["tags"] for row in texts] == [["1", "2"], None, [], [], ["3"]]
    for kind, read in (("int64", int), ("float32", float), ("hex", lambda t: int(t, 16)), ("uint64", int)):
        numbers = prepared(tmp_path, text, f"click:int8, tags:list<{kind}>")
        assert [row["tags"] for row in numbers] == [
            None if row["tags"] is None else [*map(read, row["tags"])] for row in texts
        ]


def test_parts_of_lists_that_mean_null_and_spaces_around_numbers(tmp_path: Path) -> None:
    text = "click,tags\n1,1|NULL|2\n0, 4 | 5\n1,7\n"
    assert "--null 'NULL'" in refusal(tmp_path, text, "click:int8, tags:list<int64>")
    rows = prepared(tmp_path, text, "click:int8, tags:list<int64>", form=Format(nulls=("NULL",)))
    assert [row["tags"] for row in rows] == [[1, 2], [4, 5], [7]]


@pytest.mark.parametrize(
    ("text", "schema", "form", "words"),
    [
        ("click;user\n1;2\n", "click:int8, user:int64", {}, ["it has 'click;user'", "give --delimiter ';'"]),
        ("click\tuser\n1\t2\n", "click:int8, user:int64", {}, ["give --delimiter '\\t'"]),
        ("click|user\n1|2\n", "click:int8, user:int64", {"delimiter": ";"}, ["give --delimiter '|'"]),
        ("1,2\n0,3\n", "click:int8, user:int64", {}, ["it has '1', '2'", "--no-header"]),
        ("click, user\n1, 2\n", "click:int8, user:int64", {}, ["' user' has a space", "--trim"]),
        ("Click,UserID\n1,2\n", "click:int8, user_id:int64", {}, ["did you mean 'Click'?", "did you mean 'UserID'?"]),
        ("click,user,user\n1,2,3\n", "click:int8, user:int64", {}, ["'user' more than once (fields 2, 3)"]),
        ("", "click:int8", {}, ["is empty", "must name the columns"]),
        ("\n\n", "click:int8", {}, ["is empty"]),
        ("click,user\n1,2.5\n", "user:int64", {}, ["line 2", "column 'user'", "'2.5'", "float64"]),
        ("click,user\n\n1,300\n", "user:int8", {}, ["line 3", "'300'", "larger type"]),
        ("click,user\n1,  \n", "user:int64", {}, ["--trim takes a field of spaces for an empty one"]),
        ("click,user\n1,abc\n", "user:float32", {}, ["'abc'", "declare the column string"]),
        ("1,2\n0\n", "click:int8, user:int64", {"header": False}, ["line 2: Expected 2 columns, got 1: '0'"]),
        (f"user\n{'f' * 16}\n", "user:hex", {}, ["at most 15 digits: 16 digits do not fit", "`string`"]),
        ("user\n0x1f\n", "user:hex", {}, ["without 0x"]),
        ("user\nNULL\n", "user:hex", {}, ["--null 'NULL'"]),
        (b"click,city\n1,x\n1,K\xf6ln\n", "city:string", {}, ["line 3", "utf-8", "--encoding latin-1"]),
        ("click,city\n1,K\u00f6ln\n".encode("latin-1"), "city:string", {"encoding": "ascii"}, ["line 2", "ascii"]),
        ("click,city\n1,K\u00f6ln\n".encode("utf-16"), "city:string", {}, ["is UTF-16", "--encoding utf-16"]),
        (b"click,city\n1,\x81\n", "city:string", {"encoding": "cp1252"}, ["line 2", "cp1252"]),
        (b"PAR1xxxx", "city:string", {}, ["is Parquet already"]),
        (b"PK\x03\x04xxxx", "city:string", {}, ["zip archive"]),
        (b"\xfd7zXZ\x00xx", "city:string", {}, ["xz"]),
        (gzip.compress(b"click\n" + b"1\n" * 90_000)[:-30], "click:int8", {}, ["rows.csv: "]),
    ],
    ids=range(25),
)  # fmt: skip
def test_text_that_does_not_fit_is_told_with_line_finding_and_remedy(
    tmp_path: Path, text: str | bytes, schema: str, form: dict[str, Any], words: list[str]
) -> None:
    message = refusal(tmp_path, text, schema, form=Format(**form))
    assert "rows.csv" in message
    for word in words:
        assert word in message
    for foreign in ("include_columns", "CSV column #", "straddling"):
        assert foreign not in message


@pytest.mark.parametrize(
    "values", [{"delimiter": "::"}, {"delimiter": ""}, {"delimiter": "\n"}, {"delimiter": '"'}, {"delimiter": "§"},
               {"encoding": "utf-99"}, {"encoding": "hex"}, {"encoding": ""}, {"encoding": "a\0b"}]
)  # fmt: skip
def test_formats_that_cannot_be(values: dict[str, str]) -> None:
    with pytest.raises(DataError, match="--"):
        Format(**values)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8-sig", "utf-32"])
def test_other_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    text = "click,city\n1,Köln\n0,\u00c5rhus\n1,x\n"
    rows = prepared(tmp_path, text.encode(encoding), "click:int8, city:string", form=Format(encoding=encoding))
    assert [row["city"] for row in rows] == ["Köln", "\u00c5rhus", "x"]


def test_without_a_header_the_schema_names_all_columns(tmp_path: Path) -> None:
    rows = prepared(tmp_path, "1,2\n0,3\n1,4\n", "click:int8, user:int64", form=Format(header=False))
    assert [row["user"] for row in rows] == [2, 3, 4]


def test_trimmed_names_and_values(tmp_path: Path) -> None:
    rows = prepared(
        tmp_path, "click , user, city\n1 , 2, a b \n0,  ,  \n1,4,NA\n", "click:int8, user:int64, city:string",
        form=Format(trim=True, nulls=("NA",)),
    )  # fmt: skip
    assert rows == [
        {"click": 1, "user": 2, "city": "a b"},
        {"click": 0, "user": None, "city": None},
        {"click": 1, "user": 4, "city": None},
    ]
    assert "column 'user'" in refusal(tmp_path, "user\n x\n", "user:int64", form=Format(trim=True))


def criteo_line(row: int) -> str:
    return "\t".join([str(row % 2), *[str(row)] * 13, *[f"{row:08x}"] * 26])


def test_truncated_lines_are_counted_with_their_numbers_or_left_out(tmp_path: Path) -> None:
    lines = [criteo_line(row) for row in range(40)]
    lines[6], lines[20] = lines[6][:20], "1\t2"
    (tmp_path / "day").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"day, line 7: .* 2 of 40 lines .* \(lines 7, 21\): --on-bad-line skip"):
        criteo.prepare([tmp_path / "day"], tmp_path / "out", LAST)
    for split in (LAST, Split("random", 0.4)):  # the first of them reads every file twice
        notes = Notes()
        counts = criteo.prepare([tmp_path / "day"], tmp_path / split.kind, split, on_bad_line="skip", notes=notes)
        assert sum(counts.values()) == 38
        assert list(notes.lines()) == [f"{tmp_path / 'day'}: 2 lines were left out: 7, 21"]
        assert sorted(row["I1"] for row in rows_in(tmp_path / split.kind)) == [r for r in range(40) if r not in {6, 20}]


def test_criteos_test_files_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "test").write_text("\n".join(criteo_line(row).split("\t", 1)[1] for row in range(5)) + "\n")
    with pytest.raises(DataError, match=r"Expected 40 columns, got 39: .*test files"):
        criteo.prepare([tmp_path / "test"], tmp_path / "out", LAST)


def test_libsvm_is_read_exactly_and_trains_as_a_job(tmp_path: Path) -> None:
    lines = ["# made by hand"]
    for row in range(30):
        query = f"qid:{row // 5} " if row % 2 else ""
        lines.append(f"{'+1' if row % 3 else '-1'} {query}{row}:1 {row + 7}:0.5 {2**40 + row}:+2e-3 # row {row}")
    lines += ["", "1", "-1 5:1.5"]
    (tmp_path / "rows.svm").write_text("\n".join(lines) + "\n")
    libsvm.prepare([tmp_path / "rows.svm"], tmp_path / "out", LAST)
    rows = rows_in(tmp_path / "out")
    assert len(rows) == 32
    for number, row in enumerate(rows[:30]):
        assert row["label"] == (1 if number % 3 else -1)
        assert row["ids"] == [number, number + 7, 2**40 + number]
        assert row["values"] == pytest.approx([1, 0.5, 2e-3])
        assert row["qid"] == (number // 5 if number % 2 else None)
    assert (rows[30]["ids"], rows[31]["ids"], rows[31]["values"]) == ([], [5], [1.5])
    config = DataConfig(**{**libsvm.data_section(tmp_path / "out"), "threads": 0})
    batches = load(Dataset.open(config.train, config))
    assert sum(batch.num_rows for batch in batches) == 19


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1 2:x", "not `label index:value"),
        ("1 a:1", "not `label index:value"),
        ("1 3", "not `label index:value"),
        ("x 3:1", "not `label index:value"),
        ("1,2 3:1", "several labels"),
        ("1 2:3:4", "libffm"),
        ("1 -2:3", "not `label index:value"),
        ("1 99999999999999999999:3", "not `label index:value"),
    ],
)
def test_a_line_that_is_no_libsvm_is_told_or_left_out(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "rows").write_text(f"1 1:1\n\n0 2:1\n{line}\n1 3:1\n0 4:1\n")
    with pytest.raises(DataError, match=f"rows, line 4: .*{words}"):
        libsvm.prepare([tmp_path / "rows"], tmp_path / "out", LAST)
    notes = Notes()
    libsvm.prepare([tmp_path / "rows"], tmp_path / "out", LAST, on_bad_line="skip", notes=notes)
    assert [row["ids"] for row in rows_in(tmp_path / "out")] == [[1], [2], [3], [4]]
    assert list(notes.lines()) == [f"{tmp_path / 'rows'}: 1 line was left out: 4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["csv", "rows.csv", "--schema", "click:int8"], "one or more sources and then the output folder"),
        (["csv", "rows.csv", "out", "--schema", "click:int8", "--delimiter", "::"], "one ASCII character"),
        (["csv", "rows.csv", "out", "--schema", "click:int8", "--delimiter", "\\"], "has no column"),
        (["csv", "rows.csv", "out", "--schema", "click:int8", "--list-delimiter", ""], "--list-delimiter is empty"),
        (["csv", "rows.csv", "out", "--schema", "click:int8", "--encoding", "x"], "--encoding 'x'"),
        (["csv", "rows.csv", "rows.csv", "--schema", "click:int8"], "rows.csv"),
        (["csv", "rows.csv", "/dev/null/x", "--schema", "click:int8"], "/dev/null"),
        (["criteo", "rows.csv", "out", "--threads", "0"], "--threads"),
        (["libfm", "rows.csv", "out"], "several labels"),
        (["movielens", "rows.csv", "out"], "neither u.data"),
    ],
)
def test_mistakes_on_the_command_line_of_prepare(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("click,user\n1,2\n0,3\n")
    assert run(["data", "prepare", *arguments]) == 64
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told


@pytest.mark.parametrize("days", ["2026-01-05..2026-01-01", "monday", "2026-13-01"])
def test_days_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], days: str) -> None:
    assert run(["data", "synth", str(tmp_path / "new"), "--rows", "50", "--days", days]) == 64
    assert "Traceback" not in capsys.readouterr().err
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.doc").write_text("precious")
    assert run(["data", "synth", str(tmp_path / "used"), "--rows", "50"]) == 64
    assert "holds other files" in capsys.readouterr().err
    for rows in ("nan", "inf", "-1", "1e40", "x"):
        assert run(["data", "synth", str(tmp_path / "new"), "--rows", rows]) == 64
        assert "is not a number of rows" in capsys.readouterr().err


def test_options_of_the_command_reach_the_recipe(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_bytes("1\t K\u00f6ln\n0\t\\N\n0\n1\tx\n1\tNULL\n".encode("latin-1"))
    options = [
        "--schema",
        "click:int8, city:string",
        "--delimiter",
        "\\t",
        "--no-header",
        "--null",
        "\\N",
        "--null",
        "NA",
    ]
    options += ["--trim", "--encoding", "latin-1", "--on-bad-line", "skip", "--no-quotes", "--split", "order"]
    assert run(["data", "prepare", "csv", "rows.csv", "out", *options, "--eval-fraction", "0.4"]) == 0
    assert [row["city"] for row in rows_in(Path("out"))] == ["Köln", None, "x", "NULL"]
    told = capsys.readouterr().err
    assert "note: rows.csv: 1 line was left out: 3" in told
    assert "'NULL' is taken as a value" in told
