"""The job file: one YAML, one typed model. Sections live beside their owners; this file composes and checks them.

A job says everything a run needs, so `JobConfig.load` is the only door: the command line, the roles in containers and
the tests all come through it, and `--set a.b=c` is applied to the YAML before the same model sees it. Importable
without Paddle.

Relative paths are taken from the working directory, like those of any other argument of a command: so a path means
the same in the file and after `--set`, and a job file can be moved. `load` makes them absolute at once; the workers
of a run therefore see the same files whatever their own directory is. Addresses such as `s3://...` stay as they are.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.pserver.config import TableConfig, TableName
from paddlewheel.trainer.checkpoint.store import KEY_FOUND, KEY_REMEDY, holds_secret, is_remote
from paddlewheel.trainer.job.checkpoint import CheckpointConfig, check_full_every, check_store
from paddlewheel.trainer.job.control import ControlConfig
from paddlewheel.trainer.job.errors import AcrossError, ConfigError, Problem, check_types, did_you_mean, explain
from paddlewheel.trainer.job.metrics import MetricsConfig
from paddlewheel.trainer.job.section import Section, without_defaults
from paddlewheel.trainer.job.train import TrainConfig, WarmStartConfig
from paddlewheel.trainer.job.yaml_loader import absolute_paths, apply_override, check_plain, read_source, write_yaml
from paddlewheel.trainer.models import own_module
from paddlewheel.trainer.models.config import AnyModelConfig, DeepFMConfig

Port = Annotated[int, Field(ge=1, le=65535)]
_MOST_ROWS_PER_STEP = 1 << 24
_MAX_ROLES = 10_000
"""Servers, and trainers, of a job: each is a process."""


class ClusterConfig(Section):
    """How many roles there are, and where they listen."""

    servers: int = Field(default=1, ge=1, le=_MAX_ROLES)
    """Parameter servers. Each holds its share of every table."""

    trainers: int = Field(default=1, ge=1, le=_MAX_ROLES)
    """Trainers. Each reads its share of the rows."""

    bind_address: str = "127.0.0.1"
    """Address that the roles of a one-machine run bind to. Paddle's server has no authentication: keep it private."""

    coordinator_port: Port | None = None
    """TCP port of the coordinator. None: a free one is chosen."""

    server_ports: tuple[Port, ...] | None = None
    """TCP port of each parameter server, in rank order, as many as `cluster.servers`. None: free ones are chosen."""

    trainer_threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads of each trainer's dense part. None: the machine's cores divided by the trainers."""


class JobConfig(Section):
    """A whole job. Everything has a default but `name` and `data`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name of the job: letters, digits, `.`, `_`, `-`; at most 63 characters. Names the run folder and the metrics."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Fixes the order of rows, the initial embeddings and the initial dense weights."""

    run_dir: str = Field(default_factory=lambda fields: f"runs/{fields.get('name', 'job')}")
    """Folder for logs, results and (by default) checkpoints. By default `runs/<name>`."""

    data: DataConfig
    """What is read, and how columns become features."""

    tables: dict[TableName, TableConfig] = Field(default_factory=lambda: {"default": TableConfig()}, min_length=1)
    """Embedding tables by name: at most 63 ASCII letters, digits, `.`, `_`, `-`, because tables are folders in every
    checkpoint. Features without a `table` use `default`."""

    model: AnyModelConfig = Field(default_factory=DeepFMConfig)
    """The dense part on top of the embeddings."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    """How the dense part is trained, and for how long."""

    warm_start: WarmStartConfig | None = None
    """Begin with what another job has learnt. None: from nothing."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """How many roles there are, and where they listen."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When the state of a run is saved, and where."""

    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    """The HTTP ports for metrics and the status page."""

    control: ControlConfig = Field(default_factory=ControlConfig)
    """How soon a loss is noticed, how long anything may take, and how often the job starts again."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> "JobConfig":
        """Reads a job file.

        Args:
            path: the YAML file.
            overrides: `a.b=value` texts as after `--set`; a value is YAML, a number in the path indexes a list.

        Raises:
            ConfigError: the file cannot be read, or anything in it (or in an override) cannot be used. Names each key,
                the value given, what is allowed, and the nearest known key for an unknown one.
        """
        source = os.fspath(path)
        raw = read_source(source)
        for override in overrides:
            apply_override(raw, override, source)
        raw = absolute_paths(raw)
        if "model" in raw:
            raw["model"] = own_module.settled(raw["model"], Path(source).parent)
        return cls.parse(raw, source=source)

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], overrides: Iterable[str] = (), source: str = "job"
    ) -> "JobConfig":
        """As `load`, from plain data such as a checkpoint's or an export's settings; these are left as they are."""
        raw = copy.deepcopy(dict(settings))
        for override in overrides:
            apply_override(raw, override, source)
        return cls.parse(absolute_paths(raw), source=source)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: str = "job") -> "JobConfig":
        """Checks a job given as plain data (for example the JSON that a role's worker gets); paths stay as they are.

        Raises:
            ConfigError: as in `load`.
        """
        problems = list(check_plain(raw))
        job = None
        try:
            job = cls.model_validate(raw)
        except ValidationError as error:
            problems += _unknown_to(problems, explain(cls, raw, error))
        problems += _unknown_to(problems, check_types([cls], raw))
        if job is None or problems:
            raise ConfigError(source, problems)
        return job

    @property
    def checkpoint_location(self) -> str:
        """Where checkpoints are: `checkpoint.directory`, by default `checkpoints` in the run folder."""
        return self.checkpoint.directory or str(Path(self.run_dir, "checkpoints"))

    def num_epochs(self, days: Sequence[str] | None) -> int:
        """Passes over the training data; with days, each day is one."""
        return self.train.epochs if days is None else len(days)

    def to_yaml(self, *, short: bool = False) -> str:
        """The job as a YAML file that is this job when it is loaded again.

        Args:
            short: without the keys that have their defaults; else with every key spelled out.
        """
        return write_yaml(without_defaults(self) if short else self.model_dump(mode="json"))

    @model_validator(mode="after")
    def _fits_together(self) -> "JobConfig":
        problems = list(_check_across(self))
        if problems:
            raise AcrossError(problems)
        return self


def _unknown_to(problems: Iterable[Problem], found: Iterable[Problem]) -> list[Problem]:
    """What was found at places of which nothing is known yet."""
    known = {problem.path for problem in problems}
    return [problem for problem in found if problem.path not in known]


def _check_across(job: JobConfig) -> Iterator[Problem]:
    """What no section can see by itself."""
    watch = job.train.evaluation
    if (watch.every_steps or watch.every_epochs) and not job.data.eval:
        yield Problem("train.evaluation", "evaluations during training need rows to evaluate: give data.eval")
    if watch.metric.startswith("gauc") and job.data.group is None:
        yield Problem(
            "train.evaluation.metric",
            f"{watch.metric} is an AUC within groups: give data.group, the column of the group",
        )
    if watch.metric.startswith("weighted_") and job.data.sample_weight is None:
        yield Problem(
            "train.evaluation.metric",
            f"{watch.metric} counts rows by their weight: give data.sample_weight, the column of the weight",
        )
    yield from _check_step(job)
    yield from _check_days(job)
    if job.train.device == "cpu" and job.train.precision in {"tfloat32", "float16"}:
        yield Problem(
            "train.precision",
            f"{job.train.precision} is for GPUs, and train.device is cpu: take float32, bfloat16 or auto, or "
            "train.device: gpu",
        )
    if job.train.device == "gpu" and job.train.cpu_backend == "native":
        yield Problem("train.cpu_backend", "native are operators for CPUs, and train.device is gpu: leave the key out")
    if job.train.device == "gpu" and job.train.allreduce_dtype != "float32":
        yield Problem(
            "train.allreduce_dtype",
            f"{job.train.allreduce_dtype} is for trainers on CPUs, and train.device is gpu, where NCCL sums float32: "
            "leave the key out, or take train.device: cpu",
        )
    for index, feature in enumerate(job.data.sparse):
        if feature.table not in job.tables:
            yield Problem(
                f"data.sparse.{index}.table",
                f"feature {feature.name!r} uses the table {feature.table!r}, which `tables` does not declare"
                f"{did_you_mean(feature.table, job.tables)} Declared: {', '.join(job.tables)}. Add it under "
                "`tables`, or name one of those.",
            )
    for name, table in job.tables.items():
        try:
            table.num_shards(job.cluster.servers)
        except ValueError as error:
            yield Problem(f"tables.{name}.shards", f"{error} (cluster.servers = {job.cluster.servers})")
    yield from check_store(job.checkpoint)
    yield from check_full_every(job.checkpoint, job.tables)
    yield from _check_secrets(job)
    ports = job.cluster.server_ports
    if ports is not None:
        if len(ports) != job.cluster.servers:
            yield Problem(
                "cluster.server_ports",
                f"{len(ports)} ports for cluster.servers = {job.cluster.servers}. Give one port a server, or leave the "
                "key out and free ports are chosen.",
            )
        taken = [*ports, *([job.cluster.coordinator_port] if job.cluster.coordinator_port else [])]
        twice = sorted({port for port in taken if taken.count(port) > 1})
        if twice:
            yield Problem(
                "cluster.server_ports",
                f"port {twice[0]} is given twice. Every server, and the coordinator (cluster.coordinator_port), needs "
                "its own.",
            )


def _check_secrets(job: JobConfig) -> Iterator[Problem]:
    """The job is written into every checkpoint, export and specification: no address in it may hold a secret."""
    plain = job.model_dump(mode="json")
    for path, text in _texts(plain, ""):
        if holds_secret(text):
            yield Problem(path, f"{KEY_FOUND}: a job file is no place for secrets. {KEY_REMEDY}")


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}.{index}")


def check_server_folders(job: JobConfig, restore: str | None = None) -> None:
    """Refuses folders that servers could not save to or load from, before anything is trained for them.

    Args:
        job: what is to run.
        restore: checkpoint to begin with.

    Raises:
        ConfigError: Paddle's servers hand a folder to a shell unquoted, so most characters are not possible; or the
            address to begin with holds a secret.
    """
    from paddlewheel.pserver.errors import CheckpointError
    from paddlewheel.pserver.saved_tables import check_path  # with NumPy

    location = job.checkpoint_location
    folders = {}
    if is_remote(location):
        folders["checkpoint.staging" if job.checkpoint.staging else "run_dir"] = job.checkpoint.staging or job.run_dir
    else:
        folders["checkpoint.directory" if job.checkpoint.directory else "run_dir"] = location
    if restore is not None and is_remote(restore):
        if holds_secret(restore):
            raise ConfigError(job.name, [Problem("restore", f"the address {KEY_FOUND}. {KEY_REMEDY}")])
        folders.setdefault("run_dir", job.run_dir)
    elif restore is not None:
        folders["restore"] = restore
    problems = []
    for key, folder in folders.items():
        try:
            check_path(Path(folder).absolute())
        except CheckpointError as error:
            problems.append(Problem(key, f"{error}. Name another folder (--set {key}=...)"))
    if problems:
        raise ConfigError(job.name, problems)


def _check_step(job: JobConfig) -> Iterator[Problem]:
    """What all trainers take in one step."""
    step_rows = job.data.batch_rows * job.cluster.trainers
    if step_rows >= _MOST_ROWS_PER_STEP:
        yield Problem(
            "data.batch_rows",
            f"is {job.data.batch_rows}, which with cluster.trainers {job.cluster.trainers} makes steps of {step_rows} "
            f"rows, and a step can have no more than {_MOST_ROWS_PER_STEP - 1}: trainers count its rows in float32. "
            f"Give at most {(_MOST_ROWS_PER_STEP - 1) // job.cluster.trainers}, or fewer trainers",
        )


def _check_days(job: JobConfig) -> Iterator[Problem]:
    """Day boundaries: they come by days or by rows."""
    step_rows = job.data.batch_rows * job.cluster.trainers
    for name, table in job.tables.items():
        every = table.lifecycle.every_rows
        if every is not None and job.train.days is not None:
            yield Problem(
                f"tables.{name}.lifecycle.every_rows",
                "is for data without days; with train.days (--days) each day ends with a boundary: leave one out",
            )
        elif every is not None and every < step_rows:
            yield Problem(
                f"tables.{name}.lifecycle.every_rows",
                f"is {every}, less than the {step_rows} rows of a step (data.batch_rows x cluster.trainers): they fall "
                "between steps, so give at least that",
            )
    if job.train.days is None:
        return
    if job.train.epochs != 1:
        yield Problem("train.epochs", f"is {job.train.epochs}, but with train.days each day is trained once: give 1")
    if job.data.partitions != "hive":
        yield Problem(
            "data.partitions", f"is {job.data.partitions!r}, but train.days finds days by folders: give 'hive'"
        )
