"""Reads and writes job files: YAML 1.2, overrides, relative paths."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from paddlewheel.trainer.job.errors import ConfigError, Problem, clipped

_MERGE = "tag:yaml.org,2002:merge"
_LARGEST, _SMALLEST = 3e38, 1e-37  # of a float32, in which rates and bounds end up
_MAX_BYTES, _MAX_VALUES, _MAX_DEPTH = 16 << 20, 1_000_000, 100
"""Of a job file. More is no job, and would keep whoever reads it busy for long."""


class _Loader(yaml.SafeLoader):
    """YAML with YAML 1.2's idea of numbers and booleans, and no key twice.

    PyYAML follows YAML 1.1, where `1e-4` is a text, `no` is false, `2024-01-01` is a date and `1:30` is ninety: all
    traps in a job file.
    """

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"is nested more than {_MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _check_expanded(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key_node, yaml.ScalarNode):
                message = "a list or section cannot be a key"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            if key in seen:
                message = f"the key {key!r} stands twice (first on line {seen[key].line + 1})"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in [
    ("merge", r"^<<$", ["<"]),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        (
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
]:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what YAML 1.1 or 1.2 would not read as a text; what stands twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *_Loader.yaml_implicit_resolvers.get(first, ())]
    for first in {**yaml.SafeDumper.yaml_implicit_resolvers, **_Loader.yaml_implicit_resolvers}
}


def _quoted(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # the emitter would write these line breaks as they are, and they would be read as spaces
    style = '"' if any(letter in text for letter in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def write_yaml(value: Mapping[str, Any]) -> str:
    """Plain data as YAML that `read_yaml`, and any reader of YAML 1.1 or 1.2, reads as the same data."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _check_expanded(root: yaml.Node) -> None:
    """Refuses aliases that make a few lines a value without end, before anything is built from them."""
    known: dict[int, tuple[int, int]] = {}

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Values in all, and levels."""
        if id(node) in known:
            size, depth = known[id(node)]
            if not size:
                raise yaml.composer.ComposerError(
                    None, None, "an alias (*) stands inside its own anchor (&)", mark(node)
                )
            return size, depth
        known[id(node)] = (0, 0)  # being measured
        size, depth = 1, 0
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        for part in parts:
            for worker in part if isinstance(part, tuple) else (part,):
                worker_size, worker_depth = measure(worker)
                size, depth = size + worker_size, max(depth, worker_depth)
        if size > _MAX_VALUES or depth >= _MAX_DEPTH:
            limit = f"{_MAX_VALUES:,} values" if size > _MAX_VALUES else f"{_MAX_DEPTH} levels"
            raise yaml.composer.ComposerError(None, None, f"aliases (*) make this more than {limit}", mark(node))
        known[id(node)] = (size, depth + 1)
        return known[id(node)]

    def mark(node: yaml.Node) -> Any:
        return node.start_mark

    measure(root)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 -- _Loader is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(source, [Problem("", f"{where}not readable as YAML: {what}")]) from None
    except (
        ValueError,
        TypeError,
        OverflowError,
    ) as error:  # such as a number of 5,000 digits, or !!binary of no base64
        raise ConfigError(source, [Problem("", f"not readable as YAML: {str(error).partition(';')[0]}")]) from None


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A YAML mapping, by the rules of job files.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    return read_source(os.fspath(path))


def read_source(source: str) -> dict[str, Any]:
    """A job file as plain data. Raises ConfigError when there is none, or when it is no mapping."""
    try:
        text = _read_text(Path(source))
    except FileNotFoundError:
        folder = Path(source).absolute().parent
        near = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
        hint = f". Job files in {folder}: {', '.join(near)}" if near else f". The working directory is {Path.cwd()}"
        raise ConfigError(source, [Problem("", f"there is no such job file{hint}")]) from None
    except (OSError, ValueError) as error:  # of UTF-8, or of a path with a zero byte
        raise ConfigError(source, [Problem("", f"cannot be read: {error}")]) from None
    raw = _parse_yaml(text, source)
    if not isinstance(raw, dict):
        kind = "empty" if raw is None else f"a {type(raw).__name__}"
        message = f"a job file is a YAML mapping with keys such as `name` and `data`; this is {kind}"
        raise ConfigError(source, [Problem("", message)])
    return raw


def _read_text(path: Path) -> str:
    """A file's text. What is no file, such as /dev/zero, or too large for a job is not read through."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB, so it is no job file")
    return content.decode("utf-8-sig")


