"""What the rules of lowering share: the program's layout, its variables so far, its calls so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paddlewheel.trainer.kernels.gpu.deferred import Values
from paddlewheel.trainer.kernels.gpu.emitter import Emitter, LookupDraft
from paddlewheel.trainer.kernels.gpu.graph import Graph, Op, Uses
from paddlewheel.trainer.kernels.gpu.layout import Layout
from paddlewheel.trainer.kernels.gpu.views import Shape, View, temporary

Saved = TypeVar("Saved")


class Context:
    """State of the lowering of one program.

    Attributes:
        emit: makes calls.
        values: variables' arrays.
        host: int32 vectors whose values are known, such as shapes, by variable.
        shapes: what a variable's shape was before it was reshaped, by the name that the gradient reads.
        lookups: lookups that make FM pairs, by the variable of the embeddings.
        unshaped: gradients that a scatter reads as they lie, by the variable that has them in another shape.
        masked: gradients that passed the ReLU before them, with the sums of their columns if those were made too.
        low_copies: matrices' copies in the low type.
        num_dropouts: masks that are drawn.
    """

    def __init__(self, graph: Graph, layout: Layout, *, tf32: bool, seed: int, loss_scale: View | None) -> None:
        self.graph, self.layout, self.buffers = graph, layout, layout.buffers
        self.seed, self.loss_scale = seed, loss_scale
        self.uses = Uses(graph)
        self.emit = Emitter(layout.buffers.constants, tf32=tf32)
        self.values = Values(self.emit, layout.inputs(graph))
        self.host: dict[str, list[int]] = {}
        self.shapes: dict[str, Shape] = {}
        self.lookups: dict[str, LookupDraft] = {}
        self.unshaped: dict[str, View] = {}
        self.masked: dict[str, View | None] = {}
        self.low_copies: dict[View, View] = {}
        self.num_dropouts = 0
        self._saved: dict[str, object] = {}

    @property
    def low(self) -> str:
        """Type of the operands of matrix products."""
        return self.buffers.low

    def read(self, op: Op, slot: str) -> View:
        """An operator's input."""
        return self.values.read(op.one(slot))

    def write(self, op: Op, slot: str, view: View) -> None:
        """An operator's output; nothing where it is not wanted."""
        name = op.out(slot)
        if name is not None:
            self.values.set(name, view)

    def grad_target(self, name: str, shape: Shape) -> View:
        """Where a parameter's gradient is written: its place in the flat gradient, if it goes there as it is."""
        slot = self.layout.grad_slots.get(name)
        view = temporary(shape) if slot is None else slot.with_shape(shape)
        assert view is not None
        self.values.set(name, view)
        return view

    def num_readers(self, name: str) -> int:
        """Forward operators that read a variable's array; pairs that a lookup makes need no array."""
        return sum(not (op.type == "pw_fm_pairs" and name in self.lookups) for op in self.uses.forward(name))

    def save(self, name: str, value: object) -> None:
        """What a forward operator keeps for its gradient, by one of its outputs."""
        self._saved[name] = value

    def saved(self, name: str, kind: type[Saved]) -> Saved:
        """What was kept."""
        value = self._saved[name]
        assert isinstance(value, kind)
        return value


Rule = Callable[[Context, Op], None]

RULES: dict[str, Rule] = {}
"""How each type of operator is lowered."""


def lowers(*types: str) -> Callable[[Rule], Rule]:
    """Makes a function the rule for types of operators."""

    def register(rule: Rule) -> Rule:
        for kind in types:
            assert kind not in RULES, kind
            RULES[kind] = rule
        return rule

    return register
