"""What only a GPU can show: that the kernels compute, and that a job comes out as on the CPU. Skipped where there is
none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from paddlewheel.trainer.dense.gpu_program import GpuProgram
from paddlewheel.trainer.kernels.gpu import cuda_library, self_check
from paddlewheel.trainer.kernels.gpu.kernel_calls import TILES, DotPairs, DotPairsGrad, FmPairs, FmPairsGrad
from paddlewheel.trainer.kernels.gpu.views import BYTES, Buffer, View, row_major
from tests.unit.trainer.kernels.gpu.test_gpu_kernels import error, one_table, program_of, values_of, zoo_calls
from tests.unit.trainer.models.test_models import CASES, name_of

pytestmark = [pytest.mark.needs("gpu"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def device():
    cuda_library.build()
    made = cuda_library.Device(0)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _on_this_gpu(device, monkeypatch):
    monkeypatch.setattr("tests.unit.trainer.kernels.gpu.test_gpu_kernels.EmulatedDevice", lambda: device)


@pytest.mark.parametrize("seed", range(5))
def test_every_kernel_computes_what_numpy_computes(device, seed):
    """On odd sizes and fresh random inputs, for all that the models need."""
    rng = np.random.default_rng(seed)
    calls = self_check.distinct(list(zoo_calls(batch=int(rng.integers(1, 300)), keys=int(rng.integers(1, 200)))))
    assert self_check.run(device, calls, rng) == []


@pytest.mark.parametrize("rows", [511, 5003])
def test_many_rows_with_few_ids(device, rows):
    """Several tiles of a field and the last not full, every id many times, for each width and type."""
    rng = np.random.default_rng(rows)
    calls = [
        call
        for width in (4, 8, 16, 32, 64, 128)
        for low in ("f32", "bf16", "f16")
        for call in table_calls(width, low, rows, keys=29)
    ]
    kernels = {"fields_lookup", "fields_grad", "skinny", "skinny_grad", "bias_grad", "copy2d", "matmul"}
    chosen = [call for call in self_check.distinct(calls) if call.kernel in kernels]
    assert {call.kernel for call in chosen} == kernels
    more = [call for call in calls if call.kernel in {"fields_lookup", "fields_grad"}]
    assert self_check.run(device, [*chosen, *more], rng) == []


def test_ids_that_are_all_different_or_all_the_same(device):
    """What the order by key within a tile could get wrong."""
    rng = np.random.default_rng(4)
    for keys in (1, 2, 9000):
        calls = [c for c in table_calls(16, "bf16", 1300, keys) if c.kernel == "fields_grad"]
        assert len(calls) == 1
        both = [replace(calls[0], tile=tile) for tile in TILES]
        assert self_check.run(device, both, rng) == []


def table_calls(width, low, rows, keys):
    program = one_table("float32", width)
    shapes = {"dense": (rows, 2), "label": (rows, 1), "row_weight": (rows, 1)}
    shapes |= {"t/rows": (keys, width + 1), "t/single": (rows, 5)}
    return self_check.calls_of(program.graphs["train"], shapes, low, tf32=True)


def array(*shape):
    return View(Buffer(4 * int(np.prod(shape))), 0, shape, row_major(shape))


@pytest.mark.parametrize("vectors", [2, 3, 9, 16, 17, 27, 33, 40, 70, 130])
def test_dot_products_of_any_number_of_vectors(device, vectors):
    """The last two take more shared memory for four rows, and for one, than a block gets without asking."""
    rng = np.random.default_rng(vectors)
    pairs = vectors * (vectors - 1) // 2
    stride = -(-pairs // 8) * 8
    calls = []
    for rows in (1, 37):
        for width in (1, 4, 7, 16, 17, 33):
            for kind in ("f32", "bf16", "f16"):
                v = array(rows, vectors, width)
                out, dout = (
                    View(Buffer(rows * stride * BYTES[kind]), 0, (rows, pairs), (stride, 1), kind) for _ in range(2)
                )
                calls.append(DotPairs(out, v))
                calls.append(DotPairsGrad(array(rows, vectors, width), v, dout))
    assert self_check.run(device, calls, rng) == []


@pytest.mark.parametrize("width", [1, 3, 4, 6, 16, 31, 32, 33, 70])
def test_pairs_of_any_width(device, width):
    rng = np.random.default_rng(width)
    rows, fields = 37, 7
    size = rows * fields * width
    e, dout = array(rows, fields, width), array(rows, 1)
    add = View(Buffer(2 * size), 0, (rows, fields * width), (fields * width, 1), "bf16")
    calls = [
        FmPairs(array(rows, 1), e),
        FmPairsGrad(array(rows, fields, width), e, dout, None),
        FmPairsGrad(array(rows, fields, width), e, dout, add),
    ]
    assert self_check.run(device, calls, rng) == []


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", 1e-5), ("tfloat32", 2e-3), ("bfloat16", 3e-2), ("float16", 5e-3)]
)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_model_is_the_same_on_cpu_and_gpu(case, precision, tolerance):
    cpu, gpu = program_of(case, "cpu"), program_of(case, precision)
    assert isinstance(gpu, GpuProgram)
    batch, rows = values_of(case)
    assert error(gpu.predict(batch, rows), cpu.predict(batch, rows)) < tolerance
    expected, found = cpu.gradients(batch, rows), gpu.gradients(batch, rows)
    assert found.finite
    assert error(found.flat_N, expected.flat_N) < tolerance
    for name, grads_UW in expected.tables.items():
        assert error(found.tables[name], grads_UW) < tolerance


def _paddlewheel(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paddlewheel.deploy.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_comes_out_as_on_the_cpu(tmp_path: Path):
    """Same rows, seed and steps, servers and all; bfloat16 and the GPU's order of sums may cost 0.002 of AUC."""
    _paddlewheel("data", "synth", str(tmp_path / "data"), "--rows", "60k", "--seed", "3")
    job = yaml.safe_load(Path("jobs/quickstart.yaml").read_text())
    job["data"] |= {"train": str(tmp_path / "data/train"), "eval": str(tmp_path / "data/eval")}
    job["data"]["slice_assignment"] = "static"
    job["train"] |= {"epochs": 2, "max_staleness_steps": 0}
    job |= {"cluster": {"servers": 1, "trainers": 1}}
    results = {}
    for device, precision in (("cpu", "float32"), ("gpu", "float32"), ("gpu", "auto")):
        job["train"] |= {"device": device, "precision": precision}
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(job | {"run_dir": str(tmp_path / f"{device}-{precision}")}))
        results[device, precision] = json.loads(_paddlewheel("train", str(file), "--json"))["result"]
    base = results["cpu", "float32"]
    for key, tolerance in ((("gpu", "float32"), 0.0005), (("gpu", "auto"), 0.002)):
        assert results[key]["eval"]["auc"] == pytest.approx(base["eval"]["auc"], abs=tolerance)
        assert results[key]["eval"]["logloss"] == pytest.approx(base["eval"]["logloss"], abs=tolerance)
        assert results[key]["rows"] == base["rows"]
