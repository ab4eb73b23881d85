"""The last pass: offsets of the temporary buffers of a list of calls in one arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paddlewheel.trainer.kernels.gpu.kernel_calls import Call
from paddlewheel.trainer.kernels.gpu.views import Buffer

_BORDER = 256


@dataclass
class _FreeList:
    """Gaps in an arena that grows at its end: (offset, size), in order, none next to another."""

    gaps: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0

    def take(self, size: int) -> int:
        """From the smallest gap that fits, the first of several; else at the end."""
        fits = [(length, start) for start, length in self.gaps if length >= size]
        if not fits:
            self.end += size
            return self.end - size
        length, start = min(fits)
        self.gaps.remove((start, length))
        if length > size:
            self.gaps.append((start + size, length - size))
        return start

    def give(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self.gaps, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.gaps = merged


def plan_arena(calls: Sequence[Call]) -> tuple[dict[Buffer, int], int]:
    """Offset of each temporary buffer, and the arena's size: a buffer's place is free again after its last call."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for at, call in enumerate(calls):
        for view in call.views:
            if view.buffer.kind == "temp":
                first.setdefault(view.buffer, at)
                last[view.buffer] = at
    begins: dict[int, list[Buffer]] = {}
    ends: dict[int, list[Buffer]] = {}
    for buffer, at in first.items():
        begins.setdefault(at, []).append(buffer)
    for buffer, at in last.items():
        ends.setdefault(at, []).append(buffer)
    free, offsets = _FreeList(), {}
    for at in range(len(calls)):
        for buffer in begins.get(at, []):
            offsets[buffer] = free.take(_size(buffer))
        for buffer in ends.get(at, []):
            free.give(offsets[buffer], _size(buffer))
    return offsets, free.end


def _size(buffer: Buffer) -> int:
    return -(-max(buffer.nbytes, 1) // _BORDER) * _BORDER
