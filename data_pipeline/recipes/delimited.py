"""Delimited text, plain or packed, as Arrow batches. What does not fit is told with the line and the remedy."""

import codecs
import csv
import difflib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.recipes.preparation import Advance

BadLine = Literal["fail", "skip"]
"""What a line with another number of fields does: it ends the conversion, or is left out and counted."""

_BLOCK_BYTES = 8 << 20
_COUNTED_BYTES = 1 << 30
"""So far bad lines are counted for a message."""
_SHOWN = 5
_PEEK_BYTES = 1 << 20
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
_OTHER = {
    b"PAR1": "is Parquet already: name its folder in data.train",
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"\xfd7zXZ": "is packed with xz: unpack it first, or pack it with gzip or zstd",
}
NULL_WORDS = ("NULL", "null", "Null", "\\N", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "None", "none")
"""Words that other systems write for a missing value. They count as one only where a user says so."""
_HEX = np.full(256, 255, dtype=np.uint8)
for _digits, _first in ((b"0123456789", 0), (b"abcdef", 10), (b"ABCDEF", 10)):
    _HEX[np.frombuffer(_digits, np.uint8)] = np.arange(_first, _first + len(_digits))


@dataclass(frozen=True)
class Format:
    """How text is cut into fields, and what stands for nothing.

    Attributes:
        delimiter: one character between fields.
        header: whether the first line names the columns.
        quoted: whether `"` around a field makes delimiters and line breaks inside it part of the value.
        encoding: of the text, as Python names it.
        nulls: words that mean a missing value, beside the empty field.
        trim: whether spaces around names and values are cut off.
        on_bad_line: see `BadLine`.

    Raises:
        DataError: no text can be read in this way.
    """

    delimiter: str = ","
    header: bool = True
    quoted: bool = True
    encoding: str = "utf-8"
    nulls: tuple[str, ...] = ()
    trim: bool = False
    on_bad_line: BadLine = "fail"

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in '\r\n\0"':
            raise DataError(
                f"--delimiter {self.delimiter!r}: one ASCII character is needed, such as ',', ';' or '\\t', and no "
                "quote or line break. Text with longer delimiters must be rewritten first"
            )
        try:
            found = codecs.lookup(self.encoding)
        except (LookupError, ValueError):
            found = None
        if found is None or not getattr(found, "_is_text_encoding", True):
            raise DataError(f"--encoding {self.encoding!r} is not known; examples: utf-8, latin-1, cp1252, utf-16")


PLAIN = Format()
"""Commas, quotes, a header, UTF-8."""


@dataclass
class Notes:
    """What a person should know about sources that were read."""

    bad_lines: dict[Path, tuple[Format, list[int]]] = field(default_factory=dict)
    """How each source was read, and the records of it that were left out."""
    remarks: dict[str, None] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """As sentences."""
        for source, (form, records) in sorted(self.bad_lines.items()):
            if records:
                where = line_numbers(source, form, records[:_SHOWN])
                more = ", ..." if len(records) > _SHOWN else ""
                lines = "1 line was" if len(records) == 1 else f"{len(records):,} lines were"
                yield f"{source}: {lines} left out: {', '.join(f'{where.get(r, r):,}' for r in records[:_SHOWN])}{more}"
        yield from self.remarks


def read(
    source: Path,
    advance: Advance,
    *,
    types: Mapping[str, pa.DataType],
    form: Format = PLAIN,
    notes: Notes | None = None,
    hint: Callable[[int], str] = lambda _: "",
) -> Iterator[pa.RecordBatch]:
    """Batches of the columns in `types`, in that order. Without a header, `types` names all columns of the file.

    Args:
        source: plain, or packed with gzip, bz2, zstd or lz4.
        advance: told the bytes read so far.
        types: Arrow type by column. An empty field is null.
        form: how the text is cut.
        notes: gets what a person should know.
        hint: what a line of so many fields may be.

    Raises:
        DataError: text that does not fit; the message names the file, the line or column, and the remedy.
    """
    names = _columns(source, types, form)
    wanted = {name: pa.string() if form.trim else kind for name, kind in zip(names, types.values(), strict=True)}
    bad: list[int] = []
    if notes is not None:
        notes.bad_lines[source] = (form, bad)

    def leave_out(row: pacsv.InvalidRow) -> str:
        bad.append(row.number or 0)
        return "skip"

    skipping = form.on_bad_line == "skip"
    try:
        with _opened(source, form.encoding) as (stream, raw, counting):
            first = True
            reader = _open(stream, wanted, form, threads=not skipping, handler=leave_out if skipping else None)
            for batch in reader:
                advance(raw.tell())
                whole = _trimmed(batch, types, form, source) if form.trim else batch.rename_columns(list(types))
                if first and notes is not None:
                    _remark(whole, form, source, notes)
                first = False
                yield whole
            if form.quoted and counting.quotes % 2:
                _check_closed(source, form)
        advance(source.stat().st_size)
    except (pa.ArrowException, UnicodeError, OSError, EOFError) as error:
        raise DataError(_explained(source, types, wanted, form, error, hint)) from error


