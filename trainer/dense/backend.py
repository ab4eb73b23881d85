"""Where a job's dense part is computed, as the job says: by Paddle or our operators on the CPU, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paddlewheel.trainer.dense.inputs import TableLayout
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.dense.protocols import DenseBackend
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.train import logit_shift
from paddlewheel.trainer.kernels import cpu

if TYPE_CHECKING:
    from paddlewheel.trainer.kernels.gpu.cuda_library import Device


def dense_program(
    job: JobConfig,
    layouts: Sequence[TableLayout],
    rank: int,
    *,
    predicts: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> DenseBackend:
    """The dense part of a trainer.

    Args:
        job: its model, seed and `train` block.
        layouts: its tables.
        rank: this trainer.
        predicts: nothing will be trained (`cpu_operators`).
        warn: told what is slower than it might be, and why.

    Raises:
        NativeError, GpuError: the job insists on what this machine cannot do.
        UnsupportedError: the model has an operator that no GPU kernel computes.
    """
    shared: dict[str, Any] = {
        "num_dense": len(job.data.dense_columns),
        "num_labels": len(job.data.labels),
        "model": job.model,
        "optimizer": job.train.dense_optimizer,
        "seed": job.seed,
        "rank": rank,
        "logit_shift": logit_shift(job.train.negative_sampling),
        "pad_rows": job.train.negative_sampling is not None,
    }
    if job.train.device == "gpu":
        from paddlewheel.trainer.dense.gpu_program import GpuProgram, chosen_precision

        device = open_device(rank)
        precision = chosen_precision(job.train.precision, device.capability)
        return GpuProgram(layouts, **shared, device=device, precision=precision)
    chosen = cpu_operators(job, predicts=predicts)
    if chosen.warning:
        warn(chosen.warning)
    return DenseProgram(layouts, **shared, operators=chosen.precision)


def cpu_operators(job: JobConfig, *, predicts: bool = False) -> cpu.Choice:
    """What computes the dense part of a job on a CPU; one that trains on GPUs leaves the choice to the machine.

    Args:
        job: its `train` block.
        predicts: nothing will be trained. Predictions are float32, so a processor without bfloat16 products will do.

    Raises:
        NativeError: the job insists on what this machine cannot do.
    """
    if job.train.device == "gpu":
        return cpu.choose("auto", "auto")
    return cpu.choose(job.train.cpu_backend, cpu.cpu_precision(job.train.precision, predicts=predicts))


def open_device(rank: int) -> Device:
    """The GPU of a trainer: by its rank among those that this process sees (CUDA_VISIBLE_DEVICES).

    Raises:
        GpuError: no GPU, or the kernels are not built.
    """
    from paddlewheel.trainer.kernels.gpu.cuda_library import Device, load

    return Device(rank % max(1, int(load().pw_num_devices())))
