"""The dense part as static programs: forward and gradients, the optimizer step, prediction.

Three programs share one scope. `gradients` ends at one flat float32 array, so that the host can sum it over trainers,
read the control flags beside it and skip a bad step before anything is changed; `apply` takes the summed array.

Legend: B batch rows, F features, L ids of a list, U unique keys of a table, W floats of a pulled row, D dense columns,
Y labels, N floats of the flat gradient.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.trainer.dense.inputs import Floats, TableLayout, batch_feed, feature_spec
from paddlewheel.trainer.distributed.compression import CompressedSum
from paddlewheel.trainer.distributed.process_group import ProcessGroup
from paddlewheel.trainer.job.train import DenseOptimizerConfig, WireType
from paddlewheel.trainer.kernels import cpu
from paddlewheel.trainer.models import ModelConfig, ModelError, build
from paddlewheel.trainer.models.base import Model, ModelInputs, SequenceInput, Variable

_ADAM_STATE = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")  # Paddle's names


@dataclass(frozen=True)
class HostGradients:
    """What one batch asks to change.

    Attributes:
        flat_N: gradients of the summed loss for all dense parameters, then the loss summed over rows, then the summed
            row weight.
        tables: per table the gradient of the summed loss for every unique key, [U, W].
        logit_BY: log-odds before the step.
    """

    flat_N: Floats
    tables: Mapping[str, Floats]
    logit_BY: Floats

    @property
    def finite(self) -> bool:
        """Whether all values are finite, and small enough for optimizers to square and add up in float32."""
        return all(bool(np.isfinite(np.vdot(a, a))) for a in (self.flat_N, *self.tables.values()))


class HostStepBuffer:
    """A `StepBuffer` in the host's memory.

    Args:
        program: whose gradients they are.
        num_more: floats behind the gradient.
        wire: what the gradient is rounded to on its way; the floats behind it are not.
    """

    def __init__(self, program: DenseProgram, num_more: int, wire: WireType) -> None:
        self._program, self._wire = program, wire
        self._compressed: CompressedSum | None = None
        self._all_N = np.zeros(program.num_floats + num_more, np.float32)
        self._gradient_N, self.tail = self._all_N[: program.num_floats], self._all_N[program.num_floats :]
        self._taken = False

    def clear(self) -> None:
        """Begin a step: everything is 0, unless it is written over."""
        self.tail[:] = 0.0
        self._taken = False

    def take(self, gradients: HostGradients) -> None:
        """This trainer's part, with its loss and weight in the first two floats of `tail`."""
        self._all_N[: len(gradients.flat_N)] = gradients.flat_N
        self._taken = True

    def sum(self, sync: ProcessGroup) -> None:
        """Over all trainers; `tail` holds sums then.

        Raises:
            PeerLostError: a trainer is gone.
        """
        if not self._taken:
            self._gradient_N[:] = 0.0
        if self._wire == "float32" or sync.num_trainers == 1:
            sync.all_reduce(self._all_N)
            return
        if self._compressed is None:
            self._compressed = CompressedSum(sync, self._program.num_floats, self._wire)
        self._compressed.all_reduce(self._gradient_N, self.tail)

    def apply(self, total_weight: float, *, rate_factor: float = 1.0) -> None:
        """One step of the optimizer with what was summed; see `DenseProgram.apply`.

        Without this call it is as if that sum had not been: what rounding leaves over stays as it was.
        """
        if self._compressed is not None:
            self._compressed.keep()
        self._program.apply(self._gradient_N, total_weight, rate_factor=rate_factor)


def padded_count(count: int) -> int:
    """The next size of an eighth of a power of two, at least 64."""
    if count <= 64:
        return 64
    step = 1 << max(3, (count - 1).bit_length() - 4)
    return -(-count // step) * step


def _padded(feed: Mapping[str, NDArray[Any]], num_rows: int) -> dict[str, NDArray[Any]]:
    """A batch's arrays with rows of zeros behind: no ids, label 0, weight 0. Pulled rows are of keys, and stay."""
    more = padded_count(num_rows) - num_rows
    return {
        name: array
        if name.endswith("/rows")
        else np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])
        for name, array in feed.items()
    }


