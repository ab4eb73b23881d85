"""Loss, AUC and speed as VisualDL scalars, for those who compare runs there (extra `visualdl`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddlewheel.trainer.protocol.messages import Progress

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

    def progress(self, told: Progress | None) -> None:
        """Takes a progress event of trainer 0, if there is one; the same step twice is written once."""
        if told is None or told.step == self._last_step:
            return
        self._last_step = told.step
        self._add({tag: getattr(told, name) for tag, name in _CURVES.items()}, told.step)

    def evaluation(self, report: Mapping[str, Any], step: int | None = None) -> None:
        """Takes an evaluation, during training (with its step) or after it."""
        step = max(self._last_step, 0) if step is None else step
        if step == self._last_evaluated:
            return  # every trainer reports the same evaluation
        self._last_evaluated = step
        self._add({f"eval/{name}": report.get(name) for name in ("auc", "logloss", "calibration")}, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def _add(self, values: Mapping[str, Any], step: int) -> None:
        for tag, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(tag, float(value), step)