class _Text(io.RawIOBase):
    """An unpacked stream as UTF-8. Counts quotes: an odd number of them is worth a look.

    No piece ends with a carriage return: where one does, Arrow 26 takes a line feed that begins the next piece for a
    part of the same line end, and drops it, also inside quotes.
    """

    def __init__(self, inner: pa.NativeFile, encoding: str) -> None:
        self._inner = inner
        plain = codecs.lookup(encoding).name == "utf-8"
        self._decoder = None if plain else codecs.getincrementaldecoder(encoding)()
        self._held, self._over = b"", False
        self.quotes = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = size if size > 0 else _PEEK_BYTES
        while len(self._held) < max(size, 2) and not self._over:
            data: bytes = self._inner.read(size)
            self._over = not data
            if self._decoder is not None:
                data = self._decoder.decode(data, self._over).encode()
            self.quotes += data.count(b'"')
            self._held += data
        piece = self._held[:size]
        if len(piece) > 1 and piece.endswith(b"\r") and not (self._over and len(piece) == len(self._held)):
            piece = piece[:-1]
        self._held = self._held[len(piece) :]
        return piece


@contextmanager
def _opened(source: Path, encoding: str = "utf-8") -> Iterator[tuple[pa.NativeFile, io.BufferedReader, _Text]]:
    """The unpacked stream as UTF-8, the file under it, and what counts on the way."""
    with source.open("rb") as raw:
        magic = raw.peek(8)[:8]
        for start, what in _OTHER.items():
            if magic.startswith(start):
                raise DataError(f"{source}: {what}")
        packing = next((name for start, name in _PACKED.items() if magic.startswith(start)), None)
        inner: pa.NativeFile = pa.PythonFile(raw, mode="r")
        if packing is not None:
            inner = pa.CompressedInputStream(inner, packing)
        counting = _Text(inner, encoding)
        yield pa.PythonFile(counting, mode="r"), raw, counting


def _open(
    stream: pa.NativeFile,
    types: Mapping[str, pa.DataType],
    form: Format,
    *,
    threads: bool,
    handler: Callable[[pacsv.InvalidRow], str] | None = None,
) -> pacsv.CSVStreamingReader:
    return pacsv.open_csv(
        stream,
        read_options=pacsv.ReadOptions(
            column_names=None if form.header else list(types),
            block_size=_BLOCK_BYTES,
            use_threads=threads,
        ),
        parse_options=pacsv.ParseOptions(
            delimiter=form.delimiter,
            quote_char='"' if form.quoted else False,
            newlines_in_values=form.quoted,
            invalid_row_handler=handler,
        ),
        convert_options=pacsv.ConvertOptions(
            column_types=dict(types),
            include_columns=list(types),
            null_values=["", *form.nulls],
            strings_can_be_null=True,
        ),
    )


# ------------------------------------------------------------------------------------------------------------- header


def _columns(source: Path, types: Mapping[str, pa.DataType], form: Format) -> list[str]:
    """Names as the file has them. Raises DataError where the header is not the one that is wanted."""
    try:
        head = _head(source)
    except (pa.ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{source}: cannot be unpacked: {error}") from error
    wide = codecs.lookup(form.encoding).name.startswith(("utf-16", "utf-32"))
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not wide:
        raise DataError(f"{source}: is UTF-16 text, and is read as {form.encoding}: give --encoding utf-16")
    if not form.header:
        return list(types)
    text = codecs.getincrementaldecoder(form.encoding)("replace").decode(head).removeprefix("\ufeff")
    lines = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=form.delimiter,
        quoting=csv.QUOTE_MINIMAL if form.quoted else csv.QUOTE_NONE,
    )
    try:
        found = next((line for line in lines if line), [])
    except csv.Error as error:
        raise DataError(f"{source}: its header cannot be read: {error}") from error
    if not found:
        raise DataError(f"{source}: is empty: the first line must name the columns (or give --no-header)")
    plain = [name.strip() for name in found] if form.trim else found
    missing = [name for name in types if name not in plain]
    if missing:
        raise DataError(f"{source}: {_missing(missing, found, form)}")
    twice = next((name for name in types if plain.count(name) > 1), None)
    if twice is not None:
        places = ", ".join(str(place) for place, name in enumerate(plain, 1) if name == twice)
        raise DataError(
            f"{source}: the header names {twice!r} more than once (fields {places}), so it is not clear which is "
            "meant: rename one of them, or take the header off, give --no-header and name every column in --schema"
        )
    return [found[plain.index(name)] for name in types]


