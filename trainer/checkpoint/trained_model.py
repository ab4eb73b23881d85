"""A trained model on disk, be it a checkpoint or an export: what both say alike. Importable without Paddle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlewheel.data_pipeline.signature import InputSignature
from paddlewheel.pserver.config import TableConfig, check_table_name
from paddlewheel.trainer.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    chain,
    check_complete,
    check_files,
    is_inside,
    latest,
    read_cursor,
    read_manifest,
    verify_files,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPEC = "export.json"
"""The file that makes a folder an export; written last."""
DENSE = "dense.safetensors"


@dataclass(frozen=True)
class TrainedModel:
    """A model that other jobs and commands can begin with.

    Attributes:
        path: its folder.
        is_export: whether it is an export; otherwise it is a checkpoint.
        settings: sections of the job that trained it, as plain data; at least name, seed, data, tables, model, train.
        step: how many steps it was trained.
        files: size and hash of every file, by name.
        inputs: what it was trained on; None: an earlier version wrote it, which did not say.
    """

    path: Path
    is_export: bool
    settings: Mapping[str, Any]
    step: int
    files: Mapping[str, Mapping[str, Any]]
    inputs: InputSignature | None = None

    @property
    def kind(self) -> str:
        """For messages."""
        return "export" if self.is_export else "checkpoint"

    def tables(self) -> dict[str, TableConfig]:
        """The tables that it holds."""
        used = dict.fromkeys(str(feature["table"]) for feature in self.settings["data"]["sparse"])
        return {name: TableConfig.model_validate(self.settings["tables"][name]) for name in used}

    def table_folder(self, name: str) -> Path:
        """Where a table lies: saved by servers, or exported."""
        return self.path / self._table_folder(name)

    def _table_folder(self, name: str) -> str:
        return f"{'tables' if self.is_export else 'sparse'}/{name}"

    def verify(self, tables: Iterable[str] = (), *, dense: bool = False) -> None:
        """Read every byte of these tables, and of the dense part if that is wanted.

        Raises:
            CheckpointError: a file is missing, was added, or has changed since it was written.
            UnavailableError: a file cannot be read just now.
        """
        check_files(self.path, self.files, besides=SPEC if self.is_export else MANIFEST)
        folders = tuple(f"{self._table_folder(name)}/" for name in tables)
        wanted = {n: f for n, f in self.files.items() if n.startswith(folders) or (dense and n == DENSE)}
        verify_files(self.path, wanted)
        if self.is_export or not folders:
            return
        for base in chain(self.path)[:-1]:
            found = read_manifest(base)["files"]
            verify_files(base, {n: facts for n, facts in found.items() if n.startswith(folders)})

    def parameters(self) -> dict[str, NDArray[Any]]:
        """Dense parameters by name, without the optimizer's state."""
        from safetensors.numpy import load_file

        found: dict[str, NDArray[Any]] = load_file(self.path / DENSE)
        return {name: value for name, value in found.items() if not name.startswith("adam/")}


def open_model(path: Path, *, key: str = "") -> TrainedModel:
    """The model at `path`: an export, a checkpoint, or the newest checkpoint of a folder of them or of a run folder.

    Args:
        path: the folder.
        key: how messages call what named the path.

    Raises:
        CheckpointError: there is none, or it is incomplete. Contents are not read: whoever takes them calls `verify`.
    """
    named = f"{key}: " if key else ""
    path = path.absolute()  # servers have their own working directory
    if (path / SPEC).is_file():
        try:
            spec = json.loads((path / SPEC).read_text(encoding="utf-8"))
            inputs = inputs_of(spec, str(path))
            return _checked(TrainedModel(path, True, spec["settings"], int(spec["step"]), spec["files"], inputs))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{named}{path / SPEC} cannot be read: {error}") from error
    found: Path | None = path
    if not (path / "MANIFEST.json").is_file():
        found = latest(path) or latest(path / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{named}{path} is no trained model. Give an export (a folder with {SPEC}), a checkpoint (a step-<n> "
            "folder with MANIFEST.json), or a folder that holds checkpoints"
        )
    manifest = check_complete(found)
    try:
        settings = manifest.get("settings") or read_cursor(found)["job"]
        inputs = inputs_of(manifest, str(found))
        return _checked(TrainedModel(found, False, settings, manifest["step"], manifest["files"], inputs))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{named}{found} does not say which job trained it: {error}") from error


def inputs_of(described: Mapping[str, Any], where: str) -> InputSignature | None:
    """What a checkpoint's manifest, or an export.json, says of the data of its training. Raises CheckpointError."""
    try:
        return InputSignature.from_json(described["inputs_seen"]) if described.get("inputs_seen") else None
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def trained_with(where: object) -> str:
    """How messages relate data to the model at `where`."""
    return f"with which {where} was trained"


def _checked(model: TrainedModel) -> TrainedModel:
    """Whoever wrote it: names in it become parts of paths. Raises ValueError, KeyError, TypeError."""
    for name in model.files:
        if not is_inside(name):
            raise ValueError(f"{name!r} is no name of a file in it")
    for name in model.tables():
        check_table_name(name)
    return model