def apply_override(raw: dict[str, Any], override: str, source: str) -> None:
    """Sets one `a.b.0.c=value` in `raw`. Unknown keys are left for the model to refuse, with its list of known ones."""

    def refuse(message: str) -> ConfigError:
        return ConfigError(f"--set {override}", [Problem("", message)])

    key, equals, text = override.partition("=")
    steps = [step for step in re.split(r"\.|\[(\d+)\]", key.strip()) if step]
    if not equals or not steps:
        raise refuse("write --set key=value, for example --set cluster.trainers=4")
    value = _parse_yaml(text, f"--set {override}")
    here: Any = raw
    for position, step in enumerate(steps):
        done = ".".join(steps[:position])
        last = position == len(steps) - 1
        index: str | int = step
        if isinstance(here, list):
            if not (step.isascii() and step.isdecimal() and len(step) < 10) or int(step) >= len(here):
                raise refuse(f"{done} is a list of {len(here)} entries, so {step!r} is not one of 0 to {len(here) - 1}")
            index = int(step)
        elif not isinstance(here, dict):
            raise refuse(f"{done} is {here!r} in {source}, so it has no {step!r} inside")
        if last:
            here[index] = value
        else:
            if isinstance(here, dict) and here.get(step) is None:
                here[step] = {}
            here = here[index]


def check_plain(value: Any, path: tuple[str, ...] = ()) -> Iterator[Problem]:
    """What no job can hold, whatever the key: numbers that no machine type has, text that no path or log can hold."""
    where = ".".join(path)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                shown = "null" if key is None else str(key).lower() if isinstance(key, bool) else str(key)
                yield Problem(where, f"the key {shown} is no text: write it in quotes, '{shown}'")
            else:
                yield from _check_text(key, where)
                yield from check_plain(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from check_plain(inner, (*path, str(index)))
    elif isinstance(value, str):
        yield from _check_text(value, where)
    elif isinstance(value, bool) or value is None:
        pass
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            yield Problem(where, f"{clipped(value)} does not fit in 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            # the processes of a run tell each other the job as JSON, where it would become null
            yield Problem(where, f"is {value}; a number in a job must be finite: give the largest one that makes sense")
        elif abs(value) > _LARGEST or 0 < abs(value) < _SMALLEST:
            yield Problem(where, f"{value:g} is outside of what a float32 holds ({_SMALLEST:g} to {_LARGEST:g}, and 0)")
    elif not isinstance(value, BaseModel):
        yield Problem(where, f"is a {type(value).__name__}; a job holds text, numbers, true, false, lists and sections")


def _check_text(text: str, where: str) -> Iterator[Problem]:
    if "\0" in text or (not text.isprintable() and any(0xD800 <= ord(letter) < 0xE000 for letter in text)):
        yield Problem(where, f"{clipped(text)} holds a zero byte or half a letter (a lone surrogate)")


def _absolute(value: Any) -> Any:
    if isinstance(value, str) and value and "://" not in value:
        return os.path.abspath(os.path.expanduser(value))  # noqa: PTH100, PTH111 -- Path would drop a final slash and fold `a//b`
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    return value


def absolute_paths(raw: dict[str, Any]) -> dict[str, Any]:
    """A copy of the job with its paths made absolute from the working directory."""
    out = dict(raw)
    for section, keys in {
        "data": ("train", "eval", "statistics", "quarantine_directory"),
        "model": ("folder",),
        "warm_start": ("source",),
        "checkpoint": ("directory", "staging"),
        "metrics": ("prometheus_sd_directory",),
    }.items():
        block = out.get(section)
        if isinstance(block, dict):
            out[section] = {key: _absolute(value) if key in keys else value for key, value in block.items()}
    if "run_dir" not in out and isinstance(out.get("name"), str):
        out["run_dir"] = f"runs/{out['name']}"
    if "run_dir" in out:
        out["run_dir"] = _absolute(out["run_dir"])
    return out
