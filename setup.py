"""Build step: generates the coordinator's gRPC code (everything else is in pyproject.toml).

``pip install`` and ``pip install -e`` run it by themselves; ``make proto`` runs it after an edit of the .proto file.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildPy(build_py):
    """Generates the code in the source tree before the packages are collected, for wheels and for editable installs."""

    def run(self) -> None:
        """Runs protoc, then the ordinary step."""
        runpy.run_path(str(ROOT / "trainer" / "coordinator" / "generate.py"))["generate"](ROOT, ROOT)
        super().run()


setup(cmdclass={"build_py": BuildPy})
