"""A trained model on disk, be it a checkpoint or an export: what both say alike. Importable without Paddle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.signature import InputSignature
from pserver.config import TableConfig
from trainer import checkpoint

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
        inputs: what it was trained on; None: an earlier version wrote it, which did not say.
    """

    path: Path
    is_export: bool
    settings: Mapping[str, Any]
    step: int
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
        return self.path / ("tables" if self.is_export else "sparse") / name

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
        CheckpointError: there is none, or it is incomplete. Contents are not read: whoever takes them verifies them.
    """
    named = f"{key}: " if key else ""
    path = path.absolute()  # servers have their own working directory
    if (path / SPEC).is_file():
        try:
            spec = json.loads((path / SPEC).read_text(encoding="utf-8"))
            return TrainedModel(path, True, spec["settings"], spec["step"], inputs_of(spec, str(path)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise checkpoint.CheckpointError(f"{named}{path / SPEC} cannot be read: {error}") from error
    found: Path | None = path
    if not (path / "MANIFEST.json").is_file():
        found = checkpoint.latest(path) or checkpoint.latest(path / "checkpoints")
    if found is None:
        raise checkpoint.CheckpointError(
            f"{named}{path} is no trained model. Give an export (a folder with {SPEC}), a checkpoint (a step-<n> "
            "folder with MANIFEST.json), or a folder that holds checkpoints"
        )
    manifest = checkpoint.check_complete(found)
    settings = manifest.get("settings") or checkpoint.read_cursor(found)["job"]
    return TrainedModel(found, False, settings, manifest["step"], inputs_of(manifest, str(found)))


def inputs_of(described: Mapping[str, Any], where: str) -> InputSignature | None:
    """What a checkpoint's manifest, or an export.json, says of the data of its training. Raises CheckpointError."""
    try:
        return InputSignature.from_json(described["inputs_seen"]) if described.get("inputs_seen") else None
    except ValueError as error:
        raise checkpoint.CheckpointError(f"{where}: {error}") from error


def trained_with(where: object) -> str:
    """How messages relate data to the model at `where`."""
    return f"with which {where} was trained"
