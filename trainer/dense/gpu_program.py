"""The dense part on a GPU: another `DenseBackend`.

Paddle builds the programs, as on a CPU, and the initial parameters; the operators are then run by kernels of our own.

Legend: as in trainer/dense/program.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from socket import gethostname
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.trainer.dense.inputs import Floats, TableLayout
from paddlewheel.trainer.dense.program import DenseProgram, PaddlePrograms, biases_in, padded_count, with_biases
from paddlewheel.trainer.distributed.nccl import Nccl
from paddlewheel.trainer.distributed.process_group import ProcessGroup
from paddlewheel.trainer.job.train import DenseOptimizerConfig, WireType
from paddlewheel.trainer.kernels.gpu import fusion, graph, self_check
from paddlewheel.trainer.kernels.gpu.cuda_library import Device, GpuError
from paddlewheel.trainer.kernels.gpu.kernel_calls import AdamSettings
from paddlewheel.trainer.kernels.gpu.layout import TAIL
from paddlewheel.trainer.kernels.gpu.runner import Runner
from paddlewheel.trainer.models import ModelConfig

Precision = Literal["auto", "float32", "tfloat32", "bfloat16", "float16"]
_LOW = {"float32": "f32", "tfloat32": "f32", "bfloat16": "bf16", "float16": "f16"}
_FIRST_LOSS_SCALE, _LARGEST_LOSS_SCALE, _STEPS_TO_DOUBLE = 1024.0, 65536.0, 2000


def chosen_precision(precision: Precision, capability: int) -> str:
    """What `train.precision` means on a GPU of this compute capability.

    Raises:
        GpuError: the GPU cannot compute in it.
    """
    if precision == "auto":
        return "bfloat16" if capability >= 80 else "float16"
    if precision in {"bfloat16", "tfloat32"} and capability < 80:
        raise GpuError(
            f"train.precision: {precision} needs a GPU of compute capability 8.0 or later, this one has "
            f"{capability / 10}: "
            "take float16 or float32"
        )
    return precision


@dataclass(frozen=True)
class GpuGradients:
    """What one batch asks to change; the dense gradients stay on the GPU until they are asked for."""

    program: GpuProgram
    tables: Mapping[str, Floats]
    logit_BY: Floats
    loss: float
    weight: float
    finite: bool

    @property
    def flat_N(self) -> Floats:
        """Of the newest batch alone: the next one overwrites it."""
        return self.program.flat_gradient()


class GpuProgram:
    """Parameters, optimizer state and programs on one GPU. One per process; call from one thread.

    Args:
        device: the GPU.
        precision: of matrix products: float32, tfloat32, bfloat16 or float16; sums, parameters and the optimizer are
            float32.
        others: as for `DenseProgram`.

    Raises:
        UnsupportedError: the model has an operator without a GPU kernel.
        GpuError: a kernel that the programs need computes wrong numbers here.
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
        rank: int,
        device: Device,
        precision: str,
        logit_shift: float = 0.0,
        pad_rows: bool = False,
    ) -> None:
        self._paddle = DenseProgram(
            layouts,
            num_dense=num_dense,
            num_labels=num_labels,
            model=model,
            optimizer=optimizer,
            seed=seed,
            rank=rank,
            logit_shift=logit_shift,
            pad_rows=pad_rows,
        )
        self.device, self.precision, self._layouts, self._config = device, precision, layouts, optimizer
        self.sizes, self.num_floats = self._paddle.sizes, self._paddle.num_floats
        self.output_biases = self._paddle.output_biases
        self._variables = self._paddle.programs.variables
        self.graphs = self._graphs()
        widths = {"dense": num_dense, "label": num_labels, "row_weight": 1}
        for layout in layouts:
            widths |= {f"{layout.name}/rows": layout.pull_width, f"{layout.name}/single": len(layout.single)}
        self._runner = Runner(
            device, self.graphs, low=_LOW[precision], tf32=precision == "tfloat32", seed=seed + 1_000_003 * rank
        )
        config = optimizer
        self._runner.prepare_optimizer(
            AdamSettings(
                beta1=config.beta1,
                beta2=config.beta2,
                epsilon=config.epsilon,
                weight_decay=config.weight_decay,
                l2=config.l2,
                clip_norm=config.clip_norm or 0.0,
            )
        )
        self._check_kernels(widths)
        self._power1, self._power2 = np.float32(config.beta1), np.float32(config.beta2)
        self._loss_scale, self._good_steps = _FIRST_LOSS_SCALE if precision == "float16" else 1.0, 0
        self._runner.set_loss_scale(self._loss_scale)
        first = self._paddle.parameters()
        self._runner.set_parameters(
            np.concatenate([first[name].ravel() for name in self.sizes] or [np.zeros(0, np.float32)])
        )

    def _graphs(self) -> dict[str, graph.Graph]:
        """The programs as plain data, fused."""
        programs = self._paddle.programs
        block = programs.train.global_block()
        parameters, at = [], 0
        for name, size in self.sizes.items():
            variable = self._variables[name]
            parameters.append(graph.Parameter(name, variable, tuple(block.var(variable).shape), at))
            at += size
        names = ["dense", "label", "row_weight"]
        for layout in self._layouts:
            names += [f"{layout.name}/rows", f"{layout.name}/single"]
            names += [f"{layout.name}/{kind}/{feature.name}" for feature in layout.lists for kind in ("list", "weight")]
        feeds = {name: "i32" if "/single" in name or "/list/" in name else "f32" for name in names}
        return {
            "train": fusion.fused(graph.read(programs.train, feeds, parameters, programs.train_outputs)),
            "predict": fusion.fused(graph.read(programs.predict, feeds, parameters, programs.predict_outputs)),
        }

    def _check_kernels(self, widths: dict[str, int]) -> None:
        low, tf32 = self._runner.low, self.precision == "tfloat32"
        calls = list(self._runner.optimizer_calls)
        for each in self.graphs.values():
            calls += self_check.calls_of(each, self_check.small_shapes(each, widths), low, tf32=tf32)
        kinds = self_check.distinct(calls)
        self.num_checked = len(kinds)
        wrong = self_check.run(self.device, kinds, np.random.default_rng())
        if wrong:
            found = "\n  ".join(map(str, wrong[:10]))
            raise GpuError(
                f"GPU {self.device.index} computes wrong numbers in {len(wrong)} of the kernels that this job needs:\n"
                f"  {found}\nRun `paddlewheel gpu build` again on this machine, then `paddlewheel gpu check`. If it "
                "stays, the driver, the compiler or the GPU is at fault: train with train.device: cpu"
            )

    @property
    def programs(self) -> PaddlePrograms:
        """What Paddle has built."""
        return self._paddle.programs

    # ------------------------------------------------------------------------------------------------------------ steps

    def buffer(self, num_more: int, wire: WireType = "float32") -> GpuStepBuffer:
        """Where the trainers' gradients are summed; they travel in float32."""
        assert wire == "float32", wire  # JobConfig refuses the others
        return GpuStepBuffer(self, num_more)

    def _arrays(
        self, name: str, feed: Mapping[str, NDArray[Any]]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, tuple[int, ...]]]:
        arrays = {key: feed[key] for key in self.graphs[name].feeds}
        shapes = {}
        for key, array in arrays.items():
            shape = array.shape
            if key.endswith("/rows"):
                shape = (padded_count(shape[0]), shape[1])
            elif "/list/" in key or "/weight/" in key:
                shape = (shape[0], max(4, -(-shape[1] // 4) * 4))
            shapes[key] = shape
        return arrays, shapes

    def _launch(self, name: str, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        arrays, shapes = self._arrays(name, feed)
        self.device.use()
        plan = self._runner.plan(name, shapes)
        self._runner.feed(plan, arrays)
        self._runner.launch(plan)
        return self._runner.results(plan)

    def feed_with_labels(self, batch: Batch, rows: Mapping[str, Floats]) -> dict[str, NDArray[Any]]:
        """As `DenseProgram.feed_with_labels`."""
        return self._paddle.feed_with_labels(batch, rows)

    def gradients(self, batch: Batch, rows: Mapping[str, Floats]) -> GpuGradients:
        """Forward and backward over one batch; changes nothing but the loss's scale (float16)."""
        feed = self.feed_with_labels(batch, rows)
        if (
            self.precision == "float16"
            and self._good_steps >= _STEPS_TO_DOUBLE
            and self._loss_scale < _LARGEST_LOSS_SCALE
        ):
            self._scale_loss(self._loss_scale * 2)
        while True:
            found = self._launch("train", feed)
            status = found["status"].astype(np.float64)
            finite = bool(np.isfinite(status).all())
            if finite or self._loss_scale <= 1.0:
                break
            self._scale_loss(self._loss_scale / 2)  # float16 overflowed: the same batch again
        inverse = np.float32(1.0 / self._loss_scale)
        tables = {}
        for layout in self._layouts:
            part = found[f"rows/{layout.name}"][: len(rows[layout.name])]
            tables[layout.name] = part * inverse if self._loss_scale != 1.0 else part.copy()
        result = GpuGradients(
            self, tables, found["logit"][: batch.num_rows].copy(), status[0], status[1], finite=finite
        )
        self._good_steps += 1
        return result

    def _scale_loss(self, scale: float) -> None:
        self._loss_scale, self._good_steps = scale, 0
        self._runner.set_loss_scale(scale)

    def flat_gradient(self) -> Floats:
        """Of the newest batch, with its loss and weight, in the order of `sizes`."""
        return self._runner.buffers.unpack(self._runner.read(self._runner.flat_gradient()))

    def apply(self, flat_N: Floats, total_weight: float, *, rate_factor: float = 1.0) -> None:
        """As `DenseProgram.apply`, with a gradient in the host's memory."""
        self.device.use()
        self._runner.write(self._runner.flat_gradient(0), self._runner.buffers.pack(flat_N))
        self.apply_on_gpu(total_weight, rate_factor=rate_factor)

    def apply_on_gpu(self, total_weight: float, *, rate_factor: float = 1.0) -> None:
        """The optimizer's step with the gradient that lies on the GPU."""
        rate = self._config.learning_rate * rate_factor
        self._runner.step(rate, 1.0 / total_weight, float(self._power1), float(self._power2))
        self._power1 *= np.float32(self._config.beta1)
        self._power2 *= np.float32(self._config.beta2)
        self.device.synchronize()

    def predict(self, batch: Batch, rows: Mapping[str, Floats]) -> Floats:
        """Log-odds [B, Y], without dropout."""
        return self._launch("predict", self._paddle.feed(batch, rows))["logit"].copy()

    # ------------------------------------------------------------------------------------------------------------ state

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of all parameters and of Adam's moments and powers, by the names that they have on a CPU."""
        self.device.use()
        found: dict[str, NDArray[Any]] = {}
        arrays = {kind: self._download(kind) for kind in ("", "moment1", "moment2")}
        shapes = {p.name: (p.offset, p.size, p.shape) for p in self.graphs["train"].parameters}
        for key in self._variables:
            _, kind, name = key.split("/", 2) if key.startswith("adam/") else ("", "", key)
            offset, size, shape = shapes[name]
            if "pow" in kind:
                found[key] = np.array([self._power1 if kind.startswith("beta1") else self._power2], np.float32)
            else:
                found[key] = arrays[kind[:7]][offset : offset + size].reshape(shape).copy()
        return found

    def _download(self, kind: str) -> NDArray[np.float32]:
        runner = self._runner
        view = {"": runner.flat_parameters, "moment1": runner.flat_moment(0), "moment2": runner.flat_moment(1)}[kind]
        return runner.buffers.unpack(runner.read(view))

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Set everything that `state` names.

        Raises:
            ValueError: a name or a shape differs from this model's.
        """
        self._paddle.load_state(state)  # refuses what does not fit
        self.device.use()
        arrays = {kind: np.zeros(self.num_floats, np.float32) for kind in ("", "moment1", "moment2")}
        for p in self.graphs["train"].parameters:
            for key, value in state.items():
                _, kind, name = key.split("/", 2) if key.startswith("adam/") else ("", "", key)
                if name != p.name:
                    continue
                if kind.startswith("beta1"):
                    self._power1 = np.float32(np.ravel(value)[0])
                elif kind.startswith("beta2"):
                    self._power2 = np.float32(np.ravel(value)[0])
                else:
                    arrays[kind[:7]][p.offset : p.offset + p.size] = np.ravel(value)
        runner = self._runner
        runner.set_parameters(arrays[""])
        for which, kind in enumerate(("moment1", "moment2")):
            runner.write(runner.flat_moment(which), runner.buffers.pack(arrays[kind]))

    def parameters(self) -> dict[str, NDArray[Any]]:
        """Copies of the parameters alone."""
        return {name: value for name, value in self.state().items() if name in self.sizes}

    def load_parameters(self, parameters: Mapping[str, NDArray[Any]]) -> None:
        """As `DenseProgram.load_parameters`."""
        self.load_state({**self.state(), **parameters})

    def read_output_biases(self) -> NDArray[np.float64]:
        """As `DenseProgram.read_output_biases`."""
        return biases_in(self.parameters(), self.output_biases)

    def set_output_biases(self, values_Y: NDArray[np.float64]) -> None:
        """As `DenseProgram.set_output_biases`."""
        self.load_parameters(with_biases(self.parameters(), self.output_biases, values_Y))


class GpuStepBuffer:
    """The flat gradient stays on the GPU; what follows it is the host's."""

    def __init__(self, program: GpuProgram, num_more: int) -> None:
        assert num_more <= TAIL
        self._gpu, self._runner, self._num_more = program, program._runner, num_more  # noqa: SLF001  its other half
        self.tail = np.zeros(num_more, np.float32)
        self._taken = False
        self._nccl: Nccl | None = None
        self._through_host: bool | None = None

    def clear(self) -> None:
        self.tail[:] = 0.0
        self._taken = False

    def take(self, gradients: GpuGradients) -> None:
        if self._num_more >= 2:
            self.tail[:2] = gradients.loss, gradients.weight
        self._taken = True

    def sum(self, sync: ProcessGroup) -> None:
        if sync.num_trainers == 1:
            return
        self._gpu.device.use()
        if self._through_host is None:
            self._connect(sync)
        runner, device = self._runner, self._gpu.device
        whole = runner.flat_gradient(self._num_more)
        if not self._taken:
            runner.zero_gradient()
        runner.write(whole.slice(0, runner.num_floats, whole.size), self.tail)
        if self._through_host:
            summed = runner.read(whole)
            sync.all_reduce(summed)
            runner.write(whole, summed)
            self.tail[:] = summed[runner.num_floats :]
            return
        assert self._nccl is not None
        self._nccl.all_reduce(runner.address(whole), whole.size)
        device.download(self.tail, runner.address(whole.slice(0, runner.num_floats, whole.size)))
        device.synchronize()

    def _connect(self, sync: ProcessGroup) -> None:
        """NCCL where every trainer has a GPU of its own; trainers that share one sum through the host."""
        places = sync.all_gather(zlib.crc32(gethostname().encode()) * 64 + self._gpu.device.index)
        self._through_host = len(set(places)) < len(places)
        if not self._through_host:
            self._nccl = Nccl(self._gpu.device, sync)

    def apply(self, total_weight: float, *, rate_factor: float = 1.0) -> None:
        self._gpu.apply_on_gpu(total_weight, rate_factor=rate_factor)
