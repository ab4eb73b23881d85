"""Rows in, scores out: one Parquet file with a row for every row read, in their order.

Legend: N rows of a block, B those of them that can be scored, Y labels.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.scoring_reader import Block, Blocks, scoring_config
from paddlewheel.pserver import saved_tables
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import Tables
from paddlewheel.trainer.checkpoint.trained_model import TrainedModel, trained_with
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline
from paddlewheel.trainer.loop.evaluate import PULL_AHEAD
from paddlewheel.trainer.serving.export import check_target

PROBLEM = "problem"
_ROWS_PER_GROUP = 65_536
_SAMPLED_KEYS, _MUST_BE_KNOWN = 1_000, 0.9


class PredictError(ValueError):
    """Nothing was scored: the command cannot work as it was given."""


class _Program(Protocol):
    def predict(self, batch: Any, rows: Any) -> NDArray[np.float32]: ...


class _Tables(Protocol):
    def pull(self, table: str, keys_U: NDArray[np.uint64]) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Prediction:
    """What was written.

    Attributes:
        path: the Parquet file.
        columns: its columns.
        rows: rows in it.
        unscored_rows: those that could not be scored, by `data.on_bad_row`; `problem` says why.
        unreadable_rows: rows of damaged files that are not in it, by `data.on_bad_file`.
        skipped_files: damaged files and why, of which nothing or not all is in it.
        seconds: from the first row read to the file being on disk.
    """

    path: str
    columns: tuple[str, ...]
    rows: int
    unscored_rows: int
    unreadable_rows: int
    skipped_files: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {**asdict(self), "rows_per_second": self.rows_per_second}

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Request:
    """What to score and where to: checked when it is made, before a server or a program is there.

    Raises:
        PredictError, ExportError, DataError: a path, file or column that cannot be used.
    """

    job: JobConfig
    dataset: Dataset
    target: Path

    @classmethod
    def check(
        cls,
        job: JobConfig,
        paths: Sequence[str],
        columns: Sequence[str],
        target: Path,
        *,
        trained: TrainedModel | None = None,
    ) -> Request:
        """paths: Parquet to score, by default `data.eval`. columns: to write beside the scores. target: a new file.
        trained: the model that scores them; the data must be of the kinds that it knows.
        """
        paths = paths or job.data.eval
        if not paths:
            raise PredictError("--data is missing, and the job has no data.eval: name the Parquet files to score")
        check_target(target)
        taken = {*_score_columns(job), PROBLEM} & set(columns)
        if taken:
            raise PredictError(f"--columns {min(taken)}: this is the name of a column that is written")
        config = scoring_config(job.data)
        dataset = Dataset.open(paths, config, carried=columns)
        if trained is not None and trained.inputs is not None:
            dataset.signature.check(trained.inputs, trained_with(trained.path))
        return cls(job, dataset, target)


def predict(
    request: Request, program: _Program, tables: _Tables, *, on_rows: Callable[[int], None] = lambda _: None
) -> Prediction:
    """Scores all rows and writes them; the file appears whole or not at all.

    Memory: a few blocks of `data.batch_rows` rows, and 65,536 rows of what is written.

    Raises:
        DataError: a row or file cannot be read, and the job does not say to leave it out.
        ServerError: a server was lost.
    """
    dataset, started = request.dataset, time.monotonic()
    schema = _schema(request)
    temporary = request.target.with_name(f".{request.target.name}.{os.getpid()}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    rows = unscored = 0
    try:
        with Blocks(dataset) as blocks, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            waiting: list[pa.Table] = []
            for block, probability_BY in _scored(blocks, program, tables, request.job.tables):
                waiting.append(_table(block, probability_BY, schema))
                rows += block.num_rows
                unscored += len(block.reasons)
                on_rows(rows)
                if sum(map(len, waiting)) >= _ROWS_PER_GROUP:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting))
        checked_rename(temporary, request.target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Prediction(
        path=str(request.target),
        columns=tuple(schema.names),
        rows=rows,
        unscored_rows=unscored,
        unreadable_rows=blocks.num_unreadable_rows,
        skipped_files=(*dataset.skipped_files, *blocks.unreadable.values()),
        seconds=time.monotonic() - started,
    )


def checked_rename(temporary: Path, target: Path) -> None:
    """Give a file its name when it is on disk, unless something has that name by now."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    check_target(target)
    temporary.rename(target)


