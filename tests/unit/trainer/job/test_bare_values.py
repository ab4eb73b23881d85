"""A bare value where the job file wants a section or a list is answered with what to write, and that is accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError
from paddlewheel.trainer.job.written_forms import expected_form

JOB = """
name: small
data:
  train: data/train
  eval: data/eval
  group: user
  labels: [click]
  sparse: [{name: user}, {name: item, table: item}, {name: tags, max_length: 4}]
tables: {default: {width: 8}, item: {width: 8}}
"""


def refusal(override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_settings(yaml.safe_load(JOB), [override])
    return str(caught.value)


def findings(*overrides: str) -> str:
    try:
        JobConfig.from_settings(yaml.safe_load(JOB), overrides)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("override", "written"),
    [
        ("model=deepfm", "model: {kind: deepfm}"),
        ("model=DeepFM", "model: {kind: deepfm}"),
        ("model=depfm", "model: {kind: deepfm}"),
        ("model=mymodels:Net", "model: {kind: 'mymodels:Net'}"),
        ("model=[dcn]", "model: {kind: deepfm}"),
        ("model={kind: deepfm, tower: 400}", "tower: [400]"),
        ("model={kind: two_tower, item: item}", "item: [item]"),
        ("model={kind: din, targets: tags}", "targets: {tags: tags}"),
        ("tables.item.optimizer=adam", "optimizer: {rule: adam}"),
        ("tables.item.lifecycle=0.98", "lifecycle: {show_click_decay: 0.98}"),
        ("tables={default: 16}", "default: {width: 16}"),
        ("tables=16", "tables: {default: {width: 16}}"),
        ("tables=default", "tables: {default: {}}"),
        ("tables=[default, item]", "tables: {default: {}, item: {}}"),
        ("tables=[{name: default, width: 4}]", "tables: {default: {width: 4}}"),
        ("data=data/train", "data: {train: data/train}"),
        ("data.sparse=[x]", "- {name: x}"),
        ("data.sparse=x", "sparse: [{name: x}]"),
        ("data.sparse={name: x}", "sparse: [{name: x}]"),
        ("data.sparse={x: {column: y}}", "sparse: [{name: x, column: y}]"),
        ("data.dense=[price]", "- {columns: [price]}"),
        ("data.dense=price", "dense: {columns: [price]}"),
        ("data.dense={columns: price}", "columns: [price]"),
        ("data.sparse.0.vocabulary=5", "vocabulary: {min_count: 5}"),
        ("data.sparse.0.bucketize=log_square", "bucketize: {kind: log_square}"),
        ("data.sparse.0.cross=item", "cross: [item]"),
        ("data.shuffle=false", "shuffle: {enabled: false}"),
        ("data.label_rule=soft", "label_rule: {soft: true}"),
        ("train=3", "train: {epochs: 3}"),
        ("train.dense_optimizer=0.01", "dense_optimizer: {learning_rate: 0.01}"),
        ("train.dense_optimizer.schedule=cosine", "schedule: {decay: cosine}"),
        ("train.days=2026-01-01..2026-01-07", "days: {range: 2026-01-01..2026-01-07}"),
        ("train.days={publish: chains}", "publish: {directory: chains}"),
        ("train.negative_sampling=0.1", "negative_sampling: {keep: 0.1}"),
        ("train.evaluation=gauc", "evaluation: {metric: gauc}"),
        ("train.evaluation=100", "evaluation: {every_steps: 100}"),
        ("warm_start=runs/old", "warm_start: {source: runs/old}"),
        ("warm_start={source: runs/old, tables: item}", "tables: {item: item}"),
        ("cluster=4", "cluster: {servers: 4}"),
        ("cluster.server_ports=7000", "server_ports: [7000]"),
        ("checkpoint=ck", "checkpoint: {directory: ck}"),
        ("checkpoint=100", "checkpoint: {every_steps: 100}"),
        ("metrics=9090", "metrics: {first_port: 9090}"),
        ("metrics=false", "metrics: {enabled: false}"),
    ],
)
def test_the_answer_is_what_to_write_and_it_is_accepted_there(override: str, written: str) -> None:
    message = refusal(override)
    assert f"write `{written}`" in message
    assert "input should be" not in message
    assert "instance of" not in message
    path = message.splitlines()[1].strip().partition(":")[0]
    value = yaml.safe_load(written)
    if isinstance(value, list):
        path = path.removesuffix(".0")
    else:
        (value,) = value.values()
    flow = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    # another key may still be missing, but this one has its form
    assert not re.search(rf"{re.escape(path)}: is (a|empty)", findings(override, f"{path}={flow}"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.dense_optimizer=adam", ["train.dense_optimizer: is a section of its own, got 'adam'", "learning_rate"]),
        ("cluster=[1, 2]", ["cluster: is a section of its own", "servers, trainer_threads, trainers"]),
        ("model=", ["model: is empty", "leave it out for its default"]),
        ("model.kind=", ["model.kind: is one of lr, fm", "got None"]),
        ("tables.item.optimizer={learning_rate: 0.1}", ["tables.item.optimizer.rule: is required", "adagrad"]),
        ("data.dense={columns: [p], clip: 5}", ["data.dense.clip: is a list of 2, got 5"]),
        ("name=", ["1 problem", "name: "]),
    ],
)
def test_what_has_no_nearest_form_is_told_its_keys(override: str, words: list[str]) -> None:
    message = refusal(override)
    for word in words:
        assert word in message


def test_every_section_of_a_job_answers_every_kind_of_bare_value() -> None:
    def walk(model: type[BaseModel], path: str) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            found.append(f"{path}{name}")
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                found += walk(field.annotation, f"{path}{name}.")
        return found

    for key in walk(JobConfig, ""):
        for value in ("x", "3", "true", "null", "[x]", "[[3]]", "[{a: 1}]"):
            message = findings(f"{key}={value}")
            for words in ("valid dictionary", "instance of", "valid tuple", "discriminator", "PydanticUndefined"):
                assert words not in message, (key, value)


def test_values_of_the_right_form_have_no_answer() -> None:
    whole: Any = {"width": 3}
    assert expected_form("cluster", [int], "x") is None
    assert expected_form("x", [tuple[int, ...]], [1]) is None
    assert expected_form("x", [JobConfig], whole) is None
