"""What only a GPU can show: that the kernels compute, and that a job comes out as on the CPU. Skipped where there is
none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.unit.test_gpu import error, program_of, values_of, zoo_calls
from tests.unit.test_models import CASES, name_of
from trainer.gpu import check, native
from trainer.gpu.program import GpuProgram

pytestmark = [
    pytest.mark.skipif(not native.gpus(), reason="no NVIDIA GPU on this machine"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def device():
    native.build()
    made = native.Device(0)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _on_this_gpu(device, monkeypatch):
    monkeypatch.setattr("tests.unit.test_gpu.EmulatedDevice", lambda: device)


@pytest.mark.parametrize("seed", range(5))
def test_every_kernel_computes_what_numpy_computes(device, seed):
    """On odd sizes and fresh random inputs, for all that the models need."""
    rng = np.random.default_rng(seed)
    calls = check.distinct(list(zoo_calls(batch=int(rng.integers(1, 300)), keys=int(rng.integers(1, 200)))))
    assert check.run(device, calls, rng) == []


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
        [sys.executable, "-m", "deploy.cli", *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_comes_out_as_on_the_cpu(tmp_path: Path):
    """Same rows, seed and steps, servers and all; bfloat16 and the GPU's order of sums may cost 0.002 of AUC."""
    _paddlewheel("data", "synth", str(tmp_path / "data"), "--rows", "60k", "--seed", "3")
    job = yaml.safe_load(Path("jobs/quickstart.yaml").read_text())
    job["data"] |= {"train": str(tmp_path / "data/train"), "eval": str(tmp_path / "data/eval")}
    job["train"] |= {"epochs": 2, "max_staleness_steps": 0}
    job |= {"cluster": {"servers": 1, "trainers": 1}, "control": {"leases": "static"}}
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
