"""What to write where a job file has a bare value in place of a section or a list. Importable without Paddle."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

_MEANT = {"DataConfig": "train", "ControlConfig": "step_seconds"}
"""Which key a bare value probably stands for, where the first one that takes it is not it."""
_DEFAULTS = {"lr": "deepfm", "sgd": "adagrad"}
"""The default of a union, by its first member."""


def expected_form(key: str, kinds: Sequence[Any], given: Any) -> str | None:
    """Says that `key` needs a section or a list, and how to write what was probably meant.

    Args:
        key: the last part of the path, as it is written before the colon; empty for an entry of a list.
        kinds: types that may stand there, unions taken apart.
        given: the value that is there.

    Returns:
        The message, or None where the value has the right form and is wrong otherwise.
    """
    sections = _models(kinds)
    names = next(
        (get_args(kind)[1] for kind in kinds if get_origin(kind) is dict and get_args(kind)[1] is not Any), None
    )
    items = next((get_args(kind) for kind in kinds if get_origin(kind) in (tuple, list)), None)
    if isinstance(given, Mapping) and (sections or names is not None):
        return None
    if isinstance(given, (list, tuple)) and items is not None:
        return None
    if not sections and names is None and items is None:
        return None
    if given is None:
        return f"is empty: give it a value, or leave it out for its default{_keys(sections)}"
    before = f"{key}: " if key else "- "
    form: Any
    if names is not None:
        what, form = "holds sections by name", _named(names, given)
    elif sections:
        what, form = "is a section of its own", _section(sections, given)
    else:
        assert items is not None
        what, form = "is a list", _list(items, given)
        if len(items) > 1 and items[1] is not Ellipsis:
            what = f"is a list of {len(items)}"
    return f"{what}, got {_short(given)}" + (
        f": write `{before}{_flow(form)}`" if form is not None else _keys(sections)
    )


def _list(items: tuple[Any, ...], given: Any) -> list[Any] | None:
    if len(items) > 1 and items[1] is not Ellipsis:
        return None
    models = _models(_plain(items[0]))
    if not models:
        return [given] if _fits(items[0], given) else None
    if not isinstance(given, Mapping):
        entry = _section(models, given)
        return None if entry is None else [entry]
    if given and "name" in models[0].model_fields and all(isinstance(inner, Mapping) for inner in given.values()):
        return [{"name": name, **inner} for name, inner in given.items()]
    return [dict(given)]


def _named(kind: Any, given: Any) -> dict[str, Any] | None:
    entries = given if isinstance(given, (list, tuple)) else [given]
    if all(isinstance(entry, str) for entry in entries):
        return {entry: entry if kind is str else {} for entry in entries}
    if all(isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in entries):
        return {entry["name"]: {key: value for key, value in entry.items() if key != "name"} for entry in entries}
    section = _section(_models(_plain(kind)), given)
    return None if section is None else {"default": section}


def _section(models: Sequence[Any], given: Any) -> dict[str, Any] | None:
    """A section with the key that `given` was probably meant for; None where none takes it."""
    tag = _discriminator(models)
    if tag is not None:
        values = [value for model in models for value in _literals(model.model_fields[tag].annotation)]
        if not isinstance(given, str):
            return {tag: _DEFAULTS.get(values[0], values[0])}
        if ":" in given and len(values) < len(models):
            return {tag: given}
        near = difflib.get_close_matches(given.lower(), values, n=1, cutoff=0.5)
        return {tag: near[0] if near else _DEFAULTS.get(values[0], values[0])}
    for model in models:
        fields = model.model_fields
        if isinstance(given, str):
            for name, field in fields.items():
                near = difflib.get_close_matches(given.lower(), [v for v in _literals(field.annotation) if v], n=1)
                if near:
                    return {name: near[0]}
                if name == given and field.annotation is bool:
                    return {name: True}
        ranked = sorted(fields, key=lambda name: (name != _MEANT.get(model.__name__), not fields[name].is_required()))
        for name in ranked:
            for value in (given, [given]):
                if not isinstance(given, (list, tuple, Mapping)) and _takes(fields[name], value):
                    return {name: value}
    return None


def _takes(field: Any, value: Any) -> bool:
    kind = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and set(_plain(field.annotation)) <= {bool, str, NoneType}
    ):
        return False
    return _fits(kind, tuple(value) if isinstance(value, list) else value)


def _fits(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind).validate_python(value, strict=not isinstance(value, int) or isinstance(value, bool))
    except (ValidationError, ValueError, TypeError):
        return False
    return True


def _models(kinds: Iterable[Any]) -> list[type[BaseModel]]:
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _discriminator(models: Sequence[Any]) -> str | None:
    """The key that tells the members of a union apart."""
    if len(models) < 2:
        return None
    return next((name for name in ("kind", "rule") if all(name in model.model_fields for model in models)), None)


def _literals(kind: Any) -> list[str]:
    return [value for member in _plain(kind) if get_origin(member) is Literal for value in get_args(member)]


def _plain(kind: Any) -> list[Any]:
    """Members of a union, through Annotated."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    arguments = get_args(kind)
    if arguments and get_origin(kind) not in (tuple, list, dict, Literal):
        return [inner for member in arguments for inner in _plain(member)]
    return [kind]


def _keys(models: Iterable[Any]) -> str:
    names = sorted({name for model in models for name in model.model_fields})
    return f". Its keys: {', '.join(names)}" if names else ""


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True).strip()


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."