def _head(source: Path) -> bytes:
    with _opened(source) as (stream, _, _counting):
        head: bytes = stream.read(_PEEK_BYTES)
        return head


def _missing(missing: Sequence[str], found: Sequence[str], form: Format) -> str:
    shown = ", ".join(repr(name if len(name) < 60 else name[:57] + "...") for name in found[:12])
    more = f", ... ({len(found)} in all)" if len(found) > 12 else ""
    said = f"the header has no column {', '.join(map(repr, missing))}; it has {shown}{more}"
    spaced = next((name for name in found if name.strip() in missing and name != name.strip()), None)
    other = next((mark for mark in ";\t|,:" if len(found) == 1 and mark != form.delimiter and mark in found[0]), None)
    if other is not None:
        named = "\\t" if other == "\t" else other
        return f"{said}. It looks delimited by {named!r}: give --delimiter '{named}'"
    if spaced is not None:
        return f"{said}. {spaced!r} has a space: --trim cuts spaces off names and values"
    if not any(name in missing or _nearest(name, missing) for name in found) and any(map(_is_number, found)):
        return (
            f"{said}. That looks like data: if the file has no header, give --no-header, and name all its columns in "
            "--schema"
        )
    near = [f"{name!r}: did you mean {_nearest(name, found)!r}?" for name in missing if _nearest(name, found)]
    return f"{said}. {' '.join(near)}" if near else said


def _nearest(name: str, known: Iterable[str]) -> str | None:
    by_fold = {other.strip().casefold(): other for other in known}
    near = difflib.get_close_matches(name.casefold(), list(by_fold), n=1, cutoff=0.6)
    return by_fold[near[0]] if near else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- values


def _trimmed(batch: pa.RecordBatch, types: Mapping[str, pa.DataType], form: Format, source: Path) -> pa.RecordBatch:
    """Columns that were read as text, without spaces around their values, in their types."""
    arrays = []
    for array, (name, kind) in zip(batch.columns, types.items(), strict=True):
        text = pc.utf8_trim_whitespace(array)
        text = pc.if_else(pc.is_in(text, pa.array(["", *form.nulls])), None, text)
        try:
            arrays.append(text if pa.types.is_string(kind) else text.cast(kind))
        except pa.ArrowInvalid as error:
            raise DataError(f"{source}, column {name!r}: {error}{remedy(str(error), form)}") from error
    return pa.record_batch(arrays, names=list(types))


def _remark(batch: pa.RecordBatch, form: Format, source: Path, notes: Notes) -> None:
    """Words that mean null elsewhere, in text columns, where they are values like any other."""
    words = pa.array([word for word in NULL_WORDS if word not in form.nulls])
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_string(array.type):
            found = array.filter(pc.is_in(array, words))
            if len(found):
                word = found[0].as_py()
                remark = f"{word!r} is taken as a value; if it means missing, give --null '{word}'"
                notes.remarks[f"{source}, column {name!r}: {remark}"] = None


def cleaned_lists(lists: pa.ListArray, form: Format, *, trim: bool) -> tuple[pa.Array, pa.Array]:
    """Offsets and values of lists of text without empty parts and words for null."""
    values = pc.utf8_trim_whitespace(lists.values) if trim else lists.values
    kept = pc.invert(pc.is_in(values, pa.array(["", *form.nulls])))
    before = np.concatenate([[0], np.cumsum(kept.to_numpy(zero_copy_only=False))])
    return pa.array(before[lists.offsets.to_numpy()].astype(np.int32)), values.filter(kept)


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
    wrong = ((lengths > 15) & ~gaps) | ((lengths == 0) & ~gaps)
    for digit in range(int(min(15, lengths.max(initial=0)))):
        rows = np.flatnonzero((lengths > digit) & ~wrong & ~gaps)
        nibble = _HEX[data[offsets[rows] + digit]]
        wrong[rows[nibble == 255]] = True
        values[rows] = values[rows] * 16 + nibble
    if wrong.any():
        raise DataError(f"{what}: {_no_hex(column[int(np.flatnonzero(wrong)[0])].as_py())}")
    return pa.array(values, mask=gaps)


