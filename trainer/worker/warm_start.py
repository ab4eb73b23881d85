"""Beginning a job with what another one has learnt. What can be refused is refused from descriptions, without Paddle.

The tables are rewritten by `pserver.warm_start`; the first attempt of a job calls `write_tables` and loads them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.trainer.models.own_module import without_place

if TYPE_CHECKING:
    from paddlewheel.data_pipeline.signature import ColumnKind, InputSignature
    from paddlewheel.pserver.config import TableConfig
    from paddlewheel.trainer.checkpoint.trained_model import TrainedModel
    from paddlewheel.trainer.job.config import JobConfig
    from paddlewheel.trainer.job.errors import Problem


@dataclass(frozen=True)
class WarmStart:
    """What a job takes from another one: `tables` is {mine: theirs}."""

    source: TrainedModel
    tables: Mapping[str, str]
    dense: bool

    def record(self, keys: Mapping[str, int]) -> dict[str, Any]:
        """What the checkpoints and the result of the job say about it; `keys` by this job's tables."""
        tables = {mine: {"from": theirs, "keys": keys[mine]} for mine, theirs in self.tables.items()}
        return {"source": str(self.source.path), "step": self.source.step, "tables": tables, "dense": self.dense}


def plan(job: JobConfig, inputs: InputSignature | None = None) -> WarmStart:
    """What `job.warm_start` asks for, checked.

    Args:
        job: the job.
        inputs: of the data that it trains on; None: they are not known here.

    Raises:
        DataError: the job's data are of other kinds than the source's, or otherwise fitted.
        CheckpointError: the source is no trained model.
        ConfigError: it does not fit this job; names every key, the value, what is allowed, and the remedy.
    """
    from paddlewheel.trainer.checkpoint.manifest import CheckpointError
    from paddlewheel.trainer.checkpoint.trained_model import open_model
    from paddlewheel.trainer.job.errors import ConfigError

    asked = job.warm_start
    assert asked is not None
    if "://" in asked.source:
        raise CheckpointError(
            f"warm_start.source: {asked.source} is in an object store: copy it to a folder that all trainers see, with "
            "`paddlewheel checkpoint fetch`"
        )
    source = open_model(Path(asked.source), key="warm_start.source")
    theirs = source.tables()
    mine = {name: job.tables[name] for name in job.data.tables}
    mapping = {name: name for name in mine if name in theirs} if asked.tables is None else asked.tables
    problems = list(_problems(job, source, mine, theirs, mapping))
    if problems:
        raise ConfigError(job.name, problems)
    if inputs is not None and source.inputs is not None:
        _check_inputs(job, source, mapping, inputs, source.inputs)
    return WarmStart(source, mapping, asked.dense)


def write_tables(start: WarmStart, directory: Path, job: JobConfig, num_servers: int) -> dict[str, int]:
    """Writes saved tables for this job's servers into `directory`; the number of keys by table.

    Raises:
        CheckpointError, pserver.errors.CheckpointError: a table of the source is damaged.
    """
    from paddlewheel.pserver.warm_start import warm_start

    start.source.verify(start.tables.values())
    keys = {}
    for mine, theirs in start.tables.items():
        config = job.tables[mine]
        saved = warm_start(
            start.source.table_folder(theirs),
            directory / mine,
            name=mine,
            config=config,
            seed=job.seed,
            num_shards=config.num_shards(num_servers),
        )
        keys[mine] = saved.num_keys
    return keys


def _problems(
    job: JobConfig,
    source: TrainedModel,
    mine: Mapping[str, TableConfig],
    theirs: Mapping[str, TableConfig],
    mapping: Mapping[str, str],
) -> Iterator[Problem]:
    from paddlewheel.trainer.job.errors import Problem

    if not mapping and not (job.warm_start and job.warm_start.dense):
        yield Problem(
            "warm_start.tables",
            f"nothing is taken from {source.path}: this job's tables are {_names(mine)}, the source's "
            f"{_names(theirs)}. Say which begins with which: {{mine: theirs}}",
        )
    for name, other in mapping.items():
        if name not in mine:
            yield Problem(f"warm_start.tables.{name}", f"is no table that this job's features use{_near(name, mine)}")
        elif other not in theirs:
            yield Problem(f"warm_start.tables.{name}", f"{source.path} has no table {other!r}{_near(other, theirs)}")
        else:
            yield from _table_problems(job, source, name, other, mine[name], theirs[other])
    if job.warm_start is not None and job.warm_start.dense:
        for what, here, there in _dense_differences(job, source.settings):
            yield Problem(
                "warm_start.dense",
                f"the dense part of {source.path} is of another shape: {what} is {here} here and {there} there. Make "
                "them equal, or begin with the tables alone (warm_start.dense: false)",
            )


