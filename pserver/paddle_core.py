"""The two files of Paddle that a server needs, without the rest of it."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

_CORE, _MESSAGES = "base/libpaddle.so", "distributed/fleet/proto/the_one_ps_pb2.py"


def load() -> tuple[Any, Any]:
    """(Paddle's C++ core, the module of its table descriptions).

    `import paddle` takes three times the CPU time (0.9 s) and 75 MB more, most of it for what a server never uses. So
    unless the process has imported it already, the shared library and the protobuf module are loaded by their paths.

    A core that failed to load cannot be loaded again in this process: what it had registered until then is refused the
    second time, with words that hide the cause. So there is one attempt, and its error is raised by every call.
    """
    found = _attempt()
    if isinstance(found, Exception):
        raise found
    return found


@cache
def _attempt() -> tuple[Any, Any] | Exception:
    try:
        root = _root()
        if root is not None and not {"paddle", "paddle.base.libpaddle"} & set(sys.modules):
            return _load_files(root)
        from paddle.base import core
        from paddle.distributed.fleet.proto import the_one_ps_pb2
    except Exception as error:  # noqa: BLE001 -- protobuf raises TypeError; all are raised by `load`
        return error
    return core, the_one_ps_pb2


def _root() -> Path | None:
    """Paddle's folder; None if there is none, or it was built in another way: the ordinary import knows what to do."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    return root if all((root / path).is_file() for path in (_CORE, _MESSAGES)) else None


def _load_files(root: Path) -> tuple[Any, Any]:
    core: Any = _load_file("libpaddle", root / _CORE)
    messages = _load_file("the_one_ps_pb2", root / _MESSAGES)
    from_environment = [name[len("FLAGS_") :] for name in os.environ if name in set(core.globals().keys())]
    # Also makes Paddle ignore the flags of brpc that it then sets itself, instead of exiting.
    core.init_gflags(["--tryfromenv=" + ",".join(["benchmark", *from_environment])])
    return core, messages


def _load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
