"""A static program as plain data: what is computed, in which order, from which inputs.

Paddle builds the program and its backward part; this is what the GPU side reads of it. Holds no Paddle object, so it
can be written to a file and run where Paddle is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EMPTY = "@EMPTY@"


@dataclass(frozen=True)
class Op:
    """One operator: its type as Paddle names it, variables by slot, attributes."""

    type: str
    ins: Mapping[str, tuple[str, ...]]
    outs: Mapping[str, tuple[str, ...]]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def one(self, slot: str) -> str:
        """The single input variable of a slot."""
        (name,) = self.ins[slot]
        return name

    def out(self, slot: str) -> str | None:
        """The single output variable of a slot; None where it is not wanted."""
        names = self.outs.get(slot, ())
        return names[0] if names and names[0] != EMPTY else None

    def result(self, slot: str = "Out") -> str:
        """The first output variable of a slot, which must be there."""
        return self.outs[slot][0]

    @property
    def is_gradient(self) -> bool:
        """Whether it is part of the backward pass."""
        return self.type.endswith("_grad")


@dataclass(frozen=True)
class Parameter:
    """A dense parameter: its variable, shape, and where its first float lies in the flat arrays."""

    name: str
    variable: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Floats."""
        size = 1
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class Graph:
    """A program whose inputs are `feeds` and `parameters`, and whose results are `outputs`.

    Attributes:
        ops: in an order that respects their dependences.
        feeds: input variables and their types (`f32` or `i32`).
        parameters: in the order of the flat gradient.
        outputs: variables that are read after a run, by what they are: `logit`, `rows/<table>`, `flat`.
    """

    ops: Sequence[Op]
    feeds: Mapping[str, str]
    parameters: Sequence[Parameter]
    outputs: Mapping[str, str]

    def consumers(self) -> dict[str, list[int]]:
        """Places of the operators that read each variable."""
        found: dict[str, list[int]] = {}
        for at, op in enumerate(self.ops):
            for names in op.ins.values():
                for name in names:
                    found.setdefault(name, []).append(at)
        return found

    def needed(self) -> Graph:
        """Without the operators that nothing asks for."""
        wanted = set(self.outputs.values())
        kept = []
        for op in reversed(self.ops):
            if any(name in wanted for names in op.outs.values() for name in names):
                kept.append(op)
                wanted.update(name for names in op.ins.values() for name in names)
        used = {name for op in kept for names in op.ins.values() for name in names} | set(self.outputs.values())
        feeds = {name: kind for name, kind in self.feeds.items() if name in used}
        return Graph(kept[::-1], feeds, self.parameters, self.outputs)


class Uses:
    """Who reads each variable of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._results = set(graph.outputs.values())
        self._readers = {name: [graph.ops[at] for at in places] for name, places in graph.consumers().items()}

    def readers(self, name: str) -> list[Op]:
        """The operators that read a variable, as often as they name it."""
        return self._readers.get(name, [])

    def forward(self, name: str) -> list[Op]:
        """Those of them that are not gradients."""
        return [op for op in self.readers(name) if not op.is_gradient]

    def feeds_only(self, name: str, kind: str) -> bool:
        """Whether operators of this type, and gradients, are all that reads the variable."""
        if name in self._results:
            return False
        return bool(self.readers(name)) and all(op.type == kind for op in self.forward(name))

    def only(self, name: str, kind: str) -> bool:
        """Whether nothing but operators of this type reads the variable."""
        return all(op.type == kind for op in self.readers(name))


_ATTRIBUTES = {
    "axis",
    "axes",
    "starts",
    "ends",
    "decrease_axis",
    "shape",
    "value",
    "dtype",
    "dim",
    "keep_dim",
    "reduce_all",
    "trans_x",
    "trans_y",
    "scale",
    "bias",
    "bias_after_scale",
    "in_dtype",
    "out_dtype",
    "start_axis",
    "stop_axis",
    "epsilon",
    "begin_norm_axis",
    "dropout_prob",
    "dropout_implementation",
    "is_test",
    "seed",
    "keepdim",
    "porder",
    "shifts",
    "hidden_size",
    "mode",
    "fp32_values",
    "int32_values",
    "values",
    "beta",
    "threshold",
    "asvector",
}


def read(program: Any, feeds: Mapping[str, str], parameters: Sequence[Parameter], outputs: Mapping[str, str]) -> Graph:
    """The graph of a Paddle program with one block."""
    ops = []
    for op in program.global_block().ops:
        ins = {slot: tuple(op.input(slot)) for slot in op.input_names if op.input(slot)}
        outs = {slot: tuple(op.output(slot)) for slot in op.output_names if op.output(slot)}
        attrs = {name: op.attr(name) for name in op.attr_names if name in _ATTRIBUTES}
        ops.append(Op(op.type, ins, outs, attrs))
    return Graph(ops, feeds, parameters, outputs).needed()
