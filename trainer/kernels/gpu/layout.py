"""Where everything that outlives a kernel call lies: inputs, parameters and their copies, gradients, constants.

A pass without side effects but for the pool of constants, which programs over the same parameters share.

Legend: N floats of all parameters, one after the other without gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.trainer.kernels.gpu.graph import Graph, Parameter
from paddlewheel.trainer.kernels.gpu.views import BYTES, I32, Buffer, Shape, View, row_major, temporary

TAIL = 16
"""Floats behind the flat gradient: the summed loss, the summed weight, and what a step adds to them."""

_CONSTANT_BYTES = 1 << 20


def padded(count: int, kind: str) -> int:
    """Elements of a row in the low type, padded to 16 bytes."""
    step = 16 // BYTES[kind]
    return -(-count // step) * step


def padded_matrix(rows: int, columns: int, low: str, kind: str, *, zero_padded: bool = False) -> View:
    """A temporary matrix of a type, with rows as wide as those of a copy in the low type."""
    return replace(temporary((rows, padded(columns, low)), kind, zero_padded=zero_padded), shape=(rows, columns))


@dataclass(frozen=True)
class Feeds:
    """Where the inputs of a batch lie in one buffer. A table's rows follow a row of zeros."""

    buffer: Buffer
    views: Mapping[str, View]

    @classmethod
    def of(cls, kinds: Mapping[str, str], shapes: Mapping[str, Shape]) -> Feeds:
        """One after the other, each on a border of 256 bytes; the scalars of the optimizer come first."""
        starts, nbytes = {}, 256
        for name in kinds:
            before = shapes[name][1] if name.endswith("/rows") else 0
            starts[name] = nbytes // 4 + before
            nbytes += -(-(before + int(np.prod(shapes[name], dtype=np.int64))) * 4 // 256) * 256
        buffer = Buffer(nbytes, "feed")
        shape_of = {name: tuple(shapes[name]) for name in kinds}
        views = {
            name: View(buffer, starts[name], shape_of[name], row_major(shape_of[name]), kind)
            for name, kind in kinds.items()
        }
        return cls(buffer, views)


class Constants:
    """A pool of constant arrays in one buffer; equal arrays are kept once."""

    def __init__(self) -> None:
        self.buffer = Buffer(_CONSTANT_BYTES, "const")
        self.arrays: list[NDArray[Any]] = []

    def view(self, values: Any, kind: str) -> View:
        """A constant array: the one that is there, or a new one."""
        array = np.asarray(values, np.int32 if kind == I32 else np.float32)
        start = 0
        for known in self.arrays:
            if known.dtype == array.dtype and known.shape == array.shape and np.array_equal(known, array):
                break
            start += -(-known.nbytes // 16) * 16
        else:
            assert start + array.nbytes <= self.buffer.nbytes, "constants"
            self.arrays.append(array)
        return View(self.buffer, start // 4, array.shape, row_major(array.shape), kind)

    def image(self) -> NDArray[np.uint8]:
        """The buffer's bytes."""
        image, start = np.zeros(self.buffer.nbytes, np.uint8), 0
        for array in self.arrays:
            image[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            start += -(-array.nbytes // 16) * 16
        return image


@dataclass(frozen=True)
class DeviceBuffers:
    """The buffers that outlive a step.

    Attributes:
        parameters: in the order of the flat gradient.
        low: type of the operands of matrix products.
        offsets: first float of each parameter, by variable, in `param` and in `grad`.
        size: floats of all parameters, with the gaps between them.
        param, grad: float32; behind the gradients follow `TAIL` floats.
        copies: parameters in the low type.
        low_views: these copies, by variable.
        step: the step's number, int32.
    """

    parameters: Sequence[Parameter]
    low: str
    offsets: Mapping[str, int]
    size: int
    param: Buffer
    grad: Buffer
    copies: Buffer
    low_views: Mapping[str, View]
    step: Buffer = field(default_factory=lambda: Buffer(4, "step"))
    constants: Constants = field(default_factory=Constants)

    @classmethod
    def of(cls, graph: Graph, low: str) -> DeviceBuffers:
        """For the parameters of a graph."""
        offsets, size = {}, 0
        for p in graph.parameters:  # each on a border of 32 bytes, as matrix products like it
            offsets[p.variable] = size
            size += -(-p.size // 8) * 8
        copies, low_views = _low_copies(graph.parameters, low)
        param, grad = Buffer(4 * size, "param"), Buffer(4 * (size + TAIL), "grad")
        return cls(graph.parameters, low, offsets, size, param, grad, copies, low_views)

    def parameter(self, p: Parameter) -> View:
        """The float32 parameter."""
        return View(self.param, self.offsets[p.variable], p.shape, row_major(p.shape))

    def low_at(self) -> NDArray[np.int32]:
        """Which element of `copies` is the copy of each float of the parameters; -1: it has none."""
        found = np.full(self.size, -1, np.int32)
        for p in self.parameters:
            view = self.low_views.get(p.variable)
            if view is not None:
                grid = np.full(p.shape, view.offset)
                for axis, stride in enumerate(view.strides):
                    along = [-1 if a == axis else 1 for a in range(len(p.shape))]
                    grid += (np.arange(p.shape[axis]) * stride).reshape(along)
                start = self.offsets[p.variable]
                found[start : start + p.size] = grid.ravel()
        return found

    def pack(self, flat_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """From the flat array of the interface to the one in the GPU's memory, where gaps hold zeros."""
        packed = np.zeros(self.size, np.float32)
        for p in self.parameters:
            start = self.offsets[p.variable]
            packed[start : start + p.size] = flat_N[p.offset : p.offset + p.size]
        return packed

    def unpack(self, packed: NDArray[np.float32]) -> NDArray[np.float32]:
        """The way back; what follows the parameters (loss, weight) stays at the end."""
        parts = [packed[self.offsets[p.variable] : self.offsets[p.variable] + p.size] for p in self.parameters]
        return np.concatenate([*parts, packed[self.size :]])

    @property
    def flat_gradient(self) -> View:
        """All gradients, the loss and the weight."""
        return View(self.grad, 0, (self.size + 2,), (1,))


def _low_copies(parameters: Sequence[Parameter], low: str) -> tuple[Buffer, dict[str, View]]:
    """Vectors and matrices in the low type, rows padded to 16 bytes."""
    places: dict[str, tuple[int, Shape, tuple[int, ...]]] = {}
    count = 0
    for p in parameters:
        if len(p.shape) == 1:
            places[p.variable] = count, p.shape, (1,)
            count += -(-padded(p.shape[0], low) // 8) * 8
        elif len(p.shape) == 2:
            width = padded(p.shape[1], low)
            places[p.variable] = count, p.shape, (width, 1)
            count += padded(p.shape[0], low) * width
    buffer = Buffer(count * BYTES[low], "low", zero_padded=True)
    return buffer, {name: View(buffer, *place, low) for name, place in places.items()}


def grad_slots(graph: Graph, buffers: DeviceBuffers) -> dict[str, View]:
    """Where the flat gradient has the gradient of each parameter, the loss and the weight, by variable.

    Empty for a program without gradients. The variables are those that are written, before they are made flat.
    """
    if "flat" not in graph.outputs:
        return {}
    whole = buffers.flat_gradient
    makers = {op.result(): op for op in graph.ops if op.type in {"concat", "reshape2"}}
    places = [(buffers.offsets[p.variable], p.size) for p in buffers.parameters]
    places += [(buffers.size, 1), (buffers.size + 1, 1)]
    slots = {}
    for name, (start, count) in zip(makers[graph.outputs["flat"]].ins["X"], places, strict=True):
        source = makers[name].one("X") if name in makers and makers[name].type == "reshape2" else name
        slots[source] = whole.slice(0, start, start + count)
    return slots


@dataclass(frozen=True)
class Layout:
    """What a program finds in memory when it starts, for one set of shapes."""

    buffers: DeviceBuffers
    feeds: Feeds
    grad_slots: Mapping[str, View]

    @classmethod
    def of(cls, graph: Graph, buffers: DeviceBuffers, shapes: Mapping[str, Shape]) -> Layout:
        """For these shapes of the feeds."""
        return cls(buffers, Feeds.of(graph.feeds, shapes), grad_slots(graph, buffers))

    def inputs(self, graph: Graph) -> dict[str, View]:
        """Feeds and parameters by variable."""
        return {**self.feeds.views, **{p.variable: self.buffers.parameter(p) for p in graph.parameters}}
