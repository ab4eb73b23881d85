"""Groups of operators that one kernel does better: found in the graph, replaced by operators of our own (`pw_...`).

    pw_linear        matmul by a parameter, bias, ReLU                       (and its gradient)
    pw_fm_pairs      the factorization machine's sum over pairs              (and its gradient, added to the other ones)
    pw_dot_pairs     dot products of all pairs of vectors, the triangle only (and its gradient)
    pw_scatter_rows  gradients of looked-up rows, added in place: no array of the table's size is made on the way

Every rule looks at all consumers of what it takes away, so a model that uses an inner result elsewhere keeps the plain
operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from paddlewheel.trainer.kernels.gpu.graph import EMPTY, Graph, Op


class _Editor:
    """A graph's operators, with who makes and who reads each variable."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: list[Op | None] = list(graph.ops)
        self.parameters = {p.variable: p for p in graph.parameters}
        self.results = set(graph.outputs.values())
        self.readers = graph.consumers()
        self.maker = {name: at for at, op in enumerate(graph.ops) for names in op.outs.values() for name in names}

    def forward_readers(self, name: str) -> list[int]:
        """Places of the operators, other than gradients, that read a variable."""
        return [at for at in self.readers.get(name, []) if not self.graph.ops[at].type.endswith("_grad")]

    def only(self, name: str, kind: str, **attrs: object) -> int | None:
        """The one operator that reads the variable, if it is of this type and has these attributes."""
        found = self.forward_readers(name)
        if len(set(found)) != 1 or name in self.results:
            return None
        op = self.graph.ops[found[0]]
        return found[0] if op.type == kind and all(op.attrs.get(k) == v for k, v in attrs.items()) else None

    def gradient_of(self, at: int, kind: str) -> int | None:
        """The operator that computes the gradient of the operator at a place."""
        op = self.graph.ops[at]
        for place, other in enumerate(self.graph.ops):
            if other.type == kind and all(
                other.ins.get(slot) == names for slot, names in op.ins.items() if slot in other.ins
            ):
                outs = [name for names in op.outs.values() for name in names]
                grads = other.ins.get("Out@GRAD", ())
                if any(g.split("@GRAD")[0] in outs for g in grads):
                    return place
        return None

    def result(self) -> Graph:
        return replace(self.graph, ops=[op for op in self.ops if op is not None])


def fused(graph: Graph) -> Graph:
    """The same graph with our operators in it."""
    for rule in (_linear, _fm_pairs, _dot_pairs, _rows):
        graph = rule(graph)
    return graph.needed()


def _linear(graph: Graph) -> Graph:
    edit = _Editor(graph)
    for at, op in enumerate(graph.ops):
        if op.type != "matmul_v2" or op.attrs.get("trans_x") or op.attrs.get("trans_y"):
            continue
        weight = edit.parameters.get(op.one("Y"))
        if weight is None or len(weight.shape) != 2 or op.one("X") in edit.parameters:
            continue
        places, out, bias, relu = [at], op.out("Out"), None, False
        assert out is not None
        add = edit.only(out, "elementwise_add", axis=-1)
        if (
            add is not None
            and graph.ops[add].one("X") == out
            and len(edit.parameters.get(graph.ops[add].one("Y"), weight).shape) == 1
        ):
            places.append(add)
            bias, out = graph.ops[add].one("Y"), graph.ops[add].out("Out")
            assert out is not None
            activation = edit.only(out, "relu")
            if activation is not None:
                places.append(activation)
                relu, out = True, graph.ops[activation].out("Out")
                assert out is not None
        kinds = ("matmul_v2_grad", "elementwise_add_grad", "relu_grad")[: len(places)]
        grads = [_gradient(edit, graph.ops[place], kind) for place, kind in zip(places, kinds, strict=True)]
        if any(g is None for g in grads) and any(g is not None for g in grads):
            continue
        ins = {"X": op.ins["X"], "W": op.ins["Y"]} | ({"B": (bias,)} if bias else {})
        for place in places:
            edit.ops[place] = None
        edit.ops[places[-1]] = Op("pw_linear", ins, {"Out": (out,)}, {"relu": relu})
        if grads[0] is None:
            continue
        found = [graph.ops[g] for g in grads if g is not None]
        outs = {"X@GRAD": found[0].outs.get("X@GRAD", ()), "W@GRAD": found[0].outs.get("Y@GRAD", ())}
        if bias:
            outs["B@GRAD"] = found[1].outs.get("Y@GRAD", ())
        for g in grads:
            assert g is not None
            edit.ops[g] = None
        assert grads[0] is not None
        edit.ops[grads[0]] = Op(
            "pw_linear_grad", {**ins, "Out": (out,), "Out@GRAD": found[-1].ins["Out@GRAD"]}, outs, {"relu": relu}
        )
    return edit.result()


