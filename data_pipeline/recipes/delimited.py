"""Delimited text, plain or packed, as Arrow batches."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from data_pipeline.errors import DataError
from data_pipeline.recipes.preparation import Advance

_BLOCK_BYTES = 8 << 20
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_HEX = np.full(256, 255, dtype=np.uint8)
for _digits, _first in ((b"0123456789", 0), (b"abcdef", 10), (b"ABCDEF", 10)):
    _HEX[np.frombuffer(_digits, np.uint8)] = np.arange(_first, _first + len(_digits))


def read(
    source: Path,
    advance: Advance,
    *,
    types: Mapping[str, pa.DataType],
    delimiter: str = ",",
    header: bool = True,
    quoted: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Batches of the columns in `types`, in that order. Without a header, `types` names all columns of the file.

    An empty field is null. Raises DataError naming the file, and the line or column, for text that does not fit.
    """
    with source.open("rb") as raw:
        stream: pa.NativeFile = pa.PythonFile(raw, mode="r")
        if source.suffix in _PACKED:
            stream = pa.CompressedInputStream(stream, _PACKED[source.suffix])
        try:
            reader = pacsv.open_csv(
                stream,
                read_options=pacsv.ReadOptions(column_names=None if header else list(types), block_size=_BLOCK_BYTES),
                parse_options=pacsv.ParseOptions(delimiter=delimiter, quote_char='"' if quoted else False),
                convert_options=pacsv.ConvertOptions(
                    column_types=dict(types), include_columns=list(types), null_values=[""], strings_can_be_null=True
                ),
            )
            for batch in reader:
                yield batch
                advance(raw.tell())
            advance(source.stat().st_size)
        except (pa.ArrowException, OSError, EOFError) as error:
            names = list(types)
            text = re.sub(r"CSV column #(\d+)(?!\d)", lambda m: _named(names, int(m[1]), header=header), str(error))
            raise DataError(f"{source}: {text}") from error


def _named(names: list[str], number: int, *, header: bool) -> str:
    """Name of a column that pyarrow counts from 0; without a header the names are ours."""
    return f"field {number + 1}" if header or number >= len(names) else f"column {names[number]!r} (field {number + 1})"


def hex_to_int64(column: pa.Array, what: str) -> pa.Array:
    """Exact integers of hexadecimal text of at most 15 digits. Raises DataError for other text."""
    gaps = column.is_null().to_numpy(zero_copy_only=False)
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1].astype(
        np.int64
    )
    lengths = np.diff(offsets)
    buffer = column.buffers()[2]
    data = np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)
    values = np.zeros(len(column), dtype=np.int64)
    wrong = (lengths > 15) | ((lengths == 0) & ~gaps)
    for digit in range(int(min(15, lengths.max(initial=0)))):
        rows = np.flatnonzero((lengths > digit) & ~wrong)
        nibble = _HEX[data[offsets[rows] + digit]]
        wrong[rows[nibble == 255]] = True
        values[rows] = values[rows] * 16 + nibble
    if wrong.any():
        raise DataError(f"{what}: {column[int(np.flatnonzero(wrong)[0])].as_py()!r} is not a hexadecimal category")
    return pa.array(values, mask=gaps)
