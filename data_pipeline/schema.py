"""What a job may find in a column, decided from footers only, before any row is read."""

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.types as pat

from paddlewheel.data_pipeline import arrow_arrays
from paddlewheel.data_pipeline.config import DataConfig, SparseFeature
from paddlewheel.data_pipeline.encoder import folder_number
from paddlewheel.data_pipeline.errors import DataError

Kind = Literal["integer", "boolean", "decimal", "timestamp", "date", "time", "float", "string", "null", "other"]
_EXACT = ("integer", "boolean", "decimal", "timestamp", "date", "time", "string")
_NUMERIC = ("integer", "boolean", "decimal", "float", "null")


@dataclass(frozen=True)
class Column:
    """A column of one file: the kind of its values, and whether a row holds a list of them."""

    kind: Kind
    is_list: bool
    type: pa.DataType


def classify(arrow_type: pa.DataType) -> Column:
    """Kind of an Arrow type. Encodings and extension types are looked through, and one level of list."""
    inner = arrow_arrays.storage(arrow_type)
    is_list = arrow_arrays.is_list(inner)
    if is_list:
        inner = arrow_arrays.storage(inner.value_type)
    kind: Kind
    if pat.is_integer(inner):
        kind = "integer"
    elif pat.is_boolean(inner):
        kind = "boolean"
    elif pat.is_decimal(inner):
        kind = "decimal"
    elif pat.is_timestamp(inner):
        kind = "timestamp"
    elif pat.is_date(inner):
        kind = "date"
    elif pat.is_time(inner):
        kind = "time"
    elif pat.is_floating(inner):
        kind = "float"
    elif arrow_arrays.is_text(inner):
        kind = "string"
    elif pat.is_null(inner):
        kind = "null"
    else:
        kind = "other"
    return Column(kind, is_list, arrow_type)


def columns_needed(config: DataConfig) -> tuple[str, ...]:
    """Every column that the job reads, each once."""
    names = [*config.labels, *config.dense_columns]
    for feature in config.sparse:
        names += feature.columns
        if feature.weights is not None:
            names.append(feature.weights)
    names += [c for c in (config.sample_weight, config.group) if c is not None]
    names += config.slice_metrics_by
    return tuple(dict.fromkeys(names))


def absent_columns(config: DataConfig) -> frozenset[str]:
    """Columns that a file may lack, because the job says what then holds."""
    allowed = {c for block in config.dense if block.absent_column is not None for c in block.columns}
    needed = set(config.labels) | {c for c in (config.sample_weight, config.group) if c is not None}
    needed |= set(config.slice_metrics_by)
    for feature in config.sparse:
        if feature.absent_column == "missing":
            allowed |= set(feature.columns)
            if feature.weights is not None:
                allowed.add(feature.weights)
        else:
            needed |= set(feature.columns)
    return frozenset(allowed - needed)


def check_file(
    name: str,
    schema: pa.Schema,
    partitions: Mapping[str, str | None],
    config: DataConfig,
    carried: Iterable[str] = (),
    above: Mapping[str, str | None] | None = None,
) -> dict[str, Column]:
    """Columns of the job as this file has them (absent ones are left out), and those that are only handed through.

    `partitions` are the columns that folders `key=value` below the data's path give; folders `above` it give none.

    Raises DataError naming file, column and types.
    """
    carried = frozenset(carried)
    wanted = dict.fromkeys((*columns_needed(config), *carried))
    _refuse_ambiguous(name, schema.names, partitions, wanted)
    found: dict[str, Column] = {}
    optional = absent_columns(config)
    for column in wanted:
        if column in partitions:
            found[column] = Column("string", False, pa.string())
        elif column in schema.names:
            found[column] = classify(schema.field(column).type)
        elif column not in optional or column in carried:
            raise DataError(f"{name}: has no column {column!r}; {_hint(column, schema, partitions, above or {})}")
    _check_numbers(name, found, partitions, config)
    for feature in config.sparse:
        for column in feature.columns:
            if column in found:
                _check_ids(name, column, found[column], feature, partitions)
        if feature.weights is not None and feature.weights in found:
            got = found[feature.weights]
            if got.kind not in ("float", "integer", "null") or not (got.is_list or got.kind == "null"):
                raise DataError(f"{name}: column {feature.weights!r} is {got.type}, a list of numbers is needed")
    for column in config.slice_metrics_by:
        if found[column].kind == "other" or found[column].is_list:
            raise DataError(
                f"{name}: column {column!r} of data.slice_metrics_by is {found[column].type}, a value a row is needed"
            )
    if config.group is not None:
        group = found[config.group]
        if group.kind not in (*_EXACT, "null") or group.is_list:
            raise DataError(f"{name}: column {config.group!r} is {group.type}, one integer or string a row is needed")
    return found


