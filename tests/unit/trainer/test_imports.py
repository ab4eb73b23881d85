"""Agents and the coordinator are many and light: they start fast, and take little memory beside their children."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "paddlewheel.trainer.agent.agent",
        "paddlewheel.trainer.coordinator.service",
        "paddlewheel.deploy.launch.launcher",
    ],
)
def test_what_supervises_imports_nothing_heavy(module: str) -> None:
    heavy = ("numpy", "pyarrow", "pandas", "paddle", "safetensors")
    code = f"import {module}, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