def _no_hex(text: str) -> str:
    said = f"{text!r} is not a hexadecimal category"
    if re.fullmatch(r"[0-9a-fA-F]{16,}", text):
        return f"{said} of at most 15 digits: {len(text)} digits do not fit in an int64; declare the column `string`"
    if text in NULL_WORDS:
        return f"{said}; if it means missing, give --null '{text}'"
    if re.fullmatch(r"0[xX][0-9a-fA-F]+", text):
        return f"{said}: digits alone, without {text[:2]}; or declare the column `string`"
    if text != text.strip():
        return f"{said}: it has a space; --trim cuts spaces off"
    return f"{said} (digits 0-9, a-f); declare the column `string` to take any text"


# -------------------------------------------------------------------------------------------------------- explanations


def _explained(
    source: Path,
    types: Mapping[str, pa.DataType],
    wanted: Mapping[str, pa.DataType],
    form: Format,
    error: BaseException,
    hint: Callable[[int], str],
) -> str:
    """What is wrong, with the line: the file is read again, by one thread, up to there."""
    text = str(error)
    if isinstance(error, UnicodeError) or "invalid UTF8" in text:
        return f"{source}{_undecodable(source, form)}"
    if "straddling object" in text:
        return f"{source}{_unclosed(source, form)}"
    if isinstance(error, OSError) and not isinstance(error, pa.ArrowException):
        return f"{source}: cannot be read: {error}"
    try:
        with _opened(source, form.encoding) as (stream, _, _counting):
            for _batch in _open(stream, wanted, form, threads=False):
                pass
    except (pa.ArrowException, UnicodeError, OSError, EOFError) as again:
        text = str(again)
    found = re.search(r"Row #(\d+): ", text)
    number = int(found[1]) if found else None
    where = "" if number is None else f", line {line_numbers(source, form, [number]).get(number, number):,}"
    fields = re.search(r"Expected (\d+) columns, got (\d+)(?:: (.*))?", text, re.DOTALL)
    if fields:
        return f"{source}{where}: {_bad_lines(source, wanted, form, fields, hint)}"
    column = re.search(r"CSV column #(\d+): (?:Row #\d+: )?CSV conversion error to ([^:]*): (.*)", text, re.DOTALL)
    if column:
        name = _named(source, list(types), int(column[1]), form)
        return f"{source}{where}, {name}: {column[3]}, which is no {column[2]}{remedy(text, form)}"
    return f"{source}{where}: {text}"


def _named(source: Path, names: list[str], number: int, form: Format) -> str:
    """Name of a column that Arrow counts from 0 in the file."""
    if form.header:
        text = codecs.getincrementaldecoder(form.encoding)("replace").decode(_head(source)).removeprefix("\ufeff")
        names = next((line for line in csv.reader(io.StringIO(text, newline=""), delimiter=form.delimiter) if line), [])
    return f"column {names[number]!r} (field {number + 1})" if number < len(names) else f"field {number + 1}"


def remedy(text: str, form: Format) -> str:
    """What may help where Arrow's message `text` says that a value cannot be converted."""
    value = re.search(r"(?:invalid value|string:) '(.*?)'", text, re.DOTALL)
    if value is None:
        return ""
    word = value[1]
    if word in NULL_WORDS or re.fullmatch(r"[-?.]|\(?null\)?|undefined|nil|missing|unknown", word, re.IGNORECASE):
        return f"; if {word!r} means a missing value, give --null '{word}'"
    if not word.strip() and not form.trim:
        return "; --trim takes a field of spaces for an empty one"
    if "to int" in text or "to uint" in text or "type int" in text:
        if re.fullmatch(r"[-+]?\d+", word):
            return "; declare a larger type, such as int64, uint64 or string"
        if _is_number(word):
            return "; declare the column float64, or string"
    return "; declare the column string, if it is text"


