"""What a job may find in a column, decided from footers only, before any row is read."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.types as pat

from data_pipeline.config import DataConfig, SparseFeature
from data_pipeline.errors import DataError

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
    """Kind of an Arrow type; dictionaries and one level of list are looked through."""
    inner = arrow_type
    if pat.is_dictionary(inner):
        inner = inner.value_type
    is_list = pat.is_list(inner) or pat.is_large_list(inner) or pat.is_fixed_size_list(inner)
    if is_list:
        inner = inner.value_type
        if pat.is_dictionary(inner):
            inner = inner.value_type
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
    elif (
        pat.is_string(inner)
        or pat.is_large_string(inner)
        or pat.is_binary(inner)
        or pat.is_large_binary(inner)
        or pat.is_fixed_size_binary(inner)
    ):
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
    names += config.report_by
    return tuple(dict.fromkeys(names))


def absent_columns(config: DataConfig) -> frozenset[str]:
    """Columns that a file may lack, because the job says what then holds."""
    allowed = {c for block in config.dense if block.absent is not None for c in block.columns}
    needed = set(config.labels) | {c for c in (config.sample_weight, config.group) if c is not None}
    needed |= set(config.report_by)
    for feature in config.sparse:
        if feature.absent == "missing":
            allowed |= set(feature.columns)
            if feature.weights is not None:
                allowed.add(feature.weights)
        else:
            needed |= set(feature.columns)
    return frozenset(allowed - needed)


def check_file(
    name: str, schema: pa.Schema, partitions: Iterable[str], config: DataConfig, carried: Iterable[str] = ()
) -> dict[str, Column]:
    """Columns of the job as this file has them (absent ones are left out), and those that are only handed through.

    Raises DataError naming file, column and types.
    """
    partitions, carried = tuple(partitions), frozenset(carried)
    names = list(schema.names) + [p for p in partitions if p not in schema.names]
    _refuse_case_variants(name, schema)
    found: dict[str, Column] = {}
    optional = absent_columns(config)
    for column in dict.fromkeys((*columns_needed(config), *carried)):
        if column in partitions:
            found[column] = Column("string", False, pa.string())
        elif column in schema.names:
            found[column] = classify(schema.field(column).type)
        elif column not in optional or column in carried:
            close = difflib.get_close_matches(column.lower(), [n.lower() for n in names], n=3, cutoff=0.5)
            near = [n for c in close for n in names if n.lower() == c]
            hint = (
                f"the nearest are {', '.join(map(repr, near))}"
                if near
                else f"it has {', '.join(map(repr, names[:20]))}"
            )
            raise DataError(f"{name}: has no column {column!r}; {hint}")
    _check_numbers(name, found, config)
    for feature in config.sparse:
        for column in feature.columns:
            if column in found:
                _check_ids(name, column, found[column], feature)
        if feature.weights is not None and feature.weights in found:
            got = found[feature.weights]
            if got.kind not in ("float", "integer", "null") or not (got.is_list or got.kind == "null"):
                raise DataError(f"{name}: column {feature.weights!r} is {got.type}, a list of numbers is needed")
    for column in config.report_by:
        if found[column].kind == "other" or found[column].is_list:
            raise DataError(
                f"{name}: column {column!r} of data.report_by is {found[column].type}, a value a row is needed"
            )
    if config.group is not None and found[config.group].kind not in (*_EXACT, "null"):
        raise DataError(
            f"{name}: column {config.group!r} is {found[config.group].type}, integers or strings are needed"
        )
    return found


def _check_numbers(name: str, found: dict[str, Column], config: DataConfig) -> None:
    for column in (*config.labels, *config.dense_columns, *((config.sample_weight,) if config.sample_weight else ())):
        got = found.get(column)
        if got is not None and (got.kind not in _NUMERIC or got.is_list):
            raise DataError(f"{name}: column {column!r} is {got.type}, a number is needed")


def _refuse_case_variants(name: str, schema: pa.Schema) -> None:
    lower: dict[str, str] = {}
    for column in schema.names:
        other = lower.setdefault(column.lower(), column)
        if schema.names.count(column) > 1 or other != column:
            raise DataError(f"{name}: columns {other!r} and {column!r} differ in nothing but case; rename one")


def _check_ids(name: str, column: str, got: Column, feature: SparseFeature) -> None:
    where = f"{name}: column {column!r} of feature {feature.name!r} is {got.type}"
    if feature.bucketize is not None:
        if got.kind not in _NUMERIC or got.is_list:
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
            f"{where}, which cannot be an id (integer, string, boolean, decimal, date, timestamp, or a list of these)"
        )
    if got.is_list and not feature.multi_valued:
        raise DataError(f"{where}: a list; give the feature `max_length`")
    if feature.type == "integer" and got.kind not in ("integer", "boolean", "decimal", "string", "null"):
        raise DataError(f"{where}, declared `type: integer`")
    if feature.type == "string" and got.kind not in ("string", "integer", "boolean", "null"):
        raise DataError(f"{where}, declared `type: string`")
    if feature.offset and feature.type is None and got.kind not in ("integer", "null"):
        raise DataError(f"{where}, offset needs integers")


def agree(name_a: str, a: dict[str, Column], name_b: str, b: dict[str, Column], config: DataConfig) -> None:
    """Refuses two files whose columns would give one value two keys."""
    columns = {c: f for f in config.sparse if f.bucketize is None for c in f.columns}
    names = [*columns, *([config.group] if config.group is not None else [])]
    for column in names:
        feature = columns.get(column)
        if feature is not None and feature.type is not None:
            continue
        if column in a and column in b:
            kinds = {_family(a[column].kind), _family(b[column].kind)} - {"null"}
            if len(kinds) > 1:
                raise DataError(
                    f"column {column!r} is {a[column].type} in {name_a} and {b[column].type} in "
                    f"{name_b}: the same value would get two "
                    "keys. Declare the feature's `type: integer` or `type: string`, or rewrite one"
                )


def key_kind(column: Column | None, feature: SparseFeature) -> str | None:
    """What decides a value's key beside the value: columns of one kind give equal values equal keys. None: not known,
    or (`bucketize`) the column is read as a number.
    """
    if feature.bucketize is not None:
        return None
    if feature.type is not None:
        return feature.type
    return None if column is None or column.kind == "null" else _family(column.kind)


def _family(kind: Kind) -> str:
    return "integer" if kind in ("integer", "boolean", "decimal") else kind
