"""Checkpoints: sparse tables, dense part and cursor in one folder that is complete and verified, or does not exist.

    <directory>/step-<n>/
        sparse/<table>/...      what the servers saved
        dense.safetensors       parameters and Adam's state
        cursor.json             which rows the model has seen
        MANIFEST.json           written last: job, tables, and size and hash of every file
    <directory>/LATEST          name of the newest committed folder

A folder is built under a name that starts with `.` and renamed when everything in it is on disk, so `step-<n>` never
names a half-written one. Importable without Paddle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

FORMAT = 1
_MANIFEST, _DENSE, _CURSOR, _LATEST = "MANIFEST.json", "dense.safetensors", "cursor.json", "LATEST"
_CHUNK_BYTES = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, damaged, or of another job. Nothing was loaded from it."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint whose files agree with its manifest.

    Attributes:
        path: its folder.
        manifest: step, job name, tables with rows and widths, metrics, files with size and hash.
        cursor: what rows the model has seen; written and understood by the data side.
    """

    path: Path
    manifest: Mapping[str, Any]
    cursor: Mapping[str, Any]

    def dense(self) -> dict[str, NDArray[Any]]:
        """Parameters and optimizer state by name."""
        from safetensors.numpy import load_file

        loaded: dict[str, NDArray[Any]] = load_file(self.path / _DENSE)
        return loaded

    @property
    def sparse(self) -> Path:
        """Folder that `pserver.client.Client.load` takes."""
        return self.path / "sparse"


class Draft:
    """A checkpoint under construction: fill `sparse`, then `finish`, then `commit`."""

    def __init__(self, directory: Path, step: int) -> None:
        self.directory, self.step = directory, step
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f".step-{step}.draft"
        if self.path.exists():  # left by an incarnation that died while saving
            shutil.rmtree(self.path)
        self.sparse = self.path / "sparse"
        self.sparse.mkdir(parents=True)

    def finish(
        self, *, dense: Mapping[str, NDArray[Any]], cursor: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the dense part, the cursor and, last, the manifest; returns the manifest.

        Args:
            dense: parameters and optimizer state by name.
            cursor: what rows the model has seen; JSON values.
            facts: what else the manifest tells (job, tables, metrics); JSON values.
        """
        from safetensors.numpy import save_file

        save_file({k: np.ascontiguousarray(v) for k, v in dense.items()}, self.path / _DENSE)
        (self.path / _CURSOR).write_text(json.dumps(cursor), encoding="utf-8")
        files = {name: {"bytes": path.stat().st_size, "xxh3_128": _hash(path)} for name, path in _files(self.path)}
        for _, path in _files(self.path):
            _to_disk(path)
        manifest = {"format": FORMAT, "step": self.step, **facts, "files": files}
        target = self.path / _MANIFEST
        target.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _to_disk(target)
        return manifest

    def commit(self, *, keep: int) -> Path:
        """Give the folder its name, point LATEST to it, and remove all but the newest `keep`."""
        final = self.directory / f"step-{self.step}"
        if final.exists():  # the same step again after a restart from an older checkpoint
            shutil.rmtree(final)
        self.path.rename(final)
        pointer = self.directory / f".{_LATEST}.new"
        pointer.write_text(final.name + "\n", encoding="utf-8")
        pointer.replace(self.directory / _LATEST)
        _to_disk(self.directory)
        for old in committed(self.directory)[:-keep]:
            shutil.rmtree(old)
        return final


def committed(directory: Path) -> list[Path]:
    """Committed folders, oldest step first."""
    found = [p for p in directory.glob("step-*") if p.name[5:].isdecimal() and (p / _MANIFEST).is_file()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def latest(directory: Path) -> Path | None:
    """The newest committed folder, or None. LATEST is for people: the folders themselves decide."""
    found = committed(directory)
    return found[-1] if found else None


def read(path: Path) -> Checkpoint:
    """Open and verify a committed checkpoint.

    Raises:
        CheckpointError: a file is missing, extra, or differs from the manifest in size or hash.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has checkpoint format {manifest['format']}, this version reads {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no complete checkpoint: its {_MANIFEST} cannot be read ({error})") from error
    present = dict(_files(path))
    missing, extra = sorted(set(files) - set(present)), sorted(set(present) - set(files) - {_MANIFEST})
    if missing or extra:
        raise CheckpointError(f"{path} is damaged: missing files {missing[:5]}, unexpected files {extra[:5]}")
    for name, expected in files.items():
        size = present[name].stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{path / name} is damaged: {size} bytes, the manifest says {expected['bytes']}")
        if _hash(present[name]) != expected["xxh3_128"]:
            raise CheckpointError(f"{path / name} is damaged: its hash differs from the manifest's")
    return Checkpoint(path, manifest, json.loads((path / _CURSOR).read_text(encoding="utf-8")))


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(path.rglob("*")):
        if file.is_file():
            yield file.relative_to(path).as_posix(), file


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