def _bad_lines(
    source: Path,
    types: Mapping[str, pa.DataType],
    form: Format,
    fields: re.Match[str],
    hint: Callable[[int], str],
) -> str:
    expected, got, line = int(fields[1]), int(fields[2]), fields[3] or ""
    records: list[int] = []

    def count(row: pacsv.InvalidRow) -> str:
        records.append(row.number or 0)
        return "skip"

    text = dict.fromkeys(types, pa.binary())
    rows = 0
    with _opened(source, form.encoding) as (stream, raw, _counting):
        for batch in _open(stream, text, form, threads=False, handler=count):
            rows += batch.num_rows
            if raw.tell() > _COUNTED_BYTES:
                break
    total = rows + len(records)
    where = line_numbers(source, form, records[:_SHOWN])
    listed = ", ".join(f"{where.get(record, record):,}" for record in records[:_SHOWN])
    shown = line if len(line) <= 80 else line[:77] + "..."
    many = (
        f"{len(records):,} of {total:,} lines have another number of fields (lines {listed}"
        f"{', ...' if len(records) > _SHOWN else ''})"
    )
    if len(records) * 2 > total and got == 1:
        help_ = "is --delimiter right?"
    else:
        help_ = "--on-bad-line skip leaves them out and counts them"
    return f"Expected {expected} columns, got {got}: {shown!r}. {many}: {help_}{hint(got)}"


def _undecodable(source: Path, form: Format) -> str:
    name = codecs.lookup(form.encoding).name
    if not name.startswith(("utf-16", "utf-32")):
        for number, line in enumerate(_raw_lines(source), 1):
            try:
                line.decode(form.encoding)
            except UnicodeDecodeError as error:
                near = line[max(0, error.start - 10) : error.end + 10]
                return (
                    f", line {number:,}: {near!r} is no {form.encoding} text (byte {error.start + 1} of the line): "
                    "give the encoding that the file has, such as --encoding latin-1 or cp1252"
                )
    return f": is no {form.encoding} text: give the encoding that the file has, such as --encoding latin-1"


def _unclosed(source: Path, form: Format) -> str:
    start = next((number for number, is_open in _records(source, form) if is_open is None), None)
    where = f", line {start:,}" if start is not None else ""
    return (
        f"{where}: a quote is opened and not closed within {_BLOCK_BYTES >> 20} MB, or the line is longer than that: "
        "if quotes are ordinary characters in this file, give --no-quotes"
    )


def _check_closed(source: Path, form: Format) -> None:
    """An odd number of quotes may be inches, or a field that swallowed the rest of the file."""
    opened, quoted = 1, False
    mark = re.escape(form.delimiter.encode())
    field = re.compile(rb'"(?P<quoted>(?:[^"]|"")*)(?P<closed>"[^' + mark + rb"]*)?|[^" + mark + rb"]*")
    rest = re.compile(rb'(?:[^"]|"")*(?P<closed>"[^' + mark + rb"]*)?")
    for number, line in enumerate(_raw_lines(source, form.encoding), 1):
        at = 0
        while at <= len(line):
            found = (rest if quoted else field).match(line, at)
            assert found is not None
            begins = not quoted and found.groupdict().get("quoted") is not None
            opened = number if begins else opened
            quoted = (quoted or begins) and found["closed"] is None
            at = found.end() + 1
            if quoted:
                break
    if quoted:
        raise DataError(
            f"{source}, line {opened:,}: a quote is opened and never closed, so that all lines after it would be one "
            "value: if quotes are ordinary characters in this file, give --no-quotes"
        )


def _raw_lines(source: Path, encoding: str = "utf-8") -> Iterator[bytes]:
    with _opened(source, encoding) as (stream, _, _counting):
        rest = b""
        while block := stream.read(_PEEK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        if rest:
            yield rest


def _records(source: Path, form: Format) -> Iterator[tuple[int, bool | None]]:
    """For each line its number, and whether a record begins there; None for a record that is longer than a block."""
    inside, start, length = False, 1, 0
    for number, line in enumerate(_raw_lines(source, form.encoding), 1):
        if not inside:
            start, length = number, 0
            yield number, bool(line.strip(b"\r"))
        length += len(line) + 1
        if length > _BLOCK_BYTES:
            yield start, None
            return
        inside ^= line.count(b'"') % 2 == 1


def line_numbers(source: Path, form: Format, records: Sequence[int]) -> dict[int, int]:
    """Line of each record, which Arrow counts from 1 with the header and without empty lines."""
    wanted, found = set(records), {}
    begins = (
        (number for number, is_record in _records(source, form) if is_record)
        if form.quoted
        else (number for number, line in enumerate(_raw_lines(source, form.encoding), 1) if line.strip(b"\r"))
    )
    for record, number in enumerate(begins, 1):
        if record in wanted:
            found[record] = number
            if len(found) == len(wanted):
                break
    return found
