"""Where a user's own model is: one rule for every command and process. Importable without Paddle.

`my_models:GatedFM` is looked for in `model.folder`, which is the job file's folder unless the job names another, and
then among what is installed for this Python or lies on PYTHONPATH. The working directory is not searched. The hash of
the module's file goes with the job into checkpoints and exports, and every process compares it before it imports.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from paddlewheel.trainer.models.config import CustomModelConfig, ModelError

_REMEDY = (
    "put the file back, name the folder of the old one (--set model.folder=DIR), or take it as it is (--set "
    "model.sha256=any)"
)

_loaded: dict[str, str] = {}
"""Top-level modules that were imported from a `model.folder`: name -> file."""


def settled(model: Any, folder: Path) -> Any:
    """A job's `model` block as plain data with what says which module it is: `folder` and `sha256`, where not given.

    Args:
        model: the block; one of another kind, or none at all, is left as it is.
        folder: the job file's.
    """
    if not isinstance(model, dict) or not isinstance(model.get("kind"), str) or ":" not in model["kind"]:
        return model
    found = {**model, "folder": model.get("folder") or str(folder.absolute())}
    if found.get("sha256") is None and isinstance(found["folder"], str):
        file = _find(found["kind"].partition(":")[0], found["folder"])
        found["sha256"] = None if file is None else _hash(file)
    return found


def find(config: CustomModelConfig) -> Path:
    """The file of the module.

    Raises:
        ModelError: there is none, or it is not the one that the job knows.
    """
    module = config.kind.partition(":")[0]
    file = _find(module, config.folder)
    if file is None:
        beside = f"in {config.folder} (model.folder, by default the job file's folder)" if config.folder else ""
        raise ModelError(
            f"model.kind: there is no module {module!r} {beside or 'here'}, nor on PYTHONPATH or installed for "
            f"{sys.executable}. Put {module.replace('.', '/')}.py beside the job file, or name its folder: --set "
            "model.folder=DIR"
        )
    if config.sha256 not in {None, "any"} and _hash(file) != config.sha256:
        raise ModelError(
            f"model.kind: {file} is not what the job was given or trained with: its sha256 is {_hash(file)[:12]}..., "
            f"and model.sha256 is {str(config.sha256)[:12]}...; {_REMEDY}"
        )
    return file


def load(config: CustomModelConfig) -> Any:
    """The class, its module imported.

    Raises:
        ModelError: as `find`, or the module cannot be imported, or it has no such class.
    """
    name, class_name = config.kind.split(":")
    file = find(config)
    try:
        module = _import(name, config.folder)
    except Exception as error:  # a user's code may raise anything
        raise ModelError(f"model.kind: {file} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, class_name):
        classes = sorted(key for key, value in vars(module).items() if getattr(value, "__module__", None) == name)
        raise ModelError(f"model.kind: {file} has no {class_name}. It has: {', '.join(classes) or 'no classes'}")
    return getattr(module, class_name)


def check_same_file(trained: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses a trained model's `model` block and a job's that name different files of a user's module.

    Raises:
        ModelError: they do.
    """
    before, after = trained.get("sha256") or "any", now.get("sha256") or "any"
    if "any" not in {before, after} and before != after:
        raise ModelError(
            f"the file of {now['kind']} has changed since the model was trained: its sha256 was {before[:12]}..., now "
            f"it is {after[:12]}...; {_REMEDY}"
        )


def without_place(model: Mapping[str, Any]) -> dict[str, Any]:
    """A `model` block without what says where its module is, and which file."""
    return {key: value for key, value in model.items() if key not in {"folder", "sha256"}}


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _find(module: str, folder: str | None) -> Path | None:
    """The module's file, without importing anything."""
    importlib.invalidate_caches()
    if not all(step.isidentifier() for step in module.split(".")):
        return None
    top, *inner = module.split(".")
    spec = _beside(top, folder)
    if spec is None and module in sys.modules and top not in _loaded:
        known = getattr(sys.modules[module], "__file__", None)
        return None if known is None else Path(known)
    spec = spec or _installed(top)
    name = top
    for step in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{step}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


def _beside(top: str, folder: str | None) -> ModuleSpec | None:
    spec = PathFinder.find_spec(top, [folder]) if folder is not None else None
    return spec if spec is not None and spec.loader is not None else None  # without one it is any folder of that name


def _installed(top: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None)
        if spec is not None:
            break
    else:
        return None
    places: Sequence[str] = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
    here = Path.cwd()
    named = {Path(entry).absolute() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    if here not in named and any(Path(place).absolute().parent == here for place in places):
        return None  # found because a process was started as `python -m`, which the next one may not be
    return spec


def _import(name: str, folder: str | None) -> ModuleType:
    top = name.partition(".")[0]
    spec = _beside(top, folder)
    if spec is None:
        return importlib.import_module(name)
    assert folder is not None
    assert spec.origin is not None
    if top in _loaded and _loaded[top] != spec.origin:
        for other in [other for other in sys.modules if other == top or other.startswith(f"{top}.")]:
            del sys.modules[other]  # another job's, in this process
    elif top in sys.modules and top not in _loaded:
        taken = getattr(sys.modules[top], "__file__", None) or "Python itself"
        raise ImportError(f"the name {top} is taken by {taken}: rename your module")
    _loaded[top] = spec.origin
    if top not in sys.modules:
        if folder not in sys.path:
            sys.path.append(folder)  # for what it imports from beside itself; behind all others, so it hides nothing
        module = module_from_spec(spec)
        sys.modules[top] = module
        try:
            assert spec.loader is not None
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[top], _loaded[top]
            raise
    return importlib.import_module(name)
