"""A job's kernels checked on every GPU of this machine, without training."""

from __future__ import annotations

from typing import Any

from paddlewheel.trainer.job.config import JobConfig


def check_all(job: JobConfig) -> list[dict[str, Any]]:
    """What was checked on each GPU.

    Raises:
        GpuError: no GPU, no kernels, or a kernel that computes wrong numbers.
    """
    from paddlewheel.trainer.dense.backend import dense_program
    from paddlewheel.trainer.dense.inputs import layouts
    from paddlewheel.trainer.kernels.gpu.cuda_library import GpuError, load

    tables = {name: job.tables[name] for name in job.data.tables}
    found = []
    for index in range(int(load().pw_num_devices())):
        program: Any = dense_program(job, layouts(job.data, tables), rank=index)
        found.append(
            {
                "gpu": index,
                "kernels": program.num_checked,
                "precision": program.precision,
                "capability": program.device.capability,
            }
        )
        program.device.close()
    if not found:
        raise GpuError("CUDA shows no GPU to this process: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    return found
