"""Is this Python environment one in which Paddle's parameter server works? Asked before anything starts."""

from __future__ import annotations

import importlib.metadata

from paddlewheel.pserver import paddle_core
from paddlewheel.pserver.errors import RequirementError

PADDLE_VERSION = "2.6.2"
_DISTRIBUTIONS = ("paddlepaddle", "paddlepaddle-gpu")


def check(*, import_core: bool = True) -> str:
    """Return the installed Paddle distribution's name and version, or raise RequirementError with the remedy.

    import_core: also load Paddle's core and look for the parameter server in it.
    """
    protobuf = _version("protobuf")
    if protobuf is None or int(protobuf.split(".")[0]) >= 7:
        raise RequirementError(
            f"protobuf {protobuf} is installed; Paddle {PADDLE_VERSION} works with protobuf 4 to 6: "
            "pip install 'protobuf>=4.25,<7'"
        )
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None}
    if not found:
        raise RequirementError(f"Paddle is not installed: pip install paddlepaddle=={PADDLE_VERSION}")
    if len(found) > 1:
        raise RequirementError(
            f"both {' and '.join(found)} are installed and overwrite each other's files: "
            "pip uninstall both, then install the one that you want"
        )
    ((name, version),) = found.items()
    if version.split("+")[0].split(".post")[0] != PADDLE_VERSION:
        raise RequirementError(
            f"{name} {version} is installed; {PADDLE_VERSION} is needed, the newest public wheel with a parameter "
            f"server (3.x has none): pip install {name}=={PADDLE_VERSION}"
        )
    if import_core:
        try:
            core, _ = paddle_core.load()
        except Exception as error:
            raise RequirementError(
                f"{name} {version} is installed, but its core cannot be loaded: {error}. If a library is missing, "
                f"install it; else: pip install --force-reinstall {name}=={PADDLE_VERSION}"
            ) from error
        if not hasattr(core, "DistFleetWrapper"):
            raise RequirementError(
                f"this {name} {version} was built without the parameter server (core.DistFleetWrapper is missing): "
                f"install the wheel from the public index: pip install --force-reinstall {name}=={PADDLE_VERSION}"
            )
    return f"{name} {version}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