def _hint(column: str, schema: pa.Schema, partitions: Mapping[str, str | None], above: Mapping[str, str | None]) -> str:
    """Where a column that is not there might be."""
    if column in above:
        return (
            f"a folder {column}=... lies above the path that the job gives, and only folders below it give columns: "
            "give the path of the folder that holds it"
        )
    names = [*schema.names, *partitions]
    close = difflib.get_close_matches(column.lower(), [n.lower() for n in names], n=3, cutoff=0.5)
    near = list(dict.fromkeys(n for c in close for n in names if n.lower() == c))
    if near:
        return f"the nearest are {', '.join(map(repr, near))}"
    return f"it has {', '.join(map(repr, names[:20]))}"


def _check_numbers(
    name: str, found: dict[str, Column], partitions: Mapping[str, str | None], config: DataConfig
) -> None:
    for column in (*config.labels, *config.dense_columns, *((config.sample_weight,) if config.sample_weight else ())):
        got = found.get(column)
        if got is not None and column in partitions:
            _check_folder_number(name, column, partitions[column])
        elif got is not None and (got.kind not in _NUMERIC or got.is_list):
            raise DataError(f"{name}: column {column!r} is {got.type}, a number is needed")


def _check_folder_number(name: str, column: str, value: str | None) -> None:
    """The name of a folder is text; where a number is needed it must be one."""
    if value is None:
        return
    try:
        number = folder_number(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{name}: column {column!r} comes from the folder {column}={value}, and a number is needed: rename the "
            "folder, or write the column into the files"
        )


def _refuse_ambiguous(
    name: str, names: Sequence[str], partitions: Mapping[str, str | None], wanted: Iterable[str]
) -> None:
    """Refuses columns of the job whose name the file has more than once, be it in another case or as a folder."""
    times = Counter(names)
    spellings: dict[str, list[str]] = {}
    for other in dict.fromkeys((*names, *partitions)):
        spellings.setdefault(other.lower(), []).append(other)
    for column in wanted:
        if column in partitions and times[column]:
            raise DataError(
                f"{name}: column {column!r} is in the file, and the folder {column}={partitions[column]} gives it, "
                "too. Rename one, or set data.partitions: none to take it from the files alone"
            )
        if times[column] > 1:
            raise DataError(f"{name}: has {times[column]} columns {column!r}; rename all but one")
        same = spellings.get(column.lower(), [])
        if len(same) > 1 and column in same:
            other = next(s for s in same if s != column)
            first, second = sorted((column, other), key=same.index)
            raise DataError(
                f"{name}: columns {first!r} and {second!r} differ in nothing but case, and the job reads {column!r}; "
                "rename one"
            )


def _check_ids(
    name: str, column: str, got: Column, feature: SparseFeature, partitions: Mapping[str, str | None]
) -> None:
    where = f"{name}: column {column!r} of feature {feature.name!r} is {got.type}"
    if feature.bucketize is not None:
        if column in partitions:
            _check_folder_number(name, column, partitions[column])
        elif got.kind not in _NUMERIC or got.is_list:
            raise DataError(f"{where}, bucketize needs a number")
        return
    if got.kind == "float":
        raise DataError(
            f"{where}: ids as floats are not exact above 2^53. Write them as int64 (a pandas column "
            "with gaps: dtype 'Int64'), "
            "or give `bucketize`"
        )
    if got.kind == "other":
        raise DataError(
            f"{where}, which cannot be an id (integer, string, boolean, decimal, date, time, timestamp, or a list of "
            "these). Write it as one of them, for example a duration as int64"
        )
    if got.is_list and not feature.multi_valued:
        raise DataError(f"{where}: a list; give the feature `max_length`")
    if feature.type == "integer" and got.kind not in ("integer", "boolean", "decimal", "string", "null"):
        raise DataError(
            f"{where}, declared `type: integer`, which takes integers, booleans, decimals and text: leave `type` out, "
            "or write the column as int64"
        )
    if feature.type == "string" and got.kind not in ("string", "integer", "boolean", "null"):
        raise DataError(
            f"{where}, declared `type: string`, which takes text, integers and booleans: leave `type` out, or write "
            "the column as text"
        )
    if feature.offset and feature.type is None and got.kind not in ("integer", "null"):
        raise DataError(f"{where}, offset needs integers (or `type: integer`)")


