"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

_DISTRIBUTIONS = ("paddlewheel", "paddlepaddle", "paddlepaddle-gpu", "numpy", "pyarrow", "protobuf", "grpcio")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe() -> dict[str, Any]:
    """Processor, memory, system, versions and the commit of the sources, as plain data."""
    model, flags = _processor()
    return {
        "cpu": model,
        "cpu_flags": [flag for flag in _FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": _commit(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def _processor() -> tuple[str, set[str]]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name", platform.processor()), set(fields.get("flags", "").split())


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Of the checkout that this code runs from, with a `+` when files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=20).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", ":/").strip()
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
