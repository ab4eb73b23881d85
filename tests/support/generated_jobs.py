"""Job files made from the types of their keys: most can be used, some say what no job may say."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paddlewheel.trainer.job.config import JobConfig

ODD_TEXTS = (
    *("1e-4", ".5e3", "0x1F", "0o17", "08", "1_000", "no", "yes", "true", "null", "~", "", " ", "2024-01-01", "1:30"),
    *(
        "é",
        "雪",
        "a: b",
        "#a",
        "- a",
        "*a",
        "&a",
        "!a",
        "'",
        '"',
        "<<",
        "=",
        "%",
        "@",
        "a\nb",
        "a\tb",
        "\u0085",
        "x" * 200,
    ),
)
"""Texts that one version of YAML or the other reads as something else when they stand without quotes."""

BASE: dict[str, Any] = {
    "name": "small",
    "data": {
        "train": "data/train",
        "eval": ["data/eval"],
        "labels": ["click", "buy"],
        "group": "user",
        "sample_weight": "weight",
        "statistics": "fit",
        "dense": {"columns": ["price"]},
        "sparse": [{"name": "user"}, {"name": "item", "table": "item"}, {"name": "tags", "max_length": 4}],
    },
    "tables": {"default": {"width": 8}, "item": {"width": 8, "optimizer": {"rule": "adam"}}},
    "model": {"kind": "dcn"},
}


@st.composite
def job_files(draw: st.DrawFn) -> dict[str, Any]:
    """A job as plain data: `BASE` with some keys set to values of their types, or to what is nearly of their types."""
    raw = copy.deepcopy(BASE)
    for path, strategy in draw(st.lists(st.sampled_from(_KEYS), max_size=6)):
        place = raw
        for step in path[:-1]:
            if isinstance(place, dict):
                place = place.setdefault(step, {})
            elif isinstance(step, int) and step < len(place):
                place = place[step]
            if not isinstance(place, (dict, list)):
                break
        else:
            if isinstance(place, dict):
                place[path[-1]] = draw(strategy)
    return raw


def _keys(model: type[BaseModel], path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], st.SearchStrategy[Any]]]:
    for name, field in model.model_fields.items():
        here = (*path, name)
        yield here, _values(field.annotation, field.metadata)
        inner: dict[str, tuple[Any, ...]] = {"tables": ("item",), "sparse": (2,)}
        for below in _sections(field.annotation):
            if name not in {"model", "optimizer"}:  # whole, because their keys go with their kinds
                yield from _keys(below, (*here, *inner.get(name, ())))


def _sections(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for member in get_args(kind) for model in _sections(member)]


def _values(kind: Any, metadata: Any = (), depth: int = 0) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        told = [part for item in arguments[1:] for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _values(arguments[0], [*told, *metadata], depth)
    if origin in (Union, UnionType):
        return st.one_of([_values(member, metadata, depth) for member in arguments])
    if origin is Literal:
        return st.sampled_from([*arguments, *arguments, "other"]) if len(arguments) > 1 else st.just(arguments[0])
    if origin is tuple:
        items = _values(arguments[0], (), depth)
        size = len(arguments) if arguments[-1] is not Ellipsis else None
        return st.lists(items, min_size=size or 0, max_size=size or 3) | items
    if origin is dict:
        names = st.sampled_from(["default", "item", "tags", "a b", "é"])
        return st.dictionaries(
            names, st.just(1) if arguments[1] is Any else _values(arguments[1], (), depth), max_size=2
        )
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _section(kind, depth)
    return _scalars(kind, metadata)


def _scalars(kind: Any, metadata: Any) -> st.SearchStrategy[Any]:
    if kind is NoneType:
        return st.none()
    if kind is bool:
        return st.booleans() | st.sampled_from(["yes", "off", 1, 0])
    low = max((getattr(item, "ge", getattr(item, "gt", None)) or 0 for item in metadata), default=0)
    if kind is int:
        return st.integers(low, low + 50) | st.sampled_from([-1, low, float(low + 1), low + 0.5, str(low + 1), True])
    if kind is float:
        return st.sampled_from([low, low + 0.25, low + 1, low + 1e-5, low + 7.0, 0.5, 1e6, -1.5, "0.5", True])
    return st.sampled_from(["price", "user", "a.b:C", "item", "/a", "day", *ODD_TEXTS])


def _section(model: type[BaseModel], depth: int) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: _values(field.annotation, field.metadata, depth + 1) for name, field in model.model_fields.items()}
    needed = {
        name
        for name, field in model.model_fields.items()
        if field.is_required() or (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1)
    }
    optional = {name: value for name, value in fields.items() if name not in needed}
    some = st.lists(st.sampled_from(sorted(optional)), max_size=2, unique=True) if optional else st.just([])
    return some.flatmap(
        lambda chosen: st.fixed_dictionaries({name: fields[name] for name in (*sorted(needed), *chosen)})
    )


_KEYS = list(_keys(JobConfig, ()))
