"""What a job's model consists of, as one batch shows: layers, shapes, parameters, arithmetic.

Legend: B batch rows, U unique keys of a table, W floats of a pulled row, D dense columns, L ids of a list, Y labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.trainer.dense.inputs import Floats, TableLayout, layouts
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.models.base import Model

_PRODUCTS = frozenset({"matmul_v2", "bmm"})
_SUMS = frozenset({"reduce_sum", "reduce_mean", "reduce_max", "sum", "softmax", "p_norm", "logsumexp", "layer_norm"})
_MOVES = frozenset(
    {
        *(
            "reshape2",
            "transpose2",
            "concat",
            "slice",
            "strided_slice",
            "split",
            "stack",
            "gather",
            "index_select",
            "roll",
        ),
        *(
            "flatten_contiguous_range",
            "squeeze2",
            "unsqueeze2",
            "shape",
            "cast",
            "assign",
            "assign_value",
            "tile",
            "where",
        ),
        *("fill_constant", "fill_any_like", "fill_constant_batch_size_like", "expand_v2", "expand_as_v2"),
    }
)
_MAPS = frozenset(
    {
        *(
            "elementwise_add",
            "elementwise_sub",
            "elementwise_mul",
            "elementwise_div",
            "elementwise_max",
            "elementwise_min",
        ),
        *("elementwise_pow", "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "square", "abs", "pow", "scale", "clip"),
        *("equal", "greater_than", "greater_equal", "less_than", "not_equal", "dropout", "gelu", "swish", "softplus"),
        *("leaky_relu", "silu", "logsigmoid"),
    }
)


@dataclass(frozen=True)
class Layer:
    """One layer as it was called, or one that is called by nobody and has parameters.

    Attributes:
        name: its path in the model; empty for the model itself, which has what its layers do not.
        kind: name of its class.
        output: shape of what it returned for the batch; None: it returned no single array, or was not called.
        parameters: floats that are its own and not of a layer within it.
        flops: of one batch, forward, without those of layers within it; a multiply-add is two.
    """

    name: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    flops: int


@dataclass(frozen=True)
class TableUse:
    """What the model takes from a table for the batch: `keys` rows of `width` floats, first-order weights included."""

    name: str
    features: tuple[str, ...]
    width: int
    keys: int


@dataclass(frozen=True)
class Summary:
    """A model and one batch through it, before any training.

    Attributes:
        model: its kind.
        layers: in the order in which they are first called, the model itself last.
        tables: what it reads.
        parameters: of the dense part.
        rows: of the batch.
        made_up: why the batch is random numbers and not rows of `data.train`; None: it is such rows.
        loss: mean over the batch's rows, by their weight.
        mean_predictions: of each label.
        uncounted: Paddle's operators in the model whose arithmetic is not known, and not in `flops`.
    """

    model: str
    layers: tuple[Layer, ...]
    tables: tuple[TableUse, ...]
    parameters: int
    rows: int
    made_up: str | None
    loss: float
    mean_predictions: dict[str, float]
    uncounted: tuple[str, ...]

    @property
    def flops(self) -> int:
        """Of one batch, forward."""
        return sum(layer.flops for layer in self.layers)


@dataclass
class _Call:
    """A layer, its operators, and the name of what it returned."""

    name: str
    layer: Any
    operators: list[Any] = field(default_factory=list)
    output: str | None = None


class _Watch:
    """Notes which layer adds which operators while the model is built."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._open: list[_Call] = []
        self._seen = 0

    def __call__(self, model: Model) -> None:
        self._seen = self._num_operators()
        for name, layer in model.named_sublayers(include_self=True):
            call = _Call(name, layer)
            layer.register_forward_pre_hook(lambda *_, call=call: self._enter(call))
            layer.register_forward_post_hook(lambda _layer, _inputs, output, call=call: self._leave(call, output))
            self.calls.append(call)
        self.calls.append(self.calls.pop(0))

    def _enter(self, call: _Call) -> None:
        self._settle()
        self._open.append(call)

    def _leave(self, call: _Call, output: Any) -> None:
        self._settle()
        self._open.pop()
        if isinstance(output, paddle.static.Variable):
            call.output = output.name

    def _settle(self) -> None:
        """What was added since the last time belongs to the innermost layer that is being called."""
        if self._open:
            self._open[-1].operators += paddle.static.default_main_program().global_block().ops[self._seen :]
        self._seen = self._num_operators()

    @staticmethod
    def _num_operators() -> int:
        return len(paddle.static.default_main_program().global_block().ops)


