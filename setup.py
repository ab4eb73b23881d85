"""Build step: generates the coordinator's gRPC code (everything else is in pyproject.toml).

``pip install`` and ``pip install -e`` run it by themselves; ``make proto`` runs ``python setup.py build_proto`` after
an edit of a .proto file. The generated files are not kept in the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def generate_proto() -> None:
    """Writes ``X_pb2.py``, ``X_pb2.pyi`` and ``X_pb2_grpc.py`` beside each ``X.proto`` of our packages."""
    from grpc_tools import protoc

    protos = sorted((ROOT / "paddlewheel" / "trainer").rglob("*.proto"))
    names = [path.relative_to(ROOT).as_posix() for path in protos]
    outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    if not names or protoc.main(["protoc", f"-I{ROOT}", *outputs, *names]) != 0:
        raise SystemExit(f"protoc failed on {', '.join(names) or 'no file at all'}")


class BuildProto(Command):
    """``python setup.py build_proto``."""

    description = "generate Python code from the .proto files"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        """Nothing to set."""

    def finalize_options(self) -> None:
        """Nothing to settle."""

    def run(self) -> None:
        """Generates the code in the source tree."""
        generate_proto()


class BuildPy(build_py):
    """Generates the code before the packages are collected, for wheels and for editable installs."""

    def run(self) -> None:
        """Runs protoc, then the ordinary step."""
        generate_proto()
        super().run()


setup(cmdclass={"build_proto": BuildProto, "build_py": BuildPy})