def agree(name_a: str, a: dict[str, Column], name_b: str, b: dict[str, Column], config: DataConfig) -> None:
    """Refuses two files whose columns would give one value two keys."""
    readers = [(c, f.type) for f in config.sparse if f.bucketize is None for c in f.columns]
    if config.group is not None:
        readers.append((config.group, None))
    for column, declared in readers:
        if column not in a or column not in b:
            continue
        here, there = _identity(a[column], declared), _identity(b[column], declared)
        if here == there or "null" in (here, there) or any({here, there} <= same for same in _SAME):
            continue
        if declared is None and {here, there} <= {"integer", "text", "bytes"}:
            remedy = "Declare the feature's `type: integer` or `type: string`, or rewrite one"
            if column == config.group and all(c != column for c, _ in readers[:-1]):
                remedy = "Rewrite one"
        else:
            remedy = "Rewrite one as the other"
        raise DataError(
            f"column {column!r} is {a[column].type} in {name_a} and {b[column].type} in {name_b}: the same value "
            f"would get two keys. {remedy}"
        )


_SAME = (
    {"text", "bytes"},
    {"bytes", "uuid"},
    {"text", "bytes", "integer as text"},
    {"text", "bytes", "boolean as text"},
)
"""Identities among which equal values have equal keys. A boolean's text is no integer's: `true` and `1`."""


def _identity(column: Column, declared: str | None) -> str:
    """What the values of a column are to a key: equal values of two columns with one identity have one key."""
    if column.kind == "null":
        return "null"
    if declared == "integer":
        return "integer"
    if column.kind == "string":
        inner = column.type
        while isinstance(inner, pa.BaseExtensionType) and not isinstance(inner, pa.UuidType):
            inner = inner.storage_type
        if arrow_arrays.is_list(arrow_arrays.storage(inner)):
            inner = arrow_arrays.storage(inner).value_type
        if isinstance(inner, pa.UuidType):
            return "uuid"  # 16 bytes, where others write 36 letters
        inner = arrow_arrays.storage(inner)
        tests = (pat.is_binary, pat.is_large_binary, pat.is_binary_view, pat.is_fixed_size_binary)
        return "bytes" if any(test(inner) for test in tests) else "text"
    if declared == "string":
        return f"{column.kind} as text"
    return "integer" if column.kind in ("boolean", "decimal") else column.kind


def mixed_spaces(found: Mapping[str, Iterable[Column]], config: DataConfig) -> list[str]:
    """Warnings about features that share a key space although their columns, `found` by name, cannot hold equal ids."""
    warnings: list[str] = []
    first: dict[str, tuple[SparseFeature, Column, str]] = {}
    for feature in config.sparse:
        if feature.bucketize is not None or feature.cross:
            continue
        for column in found.get(feature.columns[0], ()):
            identity = _identity(column, feature.type)
            identity = "text" if identity.endswith("as text") else identity
            if identity == "null":
                continue
            other, there, before = first.setdefault(feature.space, (feature, column, identity))
            if before != identity and not any({before, identity} <= same for same in _SAME):
                warnings.append(
                    f"features {other.name!r} ({there.type}) and {feature.name!r} ({column.type}) share the key space "
                    f"{feature.space!r}, but equal ids of theirs have different keys. Declare one `type` for both, or "
                    "give one a `key_space` of its own"
                )
                break
    return warnings


def key_kind(column: Column | None, feature: SparseFeature) -> str | None:
    """What decides a value's key beside the value: columns of one kind give equal values equal keys. None: not known,
    or (`bucketize`) the column is read as a number.
    """
    if feature.bucketize is not None:
        return None
    if feature.type is not None:
        return feature.type
    if column is None or column.kind == "null":
        return None
    identity = _identity(column, None)
    return "string" if identity in ("text", "bytes") else identity