def check_servers(client: Client, tables: Path, names: Iterable[str]) -> None:
    """Compare running servers with a checkpoint of their job: most keys of it must be known to them.

    Servers of another job would answer as if all keys were new. Nothing may be loaded there meanwhile, and no day end.

    Raises:
        PredictError: they are not.
    """
    for name in names:
        saved = saved_tables.open_table(tables / name)
        some = _some_keys(saved)
        if not len(some):
            continue
        found = int((client.pull_with_counts(name, some).shows_U > 0).sum())
        if found < _MUST_BE_KNOWN * len(some):
            raise PredictError(
                f"--coordinator: of {len(some)} keys of table {name!r} in {tables.parent} the servers of that job know "
                f"{found}. Give the coordinator of the run that this checkpoint is of, and a checkpoint of that run"
            )


def _some_keys(saved: saved_tables.SavedTable) -> NDArray[np.uint64]:
    """Keys with shows, from shards over the whole table."""
    found: list[NDArray[np.uint64]] = [np.zeros(0, np.uint64)]
    num_shards = len(saved.parts)
    chosen = np.unique(np.linspace(0, num_shards - 1, min(num_shards, 16)).astype(int)).tolist()
    for shard in chosen:
        rows = next(saved_tables.read_rows(saved, shards=[shard]), None)
        if rows is not None:
            found.append(rows.keys_N[rows.shows_N > 0][: -(-_SAMPLED_KEYS // len(chosen))])
    return np.concatenate(found)


def _scored(
    blocks: Blocks, program: _Program, tables: _Tables, configs: Tables
) -> Iterator[tuple[Block, NDArray[np.float32]]]:
    """Blocks in order with the probabilities [B, Y] of their usable rows."""
    ahead: deque[Block] = deque()  # read, not yet scored; the exchange bounds it

    def batches() -> Iterator[Batch]:
        for block in blocks:
            ahead.append(block)
            if block.batch.num_rows:
                yield block.batch

    none_BY = np.zeros((0, 0), np.float32)
    with EmbeddingPipeline(
        cast("Client", tables), batches(), max_staleness_steps=PULL_AHEAD, tables=configs, only_pulls=True
    ) as exchange:
        for batch, rows in exchange:
            while not ahead[0].batch.num_rows:
                yield ahead.popleft(), none_BY
            block = ahead.popleft()
            assert block.batch is batch
            logit_BY = program.predict(batch, rows)
            exchange.skip()
            yield block, _probability(logit_BY)
    yield from ((block, none_BY) for block in ahead)


def _probability(logit_BY: NDArray[np.float32]) -> NDArray[np.float32]:
    wide = logit_BY.astype(np.float64)
    result: NDArray[np.float32] = np.exp(-np.logaddexp(0.0, -wide)).astype(np.float32)
    return result


def _score_columns(job: JobConfig) -> list[str]:
    return [f"score_{label}" for label in job.data.labels]


def _schema(request: Request) -> pa.Schema:
    """Columns handed through in the type that fits all files, then a score for each label, then what was wrong."""
    dataset, fields = request.dataset, []
    for column in dataset.carried:
        kinds = [file.columns[column].type for file in dataset.files]
        try:
            fields.append(
                pa.unify_schemas([pa.schema([(column, kind)]) for kind in kinds], promote_options="permissive").field(0)
            )
        except pa.ArrowException as error:
            raise DataError(f"--columns {column}: files have types that cannot be one column: {error}") from error
    fields += [pa.field(name, pa.float32()) for name in _score_columns(request.job)]
    if request.job.data.on_bad_row != "fail":
        fields.append(pa.field(PROBLEM, pa.string()))
    return pa.schema(fields)


def _table(block: Block, probability_BY: NDArray[np.float32], schema: pa.Schema) -> pa.Table:
    columns: list[pa.Array] = []
    scores = iter(range(len(schema)))
    for field in schema:
        if field.name in block.carried:
            array = block.carried[field.name]
            columns.append(array if array.type == field.type else array.cast(field.type))
        elif field.name == PROBLEM:
            columns.append(pa.array([block.reasons.get(row) for row in range(block.num_rows)], pa.string()))
        else:
            score_N = np.zeros(block.num_rows, np.float32)
            if block.batch.num_rows:
                score_N[block.usable_N] = probability_BY[:, next(scores)]
            columns.append(pa.array(score_N, pa.float32(), mask=~block.usable_N))
    return pa.Table.from_arrays(columns, schema=schema)
