"""Runs lowered programs on one GPU: places their arrays in memory, captures their calls as a CUDA graph, replays it.

A graph is made for each set of shapes and kept. The keys of a batch (and with negative sampling its rows) are padded to
one of a few sizes, so that few graphs are made; a padded row is read by nothing and gets a gradient of zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.trainer.kernels.gpu.arena import plan_arena
from paddlewheel.trainer.kernels.gpu.cuda_library import Device
from paddlewheel.trainer.kernels.gpu.graph import Graph
from paddlewheel.trainer.kernels.gpu.kernel_calls import Adam, AdamSettings, Call, LowCopies, Squares, Zero
from paddlewheel.trainer.kernels.gpu.layout import DeviceBuffers
from paddlewheel.trainer.kernels.gpu.lowering import Lowered, lower
from paddlewheel.trainer.kernels.gpu.structs import Address
from paddlewheel.trainer.kernels.gpu.views import BYTES, F32, I32, Buffer, Shape, View

_NUMPY = {F32: np.float32, I32: np.int32}
_KEPT_GRAPHS = 24
_SQUARES_BLOCKS = 264


@dataclass
class Plan:
    """A program for one set of shapes, ready to be replayed."""

    lowered: Lowered
    graph: int
    address: Address


class Runner:
    """Programs over one set of parameters, on one GPU.

    Args:
        device: where.
        graphs: programs by name; all have the same parameters.
        low: type of the operands of matrix products: f32, bf16 or f16.
        tf32: see `lower`.
        seed: of dropout.
    """

    def __init__(self, device: Device, graphs: Mapping[str, Graph], *, low: str, tf32: bool, seed: int) -> None:
        self.device, self.graphs, self.low, self.tf32, self.seed = device, graphs, low, tf32, seed
        self.buffers = DeviceBuffers.of(next(iter(graphs.values())), low)
        self.num_floats = self.buffers.size
        self._starts: dict[Buffer, int] = {}
        self._shared = {"arena": 0, "feed": 0, "out": 0}
        self._sizes = {"arena": 0, "feed": 0, "out": 0}
        self.hosts: dict[str, NDArray[np.uint8]] = {}
        self._host_pointers: dict[str, int] = {}
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._num_constants = 0
        self._apply = 0
        self.optimizer_calls: list[Call] = []
        self.kernels: set[str] = set()
        own = self.buffers
        self.moments = [Buffer(4 * self.num_floats, "moment") for _ in range(2)]
        self.scalars = Buffer(64, "scalars")
        self._place(own.param, own.copies, own.grad, own.constants.buffer, own.step, *self.moments, self.scalars)
        self._zero(own.copies, own.step, own.grad, *self.moments)
        self._scalar_host = device.pinned(64)[1].view(np.float32)
        self.loss_scale = View(self.scalars, 8, (), ()) if low == "f16" else None

    # --------------------------------------------------------------------------------------------------------- memory

    def _place(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            self._starts[buffer] = self.device.alloc(max(buffer.nbytes, 16))

    def _zero(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            view = View(buffer, 0, (max(buffer.nbytes, 16) // 4,), (1,))
            self.device.launch(Zero(view), self.address)

    def address(self, view: View, arena: Mapping[Buffer, int] | None = None) -> int:
        """Of the view's first element."""
        buffer = view.buffer
        if buffer.kind in {"feed", "out"}:
            start = self._shared[buffer.kind]
        elif arena is not None and buffer in arena:
            start = self._shared["arena"] + arena[buffer]
        else:
            start = self._starts[buffer]
        return start + view.offset * BYTES[view.type]

    def address_of(self, what: str) -> int:
        """Of the memory that `feed` is copied to or `out` from."""
        return self._shared[what]

    def _grow(self, what: str, nbytes: int) -> bool:
        if nbytes <= self._sizes[what]:
            return False
        size = -(-int(nbytes * 1.1) // 65536) * 65536
        self.device.synchronize()
        for plan in self._plans.values():
            self.device.forget(plan.graph)
        self._plans.clear()
        if self._sizes[what]:
            self.device.free(self._shared[what])
        self._shared[what] = self.device.alloc(size)
        if what != "arena":
            if what in self._host_pointers:
                self.device.free(self._host_pointers[what])
            self._host_pointers[what], self.hosts[what] = self.device.pinned(size)
            self.hosts[what][:] = 0
        self._sizes[what] = size
        return True

    def write(self, view: View, values: NDArray[Any]) -> None:
        """Set an array of the GPU from the host."""
        self.device.upload(self.address(view), np.ascontiguousarray(values))
        self.device.synchronize()

    def read(self, view: View) -> NDArray[Any]:
        """An array without gaps, from the GPU."""
        assert view.contiguous
        found = np.empty(view.shape, _NUMPY[view.type])
        self.device.download(found, self.address(view))
        self.device.synchronize()
        return found

    def zero_gradient(self) -> None:
        """This trainer adds nothing."""
        self._zero(self.buffers.grad)

    @property
    def flat_parameters(self) -> View:
        """All parameters, [num_floats]."""
        return View(self.buffers.param, 0, (self.num_floats,), (1,))

    def flat_moment(self, which: int) -> View:
        """A moment of the optimizer, [num_floats]."""
        return View(self.moments[which], 0, (self.num_floats,), (1,))

    def flat_gradient(self, more: int = 2) -> View:
        """The gradients and as many floats behind them."""
        return View(self.buffers.grad, 0, (self.num_floats + more,), (1,))

    # ----------------------------------------------------------------------------------------------------- a program

    def plan(self, name: str, shapes: Mapping[str, Shape]) -> Plan:
        """The program for these shapes, made at the first request."""
        key = (name, *sorted(shapes.items()))
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        lowered = lower(
            self.graphs[name], self.buffers, shapes, tf32=self.tf32, seed=self.seed, loss_scale=self.loss_scale
        )
        calls = lowered.calls
        arena, size = plan_arena(calls)
        self._grow("arena", size)
        self._grow("feed", lowered.feeds.buffer.nbytes)
        self._grow("out", lowered.out.nbytes)
        self._upload_constants()
        self.kernels.update(call.kernel for call in calls)

        def address(view: View) -> int:
            return self.address(view, arena)

        # indices from another batch's layout would point anywhere
        feed = View(Buffer(self._sizes["feed"], "feed"), 0, (self._sizes["feed"] // 4,), (1,))
        self.device.launch(Zero(feed), self.address)
        for call in calls:  # cuBLAS finds its algorithms now: it cannot while a graph is being captured
            self.device.launch(call, address)
        self.device.synchronize()
        plan = Plan(lowered, self.device.capture(calls, address), address)
        self._plans[key] = plan
        while len(self._plans) > _KEPT_GRAPHS:
            _, old = self._plans.popitem(last=False)
            self.device.forget(old.graph)
        return plan

    def _upload_constants(self) -> None:
        constants = self.buffers.constants
        if len(constants.arrays) == self._num_constants:
            return
        self.device.upload(self._starts[constants.buffer], constants.image())
        self.device.synchronize()
        self._num_constants = len(constants.arrays)

    def _mirror(self, what: str, view: View) -> NDArray[Any]:
        start = view.offset * 4
        return self.hosts[what][start : start + view.size * 4].view(_NUMPY[view.type]).reshape(view.shape)

    def feed(self, plan: Plan, arrays: Mapping[str, NDArray[Any]]) -> None:
        """One copy of all inputs to the GPU. Arrays may have fewer rows than the plan: the rest is zeros."""
        for name, view in plan.lowered.feeds.views.items():
            target, values = self._mirror("feed", view), arrays[name]
            if target.shape == values.shape:
                target[...] = values
            else:
                target[...] = 0
                target[tuple(slice(n) for n in values.shape)] = values
            if name.endswith("/rows"):
                before = View(view.buffer, view.offset - view.shape[1], (view.shape[1],), (1,))
                self._mirror("feed", before)[:] = 0
        self.device.upload(self._shared["feed"], self.hosts["feed"][: plan.lowered.feeds.buffer.nbytes])

    def launch(self, plan: Plan) -> None:
        """StartPoint the program."""
        self.device.replay(plan.graph)

    def results(self, plan: Plan) -> dict[str, NDArray[Any]]:
        """Everything that the host reads, in one copy; valid until the next run. `status` is among it."""
        self.device.download(self.hosts["out"][: plan.lowered.out.nbytes], self._shared["out"])
        self.device.synchronize()
        views = {k: v for k, v in plan.lowered.outputs.items() if v.buffer is plan.lowered.out}
        if plan.lowered.status is not None:
            views["status"] = plan.lowered.status
        return {name: self._mirror("out", view) for name, view in views.items()}

    # ---------------------------------------------------------------------------------------------------- the optimizer

    def prepare_optimizer(self, settings: AdamSettings) -> None:
        """Captures the optimizer's step."""
        own, num_floats = self.buffers, self.num_floats
        decays = np.zeros(max(16, -(-num_floats // 4) * 4), np.uint8)
        for p in own.parameters:
            start = own.offsets[p.variable]
            decays[start : start + p.size] = len(p.shape) > 1
        low_at = own.low_at()
        decays_buffer, low_at_buffer = Buffer(decays.nbytes, "decays"), Buffer(max(low_at.nbytes, 16), "low_at")
        squares_buffer, partial_buffer = Buffer(256, "squares"), Buffer(4 * _SQUARES_BLOCKS, "partial")
        self._place(decays_buffer, low_at_buffer, squares_buffer, partial_buffer)
        decays_view, low_at_view = View(decays_buffer, 0, (1,), (1,)), View(low_at_buffer, 0, (num_floats,), (1,), I32)
        self.device.upload(self.address(decays_view), decays)
        self.write(low_at_view, low_at)
        low = View(own.copies, 0, (own.copies.nbytes // BYTES[self.low],), (1,), self.low)
        calls: list[Call] = []
        grad, squares = self.flat_gradient(0), None
        if settings.clip_norm:
            squares = View(squares_buffer, 0, (1,), (1,))
            calls.append(Squares(squares, View(partial_buffer, 0, (_SQUARES_BLOCKS,), (1,)), grad))
        views = (self.flat_parameters, self.flat_moment(0), self.flat_moment(1), low, grad, decays_view, low_at_view)
        scalars = View(self.scalars, 0, (8,), (1,))
        calls.append(Adam(*views, scalars, squares, settings))
        self.optimizer_calls = calls
        self._low_copies = LowCopies(*views, scalars, squares, settings)
        self._apply = self.device.capture(calls, self.address)
        self.kernels.update(call.kernel for call in calls)

    def set_parameters(self, flat: NDArray[np.float32]) -> None:
        """All parameters, and their copies in the low type."""
        self.write(self.flat_parameters, self.buffers.pack(flat))
        self.device.launch(self._low_copies, self.address)
        self.device.synchronize()

    def set_loss_scale(self, scale: float) -> None:
        """For float16: what the loss is multiplied by before its gradients are taken. Powers of two lose nothing."""
        self._scalar_host[8:10] = scale, 1.0 / scale
        self.device.upload(self._starts[self.scalars], self._scalar_host)
        self.device.synchronize()

    def step(self, rate: float, scale: float, power1: float, power2: float) -> None:
        """StartPoint the optimizer's step over the flat gradient times `scale`."""
        self._scalar_host[:4] = rate, scale, power1, power2
        self.device.upload(self._starts[self.scalars], self._scalar_host)
        self.device.replay(self._apply)

    # ---------------------------------------------------------------------------------------------------------- timing

    def milliseconds(self, plan: Plan, *, apply: bool, rounds: int = 5, launches: int = 50) -> float:
        """Median time of one replay of the program, with or without the optimizer's step; inputs stay as they are."""

        def work() -> None:
            for _ in range(launches):
                self.launch(plan)
                if apply:
                    self.device.replay(self._apply)

        work()
        return float(np.median([self.device.milliseconds(work) / launches for _ in range(rounds)]))

    def breakdown(self, plan: Plan, launches: int = 10) -> list[tuple[Call, float]]:
        """Milliseconds of each call of the program, each alone and repeated: its inputs may then lie in the cache."""
        found = []
        for call in plan.lowered.calls:
            graph = self.device.capture([call] * launches, plan.address)  # without what the host needs to start them

            def work(graph: int = graph) -> None:
                self.device.replay(graph)

            found.append((call, min(self.device.milliseconds(work) for _ in range(4)) / launches))
            self.device.forget(graph)
        return found