def _table_problems(
    job: JobConfig, source: TrainedModel, name: str, other: str, here: TableConfig, there: TableConfig
) -> Iterator[Problem]:
    from paddlewheel.trainer.job.errors import Problem

    for field in ("width", "first_order"):
        given, needed = getattr(here, field), getattr(there, field)
        if given != needed:
            yield Problem(
                f"tables.{name}.{field}",
                f"is {_said(given)}, but table {other!r} of {source.path}, with which it begins, has {_said(needed)}; "
                f"only {_said(needed)} is allowed. Set it to that, or leave {name!r} out of warm_start.tables to start "
                "it fresh",
            )
    my_spaces = {f.space for f in job.data.sparse if f.table == name}
    their_spaces = {f["key_space"] for f in source.settings["data"]["sparse"] if f["table"] == other}
    if not my_spaces & their_spaces:
        yield Problem(
            f"warm_start.tables.{name}",
            f"no key of table {other!r} of {source.path} could ever be met: its features make keys in the key spaces "
            f"{_names(their_spaces)}, those of {name!r} in {_names(my_spaces)}. Give the feature that is the same the "
            f"same space, for example `key_space: {min(their_spaces)}`",
        )


def _check_inputs(
    job: JobConfig, source: TrainedModel, mapping: Mapping[str, str], mine: InputSignature, theirs: InputSignature
) -> None:
    """Keys of a key space that both know must be made alike, and what the dense part takes must be scaled alike. A
    vocabulary may differ: it says which keys there are, not what they mean.
    """
    from paddlewheel.trainer.checkpoint.trained_model import trained_with

    relation = trained_with(source.path)
    their_features = source.settings["data"]["sparse"]
    quantiles = []
    for feature in job.data.sparse:
        if feature.table not in mapping:
            continue
        same = {
            other["name"]
            for other in their_features
            if other["table"] == mapping[feature.table] and other["key_space"] == feature.space
        }
        for at, column in enumerate(feature.columns):
            here = next((k for k in mine.kinds if (k.feature, k.column) == (feature.name, column)), None)
            there = [_kind_at(theirs, name, at, len(feature.columns)) for name in sorted(same)]
            known = [kind for kind in there if kind is not None]
            if here is not None and known and all(kind.kind != here.kind for kind in known):
                raise DataError(here.difference(known[0], relation))
        if feature.name in same:
            quantiles.append(f"quantiles {feature.name}")
    dense = [name for name in mine.fitted if name.startswith("dense ")]
    is_dense = job.warm_start is not None and job.warm_start.dense
    mine.check_fit(theirs, relation, [n for n in mine.fitted if n in quantiles or (is_dense and n in dense)])


def _kind_at(inputs: InputSignature, feature: str, at: int, num_columns: int) -> ColumnKind | None:
    """Of a feature's column by its place; None where the features have different numbers of columns."""
    kinds = [kind for kind in inputs.kinds if kind.feature == feature]
    return kinds[at] if len(kinds) == num_columns else None


def _dense_differences(job: JobConfig, theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What the shape and meaning of dense parameters depend on, where it differs."""
    mine = job.model_dump(mode="json")
    model, other = without_place(mine["model"]), without_place(theirs["model"])
    for key in sorted(key for key in {*model, *other} if model.get(key) != other.get(key)):
        yield f"model.{key}", model.get(key), other.get(key)
    for what, described in (("data.sparse", _features), ("data.dense", _dense_columns), ("data.labels", _labels)):
        here, there = described(mine), described(theirs)
        if here != there:
            yield what, here, there


def _features(settings: Mapping[str, Any]) -> list[str]:
    """As they enter the model: in the order of tables and kinds."""
    found = []
    for table in dict.fromkeys(f["table"] for f in settings["data"]["sparse"]):
        features = [f for f in settings["data"]["sparse"] if f["table"] == table]
        width = settings["tables"][table]["width"]
        in_order = sorted(features, key=lambda f: f["max_length"] is not None)
        found += [f"{f['name']} ({width}{', ' + f['pooling'] if f['max_length'] else ''})" for f in in_order]
    return found


def _dense_columns(settings: Mapping[str, Any]) -> list[str]:
    return [column for block in settings["data"]["dense"] for column in block["columns"]]


def _labels(settings: Mapping[str, Any]) -> list[str]:
    return list(settings["data"]["labels"])


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _names(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


def _near(given: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{hint} There are: {_names(known)}"
