"""Which rows a trainer has trained since it last told the coordinator: the trainer's side of the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paddlewheel.data_pipeline.batch import Span
from paddlewheel.trainer.protocol.messages import Span as TrainedSpan


class Trained(NamedTuple):
    """Rows that a trainer went through. skipped: those of `spans` whose step was skipped."""

    spans: tuple[TrainedSpan, ...]
    skipped: tuple[TrainedSpan, ...]


class TrainedSpans:
    """Collects spans in training order and merges those that follow each other within a slice."""

    def __init__(self) -> None:
        self._trained: dict[tuple[int, int], list[list[int]]] = {}
        self._skipped: dict[tuple[int, int], list[list[int]]] = {}

    def add(self, epoch: int, spans: Iterable[Span], *, skipped: bool) -> None:
        """A step went through these rows. `skipped`: its gradients were not finite, so the rows changed nothing."""
        for span in spans:
            _append(self._trained, epoch, span)
            if skipped:
                _append(self._skipped, epoch, span)

    def take(self) -> Trained:
        """What was added since the last call; skipped spans stand in both."""
        taken = Trained(_entries(self._trained), _entries(self._skipped))
        self._trained, self._skipped = {}, {}
        return taken


def _append(log: dict[tuple[int, int], list[list[int]]], epoch: int, span: Span) -> None:
    runs = log.setdefault((epoch, span.slice_index), [])
    if runs and runs[-1][0] + runs[-1][1] == span.row_start:
        runs[-1][1] += span.num_rows
    else:
        runs.append([span.row_start, span.num_rows])


def _entries(log: dict[tuple[int, int], list[list[int]]]) -> tuple[TrainedSpan, ...]:
    return tuple((epoch, index, start, rows) for (epoch, index), runs in sorted(log.items()) for start, rows in runs)
