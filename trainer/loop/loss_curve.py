"""The training loss over a run, in bounded memory."""

from __future__ import annotations

from typing import Any

_MOST_POINTS = 512


class LossCurve:
    """Mean loss of every `stride` steps; when there are too many points, neighbours are merged and the stride doubles.

    Depends on the steps alone, not on time, so that the same run draws the same curve.
    """

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        assert most_points % 2 == 0
        self._most_points = most_points
        self._stride = 1
        self._first_step: int | None = None
        self._points: list[float] = []
        self._sum, self._count = 0.0, 0

    def add(self, step: int, loss: float) -> None:
        """The loss of one step; steps come in order."""
        if self._first_step is None:
            self._first_step = step
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count == self._stride:
            self._points.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._points) == self._most_points:
            self._points = [(a + b) / 2 for a, b in zip(self._points[::2], self._points[1::2], strict=True)]
            self._stride *= 2

    def to_json(self) -> dict[str, Any]:
        """`first_step`, `stride`, and `loss`: the mean of each `stride` steps (a rest of fewer steps is left out)."""
        return {"first_step": self._first_step, "stride": self._stride, "loss": list(self._points)}
