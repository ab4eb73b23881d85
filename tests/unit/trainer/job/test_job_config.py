"""The job file: what is accepted, and that every refusal names the key, the value, what is allowed and the remedy."""

from __future__ import annotations

import json
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from paddlewheel.deploy.cli import run
from paddlewheel.deploy.launch.plan import plan_of
from paddlewheel.trainer.job.config import JobConfig, check_server_folders
from paddlewheel.trainer.job.errors import ConfigError

MINIMAL = """
name: small
data:
  train: data/train
  labels: [click]
  sparse:
    - {name: user, column: user}
    - {name: item, column: item, table: item}
tables:
  default: {width: 8}
  item: {width: 8, optimizer: {rule: adam, learning_rate: 0.01}}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str = MINIMAL) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        JobConfig.load(path, overrides)
    return str(caught.value)


def test_minimal_job_has_defaults_for_the_rest(write) -> None:
    job = JobConfig.load(write())
    assert (job.cluster.servers, job.cluster.trainers, job.train.epochs) == (1, 1, 1)
    assert job.tables["item"].optimizer.rule == "adam"
    assert job.run_dir == str(Path.cwd() / "runs" / "small")
    assert job.checkpoint_location == str(Path.cwd() / "runs" / "small" / "checkpoints")


def test_paths_are_taken_from_the_working_directory_and_addresses_stay(write, tmp_path: Path) -> None:
    job = JobConfig.load(write(), ["data.eval=[a/b, 's3://bucket/key', /abs]", "checkpoint.directory=../c"])
    assert job.data.train == (str(tmp_path / "data/train"),)
    assert job.data.eval == (str(tmp_path / "a/b"), "s3://bucket/key", "/abs")
    assert job.checkpoint_location == str(tmp_path.parent / "c")


def test_the_children_get_the_same_job(write) -> None:
    job = JobConfig.load(write())
    assert JobConfig.parse(json.loads(job.model_dump_json())) == job


def test_the_whole_job_as_yaml_is_the_same_job(write, tmp_path: Path) -> None:
    job = JobConfig.load(write())
    again = tmp_path / "again.yaml"
    again.write_text(job.to_yaml())
    assert JobConfig.load(again) == job


def test_features_that_share_keys_share_their_threshold(write) -> None:
    both = "data.sparse=[{name: a, table: item}, {name: b, table: item}]"
    apart = "data.sparse=[{name: a, table: item}, {name: b, table: item, key_space: b}]"
    given = "tables.item.admission_by_feature={a: 3}"
    said = refusal(write(), both, given)
    assert "'a' and 'b' share the keys of the key space 'item', but one has the threshold 3 and the other null" in said
    for fine in (apart, given), (both, "tables.item.admission_by_feature={a: 3, b: 3}"):
        assert JobConfig.load(write(), fine).tables["item"].admission_by_feature["a"] == 3


def test_key_space_survives_the_way_to_the_children(write) -> None:
    # A feature's key space depends on whether its table was written down.
    job = JobConfig.load(write())
    again = JobConfig.parse(json.loads(job.model_dump_json()))
    assert [f.space for f in again.data.sparse] == [f.space for f in job.data.sparse] == ["user", "item"]


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("cluster.trainers=4", lambda j: j.cluster.trainers == 4),
        ("train.epochs = 2", lambda j: j.train.epochs == 2),
        ("data.sparse.1.table=default", lambda j: j.data.sparse[1].table == "default"),
        ("data.sparse[0].name=u", lambda j: j.data.sparse[0].name == "u"),
        ("model.tower=[32, 16]", lambda j: j.model.tower == (32, 16)),
        ("tables.item.optimizer.learning_rate=1e-4", lambda j: j.tables["item"].optimizer.learning_rate == 1e-4),
        ("tables.item={width: 4}", lambda j: j.tables["item"].width == 4),
        ("data.labels=[no]", lambda j: j.data.labels == ("no",)),
        ("data.labels=[2024-01-01]", lambda j: j.data.labels == ("2024-01-01",)),
        ("data.labels=['00']", lambda j: j.data.labels == ("00",)),
        ("data.labels=[00]", lambda j: j.data.labels == ("00",)),
        ("cluster.server_ports=null", lambda j: j.cluster.server_ports is None),
    ],
)
def test_override(write, override: str, read: Any) -> None:
    assert read(JobConfig.load(write(), [override]))


def test_later_overrides_win(write) -> None:
    assert JobConfig.load(write(), ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.trainrs=4", ["cluster.trainrs", "did you mean cluster.trainers?", "servers"]),
        ("clustr.trainers=4", ["clustr: unknown key", "did you mean cluster?"]),
        ("data.sparse.0.colum=x", ["data.sparse.0.colum", "did you mean data.sparse.0.column?"]),
        ("data.dense={colums: [a]}", ["data.dense.colums", "did you mean data.dense.columns?"]),
        ("data.dense=[{columns: [a], fil: 0}]", ["data.dense.0.fil", "did you mean data.dense.0.fill?"]),
        ("tables.item.optimizer.learning_rat=1", ["did you mean tables.item.optimizer.learning_rate?"]),
        ("tables.item.widht=1", ["did you mean tables.item.width?"]),
        ("zzzzzz=1", ["zzzzzz: unknown key.", "Allowed in a job: checkpoint, cluster"]),
        ("tables.item.optimizer={rule: adagrda}", ["tables.item.optimizer", "adagrda", "adagrad"]),
        ("cluster.servers=0", ["cluster.servers", "greater than or equal to 1", "got 0", "Parameter servers"]),
        ("cluster.servers=two", ["cluster.servers", "integer", "got 'two'"]),
        ("tables.item.width=0", ["tables.item.width", "got 0", "Floats of an embedding"]),
        ("data.labels=[]", ["data.labels", "at least 1"]),
        ("model.kind=depfm", ["model.kind", "depfm", "did you mean deepfm?", "lr", "package.module:Class"]),
        ("train.evaluation={every_steps: 5}", ["train.evaluation", "give data.eval"]),
        ("train.evaluation={patience: 2}", ["train.evaluation", "need every_steps or every_epochs"]),
        ("train.evaluation={metric: gauc}", ["train.evaluation.metric", "give data.group"]),
        ("train.evaluation={metric: weighted_auc}", ["train.evaluation.metric", "give data.sample_weight"]),
        (
            "train.dense_optimizer.schedule={decay: exponential}",
            ["train.dense_optimizer.schedule", "give final_factor"],
        ),
        ("train.negative_sampling={keep: 0}", ["train.negative_sampling.keep", "got 0", "Share of the rows"]),
        ("model={kind: lr, tower: [1]}", ["model.tower: unknown key", "Allowed in model: kind"]),
        ("model={kind: dcn, cros_layers: 1}", ["model.cros_layers", "did you mean model.cross_layers?"]),
        ("model={kind: 'a.b:C', units: 1}", ["model.units: unknown key", "options"]),
        ("model={kind: 'a b:C'}", ["model.kind", "'a b:C'"]),
        (
            "tables.item.admission_by_feature={itm: 3}",
            ["tables.item.admission_by_feature.itm", "no feature of this table", "did you mean item?"],
        ),
        ("tables.item={engine: paddle, admission_by_feature: {item: 3}}", ["tables.item", "table of its own"]),
        ("data.sparse.1.table=itm", ["data.sparse.1.table", "'itm'", "did you mean item?", "Declared: default, item"]),
        ("cluster.server_ports=[1, 2]", ["cluster.server_ports", "2 ports for cluster.servers = 1"]),
        ("cluster={servers: 2, server_ports: [7, 7]}", ["port 7 is given twice"]),
        ("cluster={server_ports: [7], coordinator_port: 7}", ["port 7 is given twice"]),
        ("cluster.server_ports=[70000]", ["cluster.server_ports.0", "65535"]),
        ("cluster.servers=3", None),
        ("tables.item.shards=7", None),
        (
            "control={heartbeat_seconds: 5, heartbeat_timeout_seconds: 6}",
            ["control", "heartbeat_timeout_seconds", "two heartbeats"],
        ),
        ("name=a b", ["name", "letters, digits"]),
        ("cluster.trainers", ["write --set key=value"]),
        ("data.sparse.7.name=x", ["data.sparse is a list of 2 entries"]),
        ("name.first=x", ["name is 'small'"]),
        ("seed=[1", ["not readable as YAML"]),
    ],
)
def test_refusals_name_key_value_and_remedy(write, override: str, words: list[str] | None) -> None:
    if words is None:  # fits by itself; only together with something else would it not
        JobConfig.load(write(), [override])
        return
    message = refusal(write(), override)
    for word in words:
        assert word in message


def test_shards_must_fit_the_servers(write) -> None:
    message = refusal(write(), "cluster.servers=2", "tables.item.shards=7")
    assert "tables.item.shards" in message
    assert "6 or 8" in message


def test_all_problems_are_told_at_once(write) -> None:
    with pytest.raises(ConfigError) as caught:
        JobConfig.load(write(), ["cluster.trainrs=4", "cluster.servers=0", "tables.item.width=-1"])
    assert {problem.path for problem in caught.value.problems} == {
        "cluster.trainrs",
        "cluster.servers",
        "tables.item.width",
    }


def test_missing_required_key_says_what_it_is(write) -> None:
    message = refusal(write("name: x\ndata: {sparse: [{name: a}]}\n"))
    assert "data.labels: is required and missing (Label columns" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["this is empty"]),
        ("- a\n- b\n", ["this is a list"]),
        ("name: a\n name: b: c\n", ["line 2", "YAML"]),
        ("name: a\nname: b\n", ["line 2", "'name' stands twice (first on line 1)"]),
    ],
)
def test_unreadable_files(write, text: str, words: list[str]) -> None:
    message = refusal(write(text))
    for word in words:
        assert word in message


def test_a_missing_file_names_the_job_files_beside_it(write, tmp_path: Path) -> None:
    write()
    assert "job.yaml" in refusal(tmp_path / "jobs.yaml")
    assert "working directory" in refusal(tmp_path / "nowhere" / "job.yaml")


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)


def test_anchors_and_merges_work(write) -> None:
    job = JobConfig.load(write(MINIMAL.replace("  item: {width: 8,", "  other: &t {width: 8}\n  item: {<<: *t,")))
    assert job.tables["item"].width == 8


def _models(kind: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    if kind in seen:
        return seen
    seen.add(kind)
    pending: list[Any] = [field.annotation for field in kind.model_fields.values()]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            _models(annotation, seen)
        pending += getattr(annotation, "__args__", ())
    return seen


def test_every_field_of_a_job_is_documented() -> None:
    undocumented = [
        f"{model.__name__}.{name}"
        for model in _models(JobConfig, set())
        for name, field in model.model_fields.items()
        if not field.description and name != "rule"
    ]
    assert undocumented == []


def test_every_section_refuses_unknown_keys_and_changes() -> None:
    for model in _models(JobConfig, set()):
        assert model.model_config.get("extra") == "forbid", model
        assert model.model_config.get("frozen") is True, model


def test_checkpoints_in_a_store(write, tmp_path: Path) -> None:
    job = JobConfig.load(write(), ["checkpoint.directory=s3://b/p", "checkpoint.staging=tmp"])
    assert job.checkpoint_location == "s3://b/p"
    assert job.checkpoint.staging == str(tmp_path / "tmp")
    assert JobConfig.load(write(), ["checkpoint.directory=hdfs://me@host:9000/p"]).checkpoint_location


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("s4://b/p", r"no store s4://; did you mean s3\? Known: s3, gs, hdfs"),
        ("file:///x", "a folder is written as a plain path"),
        ("s3:///p", "names no bucket: write s3://bucket/prefix"),
        ("s3://AKIA:hush@b/p", "no place for secrets. Set AWS_ACCESS_KEY_ID"),
        ("hdfs://me:hush@h/p", "no place for secrets"),
        ("s3://b/p?endpoint_override=h", "set AWS_ENDPOINT_URL"),
    ],
)
def test_addresses_of_stores_that_cannot_be_used(write, value: str, words: str) -> None:
    said = refusal(write(), f"checkpoint.directory={value}")
    assert re.search(words, said), said
    assert said.count("hush") <= 0


def test_staging_without_a_store(write) -> None:
    assert "checkpoint.staging: is for checkpoints in an object store" in refusal(write(), "checkpoint.staging=/tmp/x")


def test_checkpoints_of_changes_of_tables_that_cannot_tell_them(write) -> None:
    said = refusal(write(), "checkpoint.full_every=10", "tables.default.engine=paddle")
    assert "checkpoint.full_every: is 10, but tables.default.engine is paddle" in said


GOOD_NAMES = ["default", "a", "_x", "0", "user.v2", "A-b_c.9", "x" * 63]
BAD_NAMES = [
    "",
    "a b",
    "../x",
    "..",
    ".",
    ".x",
    "-x",
    "a/b",
    "a;touch x;b",
    "x$(touch${IFS}pwned)",
    "é",
    "x" * 64,
    "a\n",
]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_names_that_tables_may_have(name: str) -> None:
    assert list(job_with(tables={name: {"width": 4}}, table=name).tables) == [name]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_tables_may_not_have(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be a table's name.*63 ASCII letters") as found:
        job_with(tables={name: {"width": 4}}, table=name)
    assert any(problem.path.startswith(f"tables.{name}") for problem in found.value.problems)


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"data": {"dense": {"columns": ["x"], "clip": [0, math.inf]}}}, "data.dense.clip.1"),
        ({"tables": {"default": {"optimizer": {"rule": "sgd", "weight_bounds": [-math.inf, 1]}}}}, "tables.default."),
        ({"train": {"dense_optimizer": {"learning_rate": math.inf}}}, "train.dense_optimizer.learning_rate"),
        ({"control": {"heartbeat_timeout_seconds": math.nan}}, "control.heartbeat_timeout_seconds"),
        ({"tables": {"default": {"lifecycle": {"delete_below_score": math.inf}}}}, "tables.default.lifecycle"),
    ],
)
def test_numbers_that_are_none_are_refused(sections: dict[str, Any], path: str) -> None:
    """They would reach the children as null."""
    with pytest.raises(ConfigError) as found:
        job_with(**sections)
    assert len(found.value.problems) == 1
    assert found.value.problems[0].path.startswith(path)
    assert "must be finite" in found.value.problems[0].message


def test_an_accepted_job_survives_its_way_to_the_children() -> None:
    job = job_with()
    assert JobConfig.parse(json.loads(job.model_dump_json())) == job


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"train": "s3://KEY:SECRET@bucket/train"}},
        {"data": {"eval": ["/here", "s3://KEY:SE/CRET@bucket/eval"]}},
        {"data": {"statistics": "gs://token@bucket/fitted"}},
        {"checkpoint": {"directory": "s3://KEY:SECRET@bucket/kept"}},
        {"warm_start": {"source": "hdfs://user:word@host/x"}},
        {"data": {"train": "s3://bucket/train?access_key=KEY&secret_key=SECRET"}},
        {"run_dir": "s3://KEY:SECRET@bucket/run"},
    ],
)
def test_no_address_in_a_job_may_hold_a_secret(sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="holds a key or password: a job file is no place for secrets"):
        job_with(**sections)


@pytest.mark.parametrize(
    "address", ["s3://bucket/a@b", "hdfs://user@host:8020/x", "hdfs://host:8020/a@b", "s3://b/x?region=eu", "/a:b@c"]
)
def test_addresses_without_a_secret(address: str) -> None:
    assert job_with(data={"train": address}).data.train


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"run_dir": "/x/my runs"}, "run_dir"),
        ({"run_dir": "/x/läufe"}, "run_dir"),
        ({"run_dir": "/x/a", "checkpoint": {"directory": "/x/a (copy)"}}, "checkpoint.directory"),
        ({"run_dir": "/x/a b", "checkpoint": {"directory": "s3://bucket/x"}}, "run_dir"),
        ({"run_dir": "/x", "checkpoint": {"directory": "s3://b/x", "staging": "/big disk"}}, "checkpoint.staging"),
    ],
)
def test_folders_that_servers_cannot_be_told_are_refused_before_anything_starts(
    sections: dict[str, Any], key: str
) -> None:
    job = job_with(**sections)
    for start in (check_server_folders, plan_of):
        with pytest.raises(ConfigError, match=rf"{key}: .*cannot hold tables.*--set {key}=") as found:
            start(job)
        assert [problem.path for problem in found.value.problems] == [key]


def test_a_run_folder_with_a_blank_is_refused_by_every_command_that_would_start_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL)
    for command in (["job", "check"], ["train"], ["role", "coordinator"]):
        assert run([*command, str(path), "--set", f"run_dir={tmp_path / 'my runs'}"]) == 64, command
        assert "cannot hold tables" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.yaml"]


def test_folders_that_servers_never_see_may_have_any_name() -> None:
    check_server_folders(job_with(run_dir="/x/my runs", checkpoint={"directory": "/x/kept"}))
    check_server_folders(job_with(run_dir="/x/my runs", checkpoint={"directory": "s3://b/x", "staging": "/disk"}))


def test_a_checkpoint_to_begin_with_lies_where_servers_can_load_it() -> None:
    job = job_with(run_dir="/x")
    check_server_folders(job, "/y/step-1")
    with pytest.raises(ConfigError, match=r"restore: .*my runs"):
        check_server_folders(job, "/y/my runs/step-1")
    with pytest.raises(ConfigError, match="restore: the address holds a key or password"):
        check_server_folders(job, "s3://KEY:SECRET@bucket/step-1")
    with pytest.raises(ConfigError, match=r"run_dir: .*my runs"):
        check_server_folders(job_with(run_dir="/my runs", checkpoint={"directory": "/x"}), "s3://bucket/step-1")


def job_with(*, table: str = "default", **sections: Any) -> JobConfig:
    data = {"train": "/t", "labels": ["click"], "sparse": [{"name": "c", "table": table}], **sections.pop("data", {})}
    return JobConfig.parse({"name": "j", "data": data, **sections})


def test_a_step_of_more_rows_than_float32_counts_is_refused(write) -> None:
    """The trainers add up the rows of a step in float32, which has no 16,777,217."""
    JobConfig.load(write(), ["data.batch_rows=1048575", "cluster.trainers=16"])
    said = refusal(write(), "data.batch_rows=1048576", "cluster.trainers=16")
    assert "data.batch_rows: is 1048576" in said
    assert "steps of 16777216 rows" in said
    assert "at most 1048575" in said
