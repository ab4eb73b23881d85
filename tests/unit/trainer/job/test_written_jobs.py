"""A job that is written, in full or without its defaults, is the same job when it is read: every kind, rule and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paddlewheel.pserver.config import Optimizer
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError
from paddlewheel.trainer.job.yaml_loader import read_yaml, write_yaml
from paddlewheel.trainer.models.config import KINDS
from tests.support.generated_jobs import BASE, ODD_TEXTS, job_files

JOBS = sorted((Path(__file__).parents[4] / "jobs").glob("*.yaml"))
RULES = [rule.model_fields["rule"].default for rule in get_args(get_args(Optimizer)[0])]
MODELS: list[dict[str, Any]] = [
    *({"kind": kind, **({"item": ["item"]} if kind == "two_tower" else {})} for kind in KINDS),
    {
        "kind": "my_models:GatedFM",
        "folder": "/models",
        "sha256": "any",
        "options": {"units": [64, 32], "deep": {"no": "1e-4", "none": None}},
    },
]


def read_again(job: JobConfig, folder: Path, *, short: bool) -> JobConfig:
    path = folder / "again.yaml"
    path.write_text(job.to_yaml(short=short), encoding="utf-8")
    return JobConfig.load(path)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["kind"])
def test_every_kind_of_model_and_rule_of_tables_is_written_as_it_is_read(tmp_path: Path, model: dict[str, Any]) -> None:
    tables = {"item": {"width": 4}, **{rule: {"optimizer": {"rule": rule}} for rule in RULES}}
    job = JobConfig.from_settings({**BASE, "model": model, "tables": {"default": {}, **tables}})
    assert {table.optimizer.rule for table in job.tables.values()} == set(RULES)
    assert read_again(job, tmp_path, short=False) == read_again(job, tmp_path, short=True) == job


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_the_shipped_jobs_are_written_as_they_are_read(tmp_path: Path, path: Path) -> None:
    job = JobConfig.load(path)
    assert read_again(job, tmp_path, short=False) == read_again(job, tmp_path, short=True) == job
    assert len(job.to_yaml(short=True)) < len(job.to_yaml())


@given(raw=job_files())
@settings(max_examples=40, deadline=None)
def test_any_job_is_written_as_it_is_read(tmp_path_factory: pytest.TempPathFactory, raw: dict[str, Any]) -> None:
    try:
        job = JobConfig.from_settings(raw)
    except ConfigError:
        assume(False)
        raise
    folder = tmp_path_factory.mktemp("job")
    for short in (False, True):
        assert read_again(job, folder, short=short) == job
    assert JobConfig.parse(json.loads(job.model_dump_json())) == job


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | st.sampled_from(ODD_TEXTS)
    )
)
@settings(max_examples=150, deadline=None)
def test_a_text_stays_a_text(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("yaml") / "texts.yaml"
    value = {"texts": texts, "again": texts, **dict.fromkeys(texts, 1)}
    path.write_text(write_yaml(value), encoding="utf-8")
    assert read_yaml(path) == value
