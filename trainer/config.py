"""The job file: one YAML, one typed model. Sections live beside their owners; this file composes and checks them.

A job says everything a run needs, so `JobConfig.load` is the only door: the command line, the roles in containers and
the tests all come through it, and `--set a.b=c` is applied to the YAML before the same model sees it. Importable
without Paddle.

Relative paths are taken from the working directory, like those of any other argument of a command: so a path means
the same in the file and after `--set`, and a job file can be moved. `load` makes them absolute at once; the children
of a run therefore see the same files whatever their own directory is. Addresses such as `s3://...` stay as they are.
"""

import copy
import difflib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from data_pipeline.config import DataConfig
from pserver.config import TableConfig, TableName
from trainer.coordinator.config import ControlConfig
from trainer.location import KEY_FOUND, KEY_REMEDY, holds_secret, is_remote
from trainer.models.config import AnyModelConfig, DeepFMConfig
from trainer.settings import TrainConfig, WarmStartConfig
from trainer.telemetry.config import MetricsConfig
from trainer.written_forms import expected_form

Port = Annotated[int, Field(ge=1, le=65535)]
_STORES = ("s3", "gs", "hdfs")
_MOST_ROWS_PER_STEP = 1 << 24
_MAX_ROLES = 10_000
"""Servers, and trainers, of a job: each is a process."""


@dataclass(frozen=True)
class Problem:
    """One thing to fix in a job file.

    Attributes:
        path: the key, as `--set` would spell it; empty when it concerns the file as a whole.
        message: what is wrong, what is allowed, and the remedy.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """The job file cannot be used as it is. `problems` holds every finding, not only the first."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *map(str, problems)]))


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ClusterConfig(_Section):
    """How many roles there are, and where they listen."""

    servers: int = Field(default=1, ge=1, le=_MAX_ROLES)
    """Parameter servers. Each holds its share of every table."""

    trainers: int = Field(default=1, ge=1, le=_MAX_ROLES)
    """Trainers. Each reads its share of the rows."""

    address: str = "127.0.0.1"
    """Address that the roles of a one-machine run bind to. Paddle's server has no authentication: keep it private."""

    coordinator_port: Port | None = None
    """TCP port of the coordinator. None: a free one is chosen."""

    server_ports: tuple[Port, ...] | None = None
    """TCP port of each parameter server, in rank order, as many as `cluster.servers`. None: free ones are chosen."""

    trainer_threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads of each trainer's dense part. None: the machine's cores divided by the trainers."""


class CheckpointConfig(_Section):
    """When the state of a run is saved, and where."""

    directory: str | None = None
    """Where `step-<n>` checkpoints are kept: a folder that all hosts see, or `s3://bucket/prefix` (also `gs://`,
    `hdfs://`), which needs no shared folder. Credentials, region and endpoint of a store come from the environment of
    every role, never from this file. None: `checkpoints` inside `run_dir`."""

    staging: str | None = None
    """With an object store: folder on each server's host where its part of a checkpoint lies until it is uploaded or
    loaded. It needs room for one checkpoint's share. None: inside `run_dir`."""

    every_steps: int | None = Field(default=None, ge=1)
    """Steps between checkpoints during training. None: steps do not count."""

    every_minutes: float | None = Field(default=None, ge=0.001, le=1e7)
    """Minutes between checkpoints during training. None: time does not count. There is always one at the end."""

    keep: int = Field(default=3, ge=1)
    """How many committed checkpoints to keep; older ones are removed after a newer one is committed."""

    on_failure: Literal["continue", "stop"] = "continue"
    """What a checkpoint that cannot be saved does to a running job. One at the end of training that fails ends it."""


