"""Any delimited text with a header and a declared schema."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.errors import DataError
from data_pipeline.recipes import delimited, preparation
from data_pipeline.recipes.preparation import Advance, Progress, Split

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
    delimiter: str = ",",
    list_delimiter: str = "|",
    threads: int = 2,
    on_progress: Progress | None = None,
) -> dict[str, int]:
    """Writes the columns of `schema` to `train/` and `eval/` below `directory`. Returns row counts."""

    def convert(source: Path, advance: Advance) -> Iterator[pa.RecordBatch]:
        types = {n: pa.string() if k.startswith("list<") else _TYPES[k] for n, k in schema.items()}
        for batch in delimited.read(source, advance, types=types, delimiter=delimiter):
            arrays = [_column(batch.column(n), k, list_delimiter, f"{source}, column {n}") for n, k in schema.items()]
            yield pa.record_batch(arrays, names=list(schema))

    settings = {
        "recipe": "csv",
        "version": 1,
        "schema": dict(schema),
        "delimiter": delimiter,
        "list_delimiter": list_delimiter,
    }
    return preparation.prepare(
        sources, directory, convert, split, settings=settings, threads=threads, on_progress=on_progress
    )


def _column(array: pa.Array, kind: str, list_delimiter: str, what: str) -> pa.Array:
    if kind == "hex":
        return delimited.hex_to_int64(array, what)
    if not kind.startswith("list<"):
        return array
    lists = pc.split_pattern(array, list_delimiter)
    try:
        values = _column(lists.values, kind[5:-1], list_delimiter, what)
        values = values if kind == "list<hex>" else values.cast(_TYPES[kind[5:-1]])
    except pa.ArrowInvalid as error:
        raise DataError(f"{what}: {error}") from error
    return pa.ListArray.from_arrays(lists.offsets, values, mask=lists.is_null())
