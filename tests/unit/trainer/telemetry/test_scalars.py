"""Scalars for VisualDL, with a stand-in for the package: it is an extra."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from paddlewheel.trainer.telemetry.scalars import Scalars, ScalarsError
from tests.support.plans import progress


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    calls: list[tuple] = []

    class LogWriter:
        def __init__(self, logdir: str) -> None:
            calls.append(("open", logdir))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            calls.append((tag, value, step))

        def close(self) -> None:
            calls.append(("close",))

    module = types.ModuleType("visualdl")
    module.LogWriter = LogWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "visualdl", module)
    return calls


def test_progress_and_evaluations(written: list[tuple]) -> None:
    scalars = Scalars(Path("/runs/visualdl"))
    scalars.progress(None)
    scalars.progress(progress(step=5, loss=0.5, rows=10, rows_per_second=2.5))
    scalars.progress(progress(step=5, loss=0.6))
    for _ in range(2):  # from two trainers
        scalars.evaluation({"auc": 0.75, "logloss": 0.4}, 5)
    scalars.close()
    assert written == [
        ("open", "/runs/visualdl"),
        ("train/loss", 0.5, 5),
        ("train/rows_per_second", 2.5, 5),
        ("train/rows", 10.0, 5),
        ("eval/auc", 0.75, 5),
        ("eval/logloss", 0.4, 5),
        ("close",),
    ]


def test_a_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "visualdl", None)
    with pytest.raises(ScalarsError, match=r"pip install 'paddlewheel\[visualdl\]'"):
        Scalars(Path("/nowhere"))