class JobConfig(_Section):
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
        return cls.from_settings(_read(source), overrides, source)

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], overrides: Iterable[str] = (), source: str = "job"
    ) -> "JobConfig":
        """As `load`, from plain data such as a checkpoint's or an export's settings; these are left as they are."""
        raw = copy.deepcopy(dict(settings))
        for override in overrides:
            _apply(raw, override, source)
        return cls.parse(_absolute_paths(raw), source=source)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: str = "job") -> "JobConfig":
        """Checks a job given as plain data (for example the JSON that a role's child gets); paths stay as they are.

        Raises:
            ConfigError: as in `load`.
        """
        problems = list(_check_plain(raw))
        known = {problem.path for problem in problems}
        try:
            job = cls.model_validate(raw)
            if not problems:
                return job
        except ValidationError as error:
            problems += [problem for problem in _explain(cls, raw, error) if problem.path not in known]
        raise ConfigError(source, problems)

    @property
    def checkpoint_location(self) -> str:
        """Where checkpoints are: `checkpoint.directory`, by default `checkpoints` in the run folder."""
        return self.checkpoint.directory or str(Path(self.run_dir, "checkpoints"))

    def to_yaml(self) -> str:
        """The job as a YAML file with every key spelled out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    @model_validator(mode="after")
    def _fits_together(self) -> "JobConfig":
        problems = list(_check_across(self))
        if problems:
            raise _AcrossError(problems)
        return self


class _AcrossError(ValueError):
    """Carries the findings of the checks across sections through pydantic."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))


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
    if job.train.device == "gpu" and job.train.operators == "native":
        yield Problem("train.operators", "native are operators for CPUs, and train.device is gpu: leave the key out")
    if job.train.device == "gpu" and job.train.allreduce != "float32":
        yield Problem(
            "train.allreduce",
            f"{job.train.allreduce} is for trainers on CPUs, and train.device is gpu, where NCCL sums float32: leave "
            "the key out, or take train.device: cpu",
        )
    for index, feature in enumerate(job.data.sparse):
        if feature.table not in job.tables:
            yield Problem(
                f"data.sparse.{index}.table",
                f"feature {feature.name!r} uses the table {feature.table!r}, which `tables` does not declare"
                f"{_did_you_mean(feature.table, job.tables)} Declared: {', '.join(job.tables)}. Add it under "
                "`tables`, or name one of those.",
            )
    for name, table in job.tables.items():
        try:
            table.num_shards(job.cluster.servers)
        except ValueError as error:
            yield Problem(f"tables.{name}.shards", f"{error} (cluster.servers = {job.cluster.servers})")
    yield from _check_store(job.checkpoint)
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


def _check_store(config: CheckpointConfig) -> Iterator[Problem]:
    """An address of an object store that can be used, and says nothing secret."""
    directory = config.directory or ""
    if "://" not in directory:
        if config.staging is not None:
            yield Problem(
                "checkpoint.staging", "is for checkpoints in an object store; checkpoint.directory is a folder"
            )
        return
    scheme, _, rest = directory.partition("://")
    host = rest.partition("/")[0]
    if scheme not in _STORES:
        yield Problem(
            "checkpoint.directory",
            f"there is no store {scheme}://{_did_you_mean(scheme, _STORES)} Known: {', '.join(_STORES)}; a folder is "
            "written as a plain path.",
        )
    elif not host and scheme != "hdfs":
        yield Problem("checkpoint.directory", f"names no bucket: write {scheme}://bucket/prefix")
    if "?" in rest or "#" in rest:
        yield Problem(
            "checkpoint.directory",
            "holds options after ? or #: set AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the like in the environment of "
            "every process instead.",
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
    from pserver.checkpoint import check_path  # with NumPy
    from pserver.errors import CheckpointError

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
    if job.train.days.publish is not None and "://" in job.checkpoint_location:
        yield Problem(
            "train.days.publish",
            "is made of checkpoints in a folder, but checkpoint.directory is in an object store: leave one of them out",
        )
    if job.data.partitions != "hive":
        yield Problem(
            "data.partitions", f"is {job.data.partitions!r}, but train.days finds days by folders: give 'hive'"
        )


# -------------------------------------------------------------------------------------------- reading and overriding


_MERGE = "tag:yaml.org,2002:merge"
_MAX_BYTES, _MAX_VALUES, _MAX_DEPTH = 16 << 20, 1_000_000, 100
"""Of a job file. More is no job, and would keep whoever reads it busy for long."""


class _Loader(yaml.SafeLoader):
    """YAML with YAML 1.2's idea of numbers and booleans, and no key twice.

    PyYAML follows YAML 1.1, where `1e-4` is a text, `no` is false, `2024-01-01` is a date and `1:30` is ninety: all
    traps in a job file.
    """

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"is nested more than {_MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _check_expanded(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key_node, yaml.ScalarNode):
                message = "a list or section cannot be a key"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            if key in seen:
                message = f"the key {key!r} stands twice (first on line {seen[key].line + 1})"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)


