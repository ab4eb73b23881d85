"""Arrays that are not computed yet, because a reader may have a better place for them, or no need of them.

A lookup whose only reader is a `concat` is made in the concatenated array; one whose gradients are only added to rows
again is not made at all. Each kind of such work is a class, so a reader can see what it would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from paddlewheel.trainer.kernels.gpu.emitter import Emitter, LookupDraft
from paddlewheel.trainer.kernels.gpu.kernel_calls import DotPairs, FmPairsGrad, Gather
from paddlewheel.trainer.kernels.gpu.views import Buffer, Shape, View, temporary


class Deferred(Protocol):
    """Work that is still to be done."""

    def write(self, emit: Emitter, target: View) -> None:
        """Compute into an array with as many elements."""


@dataclass(frozen=True)
class Lookup:
    """Rows of a table by index [count]."""

    table: View
    index: View

    def write(self, emit: Emitter, target: View) -> None:
        if target.size == 0:
            return
        if len(target.shape) == 2 and target.shape[0] != self.index.size:  # [groups, group * width]
            group = self.index.size // target.shape[0]
            width = target.shape[1] // group
            shape, strides = (target.shape[0], group, width), (target.strides[0], width, 1)
            target = View(target.buffer, target.offset, shape, strides, target.type)
        emit.add(Gather(target, self.table, self.index))


@dataclass(frozen=True)
class PairsEmbeddings:
    """The embeddings that a lookup with FM pairs finds."""

    lookup: LookupDraft

    def write(self, emit: Emitter, target: View) -> None:
        rows = self.lookup.pairs.shape[0]
        flat = planned(target, (rows, target.size // rows)) if rows else target
        assert self.lookup.embeddings is None
        if flat.strides[0] % 4 == flat.offset % 4 == 0:
            self.lookup.embeddings = flat
        else:
            self.lookup.embeddings = temporary(flat.shape)
            emit.copy_rows(flat, self.lookup.embeddings)


@dataclass(frozen=True)
class PairsGradient:
    """The gradient of FM pairs.

    Attributes:
        e: the embeddings, [rows, fields, width].
        lookup: what made the pairs, where a lookup did: then the embeddings may lie elsewhere, in the low type.
        dout, add: see `FmPairsGrad`.
    """

    e: View
    lookup: LookupDraft | None
    dout: View
    add: View | None

    def write(self, emit: Emitter, target: View) -> None:
        embeddings, (rows, fields, width) = self.e, self.e.shape
        if self.lookup is not None:
            embeddings = temporary(self.e.shape)
            Lookup(self.lookup.table, self.lookup.index).write(emit, planned(embeddings, (rows * fields, width)))
        emit.add(FmPairsGrad(planned(target, self.e.shape), embeddings, self.dout, self.add))


@dataclass(frozen=True)
class DotProducts:
    """Dot products of all pairs of vectors."""

    v: View

    def write(self, emit: Emitter, target: View) -> None:
        emit.add(DotPairs(target, self.v))


def planned(view: View, shape: Shape) -> View:
    """An array that was not computed yet, in another shape."""
    found = view.with_shape(shape)
    assert found is not None, "an array that was not computed yet has no gaps"
    return found


class Values:
    """Variables' arrays, and the work that is still to be done for some of them."""

    def __init__(self, emit: Emitter, views: Mapping[str, View]) -> None:
        self._emit = emit
        self._views = dict(views)
        self._deferred: dict[Buffer, Deferred] = {}

    def set(self, name: str, view: View, work: Deferred | None = None) -> None:
        """The array of a variable; `work`: that computes it when it is asked for."""
        self._views[name] = view
        if work is not None:
            self._deferred[view.buffer] = work

    def peek(self, name: str) -> View:
        """The array as planned; it may be that nobody computes it."""
        return self._views[name]

    def has(self, name: str) -> bool:
        """Whether a variable has an array."""
        return name in self._views

    def read(self, name: str) -> View:
        """The array, computed now if it was not."""
        view = self._views[name]
        self.compute(view)
        return view

    def compute(self, view: View) -> None:
        """Do what is still to be done, into the array itself."""
        work = self.take(view)
        if work is not None:
            work.write(self._emit, view)

    def deferred(self, view: View) -> Deferred | None:
        """What is still to be done for an array."""
        return self._deferred.get(view.buffer)

    def take(self, view: View) -> Deferred | None:
        """The same, and from now on the caller's to do."""
        return self._deferred.pop(view.buffer, None)
