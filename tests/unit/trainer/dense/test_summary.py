"""What a model consists of, against shapes, parameters and arithmetic counted by hand."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddlewheel.data_pipeline import synthetic
from paddlewheel.deploy.cli import run
from paddlewheel.trainer.dense.summary import summarise
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.models.config import KINDS

B, W, D = 32, 4, 2


def job(model: dict[str, Any], **changes: Any) -> JobConfig:
    sparse = [{"name": "user"}, {"name": "item", "table": "item"}, {"name": "tags", "max_length": 3}]
    data = {"labels": ["click"], "batch_rows": B, "dense": {"columns": ["a", "b"]}, "sparse": sparse}
    tables = {"default": {"width": W}, "item": {"width": W}}
    return JobConfig.parse({"name": "x", "data": {**data, **changes}, "tables": tables, "model": model})


def test_a_tower_is_counted_as_by_hand() -> None:
    found = summarise(job({"kind": "deepfm", "tower": [8, 6], "norm": "layer"}))
    inputs = 3 * W + D
    layers = {layer.name: layer for layer in found.layers}
    for name, before, after in (("hidden.0", inputs, 8), ("hidden.1", 8, 6), ("output", 6, 1)):
        layer = layers[f"tower.{name}"]
        assert (layer.output, layer.parameters) == ((B, after), before * after + after)
        assert layer.flops == B * after * (2 * before + 1)  # product and bias
    assert layers["tower.norms.0"].parameters == 2 * 8
    assert layers["tower.norms.0"].flops == B * 8
    assert layers["tower"].flops == B * (8 + 6)  # two times ReLU
    assert found.layers[-1].name == ""
    assert found.layers[-1].output == (B, 1)
    # pairs of F = 3 embeddings: their sum and its square's, squares, sums over the width, difference, half; three terms
    pairs = B * 3 * W + B * W + B * W + B * 3 * W + B * 3 * W + B + B
    assert pairs <= found.layers[-1].flops <= pairs + 6 * B
    assert (
        found.parameters
        == sum(layer.parameters for layer in found.layers)
        == sum([inputs * 8 + 8, 8 * 6 + 6, 6 + 1, 2 * 8, 2 * 6, *([D + 1] if "linear" in layers else [])])
    )
    assert (found.rows, found.uncounted) == (B, ())
    assert [(t.name, t.features, t.width, t.keys) for t in found.tables] == [
        ("default", ("user", "tags"), W + 1, B + 3 * B),
        ("item", ("item",), W + 1, B),
    ]
    assert found.made_up == "the job has no data.train"
    assert found.loss > 0
    assert 0 < found.mean_predictions["click"] < 1


@pytest.mark.zoo
@pytest.mark.parametrize("kind", KINDS)
def test_all_parameters_and_operators_of_every_kind_are_counted(kind: str) -> None:
    model: dict[str, Any] = {"kind": kind, **({"item": ["item"]} if kind == "two_tower" else {})}
    changes: dict[str, Any] = {}
    if kind in {"din", "dien"}:
        seen = {"name": "seen", "table": "item", "pooling": "none", "max_length": 5}
        changes = {"sparse": [{"name": "user"}, {"name": "item", "table": "item"}, seen]}
    if kind in {"esmm", "mmoe", "ple", "shared_bottom"}:
        changes = {"labels": ["click", "buy"]}
    raw = job(model, **changes).model_dump(mode="json")
    if kind in {"esmm", "mmoe", "ple", "shared_bottom", "two_tower"}:
        raw["tables"] = {name: {**table, "first_order": False} for name, table in raw["tables"].items()}
    one, two = (summarise(JobConfig.parse({**raw, "data": {**raw["data"], "batch_rows": rows}})) for rows in (B, 2 * B))
    assert one.parameters == sum(layer.parameters for layer in one.layers) > 0 or kind == "fm"
    assert one.uncounted == ()
    assert one.flops > 0
    assert two.flops == pytest.approx(2 * one.flops, rel=0.05)
    assert [layer.name for layer in one.layers] == [layer.name for layer in two.layers]
    if kind == "dien":  # two GRUs of width W over 5 ids
        assert sum(layer.flops for layer in one.layers if layer.kind == "_GRU") > 2 * B * 5 * 2 * (2 * 3 * W * W)


def told(*words: object) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run([*map(str, words)]) == 0
    return out.getvalue()


def test_the_command_sends_the_first_rows_through_a_users_own_model(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(
        "import paddle\n"
        "from paddlewheel.trainer.models.base import Model\n"
        "class Net(Model):\n"
        "    def __init__(self, spec, options):\n"
        "        super().__init__()\n"
        "        self.out = paddle.nn.Linear(spec.flat_width, 1)\n"
        "    def forward(self, inputs):\n"
        "        return paddle.cumsum(self.out(inputs.flat_BX), axis=1) + inputs.first_order_B1\n"
    )
    synthetic.generate(tmp_path / "data", 300, seed=1)
    data = {**synthetic.data_section(tmp_path / "data"), "batch_rows": 64}
    settings = {"name": "own", "data": data, "tables": {"default": {"width": 4}}, "model": {"kind": "my_models:Net"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    found = json.loads(told("model", "summary", tmp_path / "job.yaml", "--json"))
    assert (found["made_up"], found["rows"], found["model"]) == (None, 64, "my_models:Net")
    assert found["uncounted"] == ["cumsum"]
    assert [(layer["name"], layer["kind"], layer["output"]) for layer in found["layers"]] == [
        ("out", "Linear", [64, 1]),
        ("", "Net", [64, 1]),
    ]
    assert found["parameters"] == found["layers"][0]["parameters"]
    assert found["flops"] == sum(layer["flops"] for layer in found["layers"])
    assert all(table["keys"] < 64 * len(table["features"]) * 8 for table in found["tables"])
    text = told("model", "summary", tmp_path / "job.yaml")
    assert "64 rows: data.train" in text
    assert "not counted  cumsum" in text


def test_every_kind_is_listed() -> None:
    found = json.loads(told("model", "ls", "--json"))
    assert list(found) == list(KINDS)
    assert found["dcn"]["keys"]["cross_layers"] == 3
    text = told("model", "ls")
    assert all(kind in text for kind in KINDS)
    assert math.isclose(found["two_tower"]["keys"]["temperature"], 0.1)