def _check_expanded(root: yaml.Node) -> None:
    """Refuses aliases that make a few lines a value without end, before anything is built from them."""
    known: dict[int, tuple[int, int]] = {}

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Values in all, and levels."""
        if id(node) in known:
            size, depth = known[id(node)]
            if not size:
                raise yaml.composer.ComposerError(
                    None, None, "an alias (*) stands inside its own anchor (&)", mark(node)
                )
            return size, depth
        known[id(node)] = (0, 0)  # being measured
        size, depth = 1, 0
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        for part in parts:
            for child in part if isinstance(part, tuple) else (part,):
                child_size, child_depth = measure(child)
                size, depth = size + child_size, max(depth, child_depth)
        if size > _MAX_VALUES or depth >= _MAX_DEPTH:
            limit = f"{_MAX_VALUES:,} values" if size > _MAX_VALUES else f"{_MAX_DEPTH} levels"
            raise yaml.composer.ComposerError(None, None, f"aliases (*) make this more than {limit}", mark(node))
        known[id(node)] = (size, depth + 1)
        return known[id(node)]

    def mark(node: yaml.Node) -> Any:
        return node.start_mark

    measure(root)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in [
    ("merge", r"^<<$", ["<"]),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        (
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
]:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 -- _Loader is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(source, [Problem("", f"{where}not readable as YAML: {what}")]) from None
    except (
        ValueError,
        TypeError,
        OverflowError,
    ) as error:  # such as a number of 5,000 digits, or !!binary of no base64
        raise ConfigError(source, [Problem("", f"not readable as YAML: {str(error).partition(';')[0]}")]) from None


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A YAML mapping, by the rules of job files.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    return _read(os.fspath(path))


def _read(source: str) -> dict[str, Any]:
    try:
        text = _read_text(Path(source))
    except FileNotFoundError:
        folder = Path(source).absolute().parent
        near = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
        hint = f". Job files in {folder}: {', '.join(near)}" if near else f". The working directory is {Path.cwd()}"
        raise ConfigError(source, [Problem("", f"there is no such job file{hint}")]) from None
    except (OSError, ValueError) as error:  # of UTF-8, or of a path with a zero byte
        raise ConfigError(source, [Problem("", f"cannot be read: {error}")]) from None
    raw = _parse_yaml(text, source)
    if not isinstance(raw, dict):
        kind = "empty" if raw is None else f"a {type(raw).__name__}"
        message = f"a job file is a YAML mapping with keys such as `name` and `data`; this is {kind}"
        raise ConfigError(source, [Problem("", message)])
    return raw


def _read_text(path: Path) -> str:
    """A file's text. What is no file, such as /dev/zero, or too large for a job is not read through."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB, so it is no job file")
    return content.decode("utf-8-sig")


def _apply(raw: dict[str, Any], override: str, source: str) -> None:
    """Sets one `a.b.0.c=value` in `raw`. Unknown keys are left for the model to refuse, with its list of known ones."""

    def refuse(message: str) -> ConfigError:
        return ConfigError(f"--set {override}", [Problem("", message)])

    key, equals, text = override.partition("=")
    steps = [step for step in re.split(r"\.|\[(\d+)\]", key.strip()) if step]
    if not equals or not steps:
        raise refuse("write --set key=value, for example --set cluster.trainers=4")
    value = _parse_yaml(text, f"--set {override}")
    here: Any = raw
    for position, step in enumerate(steps):
        done = ".".join(steps[:position])
        last = position == len(steps) - 1
        index: str | int = step
        if isinstance(here, list):
            if not (step.isascii() and step.isdecimal() and len(step) < 10) or int(step) >= len(here):
                raise refuse(f"{done} is a list of {len(here)} entries, so {step!r} is not one of 0 to {len(here) - 1}")
            index = int(step)
        elif not isinstance(here, dict):
            raise refuse(f"{done} is {here!r} in {source}, so it has no {step!r} inside")
        if last:
            here[index] = value
        else:
            if isinstance(here, dict) and here.get(step) is None:
                here[step] = {}
            here = here[index]


_LARGEST, _SMALLEST = 3e38, 1e-37  # of a float32, in which rates and bounds end up


