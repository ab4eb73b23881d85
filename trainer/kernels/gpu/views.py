"""Arrays as plain data: memory of one thing, and strided views of it, before any address is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

F32, BF16, F16, I32 = "f32", "bf16", "f16", "i32"
BYTES = {F32: 4, BF16: 2, F16: 2, I32: 4}

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of one thing; two buffers are never equal.

    Attributes:
        nbytes: its size.
        kind: temporary buffers (`temp`) share an arena; the others have a place of their own.
        zero_padded: whether it holds a matrix whose padding columns are zero.
    """

    nbytes: int
    kind: str = "temp"
    zero_padded: bool = False


@dataclass(frozen=True)
class View:
    """An array in a buffer. Strides and offset count elements; a stride of 0 repeats."""

    buffer: Buffer
    offset: int
    shape: Shape
    strides: tuple[int, ...]
    type: str = F32

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def contiguous(self) -> bool:
        """Whether elements lie in order without gaps."""
        return all(s == e or n == 1 for n, s, e in zip(self.shape, self.strides, row_major(self.shape), strict=True))

    def with_shape(self, shape: Sequence[int]) -> View | None:
        """The same elements in another shape; None where that needs a copy."""
        shape = tuple(shape)
        if self.contiguous:
            return View(self.buffer, self.offset, shape, row_major(shape), self.type)
        strides = _reshaped(self.shape, self.strides, shape)
        return None if strides is None else View(self.buffer, self.offset, shape, strides, self.type)

    def slice(self, axis: int, start: int, stop: int) -> View:
        """Elements start to stop of one axis."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return View(self.buffer, self.offset + start * self.strides[axis], shape, self.strides, self.type)

    def permuted(self, axes: Sequence[int]) -> View:
        """With axes in another order."""
        return View(
            self.buffer,
            self.offset,
            tuple(self.shape[a] for a in axes),
            tuple(self.strides[a] for a in axes),
            self.type,
        )

    def broadcast(self, shape: Sequence[int]) -> View:
        """Repeated along new and single-element axes, as NumPy does."""
        more = len(shape) - len(self.shape)
        strides = [0] * more
        for n, m, s in zip(self.shape, shape[more:], self.strides, strict=True):
            assert n in {m, 1}, (self.shape, shape)
            strides.append(s if n == m else 0)
        return View(self.buffer, self.offset, tuple(shape), tuple(strides), self.type)

    def without(self, axis: int) -> View:
        """The first element of one axis, without that axis."""
        return View(
            self.buffer,
            self.offset,
            (*self.shape[:axis], *self.shape[axis + 1 :]),
            (*self.strides[:axis], *self.strides[axis + 1 :]),
            self.type,
        )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an array without gaps."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _reshaped(old: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of the new shape over the same memory, where groups of axes can be merged and split."""
    if int(np.prod(old, dtype=np.int64)) == 0:
        return row_major(new)
    groups: list[tuple[int, int]] = []
    pairs = [(n, s) for n, s in zip(old, strides, strict=True) if n != 1]
    for n, s in pairs:
        if groups and groups[-1][1] == s * n:
            groups[-1] = (groups[-1][0] * n, s)
        else:
            groups.append((n, s))
    result: list[int] = []
    position, left = 0, groups[0][0] if groups else 1
    for n in new:
        if n == 1:
            result.append(0)
            continue
        if position >= len(groups) or left % n:
            return None
        left //= n
        result.append(left * groups[position][1])
        if left == 1:
            position += 1
            left = groups[position][0] if position < len(groups) else 1
    return tuple(result)


def temporary(shape: Sequence[int], kind: str = F32, *, zero_padded: bool = False) -> View:
    """A new array without gaps, of one step."""
    shape = tuple(shape)
    nbytes = int(np.prod(shape, dtype=np.int64)) * BYTES[kind]
    return View(Buffer(nbytes, zero_padded=zero_padded), 0, shape, row_major(shape), kind)