def biases_in(parameters: Mapping[str, NDArray[Any]], places: Sequence[tuple[str, int]]) -> NDArray[np.float64]:
    """The output biases among parameters, [Y]; places: see `DenseBackend.output_biases`."""
    return np.array([parameters[name].reshape(-1)[place] for name, place in places], np.float64)


def with_biases(
    parameters: Mapping[str, NDArray[Any]], places: Sequence[tuple[str, int]], values_Y: NDArray[np.float64]
) -> dict[str, NDArray[Any]]:
    """Those of the parameters that hold output biases, with new ones."""
    changed = {name: parameters[name].copy() for name, _ in places}
    for (name, place), value in zip(places, values_Y.tolist(), strict=True):
        changed[name].reshape(-1)[place] = value
    return changed


@dataclass(frozen=True)
class PaddlePrograms:
    """Paddle's programs of a dense part, for who runs their operators in another way.

    Attributes:
        train, predict: the programs.
        train_outputs, predict_outputs: variables of what they compute: logit, flat, rows/<table>.
        variables: of parameters and optimizer state, by their stable names.
    """

    train: Any
    predict: Any
    train_outputs: Mapping[str, str]
    predict_outputs: Mapping[str, str]
    variables: Mapping[str, str]


class OtherDenseError(ValueError):
    """A saved dense part is of another model."""


def clipped_scale(flat_N: Floats, total_weight: float, clip_norm: float | None) -> float:
    """What turns the summed gradient into the mean one, with at most `clip_norm` as its norm (Pascanu et al., 2013)."""
    scale = 1.0 / total_weight
    if clip_norm is None:
        return scale
    norm = math.sqrt(float(np.sum(np.square(flat_N, dtype=np.float64)))) * scale
    return scale * min(1.0, clip_norm / norm) if norm > 0 else scale


