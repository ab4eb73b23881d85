"""Runs lowered programs on one GPU: places their arrays in memory, captures their calls as a CUDA graph, replays it.

A graph is made for each set of shapes and kept. The keys of a batch (and with negative sampling its rows) are padded to
one of a few sizes, so that few graphs are made; a padded row is read by nothing and gets a gradient of zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.trainer.kernels.gpu.graph import Graph
from paddlewheel.trainer.kernels.gpu.kernel_calls import BYTES, F32, Address, Buffer, Call, View
from paddlewheel.trainer.kernels.gpu.library import Device
from paddlewheel.trainer.kernels.gpu.lowering import Lowered, Lowering, Memory, Shape

_NUMPY = {F32: np.float32, "i32": np.int32}
_KEPT_GRAPHS = 24


def places(calls: Sequence[Call]) -> tuple[dict[int, int], int]:
    """Offsets of the temporary buffers in an arena, and its size: a buffer's place is free again after its last
    call.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    for at, call in enumerate(calls):
        for view in call.views:
            if view.buffer.kind == "temp":
                key = id(view.buffer)
                first.setdefault(key, at)
                last[key] = at
                size[key] = -(-max(view.buffer.nbytes, 1) // 256) * 256
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for key, at in first.items():
        begins.setdefault(at, []).append(key)
    for key, at in last.items():
        ends.setdefault(at, []).append(key)
    free: list[tuple[int, int]] = []  # offset, size
    top, found = 0, {}
    for at in range(len(calls)):
        for key in begins.get(at, []):
            fits = [(s, o) for o, s in free if s >= size[key]]
            if fits:
                s, o = min(fits)
                free.remove((o, s))
                if s > size[key]:
                    free.append((o + size[key], s - size[key]))
                found[key] = o
            else:
                found[key] = top
                top += size[key]
        for key in ends.get(at, []):
            free.append((found[key], size[key]))
            free.sort()
            merged: list[tuple[int, int]] = []
            for o, s in free:
                if merged and merged[-1][0] + merged[-1][1] == o:
                    merged[-1] = (merged[-1][0], merged[-1][1] + s)
                else:
                    merged.append((o, s))
            free = merged
    return found, top


@dataclass
class Plan:
    """A program for one set of shapes, ready to be replayed."""

    lowered: Lowered
    graph: int
    calls: Sequence[Call]
    address: Address


class Runner:
    """Programs over one set of parameters, on one GPU.

    Args:
        device: where.
        graphs: programs by name; all have the same parameters.
        low: type of the operands of matrix products: f32, bf16 or f16.
        tf32: see `Lowering`.
        seed: of dropout.
    """

    def __init__(self, device: Device, graphs: Mapping[str, Graph], *, low: str, tf32: bool, seed: int) -> None:
        self.device, self.graphs, self.low, self.tf32, self.seed = device, graphs, low, tf32, seed
        self.memory = Memory(next(iter(graphs.values())), low)
        self.num_floats = self.memory.size
        self._at: dict[int, int] = {}
        self._arena = self._feed = self._out = 0
        self._sizes = {"arena": 0, "feed": 0, "out": 0}
        self.hosts: dict[str, NDArray[np.uint8]] = {}
        self._host_pointers: dict[str, int] = {}
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._num_constants = 0
        self._apply = 0
        self.optimizer_calls: list[Call] = []
        self.kernels: set[str] = set()
        for buffer in (self.memory.param, self.memory.copies, self.memory.grad, self.memory.const, self.memory.step):
            self._at[id(buffer)] = device.alloc(max(buffer.nbytes, 16))
        self._zero(self.memory.copies, self.memory.step, self.memory.grad)
        self.moments = [Buffer(4 * self.num_floats, "moment") for _ in range(2)]
        self.scalars = Buffer(64, "scalars")
        for buffer in (*self.moments, self.scalars):
            self._at[id(buffer)] = device.alloc(max(buffer.nbytes, 16))
        self._zero(*self.moments)
        self._scalar_host = device.pinned(64)[1].view(np.float32)
        self.loss_scale = View(self.scalars, 8, (), ()) if low == "f16" else None

    # --------------------------------------------------------------------------------------------------------- memory

    def _zero(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            view = View(buffer, 0, (max(buffer.nbytes, 16) // 4,), (1,))
            self.device.launch(Call("zero", (view,)), self.address)

    def address(self, view: View, arena: Mapping[int, int] | None = None) -> int:
        """Of the view's first element."""
        start = {"feed": self._feed, "out": self._out}.get(view.buffer.kind)
        if start is None:
            key = id(view.buffer)
            start = self._arena + arena[key] if arena is not None and key in arena else self._at[key]
        return start + view.offset * BYTES[view.type]

    def address_of(self, what: str) -> int:
        """Of the memory that `feed` is copied to or `out` from."""
        return self._feed if what == "feed" else self._out

    def _grow(self, what: str, nbytes: int) -> bool:
        if nbytes <= self._sizes[what]:
            return False
        size = -(-int(nbytes * 1.1) // 65536) * 65536
        self.device.synchronize()
        for plan in self._plans.values():
            self.device.forget(plan.graph)
        self._plans.clear()
        if self._sizes[what]:
            self.device.free(getattr(self, f"_{what}"))
        setattr(self, f"_{what}", self.device.alloc(size))
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
        self._zero(self.memory.grad)

    @property
    def flat_parameters(self) -> View:
        """All parameters, [num_floats]."""
        return View(self.memory.param, 0, (self.num_floats,), (1,))

    def flat_moment(self, which: int) -> View:
        """A moment of the optimizer, [num_floats]."""
        return View(self.moments[which], 0, (self.num_floats,), (1,))

    def flat_gradient(self, more: int = 2) -> View:
        """The gradients and as many floats behind them."""
        return View(self.memory.grad, 0, (self.num_floats + more,), (1,))

    # ----------------------------------------------------------------------------------------------------- a program

    def plan(self, name: str, shapes: Mapping[str, Shape]) -> Plan:
        """The program for these shapes, made at the first request."""
        key = (name, *sorted(shapes.items()))
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        lowering = Lowering(
            self.graphs[name], self.memory, shapes, tf32=self.tf32, seed=self.seed, loss_scale=self.loss_scale
        )
        lowered = lowering.run()
        calls = list(lowered.calls)
        if lowering.dropouts:
            calls.append(Call("count", (View(self.memory.step, 0, (1,), (1,), "i32"),)))
        arena, size = places(calls)
        self._grow("arena", size)
        self._grow("feed", lowered.feeds.buffer.nbytes)
        self._grow("out", lowered.out.nbytes)
        self._upload_constants()
        self.kernels.update(call.kernel for call in calls)

        def address(view: View) -> int:
            return self.address(view, arena)

        # indices from another batch's layout would point anywhere
        feed = View(Buffer(self._sizes["feed"], "feed"), 0, (self._sizes["feed"] // 4,), (1,))
        self.device.launch(Call("zero", (feed,)), self.address)
        for call in calls:  # cuBLAS finds its algorithms now: it cannot while a graph is being captured
            self.device.launch(call, address)
        self.device.synchronize()
        plan = Plan(lowered, self.device.capture(calls, address), calls, address)
        self._plans[key] = plan
        while len(self._plans) > _KEPT_GRAPHS:
            _, old = self._plans.popitem(last=False)
            self.device.forget(old.graph)
        return plan

    def _upload_constants(self) -> None:
        if len(self.memory.constants) == self._num_constants:
            return
        image, at = np.zeros(self.memory.const.nbytes, np.uint8), 0
        for array in self.memory.constants:
            image[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += -(-array.nbytes // 16) * 16
        self.device.upload(self._at[id(self.memory.const)], image)
        self.device.synchronize()
        self._num_constants = len(self.memory.constants)

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
        self.device.upload(self._feed, self.hosts["feed"][: plan.lowered.feeds.buffer.nbytes])

    def launch(self, plan: Plan) -> None:
        """StartPoint the program."""
        self.device.replay(plan.graph)

    def results(self, plan: Plan) -> dict[str, NDArray[Any]]:
        """Everything that the host reads, in one copy; valid until the next run. `status` is among it."""
        self.device.download(self.hosts["out"][: plan.lowered.out.nbytes], self._out)
        self.device.synchronize()
        views = {k: v for k, v in plan.lowered.outputs.items() if v.buffer is plan.lowered.out}
        if plan.lowered.status is not None:
            views["status"] = plan.lowered.status
        return {name: self._mirror("out", view) for name, view in views.items()}

    # ---------------------------------------------------------------------------------------------------- the optimizer

    def prepare_optimizer(
        self, *, beta1: float, beta2: float, epsilon: float, weight_decay: float, l2: float, clip_norm: float | None
    ) -> None:
        """Captures the optimizer's step."""
        decays = np.zeros(max(16, -(-self.num_floats // 4) * 4), np.uint8)
        for p in self.memory.graph.parameters:
            start = self.memory.at[p.variable]
            decays[start : start + p.size] = len(p.shape) > 1
        low_at = self.memory.low_places()
        buffers = [Buffer(decays.nbytes, "decays"), Buffer(max(low_at.nbytes, 16), "low_at"), Buffer(256, "squares")]
        for buffer in buffers:
            self._at[id(buffer)] = self.device.alloc(buffer.nbytes)
        n = self.num_floats
        low_at_view = View(buffers[1], 0, (n,), (1,), "i32")
        self.device.upload(self.address(View(buffers[0], 0, (1,), (1,))), decays)
        self.write(low_at_view, low_at)
        low = View(self.memory.copies, 0, (self.memory.copies.nbytes // BYTES[self.low],), (1,), self.low)
        squares, calls = None, []
        grad = self.flat_gradient(0)
        if clip_norm is not None:
            squares = View(buffers[2], 0, (1,), (1,))
            partial = Buffer(4 * 264, "partial")
            self._at[id(partial)] = self.device.alloc(partial.nbytes)
            calls.append(Call("squares", (squares, View(partial, 0, (264,), (1,))), (grad,)))
        told = {
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": epsilon,
            "weight_decay": weight_decay,
            "l2": l2,
            "clip_norm": clip_norm or 0.0,
            "low_type": self.low,
        }
        ins = (grad, View(buffers[0], 0, (1,), (1,)), low_at_view, View(self.scalars, 0, (8,), (1,)), squares)
        outs = (self.flat_parameters, self.flat_moment(0), self.flat_moment(1), low)
        calls.append(Call("adam", outs, ins, told))
        self.optimizer_calls = calls
        self._low_copies = Call("low_copies", outs, ins, told)
        self._apply = self.device.capture(calls, self.address)
        self.kernels.update(call.kernel for call in calls)

    def set_parameters(self, flat: NDArray[np.float32]) -> None:
        """All parameters, and their copies in the low type."""
        self.write(self.flat_parameters, self.memory.spread(flat))
        self.device.launch(self._low_copies, self.address)
        self.device.synchronize()

    def set_loss_scale(self, scale: float) -> None:
        """For float16: what the loss is multiplied by before its gradients are taken. Powers of two lose nothing."""
        self._scalar_host[8:10] = scale, 1.0 / scale
        self.device.upload(self._at[id(self.scalars)], self._scalar_host)
        self.device.synchronize()

    def step(self, rate: float, scale: float, power1: float, power2: float) -> None:
        """StartPoint the optimizer's step over the flat gradient times `scale`."""
        self._scalar_host[:4] = rate, scale, power1, power2
        self.device.upload(self._at[id(self.scalars)], self._scalar_host)
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
        for call in plan.calls:
            graph = self.device.capture([call] * launches, plan.address)  # without what the host needs to start them

            def work(graph: int = graph) -> None:
                self.device.replay(graph)

            found.append((call, min(self.device.milliseconds(work) for _ in range(4)) / launches))
            self.device.forget(graph)
        return found
