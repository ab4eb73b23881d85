"""The JSON schema takes what a job file may say, as a standard validator sees it, and refuses what has another form."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError
from paddlewheel.trainer.job.schema import job_schema
from paddlewheel.trainer.job.yaml_loader import apply_override, read_yaml
from paddlewheel.trainer.models.config import KINDS
from tests.support.generated_jobs import BASE, job_files

JOBS = sorted((Path(__file__).parents[4] / "jobs").glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(job_schema())


def is_job(raw: dict[str, Any]) -> bool:
    try:
        JobConfig.parse(raw)
    except ConfigError:
        return False
    return True


def faults(raw: dict[str, Any]) -> list[str]:
    return [error.message[:300] for error in VALIDATOR.iter_errors(raw)]


def test_it_is_a_schema_and_its_defaults_are_what_it_takes() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    for section in (VALIDATOR.schema, *VALIDATOR.schema["$defs"].values()):
        for name, key in section.get("properties", {}).items():
            if "default" in key:
                VALIDATOR.evolve(schema={**key, "$defs": VALIDATOR.schema["$defs"]}).validate(key["default"]), name


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_it_takes_the_shipped_jobs(path: Path) -> None:
    assert faults(read_yaml(path)) == []
    assert faults(JobConfig.load(path).model_dump(mode="json")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_every_kind_of_model(kind: str) -> None:
    model = {"kind": kind, **({"item": ["item"]} if kind == "two_tower" else {})}
    assert faults({**BASE, "model": model}) == []


@given(raw=job_files())
@settings(max_examples=200, deadline=None)
def test_what_a_job_may_say_it_takes(raw: dict[str, Any]) -> None:
    if is_job(raw):
        assert faults(raw) == []


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_value_of_another_form_is_refused_by_both(data: st.DataObject) -> None:
    """Somewhere in a full job: a key that is not known, or a value whose type no key there has."""
    raw = copy.deepcopy(_FULL)
    path = data.draw(st.sampled_from(_PLACES))
    place = raw
    for step in path[:-1]:
        place = place[step]
    value = place[path[-1]]
    if isinstance(value, dict) and "default" not in value and path[-1] != "options":
        value["no_such_key"] = 1
    else:
        place[path[-1]] = {"of": ["another form"]} if not isinstance(value, dict) else 7
    assert not is_job(raw)
    assert faults(raw), path


_FULL = JobConfig.from_settings(BASE).model_dump(mode="json")


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(place for step, below in inner for place in _places(below, (*path, step)))]


_PLACES = _places(_FULL)


@pytest.mark.parametrize(
    "override",
    [
        "cluster.servers='2'",
        "cluster.servers=true",
        "cluster.servers=0",
        "cluster.servers=1.5",
        "train.dense_optimizer.learning_rate='1e-3'",
        "data.shuffle.enabled=yes",
        "data.shuffle.enabled=1",
        "data.labels=[]",
        "data.labels=null",
        "data.batch_rows=null",
        "data.sparse=user",
        "data.sparse.0.max_length='4'",
        "data.dense={columns: [price], clip: [1]}",
        "model={kind: depfm}",
        "model={kind: lr, tower: [1]}",
        "model={kind: 'a b:C'}",
        "model={kind: two_tower}",
        "model={tower: [8], cross_layers: 2}",
        "tables.item.optimizer={learning_rate: 0.1}",
        "tables.item.optimizer={rule: adam, initial_accumulator: 1}",
        "tables.item.width='8'",
        "tables={'a b': {}}",
        "tables={}",
        "name=a b",
        "nme=x",
    ],
)
def test_both_refuse(override: str) -> None:
    raw = copy.deepcopy(BASE)
    apply_override(raw, override, "job")
    assert not is_job(raw)
    assert faults(raw)


def test_a_model_without_a_kind_is_one_for_both() -> None:
    raw = {**BASE, "model": {"tower": [8], "dropout": 0.5}, "data": {**BASE["data"], "labels": "click", "dense": None}}
    assert is_job(raw)
    assert faults(raw) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.servers='2'", "cluster.servers: is '2', and must be a whole number, without quotes"),
        ("train.dense_optimizer.learning_rate='1e-3'", "is '1e-3', and must be a number, without quotes"),
        ("data.shuffle.enabled=yes", "data.shuffle.enabled: is 'yes', and must be true or false, without quotes"),
        ("cluster.server_ports=['1']", "cluster.server_ports.0: is '1', and must be a whole number"),
    ],
)
def test_a_value_of_another_type_is_told(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_settings(BASE, [override])
    assert words in str(caught.value)


def test_words_for_true_are_refused_in_a_block_that_stands_alone() -> None:
    raw = copy.deepcopy(BASE)
    raw["data"]["dense"] = {"columns": ["price"], "standardise": "yes"}
    with pytest.raises(ConfigError, match=r"data.dense.standardise: is 'yes', and must be true or false"):
        JobConfig.parse(raw)
    assert faults(raw)