class DenseProgram:
    """Parameters, optimizer state and the programs over them. One per process; call from one thread.

    Args:
        layouts: the tables, in the job's order.
        num_dense, num_labels: columns of a batch.
        model: the job's `model` block.
        optimizer: the job's `train.dense_optimizer` block.
        seed: initial parameters depend on this alone, so they are equal on every trainer.
        rank: makes dropout differ between trainers. None: the programs are built, to see whether they can be, and hold
            no memory; nothing can be run then.
        logit_shift: added to the log-odds of predictions, not in training (`trainer.sampling.logit_shift`).
        operators: precision of our operators' products; None: Paddle's own operators alone.
        pad_rows: compute gradients with rows of weight 0 behind the batch's own, up to one of a few row counts: for a
            job whose batches would each have another one, and so products or a CUDA graph of their own to be prepared.
        on_built: told of the model before it is called.

    Raises:
        ModelError: the features do not fit the model, or it is a user's own and not as it must be.
        NativeError: our operators are asked for and cannot be had.
    """

    def __init__(
        self,
        layouts: Sequence[TableLayout],
        *,
        num_dense: int,
        num_labels: int,
        model: ModelConfig,
        optimizer: DenseOptimizerConfig,
        seed: int,
        rank: int | None,
        logit_shift: float = 0.0,
        operators: cpu.Precision | None = None,
        pad_rows: bool = False,
        on_built: Callable[[Model], None] = lambda _: None,
    ) -> None:
        paddle.enable_static()
        self._pad_rows = pad_rows
        self._layouts, self._config = layouts, optimizer
        self._native_adam = (
            None if operators is None else cpu.AdamW(optimizer.beta1, optimizer.beta2, optimizer.epsilon)
        )
        self._scope = paddle.static.Scope()
        self._executor = paddle.static.Executor(paddle.CPUPlace())
        self._main, startup = paddle.static.Program(), paddle.static.Program()
        if operators is not None:
            cpu.load()
        with _building(self._main, startup, "dense/"), cpu.using(operators):
            pulled, inputs = self._inputs(num_dense)
            layer = build(feature_spec(layouts, num_dense, num_labels), model)
            on_built(layer)
            logit_BY = layer(inputs)
            _check_logits(logit_BY, num_labels, model.kind)
            # of the first label: that is the one whose rows are sampled
            shift_Y = np.where(np.arange(num_labels) == 0, logit_shift, 0.0).astype(np.float32)
            self._shifted = logit_BY + paddle.assign(shift_Y) if logit_shift else logit_BY
            self._predict = cpu.in_float32(self._main.clone(for_test=True))
            label_BY = paddle.static.data("label", [-1, num_labels], "float32")
            weight_B1 = paddle.static.data("row_weight", [-1, 1], "float32")
            loss = paddle.sum(layer.loss(inputs, logit_BY, label_BY) * weight_B1)
            named = list(layer.named_parameters())
            params = [p for _, p in named]
            grads = paddle.static.gradients([loss], pulled + params)
            _check_used([*(layout.name for layout in layouts), *(name for name, _ in named)], grads, model.kind)
            parts = [paddle.reshape(g, [-1]) for g in grads[len(pulled) :]]
            parts += [paddle.reshape(loss, [1]), paddle.reshape(paddle.sum(weight_B1), [1])]
            flat = paddle.concat(parts)
        self._logit, self._flat = logit_BY, flat
        self._table_grads = grads[: len(pulled)]
        self.sizes = {name: int(np.prod(p.shape)) for name, p in named}
        self.num_floats = sum(self.sizes.values())
        self._variables = {name: p.name for name, p in named}
        names = {p.name: name for name, p in named}
        self.output_biases = [(names[p.name], place) for p, place in layer.output_biases()]
        """Parameter and place of each label's bias (`Model.output_biases`); empty: the model names none."""
        _check_biases(self.output_biases, num_labels, model.kind)
        if rank is None:
            return
        apply_startup = self._build_apply(named, optimizer)
        _seed_initializers(startup, seed)
        with paddle.static.scope_guard(self._scope):
            self._executor.run(startup)
            self._executor.run(apply_startup)
        # A program's own `random_seed` would make dropout draw the same mask at every step.
        paddle.seed(seed + 1_000_003 * (rank + 1))

    def _inputs(self, num_dense: int) -> tuple[list[Variable], ModelInputs]:
        static = paddle.static
        pulled, groups, first_order, sequences = [], [], [], {}
        names: list[Sequence[str]] = []
        index: dict[str, Variable] = {}
        for layout in self._layouts:
            emb_UW = static.data(f"{layout.name}/rows", [-1, layout.pull_width], "float32")
            emb_UW.stop_gradient = False
            pulled.append(emb_UW)
            if layout.single:
                index_BF = static.data(f"{layout.name}/single", [-1, len(layout.single)], "int32")
                vectors_BFW, order_B1 = _lookup_single(emb_UW, index_BF, layout)
                groups.append(vectors_BFW)
                names.append(layout.single)
                index.update((name, index_BF[:, at : at + 1]) for at, name in enumerate(layout.single))
                if layout.first_order:
                    first_order.append(order_B1)
            if not layout.lists:
                continue
            order_P1, vector_PW = _with_no_id(emb_UW, layout)
            for feature in layout.lists:
                index_BL = static.data(f"{layout.name}/list/{feature.name}", [-1, -1], "int32")
                mask_BL = paddle.cast(index_BL > 0, "float32")
                emb_BLW = _lookup(vector_PW, index_BL, layout.width)
                if feature.pooling == "none":
                    sequences[feature.name] = SequenceInput(emb_BLW, mask_BL)
                    continue
                scale_BL = mask_BL
                if feature.weighted:
                    scale_BL = static.data(f"{layout.name}/weight/{feature.name}", [-1, -1], "float32") * mask_BL
                    emb_BLW = emb_BLW * paddle.unsqueeze(scale_BL, -1)
                total_B1 = paddle.sum(scale_BL, axis=1, keepdim=True)
                divisor_B1 = paddle.where(total_B1 == 0, paddle.ones_like(total_B1), total_B1)
                pooled_BW = paddle.sum(emb_BLW, axis=1)
                names.append([feature.name])
                groups.append(
                    paddle.unsqueeze(pooled_BW / divisor_B1 if feature.pooling == "mean" else pooled_BW, axis=1)
                )
                if order_P1 is not None:
                    weight_BL = paddle.squeeze(_lookup(order_P1, index_BL, 1), axis=[-1])
                    order_B1 = paddle.sum(weight_BL * scale_BL, axis=1, keepdim=True)
                    first_order.append(order_B1 / divisor_B1 if feature.pooling == "mean" else order_B1)
        dense_BD = static.data("dense", [-1, num_dense], "float32") if num_dense else None
        if first_order:
            first_order_B1 = paddle.add_n(first_order) if len(first_order) > 1 else first_order[0]
        else:
            first_order_B1 = paddle.zeros([1, 1], "float32")
        return pulled, ModelInputs(dense_BD, groups, names, first_order_B1, sequences, index)

    def _build_apply(self, named: list[tuple[str, Any]], config: DenseOptimizerConfig) -> Any:
        self._apply, startup = paddle.static.Program(), paddle.static.Program()
        with _building(self._apply, startup, "apply/"):
            block = self._apply.global_block()
            flat = paddle.static.data("flat", [self.num_floats], "float32")
            scale = paddle.static.data("scale", [1], "float32")
            pairs, offset = [], 0
            for (_, param), size in zip(named, self.sizes.values(), strict=True):
                twin = block.create_parameter(name=param.name, shape=list(param.shape), dtype="float32")
                twin.optimize_attr = param.optimize_attr
                gradient = paddle.reshape(flat[offset : offset + size] * scale, param.shape)
                pairs.append((twin, gradient + config.l2 * twin if config.l2 and len(param.shape) > 1 else gradient))
                offset += size
            adam = paddle.optimizer.AdamW(
                config.learning_rate,
                beta1=config.beta1,
                beta2=config.beta2,
                epsilon=config.epsilon,
                weight_decay=config.weight_decay,
                apply_decay_param_fun={p.name for _, p in named if len(p.shape) > 1}.__contains__,
            )
            adam.apply_gradients(pairs)
            self._rate = adam._global_learning_rate().name  # noqa: SLF001  as for the moments below
        for kind, by_param in adam._accumulators.items():  # noqa: SLF001  the only way to their names
            for name, param in named:
                self._variables[f"adam/{kind}/{name}"] = by_param[param.name].name
        return startup

    def buffer(self, num_more: int, wire: WireType = "float32") -> HostStepBuffer:
        """Where the trainers' gradients are summed, and in what type they travel."""
        return HostStepBuffer(self, num_more, wire)

    def feed(self, batch: Batch, rows: Mapping[str, Floats]) -> dict[str, NDArray[Any]]:
        """The arrays of a batch by the programs' input names. `rows` holds each table's pulled values [U, W]."""
        return batch_feed(self._layouts, batch, rows)

    def feed_with_labels(self, batch: Batch, rows: Mapping[str, Floats]) -> dict[str, NDArray[Any]]:
        """`feed`, with what the loss reads."""
        weight_B = batch.sample_weight_B
        if weight_B is None:
            weight_B1 = np.ones((batch.num_rows, 1), np.float32)
        else:
            weight_B1 = weight_B.reshape(-1, 1).astype(np.float32)
        found = {**self.feed(batch, rows), "label": batch.labels_BL, "row_weight": weight_B1}
        return _padded(found, batch.num_rows) if self._pad_rows else found

    def gradients(self, batch: Batch, rows: Mapping[str, Floats]) -> HostGradients:
        """Forward and backward over one batch; changes nothing."""
        feed = self.feed_with_labels(batch, rows)
        flat, logit, *tables = self._run(self._main, feed, [self._flat, self._logit, *self._table_grads])
        by_table = {
            layout.name: grads[: len(rows[layout.name])] for layout, grads in zip(self._layouts, tables, strict=True)
        }
        return HostGradients(flat, by_table, logit[: batch.num_rows])

    def shapes(self, feed: dict[str, NDArray[Any]], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Shapes that arrays of the training program, by Paddle's names, have for one batch (`feed_with_labels`)."""
        arrays = self._fetch(self._main, feed, names)
        return {name: tuple(array.shape()) for name, array in zip(names, arrays, strict=True)}

    def apply(self, flat_N: Floats, total_weight: float, *, rate_factor: float = 1.0) -> None:
        """One Adam step with the gradient `flat_N / total_weight`, [num_floats], clipped as the job says.

        Args:
            flat_N: summed over all trainers, the same on each of them.
            total_weight: summed weight of all rows.
            rate_factor: what the schedule makes of the learning rate in this step.
        """
        config = self._config
        scale = clipped_scale(flat_N, total_weight, config.clip_norm)
        rate = config.learning_rate * rate_factor
        if self._native_adam is None:
            self._tensor(self._rate).set(np.array([rate], np.float32), paddle.CPUPlace())
            self._run(self._apply, {"flat": flat_N, "scale": np.array([scale], np.float32)}, [])
            return
        offset = 0
        for name, size in self.sizes.items():
            parts = [name, *(f"adam/{kind}/{name}" for kind in _ADAM_STATE)]
            tensors = [self._tensor(self._variables[part]) for part in parts]
            matrix = len(tensors[0].shape()) > 1
            decay, l2 = (config.weight_decay, config.l2) if matrix else (0.0, 0.0)
            gradient = flat_N[offset : offset + size]
            self._native_adam.step(tensors, gradient, scale=scale, rate=rate, decay=decay, l2=l2)
            offset += size

    def predict(self, batch: Batch, rows: Mapping[str, Floats]) -> Floats:
        """Log-odds [B, Y], without dropout, computed in float32: the same for an export, on any machine."""
        logit_BY: Floats = self._run(self._predict, self.feed(batch, rows), [self._shifted])[0]
        return logit_BY

    def save_inference(self, prefix: Path) -> None:
        """Write prediction as `<prefix>.pdmodel` and `<prefix>.pdiparams`, for Paddle alone.

        Inputs are those of `batch_feed`; outputs are the log-odds [B, Y] (shifted as in `predict`) and probabilities.
        """
        program = self._predict.clone(for_test=True)
        with _building(program, paddle.static.Program(), "export/"):
            block = program.global_block()
            logit_BY = block.var(self._shifted.name)
            fetched = [logit_BY, paddle.nn.functional.sigmoid(logit_BY)]
            inputs = [block.var(name) for name in self.input_names if block.has_var(name)]
        with paddle.static.scope_guard(self._scope):
            paddle.static.save_inference_model(str(prefix), inputs, fetched, self._executor, program=program)

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs of prediction, in order."""
        dense = ["dense"] if self._predict.global_block().has_var("dense") else []
        return [name for layout in self._layouts for name in layout.input_names] + dense

    def _run(self, program: Any, feed: dict[str, NDArray[Any]], fetch: list[Variable]) -> list[Any]:
        return [np.asarray(each) for each in self._fetch(program, feed, fetch)]  # a copy; Paddle's own way copies twice

    def _fetch(self, program: Any, feed: dict[str, NDArray[Any]], fetch: Sequence[Variable | str]) -> list[Any]:
        known = {k: v for k, v in feed.items() if program.global_block().has_var(k)}
        with paddle.static.scope_guard(self._scope):
            found: list[Any] = self._executor.run(program, feed=known, fetch_list=list(fetch), return_numpy=False)
        return found

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of all parameters and of Adam's moments and powers, by stable names."""
        return {k: np.array(self._tensor(v)) for k, v in self._variables.items()}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Set everything that `state` names.

        Raises:
            OtherDenseError: a name or a shape differs from this model's.
        """
        missing, extra = sorted(set(self._variables) - set(state)), sorted(set(state) - set(self._variables))
        if missing or extra:
            raise OtherDenseError(
                f"the saved dense part is of another model: it lacks {missing[:5]}, it has more {extra[:5]}"
            )
        for name, value in state.items():
            tensor = self._tensor(self._variables[name])
            if list(tensor.shape()) != list(value.shape):
                raise OtherDenseError(
                    f"dense parameter {name} is {list(value.shape)} in the file, {tensor.shape()} in the job"
                )
            tensor.set(np.ascontiguousarray(value), paddle.CPUPlace())

    def load_parameters(self, parameters: Mapping[str, NDArray[Any]]) -> None:
        """Set the parameters alone; the optimizer's moments stay as they are.

        Raises:
            OtherDenseError: a name or a shape differs from this model's.
        """
        self.load_state({**self.state(), **parameters})

    def parameters(self) -> dict[str, NDArray[Any]]:
        """Copies of the parameters alone."""
        return {k: np.array(self._tensor(self._variables[k])) for k in self.sizes}

    def read_output_biases(self) -> NDArray[np.float64]:
        """Values of `output_biases`, [Y]."""
        return biases_in(self.parameters(), self.output_biases)

    def set_output_biases(self, values_Y: NDArray[np.float64]) -> None:
        """Set them, [Y]; nothing else changes."""
        self.load_parameters(with_biases(self.parameters(), self.output_biases, values_Y))

    @property
    def programs(self) -> PaddlePrograms:
        """What Paddle has built."""
        rows = {f"rows/{t.name}": v.name for t, v in zip(self._layouts, self._table_grads, strict=True)}
        return PaddlePrograms(
            self._main,
            self._predict,
            {"logit": self._logit.name, "flat": self._flat.name, **rows},
            {"logit": self._shifted.name},
            self._variables,
        )

    def _tensor(self, variable: str) -> Any:
        return self._scope.find_var(variable).get_tensor()


@contextmanager
def _building(main: Any, startup: Any, prefix: str) -> Iterator[None]:
    """Operators and variables of the block go to these programs, under names that do not depend on what came before."""
    with (
        warnings.catch_warnings(),
        paddle.static.program_guard(main, startup),
        paddle.utils.unique_name.guard(prefix),
    ):
        # a reminder of Paddle 1's broadcasting, at every operator between [B, X] and [B, 1]
        warnings.filterwarnings("ignore", message=r"[\s\S]*has been unified with", category=DeprecationWarning)
        yield


def _check_used(names: list[str], grads: list[Variable | None], kind: str) -> None:
    unused = [name for name, grad in zip(names, grads, strict=True) if grad is None]
    if unused:
        raise ModelError(
            f"model {kind}: the loss does not depend on {', '.join(unused)}. Every table and parameter must take part "
            "in it: leave unused features out of the job, unused layers out of the model."
        )


def _check_logits(logit_BY: Variable, num_labels: int, kind: str) -> None:
    """With another shape the loss would be taken over pairs that do not belong together, without a word."""
    shape = list(getattr(logit_BY, "shape", ()))
    if len(shape) != 2 or shape[1] not in (num_labels, -1):
        raise ModelError(
            f"model {kind}: forward returns {f'an array {shape}' if shape else type(logit_BY).__name__}, and log-odds "
            f"[batch rows, {num_labels}] are needed: a number a row for each of data.labels"
        )


def _check_biases(biases: Sequence[tuple[str, int]], num_labels: int, kind: str) -> None:
    if len(biases) not in {0, num_labels}:
        raise ModelError(
            f"model {kind}: output_biases names {len(biases)} places, and data.labels has {num_labels} labels: name "
            "one for each, or none"
        )


def _seed_initializers(startup: Any, seed: int) -> None:
    """Give every random initializer a seed of its own, made from `seed` and its place.

    With one seed for the whole program Paddle starts all parameters with the same random numbers: layers would be
    correlated, and parallel experts would stay equal forever.
    """
    random = [op for op in startup.global_block().ops if "seed" in op.attr_names]
    for place, op in enumerate(random):
        state = np.random.SeedSequence([seed, place]).generate_state(1)[0]
        op._set_attr("seed", int(state >> 1) or 1)  # noqa: SLF001  int32; 0 would mean "any"


def _with_no_id(emb_UW: Variable, layout: TableLayout) -> tuple[Variable | None, Variable]:
    """First-order weights and vectors below a row of zeros that receives no update: index 0 means "no id"."""
    rows_PW = paddle.concat([paddle.zeros([1, layout.pull_width], "float32"), emb_UW], axis=0)
    return (rows_PW[:, :1], rows_PW[:, 1:]) if layout.first_order else (None, rows_PW)


def _lookup_single(emb_UW: Variable, index_BF: Variable, layout: TableLayout) -> tuple[Variable, Variable | None]:
    """Vectors [B, F, W] of features with at most one id a row, and the sum of their first-order weights, [B, 1]."""
    if cpu.fits():
        return cpu.lookup(emb_UW, index_BF, first_order=layout.first_order)
    order_P1, vector_PW = _with_no_id(emb_UW, layout)
    flat, shape = paddle.reshape(index_BF, [-1]), [-1, len(layout.single)]
    vectors_BFW = paddle.reshape(paddle.gather(vector_PW, flat), [*shape, layout.width])
    if order_P1 is None:
        return vectors_BFW, None
    weight_BF = paddle.reshape(paddle.gather(order_P1, flat), shape)
    return vectors_BFW, paddle.sum(weight_BF, axis=1, keepdim=True)


def _lookup(rows_PW: Variable, index_BL: Variable, width: int) -> Variable:
    """Rows by index, [B, L, W] with both B and L known only when the batch is."""
    shape = paddle.shape(index_BL)
    return paddle.reshape(paddle.gather(rows_PW, paddle.reshape(index_BL, [-1])), [shape[0], shape[1], width])
