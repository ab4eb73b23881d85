"""Whether each kernel that a program will use computes the right numbers on this GPU.

The program is lowered for a small batch of odd sizes; each of its calls runs alone on fresh random inputs, with its
outputs
poisoned before, and is compared with NumPy in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddlewheel.trainer.kernels.gpu import reference
from paddlewheel.trainer.kernels.gpu.graph import Graph
from paddlewheel.trainer.kernels.gpu.kernel_calls import BF16, BYTES, F16, F32, TILES, Call, View
from paddlewheel.trainer.kernels.gpu.library import Device
from paddlewheel.trainer.kernels.gpu.lowering import Lowering, Memory, Shape

_UPDATES = {"scatter_add", "fields_grad", "count", "adam", "low_copies"}
"""Kernels that read what they write."""
_POSITIVE = {"log", "div", "div_grad", "sqrt_affine", "rsqrt_affine"}
_TOLERANCE = {F32: 2e-5, BF16: 6e-3, F16: 1e-3, "i32": 0.0}
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


def calls_of(
    graph: Graph, shapes: dict[str, Shape], low: str, *, tf32: bool, seed: int = 0
) -> tuple[Sequence[Call], Memory]:
    """The calls of a program for these shapes."""
    memory = Memory(graph, low)
    return Lowering(graph, memory, shapes, tf32=tf32, seed=seed).run().calls, memory


def distinct(calls: Sequence[Call]) -> list[Call]:
    """One of each kind of call: kernel, function, types, and the form of its arrays; with each of its tiles."""
    found: dict[Any, Call] = {}
    for call in calls:
        told = tuple(
            (k, str(v))
            for k, v in sorted(call.told.items())
            if k in {"op", "trans_a", "trans_b", "relu", "by_warp", "largest"}
        )
        views = tuple(None if v is None else (v.type, len(v.shape), v.contiguous) for v in (*call.outs, *call.ins))
        found.setdefault((call.kernel, told, views), call)
    other = [replace(c, told={**c.told, "tile": tile}) for c in found.values() if "tile" in c.told for tile in TILES]
    return [*(c for c in found.values() if "tile" not in c.told), *other]


def run(device: Device, calls: Sequence[Call], rng: np.random.Generator) -> list[Wrong]:
    """Every call alone; those that are wrong."""
    wrong = []
    for call in calls:
        found = _run(device, call, rng)
        if found is not None:
            wrong.append(found)
    return wrong


def _run(device: Device, call: Call, rng: np.random.Generator) -> Wrong | None:
    memory = reference.Memory()
    op = call.told.get("op", "")
    for position, view in enumerate(call.ins):
        if view is None:
            continue
        memory.bytes(view.buffer)[:] = 0
        memory.store(view, _random(call, position, view, op, rng))
    for view in call.outs:
        if view is not None and call.kernel in _UPDATES:
            memory.bytes(view.buffer)[:] = 0
            memory.store(view, rng.uniform(0.1, 0.9, view.shape) if call.kernel == "adam" else np.zeros(view.shape))
    buffers = {id(v.buffer): v.buffer for v in call.views}
    at: dict[int, int] = {}
    try:
        for key, buffer in buffers.items():
            image = memory.bytes(buffer)
            at[key] = device.alloc(image.nbytes)
            device.upload(at[key], image)
        device.launch(call, lambda v: at[id(v.buffer)] + v.offset * BYTES[v.type])
        results = {}
        for key, buffer in buffers.items():
            results[key] = np.empty_like(memory.bytes(buffer))
            device.download(results[key], at[key])
        device.synchronize()
    finally:
        for pointer in at.values():
            device.free(pointer)
    reference.run(call, memory)
    checked = [v for place, v in enumerate(call.outs) if v is not None and not _is_workspace(call, place)]
    expected = [memory.load(view) for view in checked]
    for key, buffer in buffers.items():
        memory.bytes(buffer)[:] = results[key]
    for view, want in zip(checked, expected, strict=True):
        got = memory.load(view)
        allowed = _TOLERANCE[view.type]
        if call.kernel == "matmul" and call.told["tf32"] and call.ins[0] is not None and call.ins[0].type == F32:
            allowed = max(allowed, _TF32_TOLERANCE)
        scale = float(np.linalg.norm(want)) or 1.0
        error = float(np.linalg.norm(got - want)) / scale
        if not error <= allowed:  # a NaN is wrong too
            return Wrong(f"{call.kernel} {op}".strip(), error, allowed, " ".join(str(v.shape) for v in call.views))
    return None


def _is_workspace(call: Call, place: int) -> bool:
    return (place == 1 and call.kernel in {"reduce", "squares", "bias_grad", "skinny_grad"}) or (
        place == 3 and call.kernel == "skinny_grad"
    )


def _random(call: Call, position: int, view: View, op: str, rng: np.random.Generator) -> Any:
    if call.kernel in {"adam", "low_copies"} and position > 0:
        return np.arange(view.size) if view.type == "i32" else rng.uniform(0.1, 0.9, view.shape)
    if view.type == "i32":
        table = call.ins[0] if call.kernel in {"gather", "fields_lookup"} else call.outs[0]
        by_index = {"gather", "scatter_add", "fields_lookup", "fields_grad"}
        high = table.shape[0] if call.kernel in by_index and table is not None else 4
        return rng.integers(0, high, view.shape)
    if op in _POSITIVE:
        return rng.uniform(0.5, 1.5, view.shape)
    if op == "equal":
        return rng.integers(0, 3, view.shape).astype(np.float64)
    if op == "where" and position == 0:
        return rng.integers(0, 2, view.shape).astype(np.float64)
    if call.kernel == "reduce":
        # Of both signs, and yet no sum is what rounding leaves of terms that cancel: against that, a right kernel's
        # relative error would be too large in one of 600 sums of 37.
        return rng.uniform(-0.2, 1.0, view.shape)
    return rng.uniform(-1.0, 1.0, view.shape)
