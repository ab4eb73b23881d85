"""libsvm and libfm text: a label, then `index:value` pairs; `qid:<n>` and a comment after `#` may be there.

A row becomes `label` (float32, as written: -1/1 labels need `label_rule: {positive: 1}` in the job), `ids` (list of
int64, as written), `values` (list of float32, as long), and `qid` (int64, null where there is none).
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.recipes import delimited, preparation
from paddlewheel.data_pipeline.recipes.delimited import BadLine, Format, Notes
from paddlewheel.data_pipeline.recipes.preparation import Advance, Progress, Split

_LINES = Format(delimiter="\x1f", header=False, quoted=False)
_PAIR = r"^[0-9]{1,18}:[^:]+$"
_QUERY = r"^qid:[0-9]{1,18}$"


def prepare(
    sources: Iterable[str | Path],
    directory: str | Path,
    split: Split,
    *,
    on_bad_line: BadLine = "fail",
    threads: int = 2,
    notes: Notes | None = None,
    on_progress: Progress | None = None,
) -> dict[str, int]:
    """Writes `train/` and `eval/` below `directory`, one part per source. Returns row counts."""
    settings = {"recipe": "libsvm", "version": 1, "on_bad_line": on_bad_line}
    convert = partial(_convert, skip=on_bad_line == "skip", notes=notes)
    return preparation.prepare(
        sources, directory, convert, split, settings=settings, threads=threads, on_progress=on_progress
    )


def _convert(source: Path, advance: Advance, *, skip: bool, notes: Notes | None) -> Iterator[pa.RecordBatch]:
    before = 0
    bad: list[int] = []
    for batch in delimited.read(source, advance, types={"line": pa.string()}, form=_LINES):
        table, wrong = _parse(batch.column("line"))
        if wrong.size and not skip:
            record = before + int(wrong[0]) + 1
            line = delimited.line_numbers(source, _LINES, [record]).get(record, record)
            raise DataError(f"{source}, line {line:,}: {_why(batch.column('line')[int(wrong[0])].as_py())}")
        bad += [before + int(row) + 1 for row in wrong]
        before += batch.num_rows
        yield table
    if notes is not None:
        notes.bad_lines[source] = (_LINES, bad)


def _parse(lines: pa.Array) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """The rows of lines, and which lines are none; comments and empty lines are left out."""
    if pc.any(pc.match_substring(lines, "#")).as_py():
        lines = pc.replace_substring_regex(lines, "#.*$", "")
    lists = pc.ascii_split_whitespace(pc.utf8_trim_whitespace(lines))
    offsets = lists.offsets.to_numpy().astype(np.int64)
    tokens = lists.values
    row_T = np.repeat(np.arange(len(lines)), np.diff(offsets))
    is_label_T = np.zeros(len(tokens), bool)
    is_label_T[offsets[:-1][np.diff(offsets) > 0]] = True
    empty = pc.equal(tokens, "").to_numpy(zero_copy_only=False)
    label_N, bad_label_T = _numbers(tokens, is_label_T & ~empty, pa.float32())
    is_query_T = _matches(tokens, _QUERY) & ~is_label_T
    is_pair_T = _matches(tokens, _PAIR) & ~is_label_T
    parts = pc.split_pattern(tokens.filter(pa.array(is_pair_T)), ":").values.to_numpy(zero_copy_only=False)
    ids = pa.array(parts[0::2], pa.string()).cast(pa.int64())
    value_P, bad_pair_P = _numbers(pa.array(parts[1::2], pa.string()), np.ones(len(parts) // 2, bool), pa.float32())
    wrong_T = bad_label_T | ~(is_label_T | is_query_T | is_pair_T | empty)
    wrong_T[np.flatnonzero(is_pair_T)[bad_pair_P]] = True
    wrong_N = np.bincount(row_T[wrong_T], minlength=len(lines)) > 0
    there_N = np.bincount(row_T[is_label_T & ~empty], minlength=len(lines)) > 0
    kept_N = there_N & ~wrong_N
    kept_P = kept_N[row_T[is_pair_T]]
    lengths = np.bincount(row_T[is_pair_T][kept_P], minlength=len(lines))[kept_N]
    bounds = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    query_N = np.zeros(len(lines), np.int64)
    queries = pc.utf8_slice_codeunits(tokens.filter(pa.array(is_query_T)), 4).cast(pa.int64())
    query_N[row_T[is_query_T]] = queries.to_numpy()
    has_query_N = np.bincount(row_T[is_query_T], minlength=len(lines)) > 0
    labels = np.zeros(len(lines), np.float32)
    labels[row_T[is_label_T & ~empty]] = label_N
    table = pa.record_batch(
        {
            "label": pa.array(labels[kept_N]),
            "ids": pa.ListArray.from_arrays(bounds, ids.filter(pa.array(kept_P))),
            "values": pa.ListArray.from_arrays(bounds, pa.array(value_P[kept_P])),
            "qid": pa.array(query_N[kept_N], mask=~has_query_N[kept_N]),
        }
    )
    return table, np.flatnonzero(wrong_N)


def _matches(tokens: pa.Array, pattern: str) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.match_substring_regex(tokens, pattern).to_numpy(zero_copy_only=False).astype(bool)
    return found


def _numbers(
    texts: pa.Array, chosen_T: npt.NDArray[np.bool_], kind: pa.DataType
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Numbers of the chosen texts, and which of all texts are chosen and none. A leading + is allowed."""
    some = pc.replace_substring_regex(texts.filter(pa.array(chosen_T)), r"^\+", "")
    bad_T = np.zeros(len(texts), bool)
    try:
        return some.cast(kind).to_numpy(zero_copy_only=False), bad_T
    except pa.ArrowInvalid:
        pass
    numbers = np.zeros(len(some), np.float32)
    places = np.flatnonzero(chosen_T)
    for place, text in enumerate(some.to_pylist()):
        try:
            numbers[place] = pa.scalar(text).cast(kind).as_py()
        except pa.ArrowInvalid:
            bad_T[places[place]] = True
    return numbers, bad_T


def _why(line: str) -> str:
    shown = line if len(line) <= 80 else line[:77] + "..."
    token = next((t for t in line.split("#", maxsplit=1)[0].split()[1:] if t.count(":") != 1), None)
    if token is not None and token.count(":") == 2:
        return f"{shown!r} has three parts in {token!r}, as libffm has (field:index:value); libsvm and libfm have two"
    if "," in line.split(maxsplit=1)[0]:
        return f"{shown!r} has several labels; one number is expected"
    return (
        f"{shown!r} is not `label index:value ...` with a number for label and value: --on-bad-line skip leaves it out"
    )


def data_section(directory: str | Path, max_length: int = 256) -> dict[str, Any]:
    """A `data` section: all ids in one feature, weighted by their values."""
    root = Path(directory)
    return {
        "train": str(root / "train"),
        "eval": str(root / "eval"),
        "batch_rows": 2048,
        "labels": ["label"],
        "label_rule": {"positive": 1},
        "sparse": [{"name": "ids", "weights": "values", "max_length": max_length}],
    }
