"""Whether each kernel that a program will use computes the right numbers on this GPU.

The program is lowered for a small batch of odd sizes; each of its calls runs alone on fresh random inputs, with its
outputs poisoned before, and is compared with NumPy in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddlewheel.trainer.kernels.gpu import reference
from paddlewheel.trainer.kernels.gpu.cuda_library import Device
from paddlewheel.trainer.kernels.gpu.graph import Graph
from paddlewheel.trainer.kernels.gpu.kernel_calls import (
    TILES,
    Adam,
    Call,
    Elementwise,
    FieldsGrad,
    FieldsLookup,
    Gather,
    Matmul,
    Reduce,
    ScatterAdd,
)
from paddlewheel.trainer.kernels.gpu.layout import DeviceBuffers
from paddlewheel.trainer.kernels.gpu.lowering import lower
from paddlewheel.trainer.kernels.gpu.views import BF16, BYTES, F16, F32, I32, Buffer, Shape, View

_POSITIVE = {"log", "div", "div_grad", "sqrt_affine", "rsqrt_affine"}
_TOLERANCE = {F32: 2e-5, BF16: 6e-3, F16: 1e-3, I32: 0.0}
_TF32_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Wrong:
    """A kernel whose result is not what NumPy computes."""

    kernel: str
    error: float
    allowed: float
    shapes: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.shapes}: relative error {self.error:.1e}, allowed {self.allowed:.0e}"


def small_shapes(
    graph: Graph, widths: dict[str, int], batch: int = 37, keys: int = 23, length: int = 5
) -> dict[str, Shape]:
    """Odd sizes for each input. `widths` are the last axes, by input."""
    shapes: dict[str, Shape] = {}
    for name in graph.feeds:
        if name.endswith("/rows"):
            shapes[name] = (keys, widths[name])
        elif "/list/" in name or "/weight/" in name:
            shapes[name] = (batch, length)
        else:
            shapes[name] = (batch, widths[name])
    return shapes


def calls_of(graph: Graph, shapes: dict[str, Shape], low: str, *, tf32: bool) -> Sequence[Call]:
    """The calls of a program for these shapes."""
    return lower(graph, DeviceBuffers.of(graph, low), shapes, tf32=tf32).calls


def distinct(calls: Sequence[Call]) -> list[Call]:
    """One of each kind of call: kernel, function, types, and the form of its arrays; with each of its tiles."""
    found: dict[Any, Call] = {}
    for call in calls:
        views = tuple(None if v is None else (v.type, len(v.shape), v.contiguous) for v in (*call.outs, *call.ins))
        found.setdefault((call.kernel, call.variant, views), call)
    tiled = [call for call in found.values() if isinstance(call, FieldsGrad)]
    others = [call for call in found.values() if not isinstance(call, FieldsGrad)]
    return [*others, *(replace(call, tile=tile) for call in tiled for tile in TILES)]


def run(device: Device, calls: Sequence[Call], rng: np.random.Generator) -> list[Wrong]:
    """Every call alone; those that are wrong."""
    wrong = []
    for call in calls:
        found = _run(device, call, rng)
        if found is not None:
            wrong.append(found)
    return wrong


def _run(device: Device, call: Call, rng: np.random.Generator) -> Wrong | None:
    memory = _filled(call, rng)
    images = _results_on(device, call, memory)
    reference.run(call, memory)
    expected = [memory.load(view) for view in call.results]
    for buffer, image in images.items():
        memory.bytes(buffer)[:] = image
    for view, want in zip(call.results, expected, strict=True):
        got = memory.load(view)
        allowed = _TOLERANCE[view.type]
        if isinstance(call, Matmul) and call.tf32 and call.a.type == F32:
            allowed = max(allowed, _TF32_TOLERANCE)
        scale = float(np.linalg.norm(want)) or 1.0
        error = float(np.linalg.norm(got - want)) / scale
        if not error <= allowed:  # a NaN is wrong too
            what = f"{call.kernel} {_function_of(call)}".strip()
            return Wrong(what, error, allowed, " ".join(str(v.shape) for v in call.views))
    return None


def _filled(call: Call, rng: np.random.Generator) -> reference.HostMemory:
    """Random inputs; outputs are poison, unless the kernel reads them."""
    memory = reference.HostMemory()
    for position, view in enumerate(call.ins):
        if view is not None:
            memory.bytes(view.buffer)[:] = 0
            memory.store(view, _random(call, position, view, rng))
    for view in call.outs if call.updates else ():
        if view is not None:
            memory.bytes(view.buffer)[:] = 0
            old = rng.uniform(0.1, 0.9, view.shape) if call.kernel == "adam" else np.zeros(view.shape)
            memory.store(view, old)
    return memory


def _results_on(device: Device, call: Call, memory: reference.HostMemory) -> dict[Buffer, Any]:
    """What is in each buffer after the call; before it, what `memory` holds."""
    starts: dict[Buffer, int] = {}
    images = {}
    try:
        for buffer in dict.fromkeys(view.buffer for view in call.views):
            image = memory.bytes(buffer)
            starts[buffer] = device.alloc(image.nbytes)
            device.upload(starts[buffer], image)
        device.launch(call, lambda view: starts[view.buffer] + view.offset * BYTES[view.type])
        for buffer, start in starts.items():
            images[buffer] = np.empty_like(memory.bytes(buffer))
            device.download(images[buffer], start)
        device.synchronize()
    finally:
        for pointer in starts.values():
            device.free(pointer)
    return images


def _function_of(call: Call) -> str:
    return call.function if isinstance(call, (Elementwise, Reduce)) else ""


def _random(call: Call, position: int, view: View, rng: np.random.Generator) -> Any:
    """Values for the input at a position, for which the kernel's arithmetic is well conditioned."""
    function = _function_of(call)
    if isinstance(call, Adam) and position > 0:
        return np.arange(view.size) if view.type == I32 else rng.uniform(0.1, 0.9, view.shape)
    if view.type == I32:
        high = call.table.shape[0] if isinstance(call, (Gather, ScatterAdd, FieldsLookup, FieldsGrad)) else 4
        return rng.integers(0, high, view.shape)
    if function in _POSITIVE:
        return rng.uniform(0.5, 1.5, view.shape)
    if function == "equal":
        return rng.integers(0, 3, view.shape).astype(np.float64)
    if function == "where" and position == 0:
        return rng.integers(0, 2, view.shape).astype(np.float64)
    if isinstance(call, Reduce):
        # Of both signs, and yet no sum is what rounding leaves of terms that cancel: against that, a right kernel's
        # relative error would be too large in one of 600 sums of 37.
        return rng.uniform(-0.2, 1.0, view.shape)
    return rng.uniform(-1.0, 1.0, view.shape)
