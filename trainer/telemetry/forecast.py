"""When a process that grows will have used up its memory: a straight line through what was measured of late."""

from __future__ import annotations

from collections import deque
from statistics import linear_regression

_WINDOW_SECONDS = 600.0
_SECONDS_BETWEEN_SAMPLES = 2.0
_LEAST_SECONDS = 20.0
_LEAST_GROWTH = 0.002
"""Of what is used, over the window: less is the allocator's breathing."""
_FARTHEST = 10.0
"""How many times as far into the future as the measurements reach back: beyond, a straight line tells nothing."""
_STEADY = 0.5
"""Least growth of the second half of the measurements, of that of all: a process that has only started slows down."""


class MemoryForecast:
    """Takes (time, bytes) as it comes; keeps ten minutes of it."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now: float, used_bytes: float) -> None:
        """One measurement; times in seconds, rising."""
        if self._samples and now - self._samples[-1][0] < _SECONDS_BETWEEN_SAMPLES:
            return
        self._samples.append((now, used_bytes))
        while now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()

    def clear(self) -> None:
        """The process was replaced."""
        self._samples.clear()

    def seconds_until(self, limit_bytes: float) -> float | None:
        """From the last measurement, at the growth of the last ten minutes; None while it does not grow steadily, too
        little was measured, or the limit is too far away to tell.
        """
        if len(self._samples) < 3 or self._samples[-1][0] - self._samples[0][0] < _LEAST_SECONDS:
            return None
        times, used = zip(*self._samples, strict=True)
        slope, last = float(linear_regression(times, used).slope), float(used[-1])
        span = times[-1] - times[0]
        if slope * span < _LEAST_GROWTH * last:
            return None
        half = len(times) // 2 - (len(times) < 4)
        if linear_regression(times[half:], used[half:]).slope < _STEADY * slope:
            return None
        left = max(0.0, (limit_bytes - last) / slope)
        return left if left <= _FARTHEST * span else None
