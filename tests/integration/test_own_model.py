"""A user's own model from the job file to predictions, each command in another working directory than the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from paddlewheel.data_pipeline import synthetic

MODEL = """
from pydantic import BaseModel
from my_layers import TowerOfMine
from paddlewheel.trainer.models.base import Model

class Squeeze(Model):
    class Options(BaseModel):
        units: int

    def __init__(self, spec, options):
        super().__init__()
        self.tower = TowerOfMine(spec.flat_width, [options.units], spec.num_labels)

    def forward(self, inputs):
        return self.tower(inputs.flat_BX) + inputs.first_order_B1
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    synthetic.generate(tmp_path / "data", 3000, seed=1)
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "my_models.py").write_text(MODEL)
    (folder / "my_layers.py").write_text("from paddlewheel.trainer.models.base import Tower as TowerOfMine\n")
    settings = {
        "name": "own",
        "run_dir": str(tmp_path / "run"),
        "data": {**synthetic.data_section(tmp_path / "data"), "batch_rows": 256},
        "tables": {"default": {"width": 4}},
        "model": {"kind": "my_models:Squeeze", "options": {"units": 8}},
        "metrics": {"enabled": False},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "somewhere").mkdir()
    return folder / "job.yaml"


def paddlewheel(job: Path, *words: Any, code: int = 0) -> dict[str, Any]:
    """A command in a folder where nothing is, as it is installed: no folder of the user's is on Python's path."""
    call = "import sys; from paddlewheel.deploy.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", call, *map(str, words), "--json"]
    where = job.parent.parent / "somewhere"
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, (done.stdout[-2000:], done.stderr[-2000:])
    return json.loads(done.stdout)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.kind='my_modles:Squeeze'", "model.kind: there is no module 'my_modles'"),
        pytest.param("model.kind='my_models:Squeze'", "my_models.py has no Squeze", marks=pytest.mark.slow),
        pytest.param("model.options={units: 8, x: 2}", "model.options.x: unknown key", marks=pytest.mark.slow),
    ],
)
def test_a_check_tells_what_is_wrong_with_it(job: Path, override: str, words: str) -> None:
    assert words in paddlewheel(job, "job", "check", job, "--set", override, code=64)["error"]["message"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_one_file_beside_the_job_serves_every_command(job: Path, tmp_path: Path) -> None:
    trained = paddlewheel(job, "train", job)
    [step] = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    known = json.loads((step / "MANIFEST.json").read_text())["settings"]["model"]
    assert (known["kind"], known["options"], known["folder"]) == ("my_models:Squeeze", {"units": 8}, str(job.parent))
    assert len(known["sha256"]) == 64
    evaluated = paddlewheel(job, "evaluate", job)
    assert evaluated["result"]["eval"]["auc"] == pytest.approx(trained["result"]["eval"]["auc"])
    paddlewheel(job, "export", job, "--to", tmp_path / "export")
    spec = json.loads((tmp_path / "export" / "export.json").read_text())
    assert spec["model"] == known
    assert spec["tables"]["default"]["unknown"] == "unknown/default.npy"
    assert pq.read_table(tmp_path / "export" / "tables" / "default").num_rows == spec["tables"]["default"]["keys"]
    paddlewheel(job, "predict", job, "--to", tmp_path / "job.parquet")
    paddlewheel(job, "predict", step, "--to", tmp_path / "step.parquet")
    paddlewheel(job, "predict", "--export", tmp_path / "export", "--to", tmp_path / "export.parquet")
    scores = [pq.read_table(tmp_path / f"{name}.parquet")["score_click"] for name in ("job", "step", "export")]
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_allclose(scores[0], scores[2], atol=1e-6)

    (job.parent / "my_models.py").write_text(MODEL.replace("+ inputs", "- inputs"))
    for words in (["evaluate", job], ["export", job, "--to", tmp_path / "n"], ["predict", job, "--to", tmp_path / "n"]):
        assert "has changed since the model was trained" in paddlewheel(job, *words, code=64)["error"]["message"]
    again = paddlewheel(job, "predict", step, "--to", tmp_path / "n", code=64)["error"]["message"]
    assert "is not what the job was given or trained with" in again
    assert "model.sha256" in paddlewheel(job, "train", job, "--set", "train.epochs=2", code=64)["error"]["message"]
    paddlewheel(job, "predict", step, "--to", tmp_path / "other.parquet", "--set", "model.sha256=any")
    (job.parent / "my_models.py").unlink()
    gone = paddlewheel(job, "predict", step, "--to", tmp_path / "n", code=64)["error"]["message"]
    assert f"there is no module 'my_models' in {job.parent}" in gone
    paddlewheel(job, "predict", "--export", tmp_path / "export", "--to", tmp_path / "without.parquet")