def _gradient(edit: _Editor, op: Op, kind: str) -> int | None:
    """The gradient operator of this very operator: it reads the same inputs, or (ReLU) the same output."""
    readers = edit.readers.get(op.outs["Out"][0] if kind == "relu_grad" else op.one("Y"), [])
    for place in readers:
        other = edit.graph.ops[place]
        if other.type != kind:
            continue
        if kind == "relu_grad" or (other.ins["X"] == op.ins["X"] and other.ins["Y"] == op.ins["Y"]):
            return place
    return None


def _fm_pairs(graph: Graph) -> Graph:
    edit = _Editor(graph)
    for at, op in enumerate(graph.ops):
        if op.type != "reduce_sum" or op.attrs.get("dim") != [1] or op.attrs.get("keep_dim"):
            continue
        e, total = op.one("X"), op.out("Out")
        chain = _follow(edit, total, ("elementwise_mul", {}), ("reduce_sum", {"dim": [1], "keep_dim": True}))
        if chain is None:
            continue
        squared = [
            place
            for place in edit.forward_readers(e)
            if graph.ops[place].type == "elementwise_mul"
            and graph.ops[place].ins["X"] == graph.ops[place].ins["Y"] == (e,)
        ]
        if not squared:
            continue
        other = _follow(edit, graph.ops[squared[0]].out("Out"), ("reduce_sum", {"dim": [1, 2]}), ("reshape2", {}))
        if other is None:
            continue
        end = _follow(
            edit, graph.ops[chain[-1]].out("Out"), ("elementwise_sub", {}), ("scale", {"scale": 0.5, "bias": 0.0})
        )
        if end is None or graph.ops[end[0]].ins["Y"] != graph.ops[other[-1]].outs["Out"]:
            continue
        forward = [at, *chain, squared[0], *other, *end]
        out = graph.ops[end[-1]].outs["Out"]
        if not _replace_gradient(edit, e, out, forward, "pw_fm_pairs_grad"):
            continue
        for place in forward:
            edit.ops[place] = None
        edit.ops[max(forward)] = Op("pw_fm_pairs", {"E": (e,)}, {"Out": out})
    return edit.result()


def _dot_pairs(graph: Graph) -> Graph:
    edit = _Editor(graph)
    for at, op in enumerate(graph.ops):
        if (
            op.type != "matmul_v2"
            or op.ins["X"] != op.ins["Y"]
            or not op.attrs.get("trans_y")
            or op.attrs.get("trans_x")
        ):
            continue
        chain = _follow(edit, op.out("Out"), ("reshape2", {}), ("index_select", {"dim": 1}))
        if chain is None:
            continue
        size = graph.ops[chain[0]].attrs["shape"][-1]
        index = edit.maker.get(graph.ops[chain[1]].one("Index"))
        num_vectors = round(size**0.5)
        rows, columns = np.tril_indices(num_vectors, -1)
        if index is None or graph.ops[index].type != "assign_value":
            continue
        if values_of(graph.ops[index]).tolist() != (rows * num_vectors + columns).tolist():
            continue
        forward = [at, *chain]
        out = graph.ops[chain[-1]].outs["Out"]
        if not _replace_gradient(edit, op.one("X"), out, forward, "pw_dot_pairs_grad"):
            continue
        for place in forward:
            edit.ops[place] = None
        edit.ops[chain[-1]] = Op("pw_dot_pairs", {"E": op.ins["X"]}, {"Out": out})
    return edit.result()


def values_of(op: Op) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """The array of an `assign_value`."""
    for name, kind in (("int32_values", np.int32), ("fp32_values", np.float32), ("values", np.float32)):
        if op.attrs.get(name):
            return np.asarray(op.attrs[name], kind).reshape(op.attrs["shape"])
    raise NotImplementedError(f"assign_value of {sorted(op.attrs)}")


def _follow(edit: _Editor, name: str | None, *steps: tuple[str, Mapping[str, object]]) -> list[int] | None:
    places = []
    for kind, attrs in steps:
        place = None if name is None else edit.only(name, kind, **attrs)
        if place is None:
            return None
        places.append(place)
        name = edit.graph.ops[place].out("Out")
    return places


