"""Any delimited text with a declared schema."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.recipes import delimited, preparation
from paddlewheel.data_pipeline.recipes.delimited import Format, Notes
from paddlewheel.data_pipeline.recipes.preparation import Advance, Progress, Split

_TYPES = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(), "uint64": pa.uint64(),
    "float32": pa.float32(), "float64": pa.float64(), "bool": pa.bool_(), "string": pa.string(),
    "date": pa.date32(), "timestamp": pa.timestamp("us"), "hex": pa.string(),
}  # fmt: skip


def parse_schema(text: str) -> dict[str, str]:
    """`click:int8, user:int64, tags:list<string>` -> types by column. Raises DataError naming what is wrong."""
    result: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, colon, kind = (part.strip() for part in item.rpartition(":"))
        inner = re.fullmatch(r"list<(\w+)>", kind)
        if not colon or not name or (inner.group(1) if inner else kind) not in _TYPES:
            raise DataError(f"schema: {item!r} is not NAME:TYPE with a type of {', '.join(_TYPES)} or list<TYPE>")
        if name in result:
            raise DataError(f"schema: column {name!r} is given twice")
        result[name] = kind
    if not result:
        raise DataError("schema: no column is given (example: 'click:int8, user:int64, tags:list<string>')")
    return result


def prepare(
    sources: Iterable[str | Path],
    directory: str | Path,
    split: Split,
    schema: Mapping[str, str],
    *,
    form: Format = delimited.PLAIN,
    delimiter: str | None = None,
    list_delimiter: str = "|",
    threads: int = 2,
    notes: Notes | None = None,
    on_progress: Progress | None = None,
) -> dict[str, int]:
    """Writes the columns of `schema` to `train/` and `eval/` below `directory`. Returns row counts.

    `delimiter` replaces that of `form`. Empty parts of a list, and parts that mean null, are left
    out. `notes` gets what a person should know.
    """
    if delimiter is not None:
        form = replace(form, delimiter=delimiter)
    if not list_delimiter:
        raise DataError("--list-delimiter is empty: give the text between the values of a list, such as '|'")

    def convert(source: Path, advance: Advance) -> Iterator[pa.RecordBatch]:
        types = {n: pa.string() if k.startswith("list<") else _TYPES[k] for n, k in schema.items()}
        for batch in delimited.read(source, advance, types=types, form=form, notes=notes):
            arrays = [
                _column(batch.column(n), k, list_delimiter, form, f"{source}, column {n}") for n, k in schema.items()
            ]
            yield pa.record_batch(arrays, names=list(schema))

    settings = {
        "recipe": "csv",
        "version": 2,
        "schema": dict(schema),
        "format": asdict(form),
        "list_delimiter": list_delimiter,
    }
    return preparation.prepare(
        sources, directory, convert, split, settings=settings, threads=threads, on_progress=on_progress
    )


def _column(array: pa.Array, kind: str, list_delimiter: str, form: Format, what: str) -> pa.Array:
    if kind == "hex":
        return delimited.hex_to_int64(array, what)
    if not kind.startswith("list<"):
        return array
    lists = pc.split_pattern(array, list_delimiter)
    inner = kind[5:-1]
    offsets, text = delimited.cleaned_lists(lists, form, trim=form.trim or inner != "string")
    try:
        values = delimited.hex_to_int64(text, what) if inner == "hex" else text.cast(_TYPES[inner])
    except pa.ArrowInvalid as error:
        raise DataError(f"{what}: {error}{delimited.remedy(str(error), form)}") from error
    return pa.ListArray.from_arrays(offsets, values, mask=lists.is_null())
