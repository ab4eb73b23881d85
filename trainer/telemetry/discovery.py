"""Where Prometheus finds a process: one small file each in a folder that its file_sd_configs watch."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path


class TargetFile:
    """`<folder>/<job>-<role>-<rank>.json`, written at once or not at all, removed in the end.

    The `instance` is job, role and rank instead of host and port: a role that starts again, elsewhere or at another
    port, continues its series.
    """

    def __init__(self, folder: Path, job: str, role: str, rank: int) -> None:
        self._instance = f"{job}-{role}-{rank}"
        self._path = folder / f"{self._instance}.json"

    def write(self, host: str, port: int, scheme: str) -> None:
        """Raises OSError."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        group = {"targets": [address], "labels": {"instance": self._instance, "__scheme__": scheme}}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps([group], indent=1) + "\n", encoding="utf-8")
        draft.replace(self._path)

    def remove(self) -> None:
        """Nothing is to be asked any more."""
        with contextlib.suppress(OSError):
            self._path.unlink()
