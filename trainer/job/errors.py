"""Explains what is wrong in a job file: the key, the value, what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from paddlewheel.trainer.job.written_forms import expected_form

_ABOUT_KEYS = frozenset({"missing", "extra_forbidden", "value_error"})
"""Findings of pydantic that are about a key, or about several values at once, and not about the form of one value."""


@dataclass(frozen=True)
class Problem:
    """One thing to fix in a job file.

    Attributes:
        path: the key, as `--set` would spell it; empty when it concerns the file as a whole.
        message: what is wrong, what is allowed, and the remedy.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """The job file cannot be used as it is. `problems` holds every finding, not only the first."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *map(str, problems)]))


class AcrossError(ValueError):
    """Carries the findings of the checks across sections through pydantic."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown name: the nearest known one, if there is one."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else "."


def _members(kind: Any) -> Iterator[Any]:
    """The members of a union, through Annotated."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _members(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind


def _models(kinds: Iterable[Any]) -> list[type[BaseModel]]:
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _inside(kinds: Iterable[Any], step: str | int) -> list[Any]:
    """The kinds that may stand under `step` of a value of one of `kinds`."""
    found: list[Any] = []
    for kind in kinds:
        arguments = get_args(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if step in kind.model_fields:
                found += _members(kind.model_fields[str(step)].annotation)
        elif get_origin(kind) is dict:
            found += _members(arguments[1])
        elif arguments:
            found += _members(arguments[0])
    return found


def _is_member(kind: Any, tag: str) -> bool:
    """Whether pydantic calls the union member `kind` by `tag`: its class name, or the value of its discriminator."""
    for model in _models([kind]):
        literals = (f.annotation for f in model.model_fields.values() if get_origin(f.annotation) is Literal)
        return tag == model.__name__ or any(tag in get_args(literal) for literal in literals)
    return False


@dataclass(frozen=True)
class _Place:
    """Where in the job an error of pydantic points: the user's path, and the kinds a value there may have."""

    path: tuple[str | int, ...]
    kinds: list[Any]
    parents: list[Any]

    @property
    def text(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def key(self) -> str:
        """What stands before the colon; empty for an entry of a list."""
        return next((step for step in reversed(self.path[-1:]) if isinstance(step, str)), "")

    @property
    def description(self) -> str:
        """The first sentence of what the key means."""
        for model in _models(self.parents):
            field = model.model_fields.get(str(self.path[-1])) if self.path else None
            if field is not None and field.description:
                return re.split(r"(?<=\.)\s", " ".join(field.description.split()), maxsplit=1)[0]
        return ""


def _locate(root: type[BaseModel], raw: Any, location: tuple[str | int, ...]) -> _Place:
    """Pydantic's location holds names of union members beside keys; the value itself tells which is which."""
    path: list[str | int] = []
    kinds: list[Any] = [root]
    parents: list[Any] = []
    value = raw
    for step in location:
        is_key = isinstance(value, Mapping) and (step in value or any(step in m.model_fields for m in _models(kinds)))
        if is_key or (isinstance(value, (list, tuple)) and isinstance(step, int)):
            path.append(step)
            parents, kinds = kinds, _inside(kinds, step)
            value = value.get(step) if isinstance(value, Mapping) else next(iter(value[int(step) :][:1]), None)
        elif isinstance(step, int):  # one entry written without its list, which the model made a list of
            kinds = _inside(kinds, step)
        else:
            kinds = [kind for kind in kinds if _is_member(kind, step)] or kinds
    return _Place(tuple(path), kinds, parents)


def explain(root: type[BaseModel], raw: Any, error: ValidationError) -> Iterator[Problem]:
    """Turns pydantic's findings into ours: one a key, by the user's path, with the nearest key and the remedy."""
    found: dict[tuple[str | int, ...], list[str]] = {}
    for item in error.errors(include_url=False):
        across = item.get("ctx", {}).get("error")
        if isinstance(across, AcrossError):
            yield from across.problems
            continue
        if item["type"] == "default_factory_not_called":  # the value that it would be made from has a finding
            continue
        place = _locate(root, raw, item["loc"])
        form = None if item["type"] in _ABOUT_KEYS else expected_form(place.key, place.kinds, item["input"])
        if form is not None:
            if form not in found.setdefault(place.path, []):
                found[place.path].append(form)
            continue
        if item["type"] == "union_tag_not_found":
            name = item["ctx"]["discriminator"].strip("'")
            known = [value for model in _models(place.kinds) for value in get_args(model.model_fields[name].annotation)]
            found.setdefault((*place.path, name), []).append(f"is required and missing: one of {', '.join(known)}")
            continue
        if item["type"] == "union_tag_invalid":
            problem = _unknown_tag(place, item["ctx"], item["input"])
            found.setdefault((problem.path,), []).append(problem.message)
            continue
        found.setdefault(place.path, [])
        message = _message(place, item)
        if message not in found[place.path]:
            found[place.path].append(message)
    for path, messages in found.items():
        # A value given as one form of a union also fails the other forms: keep what was said about its inside.
        if not any(len(other) > len(path) and other[: len(path)] == path for other in found):
            yield Problem(".".join(map(str, path)), ", or ".join(messages))


def check_types(kinds: Iterable[Any], value: Any, path: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Numbers in quotes, words for true and false, and such: pydantic would take them, other readers of the file not.

    Args:
        kinds: types that `value` may have, such as `[JobConfig]`.
        value: plain data, as it was read from a job file.
        path: where it stands.
    """
    kinds = list(kinds)
    if isinstance(value, Mapping):
        lists = [kind for kind in kinds if get_origin(kind) is tuple]  # of one, which is written alone
        kinds = [kind for kind in kinds if kind not in lists] + _inside(lists, 0)
        for key, inner in value.items():
            yield from check_types(_inside(kinds, key), inner, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from check_types(_inside(kinds, index), inner, (*path, str(index)))
    elif kinds and {bool, int, float, NoneType}.issuperset(kinds):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, str) or (isinstance(value, bool) and bool not in kinds) or (number and kinds[0] is bool):
            kind = "true or false" if kinds[0] is bool else "a whole number" if int in kinds else "a number"
            yield Problem(".".join(path), f"is {clipped(value)}, and must be {kind}, without quotes")


def _unknown_tag(place: _Place, context: Mapping[str, str], block: Any) -> Problem:
    """An unknown `kind` or `rule`: what is there, and what was probably meant."""
    name = context["discriminator"].strip("'()")
    tags = re.findall(r"'([^']*)'", context["expected_tags"])
    known = [tag for tag in tags if tag[:1].islower()]
    own = ", or your own as package.module:Class" if len(known) < len(tags) else ""
    given = context["tag"]
    if isinstance(block, Mapping) and not isinstance(block.get(name), str):
        return Problem(f"{place.text}.{name}", f"is one of {', '.join(known)}{own}; got {clipped(block.get(name))}")
    return Problem(
        f"{place.text}.{name}",
        f"there is no {name} {given!r}{did_you_mean(given, known)} Known: {', '.join(known)}{own}.",
    )


def _message(place: _Place, item: Any) -> str:
    given = clipped(item["input"])
    meaning = f" ({place.description.rstrip('.')})" if place.description else ""
    if item["type"] == "extra_forbidden":
        known = sorted({name for model in _models(place.parents) for name in model.model_fields})
        parent = ".".join(map(str, place.path[:-1]))
        prefix = f"{parent}." if parent else ""
        hint = did_you_mean(str(place.path[-1]), known, prefix)
        return f"unknown key{hint} Allowed in {parent or 'a job'}: {', '.join(known)}"
    if item["type"] == "missing":
        return f"is required and missing{meaning}"
    if item["type"] == "value_error":
        return f"{item['ctx']['error']}"
    text = item["msg"][0].lower() + item["msg"][1:]
    return f"{text}, got {given}{meaning}"


def clipped(value: Any) -> str:
    """A value as a message shows it: at most 80 characters."""
    text = (
        f"a number of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 256 else repr(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."
