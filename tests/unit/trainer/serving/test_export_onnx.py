"""The program for ONNX runtimes computes what Paddle's does, or is not written."""

from __future__ import annotations

import re

import numpy as np
import onnxruntime
import pytest

from paddlewheel.trainer.dense.inputs import ListFeature, TableLayout
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.job.train import DenseOptimizerConfig
from paddlewheel.trainer.models import parse_model
from paddlewheel.trainer.serving import export
from paddlewheel.trainer.serving.exported_program import ExportedProgram

SUM = [
    TableLayout("user", 5, True, ("u1", "u2"), (ListFeature("tags", "mean", weighted=True),)),
    TableLayout("item", 5, True, ("i",), (ListFeature("seen", "sum"),)),
]
SEQUENCE = [SUM[0], TableLayout("item", 5, True, ("i",), (ListFeature("seen", "none"),))]


def write(folder, kind, layouts):
    program = DenseProgram(
        layouts,
        num_dense=3,
        num_labels=1,
        model=parse_model({"kind": kind}),
        optimizer=DenseOptimizerConfig(),
        seed=1,
        rank=0,
        logit_shift=-0.5,
    )
    (folder / "dense").mkdir()
    program.save_inference(folder / "dense" / "model")
    export._write_onnx(folder, layouts, 3)


@pytest.mark.parametrize(("kind", "layouts"), [("deepfm", SUM), ("din", SEQUENCE)])
def test_both_programs_agree(tmp_path, kind, layouts):
    write(tmp_path, kind, layouts)
    session = onnxruntime.InferenceSession(tmp_path / "dense" / "model.onnx")
    feed = export._made_up(layouts, 3, 20)
    log_odds, probability = session.run(None, {one.name: feed[one.name] for one in session.get_inputs()})
    expected = ExportedProgram(tmp_path / "dense" / "model", layouts).run(feed)
    np.testing.assert_allclose(log_odds, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(probability, 1 / (1 + np.exp(-expected)), rtol=1e-4, atol=1e-4)
    assert np.ptp(log_odds) > 0.1


def test_a_conversion_that_computes_something_else_is_refused(tmp_path):
    with pytest.raises(export.ExportError, match=r"does not compute the same: log-odds differ"):
        write(tmp_path, "dien", SEQUENCE)


def test_without_the_extra_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "paddle2onnx", None)
    with pytest.raises(export.ExportError, match=re.escape("pip install 'paddlewheel[onnx]'")):
        write(tmp_path, "lr", SUM)