def summarise(job: JobConfig) -> Summary:
    """Builds a job's model with Paddle's own operators, on the CPU, and sends a batch of `data.batch_rows` through it.

    The batch is the first rows of `data.train`, or random numbers where these cannot be read. Embeddings, which
    servers would give, are random.

    Raises:
        ModelError: the model cannot be built.
    """
    used = {name: job.tables[name] for name in job.data.tables}
    tables = layouts(job.data, used)
    watch = _Watch()
    program = DenseProgram(
        tables,
        num_dense=len(job.data.dense_columns),
        num_labels=len(job.data.labels),
        model=job.model,
        optimizer=job.train.dense_optimizer,
        seed=job.seed,
        rank=0,
        on_built=watch,
    )
    rng = np.random.default_rng(job.seed)
    batch, made_up = _first_rows(job, tables, rng)
    rows: dict[str, Floats] = {
        table.name: rng.uniform(
            -used[table.name].initial_range,
            used[table.name].initial_range,
            (len(batch.tables[table.name].keys_U), table.pull_width),
        ).astype(np.float32)
        for table in tables
    }
    operators = [operator for call in watch.calls for operator in call.operators]
    names = {name for operator in operators for name in (*operator.input_arg_names, *operator.output_arg_names)}
    shapes = program.shapes(program.feed_with_labels(batch, rows), sorted(names))
    found = program.gradients(batch, rows)
    predicted_BY = 1 / (1 + np.exp(-found.logit_BY.astype(np.float64)))
    uncounted = {operator.type for operator in operators if flops_of(operator, shapes) is None}
    return Summary(
        model=job.model.kind,
        layers=tuple(layer for call in watch.calls if (layer := _layer(call, shapes)) is not None),
        tables=tuple(
            TableUse(
                table.name,
                (*table.single, *(feature.name for feature in table.lists)),
                table.pull_width,
                len(rows[table.name]),
            )
            for table in tables
        ),
        parameters=program.num_floats,
        rows=batch.num_rows,
        made_up=made_up,
        loss=float(found.flat_N[-2] / found.flat_N[-1]),
        mean_predictions=dict(zip(job.data.labels, predicted_BY.mean(axis=0).tolist(), strict=True)),
        uncounted=tuple(sorted(uncounted)),
    )


def _layer(call: _Call, shapes: Mapping[str, tuple[int, ...]]) -> Layer | None:
    own = sum(math.prod(p.shape) for p in call.layer.parameters(include_sublayers=False))
    if call.name and not call.operators and not own:
        return None  # such as a list of layers
    flops = sum(flops_of(operator, shapes) or 0 for operator in call.operators)
    output = None if call.output is None else shapes.get(call.output)
    return Layer(call.name, type(call.layer).__name__, output, own, flops)


def flops_of(operator: Any, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Arithmetic of one of Paddle's operators: two for each multiply-add of a product, one for each number that a sum
    reads or that a function of single numbers writes. None: it is not known.
    """

    def size(names: list[str]) -> int:
        return sum(math.prod(shapes[name]) for name in names)

    if operator.type in _MOVES:
        return 0
    if operator.type in _PRODUCTS:
        factor = shapes[operator.input("X")[0]]
        is_turned = operator.type == "matmul_v2" and operator.attr("trans_x") and len(factor) > 1
        return 2 * size(operator.output("Out")) * factor[-2 if is_turned else -1]
    if operator.type in _SUMS:
        return size(operator.input("X"))
    if operator.type in _MAPS:
        return size(operator.output("Out"))
    if operator.type == "rnn":
        steps, rows, _ = shapes[operator.input("Input")[0]]
        return 2 * steps * rows * sum(math.prod(s) for n in operator.input("WeightList") if len(s := shapes[n]) == 2)
    return None


def _first_rows(job: JobConfig, tables: list[TableLayout], rng: np.random.Generator) -> tuple[Batch, str | None]:
    """The first batch of the training data; where there is none, one that is made up, and why."""
    if not job.data.train:
        return _made_up(job, tables, rng), "the job has no data.train"
    try:
        data = Dataset.open(job.data.train, job.data)
        with Loader(data, job.data, data.slices()[:1], seed=job.seed, epoch=0, training=False) as loader:
            batch = next(iter(loader), None)
    except DataError as error:
        return _made_up(job, tables, rng), str(error)
    if batch is None:
        return _made_up(job, tables, rng), "data.train has no rows"
    return batch, None


def _made_up(job: JobConfig, tables: list[TableLayout], rng: np.random.Generator) -> Batch:
    """Random rows, as many as a batch has: each id is another key, and lists are full."""
    B = job.data.batch_rows
    lengths = {feature.name: feature.max_length for feature in job.data.sparse}

    def keys(table: TableLayout) -> TableKeys:
        index: dict[str, NDArray[np.int32]] = {}
        ids = 0
        for name in (*table.single, *(feature.name for feature in table.lists)):
            length = lengths[name]
            count = B * (length or 1)
            ids_of_rows = np.arange(ids + 1, ids + count + 1, dtype=np.int32)
            index[name] = ids_of_rows if length is None else ids_of_rows.reshape(B, length)
            ids += count
        single = [index[name] for name in table.single]
        single_BF = np.stack(single, axis=1) if single else np.zeros((B, 0), np.int32)
        weights = {f.name: np.ones(index[f.name].shape, np.float32) for f in table.lists if f.weighted}
        return TableKeys(np.arange(1, ids + 1, dtype=np.uint64), index, single_BF, tuple(table.single), weights)

    return Batch(
        num_rows=B,
        dense_BD=rng.standard_normal((B, len(job.data.dense_columns))).astype(np.float32),
        labels_BL=(rng.random((B, len(job.data.labels))) < 0.5).astype(np.float32),
        tables={table.name: keys(table) for table in tables},
        spans=(),
    )
