"""The two files of Paddle that a server needs, without the rest of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


@cache
def load() -> tuple[Any, Any]:
    """(Paddle's C++ core, the module of its table descriptions).

    `import paddle` takes three times the CPU time (0.9 s) and 75 MB more, most of it for what a server never uses. So
    unless the process has imported it already, the shared library and the protobuf module are loaded by their paths.
    """
    spec = importlib.util.find_spec("paddle")
    if spec is not None and spec.submodule_search_locations and "paddle" not in sys.modules:
        with contextlib.suppress(ImportError, OSError):  # built in another way: the ordinary import says what is wrong
            return _load_files(Path(next(iter(spec.submodule_search_locations))))
    from paddle.base import core
    from paddle.distributed.fleet.proto import the_one_ps_pb2

    return core, the_one_ps_pb2


def _load_files(root: Path) -> tuple[Any, Any]:
    core: Any = _load_file("libpaddle", root / "base" / "libpaddle.so")
    messages = _load_file("the_one_ps_pb2", root / "distributed" / "fleet" / "proto" / "the_one_ps_pb2.py")
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