def _replace_gradient(edit: _Editor, e: str, out: tuple[str, ...], forward: list[int], kind: str) -> bool:
    """Put one operator in the place of the gradients of the forward operators, back to those of `e`.

    True also where the graph has no gradients at all.
    """
    graph = edit.graph
    inner = {name for place in forward for names in graph.ops[place].outs.values() for name in names} - set(out)
    flow, places, ends = {f"{out[0]}@GRAD"}, [], []
    for place, op in enumerate(graph.ops):
        if op.ins and op.type != "concat" and any(n in flow for names in op.ins.values() for n in names):
            grads = [
                n
                for slot, names in op.ins.items()
                if slot.endswith("@GRAD") or op.type in {"sum", "scale"}
                for n in names
            ]
            made = [n for names in op.outs.values() for n in names if n != EMPTY]
            if not all(n in flow for n in grads):
                continue
            places.append(place)
            for n in made:
                base = n.split("@GRAD")[0]
                if base == e:
                    ends.append(n)
                elif base in inner:
                    flow.add(n)
                else:
                    return False
    if not places:
        return True
    results: tuple[str, ...]
    rest: tuple[str, ...]
    total = next((p for p, op in enumerate(graph.ops) if op.type == "sum" and set(ends) <= set(op.ins["X"])), None)
    if total is None or not ends:
        if len(ends) != 1:
            return False
        position, results, rest = max(places), (ends[0],), ()
    else:
        position, results = total, graph.ops[total].outs["Out"]
        rest = tuple(n for n in graph.ops[total].ins["X"] if n not in ends)
    for place in places:
        edit.ops[place] = None
    ins = {"E": (e,), "Out@GRAD": (f"{out[0]}@GRAD",)}
    if len(rest) == 1:
        ins["Add"], rest = rest, ()
    if not rest:
        edit.ops[position] = Op(kind, ins, {"E@GRAD": results})
    else:  # the sum stays, with one entry for ours
        edit.ops[max(places)] = Op(kind, ins, {"E@GRAD": (ends[0],)})
        edit.ops[position] = Op("sum", {"X": (*rest, ends[0])}, {"Out": results})
    return True


def _rows(graph: Graph) -> Graph:
    edit = _Editor(graph)
    padded: dict[str, list[int]] = {}  # a table's rows -> where zeros are put before them
    for at, op in enumerate(graph.ops):
        if (
            op.type != "concat"
            or op.attrs.get("axis") != 0
            or len(op.ins["X"]) != 2
            or not op.ins["X"][1].endswith("/rows")
        ):
            continue
        made = graph.ops[edit.maker[op.ins["X"][0]]]
        if made.type == "fill_constant" and made.attrs.get("value") == 0.0:
            padded.setdefault(op.ins["X"][1], []).append(at)
    for rows, places in padded.items():
        _rows_of_table(edit, rows, places)
    return edit.result()


def _rows_of_table(edit: _Editor, rows: str, places: list[int]) -> None:
    graph = edit.graph
    tables: dict[str, Op | None] = {}
    fits = True
    for at in places:
        out = graph.ops[at].outs["Out"][0]
        edit.ops[at] = Op("pw_padded_rows", {"X": (rows,)}, {"Out": (out,)})
        tables[out] = None
        for place in edit.forward_readers(out):
            reader = graph.ops[place]
            if reader.type == "slice" and reader.attrs["axes"] == [1] and not reader.attrs.get("decrease_axis"):
                tables[reader.outs["Out"][0]] = reader
            else:
                fits &= reader.type == "gather"
    fits &= set(edit.forward_readers(rows)) == set(places)
    fits &= all(graph.ops[p].type in {"gather", "slice"} for name in tables for p in edit.forward_readers(name))
    lookups = [p for p, o in enumerate(graph.ops) if o.type == "gather_grad" and o.one("X") in tables]
    if not fits or not lookups:
        return
    flow = {graph.ops[p].outs["X@GRAD"][0] for p in lookups}
    gone = []
    for place, other in enumerate(graph.ops):
        if other.type not in {"sum", "slice_grad", "concat_grad", "scale"}:
            continue
        sums = other.type in {"sum", "scale"}
        grads = [n for slot, names in other.ins.items() if sums or slot == "Out@GRAD" for n in names]
        if grads and all(n in flow for n in grads):
            gone.append(place)
            flow.update(n for names in other.outs.values() for n in names if n != EMPTY)
    if f"{rows}@GRAD" not in flow:
        return
    for place in gone:
        edit.ops[place] = None
    for place in lookups:
        old = graph.ops[place]
        cut = tables[old.one("X")]
        attrs = {"starts": 0, "ends": None}
        if cut is not None:
            attrs = {"starts": cut.attrs["starts"][0], "ends": cut.attrs["ends"][0]}
        ins = {"Index": old.ins["Index"], "Out@GRAD": old.ins["Out@GRAD"], "Rows": (rows,)}
        edit.ops[place] = Op("pw_scatter_rows", ins, {"Rows@GRAD": (f"{rows}@GRAD",)}, attrs)
