"""``paddlewheel gpu``: the kernels of the dense part on NVIDIA GPUs."""

from typing import Annotated, Any

from cyclopts import App, Parameter

from paddlewheel.deploy.cli.arguments import JobFile, Json, Overrides, answer

app = App(name="gpu", help="Build the kernels for this machine's GPUs; check that they compute the right numbers.")


@app.command
def build(
    *,
    arch: Annotated[
        tuple[int, ...],
        Parameter(
            consume_multiple=True, negative=(), help="Compute capabilities such as 80 90. By default this machine's."
        ),
    ] = (),
    json: Json = False,
) -> None:
    """Compile the kernels with nvcc (half a minute). Once on each machine, and after an update of paddlewheel."""
    from paddlewheel.trainer.kernels.gpu import cuda_library

    path = cuda_library.build(arch)
    shown = sorted(set(arch) or {gpu.capability for gpu in cuda_library.gpus()})
    answer({"library": str(path), "architectures": shown}, json=json, text=lambda: f"built {path} for {shown}")


@app.command
def check(job: JobFile, *, overrides: Overrides = (), json: Json = False) -> None:
    """On every GPU, compare each kernel that a job needs with NumPy in float64, on fresh random inputs.

    A trainer does the same before its first step.
    """
    from paddlewheel.trainer.dense.gpu_self_check import check_all
    from paddlewheel.trainer.job.config import JobConfig

    found: list[dict[str, Any]] = check_all(JobConfig.load(job, (*overrides, "train.device=gpu")))
    answer(
        found,
        json=json,
        text=lambda: "\n".join(
            f"GPU {each['gpu']}: {each['kernels']} kinds of call are right ({each['precision']}, compute capability "
            f"{each['capability'] / 10})"
            for each in found
        ),
    )
