"""Build step: generates the coordinator's gRPC code from its .proto files (everything else is in pyproject.toml).

``pip install`` and ``pip install -e`` run it by themselves; ``make proto`` runs ``python setup.py build_proto`` after an edit.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PACKAGES = ("pserver", "trainer", "data_pipeline", "deploy")


def generate_proto() -> list[Path]:
    """Writes ``X_pb2.py``, ``X_pb2.pyi`` and ``X_pb2_grpc.py`` beside each ``X.proto`` of our packages."""
    protos = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.proto"))
    if protos:
        from grpc_tools import protoc

        names = [path.relative_to(ROOT).as_posix() for path in protos]
        arguments = ["protoc", f"-I{ROOT}", f"--python_out={ROOT}", f"--pyi_out={ROOT}", f"--grpc_python_out={ROOT}", *names]
        if protoc.main(arguments) != 0:
            raise SystemExit(f"protoc failed on {', '.join(names)}")
    return protos


class BuildProto(Command):
    """``python setup.py build_proto``."""

    description = "generate Python code from the .proto files"
    user_options: list[tuple[str, str | None, str]] = []  # noqa: RUF012 -- setuptools wants a plain class attribute

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