def _check_plain(value: Any, path: tuple[str, ...] = ()) -> Iterator[Problem]:
    """What no job can hold, whatever the key: numbers that no machine type has, text that no path or log can hold."""
    where = ".".join(path)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                shown = "null" if key is None else str(key).lower() if isinstance(key, bool) else str(key)
                yield Problem(where, f"the key {shown} is no text: write it in quotes, '{shown}'")
            else:
                yield from _check_text(key, where)
                yield from _check_plain(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _check_plain(inner, (*path, str(index)))
    elif isinstance(value, str):
        yield from _check_text(value, where)
    elif isinstance(value, bool) or value is None:
        pass
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            yield Problem(where, f"{_clipped(value)} does not fit in 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            # the processes of a run tell each other the job as JSON, where it would become null
            yield Problem(where, f"is {value}; a number in a job must be finite: give the largest one that makes sense")
        elif abs(value) > _LARGEST or 0 < abs(value) < _SMALLEST:
            yield Problem(where, f"{value:g} is outside of what a float32 holds ({_SMALLEST:g} to {_LARGEST:g}, and 0)")
    elif not isinstance(value, BaseModel):
        yield Problem(where, f"is a {type(value).__name__}; a job holds text, numbers, true, false, lists and sections")


def _check_text(text: str, where: str) -> Iterator[Problem]:
    if "\0" in text or (not text.isprintable() and any(0xD800 <= ord(letter) < 0xE000 for letter in text)):
        yield Problem(where, f"{_clipped(text)} holds a zero byte or half a letter (a lone surrogate)")


def _clipped(value: Any) -> str:
    text = (
        f"a number of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 256 else repr(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."


def _absolute(value: Any) -> Any:
    if isinstance(value, str) and value and "://" not in value:
        return os.path.abspath(os.path.expanduser(value))  # noqa: PTH100, PTH111 -- Path would drop a final slash and fold `a//b`
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    return value


def _absolute_paths(raw: dict[str, Any]) -> dict[str, Any]:
    """A copy of the job with its paths made absolute from the working directory."""
    out = dict(raw)
    for section, keys in {
        "data": ("train", "eval", "fitted", "quarantine_directory"),
        "warm_start": ("source",),
        "checkpoint": ("directory", "staging"),
        "metrics": ("targets",),
    }.items():
        block = out.get(section)
        if isinstance(block, dict):
            out[section] = {key: _absolute(value) if key in keys else value for key, value in block.items()}
    if "run_dir" not in out and isinstance(out.get("name"), str):
        out["run_dir"] = f"runs/{out['name']}"
    if "run_dir" in out:
        out["run_dir"] = _absolute(out["run_dir"])
    return out


# -------------------------------------------------------------------------------------------------------- explaining


def _did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else "."


def _members(kind: Any) -> Iterator[Any]:
    """The members of a union, through Annotated."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _members(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind


def _models(kinds: Iterable[Any]) -> list[type[BaseModel]]:
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _inside(kinds: Iterable[Any], step: str | int) -> list[Any]:
    """The kinds that may stand under `step` of a value of one of `kinds`."""
    found: list[Any] = []
    for kind in kinds:
        arguments = get_args(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if step in kind.model_fields:
                found += _members(kind.model_fields[str(step)].annotation)
        elif get_origin(kind) is dict:
            found += _members(arguments[1])
        elif arguments:
            found += _members(arguments[0])
    return found


def _is_member(kind: Any, tag: str) -> bool:
    """Whether pydantic calls the union member `kind` by `tag`: its class name, or the value of its discriminator."""
    for model in _models([kind]):
        literals = (f.annotation for f in model.model_fields.values() if get_origin(f.annotation) is Literal)
        return tag == model.__name__ or any(tag in get_args(literal) for literal in literals)
    return False


@dataclass(frozen=True)
class _Place:
    """Where in the job an error of pydantic points: the user's path, and the kinds a value there may have."""

    path: tuple[str | int, ...]
    kinds: list[Any]
    parents: list[Any]

    @property
    def text(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def key(self) -> str:
        """What stands before the colon; empty for an entry of a list."""
        return next((step for step in reversed(self.path[-1:]) if isinstance(step, str)), "")

    @property
    def description(self) -> str:
        """The first sentence of what the key means."""
        for model in _models(self.parents):
            field = model.model_fields.get(str(self.path[-1])) if self.path else None
            if field is not None and field.description:
                return re.split(r"(?<=\.)\s", " ".join(field.description.split()), maxsplit=1)[0]
        return ""


def _locate(root: type[BaseModel], raw: Any, location: tuple[str | int, ...]) -> _Place:
    """Pydantic's location holds names of union members beside keys; the value itself tells which is which."""
    path: list[str | int] = []
    kinds: list[Any] = [root]
    parents: list[Any] = []
    value = raw
    for step in location:
        is_key = isinstance(value, Mapping) and (step in value or any(step in m.model_fields for m in _models(kinds)))
        if is_key or (isinstance(value, (list, tuple)) and isinstance(step, int)):
            path.append(step)
            parents, kinds = kinds, _inside(kinds, step)
            value = value.get(step) if isinstance(value, Mapping) else next(iter(value[int(step) :][:1]), None)
        elif isinstance(step, int):  # one entry written without its list, which the model made a list of
            kinds = _inside(kinds, step)
        else:
            kinds = [kind for kind in kinds if _is_member(kind, step)] or kinds
    return _Place(tuple(path), kinds, parents)


_ABOUT_KEYS = frozenset({"missing", "extra_forbidden", "value_error"})
"""Findings of pydantic that are about a key, or about several values at once, and not about the form of one value."""


def _explain(root: type[BaseModel], raw: Any, error: ValidationError) -> Iterator[Problem]:
    """Turns pydantic's findings into ours: one a key, by the user's path, with the nearest key and the remedy."""
    found: dict[tuple[str | int, ...], list[str]] = {}
    for item in error.errors(include_url=False):
        across = item.get("ctx", {}).get("error")
        if isinstance(across, _AcrossError):
            yield from across.problems
            continue
        if item["type"] == "default_factory_not_called":  # the value that it would be made from has a finding
            continue
        place = _locate(root, raw, item["loc"])
        form = None if item["type"] in _ABOUT_KEYS else expected_form(place.key, place.kinds, item["input"])
        if form is not None:
            if form not in found.setdefault(place.path, []):
                found[place.path].append(form)
            continue
        if item["type"] == "union_tag_not_found":
            name = item["ctx"]["discriminator"].strip("'")
            known = [value for model in _models(place.kinds) for value in get_args(model.model_fields[name].annotation)]
            found.setdefault((*place.path, name), []).append(f"is required and missing: one of {', '.join(known)}")
            continue
        if item["type"] == "union_tag_invalid":
            problem = _unknown_tag(place, item["ctx"], item["input"])
            found.setdefault((problem.path,), []).append(problem.message)
            continue
        found.setdefault(place.path, [])
        message = _message(place, item)
        if message not in found[place.path]:
            found[place.path].append(message)
    for path, messages in found.items():
        # A value given as one form of a union also fails the other forms: keep what was said about its inside.
        if not any(len(other) > len(path) and other[: len(path)] == path for other in found):
            yield Problem(".".join(map(str, path)), ", or ".join(messages))


def _unknown_tag(place: _Place, context: Mapping[str, str], block: Any) -> Problem:
    """An unknown `kind` or `rule`: what is there, and what was probably meant."""
    name = context["discriminator"].strip("'()")
    tags = re.findall(r"'([^']*)'", context["expected_tags"])
    known = [tag for tag in tags if tag[:1].islower()]
    own = ", or your own as package.module:Class" if len(known) < len(tags) else ""
    given = context["tag"]
    if isinstance(block, Mapping) and not isinstance(block.get(name), str):
        return Problem(f"{place.text}.{name}", f"is one of {', '.join(known)}{own}; got {_clipped(block.get(name))}")
    return Problem(
        f"{place.text}.{name}",
        f"there is no {name} {given!r}{_did_you_mean(given, known)} Known: {', '.join(known)}{own}.",
    )


def _message(place: _Place, item: Any) -> str:
    given = _clipped(item["input"])
    meaning = f" ({place.description.rstrip('.')})" if place.description else ""
    if item["type"] == "extra_forbidden":
        known = sorted({name for model in _models(place.parents) for name in model.model_fields})
        parent = ".".join(map(str, place.path[:-1]))
        prefix = f"{parent}." if parent else ""
        hint = _did_you_mean(str(place.path[-1]), known, prefix)
        return f"unknown key{hint} Allowed in {parent or 'a job'}: {', '.join(known)}"
    if item["type"] == "missing":
        return f"is required and missing{meaning}"
    if item["type"] == "value_error":
        return f"{item['ctx']['error']}"
    text = item["msg"][0].lower() + item["msg"][1:]
    return f"{text}, got {given}{meaning}"
