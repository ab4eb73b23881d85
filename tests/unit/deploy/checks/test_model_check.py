"""The dense part of a job is built without a row of data or a parameter in memory: what is refused, and how."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from paddlewheel.deploy.checks.model_check import CheckLostError, ModelCheck, num_floats
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError
from paddlewheel.trainer.models.config import KINDS, ModelError

OWN_MODEL = """
import sys
import paddle
from pydantic import BaseModel
from paddlewheel.trainer.models.base import Model

print("a user's module may print")

class Net(Model):
    class Options(BaseModel):
        units: int = 1

    def __init__(self, spec, options):
        super().__init__()
        self.out = paddle.nn.Linear(spec.flat_width, options.units)

    def forward(self, inputs):
        return self.out(inputs.flat_BX)

class Typo(Net):
    def forward(self, inputs):
        return self.out(inputs.flat)

class Leaves(Net):
    def forward(self, inputs):
        sys.exit(3)

class Nothing:
    pass
"""


def job(model: dict[str, Any], **changes: Any) -> JobConfig:
    raw: dict[str, Any] = {
        "name": "x",
        "data": {
            "train": "t",
            "labels": ["click"],
            "dense": {"columns": ["price"]},
            "sparse": [{"name": "user"}, {"name": "item"}, {"name": "tags", "max_length": 3}],
        },
        "tables": {"default": {"width": 4}},
        "model": model,
    }
    for key, value in changes.items():
        if key in raw["data"]:
            raw["data"][key] = value
        else:
            raw[key] = value
    return JobConfig.parse(raw)


SEQUENCE = [
    {"name": "user"},
    {"name": "item", "table": "i"},
    {"name": "seen", "table": "i", "max_length": 3, "pooling": "none"},
]
TWO = {"default": {"width": 4}, "i": {"width": 4}}
NO_FIRST = {"default": {"width": 4, "first_order": False}}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_fits_is_built_without_memory(kind: str) -> None:
    changes: dict[str, Any] = {}
    model: dict[str, Any] = {"kind": kind}
    if kind in {"din", "dien"}:
        changes = {"sparse": SEQUENCE, "tables": TWO}
    if kind in {"esmm", "mmoe", "ple", "shared_bottom"}:
        changes = {"labels": ["click", "buy"], "tables": NO_FIRST}
    if kind == "two_tower":
        model["item"] = ["item"]
        changes = {"tables": NO_FIRST}
    assert num_floats(job(model, **changes)) > 0


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ({"kind": "din"}, {}, "no feature has `pooling: none`"),
        (
            {"kind": "deepfm"},
            {"sparse": SEQUENCE, "tables": {"default": {"width": 4}, "i": {"width": 4}}},
            "reads no sequences",
        ),
        ({"kind": "esmm"}, {}, r"esmm needs data.labels = \[click, conversion\], got 1"),
        ({"kind": "mmoe", "label_weights": [1, 2]}, {}, "model.label_weights has 2 numbers for 1 labels"),
        ({"kind": "finalmlp", "heads": 7}, {}, "model.heads = 7 does not divide"),
        ({"kind": "two_tower", "item": ["x"]}, {}, "model.item: 'x' is no pooled feature"),
        ({"kind": "two_tower", "item": ["tags"]}, {}, "model.item: 'tags' comes first"),
        (
            {"kind": "lr"},
            {"tables": NO_FIRST},
            "loss does not depend on default",
        ),
        ({"kind": "fm"}, {"sparse": []}, "no sparse feature"),
        (
            {"kind": "deepfm"},
            {
                "sparse": [{"name": "user"}, {"name": "item", "table": "i"}],
                "tables": {"default": {"width": 4}, "i": {"width": 8}},
            },
            r"one table width; got widths \[4, 8\]",
        ),
        ({"kind": "nowhere:Net"}, {}, "there is no module 'nowhere'"),
    ],
    ids=range(11),
)
def test_models_that_do_not_fit(model: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        num_floats(job(model, **changes))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Net", {"units": 3}, r"forward returns an array \[-1, 3\], and log-odds \[batch rows, 1\] are needed"),
        ("Net", {"unit": 3}, r"model.options.unit: unknown key; did you mean units\? Allowed in model.options: units"),
        ("Net", {"units": "many"}, "model.options.units: Input should be a valid integer"),
        ("Typo", {}, r"AttributeError: .*'flat' \(.*own_models.py, line 22\)"),
        ("Leaves", {}, r"SystemExit: 3 \(.*own_models.py, line 26\)"),
        ("Nothing", {}, "not a subclass of trainer.models.base.Model"),
        ("Absent", {}, r"own_models.py has no Absent. It has: Leaves, Net, Nothing, Typo"),
    ],
)
def test_a_users_own_model_that_is_not_as_it_must_be(
    tmp_path: Path, name: str, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "own_models.py").write_text(OWN_MODEL)
    with pytest.raises(ModelError, match=words):
        num_floats(job({"kind": f"own_models:{name}", "options": options, "folder": str(tmp_path)}))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_check_that_somebody_kills_is_no_mistake_in_the_job(number: signal.Signals) -> None:
    with ModelCheck(job({"kind": "fm"})) as check:
        assert check._worker is not None
        check._worker.send_signal(signal.SIGSTOP)  # before it can come to an end, or to a handler of Python's
        check._worker.send_signal(number)
        check._worker.send_signal(signal.SIGCONT)
        with pytest.raises(CheckLostError, match=f"killed by {number.name}: try again"):
            check.finish()
    assert not issubclass(CheckLostError, ValueError)  # 75, not 64


def test_a_check_that_ends_of_its_own_doing_is_the_jobs_mistake() -> None:
    with ModelCheck(job({"kind": "fm"})) as check:
        assert check._worker is not None
        check._worker.send_signal(signal.SIGABRT)
        with pytest.raises(ConfigError, match="exit code -6"):
            check.finish()
