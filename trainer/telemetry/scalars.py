"""Loss, AUC and speed as VisualDL scalars, for those who compare runs there (extra `visualdl`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CURVES = {
    "train/loss": "loss",
    "train/auc": "auc",
    "train/rows_per_second": "rows_per_second",
    "train/rows": "rows",
}


class ScalarsError(ValueError):
    """VisualDL is asked for and not installed."""


class Scalars:
    """Writes progress and evaluations into a folder for `visualdl --logdir`.

    Steps that a restart repeats are written again: VisualDL shows the later ones.

    Raises:
        ScalarsError: the package is missing.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._writer: Any = importlib.import_module("visualdl").LogWriter(logdir=str(folder))
        except ImportError as error:
            raise ScalarsError(
                "metrics.visualdl is on, but the package visualdl is missing: pip install 'paddlewheel[visualdl]', or "
                "set metrics.visualdl=false"
            ) from error
        self._last_step = self._last_evaluated = -1

    def progress(self, event: Mapping[str, Any]) -> None:
        """Takes a progress event of trainer 0; the same step twice is written once."""
        step = event.get("step")
        if not isinstance(step, int) or step == self._last_step:
            return
        self._last_step = step
        self._add(_CURVES, event, step)

    def evaluation(self, event: Mapping[str, Any]) -> None:
        """Takes an evaluation, during training (with its step) or after it."""
        step = event.get("step", max(self._last_step, 0))
        if step == self._last_evaluated:
            return  # every trainer reports the same evaluation
        self._last_evaluated = step
        self._add({f"eval/{name}": name for name in ("auc", "logloss", "calibration")}, event, int(step))

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def _add(self, names: Mapping[str, str], event: Mapping[str, Any], step: int) -> None:
        for tag, key in names.items():
            value = event.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(tag, float(value), step)
