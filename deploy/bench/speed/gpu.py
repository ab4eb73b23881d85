"""The dense part on a GPU, alone: `python -m paddlewheel.deploy.bench.speed.gpu SPEC RESULT`; see `runs.gpu_towers`.

Inputs are one batch of the workload's rows, kept; towers as DeepFM, DLRM and DCN-v2 have them. Two rates are told:
of the replayed graphs with inputs on the GPU, and of the trainer's own calls, with one copy to the GPU and one back
a step.

Legend: B batch rows, F slots, U unique keys, W floats of a pulled row.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.deploy.bench.speed.workload import Workload
from paddlewheel.trainer.dense.gpu_program import GpuProgram
from paddlewheel.trainer.dense.inputs import TableLayout
from paddlewheel.trainer.job.train import DenseOptimizerConfig
from paddlewheel.trainer.kernels.gpu.cuda_library import Device
from paddlewheel.trainer.kernels.gpu.kernel_calls import Call, Matmul, Skinny, SkinnyGrad
from paddlewheel.trainer.kernels.gpu.views import BYTES
from paddlewheel.trainer.models import parse_model

MODELS: dict[str, dict[str, Any]] = {
    "deepfm": {"kind": "deepfm", "tower": [400, 400, 400]},
    "dlrm": {"kind": "dlrm", "bottom": [512, 256], "tower": [512, 256]},
    "dcn": {"kind": "dcn", "cross_layers": 3, "tower": [400, 400, 400]},
}
"""The towers that are measured; the PyTorch peer has the first two."""


def batch_of(work: Workload, num_rows: int) -> tuple[Batch, dict[str, np.ndarray[Any, Any]]]:
    """A batch, and pulled values for its keys. Ids of different slots are different keys."""
    rng = np.random.default_rng(work.seed)
    ids_BF = rng.zipf(work.zipf_exponent, (num_rows, work.num_slots)) % work.ids_per_slot + 1
    ids_BF += np.arange(work.num_slots) * (work.ids_per_slot + 1)
    keys_U, inverse = np.unique(ids_BF, return_inverse=True)
    index_BF = (inverse.reshape(ids_BF.shape) + 1).astype(np.int32)
    names = tuple(work.slots)
    keys = TableKeys(keys_U.astype(np.uint64), {n: index_BF[:, i] for i, n in enumerate(names)}, index_BF, names)
    batch = Batch(
        num_rows=num_rows,
        dense_BD=rng.random((num_rows, work.num_dense), np.float32),
        labels_BL=(rng.random((num_rows, 1)) < 0.25).astype(np.float32),
        tables={"default": keys},
        spans=(),
    )
    return batch, {"default": rng.normal(0, 0.05, (len(keys_U), 1 + work.width)).astype(np.float32)}


def program_of(work: Workload, model: str, precision: str, device: Device) -> GpuProgram:
    """The tower of a model on the workload's slots."""
    layout = TableLayout("default", 1 + work.width, first_order=True, single=tuple(work.slots))
    return GpuProgram(
        [layout],
        num_dense=work.num_dense,
        num_labels=1,
        model=parse_model(MODELS[model]),
        optimizer=DenseOptimizerConfig(learning_rate=work.dense_learning_rate),
        seed=work.seed,
        rank=0,
        device=device,
        precision=precision,
    )


def flops(call: Call) -> int:
    """Of a matrix product; the rest of a step's arithmetic is small beside it."""
    if isinstance(call, Matmul):
        return 2 * call.out.size * call.sizes[2]
    if isinstance(call, (Skinny, SkinnyGrad)):
        return (2 if isinstance(call, Skinny) else 4) * call.x.shape[0] * call.w.size
    return 0


def nbytes(call: Call) -> int:
    """That a call reads and writes, each element once (of a table by index: as many rows as indices)."""
    total = 0
    for view in call.views:
        size = (
            view.size
            if 0 not in view.strides
            else int(np.prod([n for n, s in zip(view.shape, view.strides, strict=True) if s]))
        )
        total += size * BYTES[view.type]
    return total


def measure(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Every model, precision and batch of the spec."""
    work = Workload(**spec["work"])
    found = []
    for model in spec["models"]:
        for precision in spec["precisions"]:
            for num_rows in spec["batches"]:
                device = Device(0)
                program = program_of(work, model, precision, device)
                found.append(
                    {"model": model, "precision": precision, "batch_rows": num_rows, **_one(program, work, num_rows)}
                )
                device.close()
                sys.stderr.write(json.dumps(found[-1])[:400] + "\n")
    return found


def _one(program: GpuProgram, work: Workload, num_rows: int) -> dict[str, Any]:
    batch, rows = batch_of(work, num_rows)
    buffer = program.buffer(2)

    def step() -> None:
        buffer.clear()
        buffer.take(program.gradients(batch, rows))
        buffer.apply(float(num_rows))

    for _ in range(3):
        step()
    started, steps = time.perf_counter(), max(5, min(200, 2_000_000 // num_rows))
    for _ in range(steps):
        step()
    whole = (time.perf_counter() - started) / steps * 1e3
    runner = program._runner  # noqa: SLF001  its timings are of no use to anybody else
    _, shapes = program._arrays("train", program.feed_with_labels(batch, rows))  # noqa: SLF001
    plan = runner.plan("train", shapes)
    parts = runner.breakdown(plan)
    kernels: dict[str, float] = {}
    for call, ms in parts:
        kernels[call.kernel] = kernels.get(call.kernel, 0.0) + ms
    feed, out = plan.lowered.feeds.buffer.nbytes, plan.lowered.out.nbytes
    device = program.device
    host = runner.hosts

    def copies() -> None:
        device.upload(runner.address_of("feed"), host["feed"][:feed])
        device.download(host["out"][:out], runner.address_of("out"))

    least = sum(a.nbytes for a in (*rows.values(), batch.tables["default"].single_BF, batch.dense_BD, batch.labels_BL))
    least += sum(a.nbytes for a in rows.values()) + 7 * 4 * program.num_floats
    return {
        "replay_ms": [runner.milliseconds(plan, apply=True, rounds=1) for _ in range(5)],
        "program_ms": runner.milliseconds(plan, apply=False),
        "step_ms": whole,
        "copies_ms": float(np.median([device.milliseconds(copies) for _ in range(5)])),
        "uploaded_bytes": feed,
        "downloaded_bytes": out,
        "keys": len(batch.tables["default"].keys_U),
        "calls": len(plan.lowered.calls),
        "kernels_ms": kernels,
        "flops": sum(flops(call) for call, _ in parts),
        "bytes": sum(nbytes(call) for call, _ in parts),
        "least_bytes": least,
    }


def main() -> None:
    """All cases; writes a list of what was measured."""
    spec, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    result.write_text(json.dumps({"cases": measure(cast("dict[str, Any]", spec))}))


if __name__ == "__main__":
    main()
