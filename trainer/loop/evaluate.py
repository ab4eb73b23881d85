"""Scores rows without training and merges the metrics of all trainers.

Legend: Y labels, R rows kept for grouped metrics.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import Tables
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.distributed.process_group import ProcessGroup
from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline
from paddlewheel.trainer.loop.metrics import ClickMetrics, GroupedMetrics, GroupedSums, Rows, WeightedMetrics

# An evaluation changes nothing, so pulls may run ahead as far as memory allows.
PULL_AHEAD = 2
_ROWS_PER_MERGE = 4_000_000
_SLICES_REPORTED = 100


class BrokenOffError(Exception):
    """An evaluation was to stop before all rows were scored. It says nothing then."""


class Scores:
    """Metrics of every label over scored batches.

    Args:
        labels: their names, in the order of the batch's columns.
        weighted: the batches have sample weights: report the weighted metrics beside the others.
    """

    def __init__(self, labels: Sequence[str], *, weighted: bool = False) -> None:
        self.labels = tuple(labels)
        self._clicks = [ClickMetrics() for _ in self.labels]
        self._weighted = [WeightedMetrics() for _ in self.labels if weighted]
        self._grouped = [GroupedMetrics() for _ in self.labels]
        self._has_groups = False
        self._slices: dict[str, _Slices] = {}

    def update(self, batch: Batch, logit_BY: Any) -> None:
        """Add a batch. Rows whose group is null count in everything but the grouped metrics."""
        for column, (clicks, grouped) in enumerate(zip(self._clicks, self._grouped, strict=True)):
            logit_B, label_B = logit_BY[:, column], batch.labels_BL[:, column]
            clicks.update(logit_B, label_B)
            if batch.group_B is not None:
                self._has_groups = True
                known_B = batch.group_B != 0
                grouped.update(batch.group_B[known_B], logit_B[known_B], label_B[known_B])
        for column, weighted in enumerate(self._weighted):
            assert batch.sample_weight_B is not None
            weighted.update(logit_BY[:, column], batch.labels_BL[:, column], batch.sample_weight_B)
        for name, value_B in batch.slice_metrics_by.items():
            self._slices.setdefault(name, _Slices()).update(value_B, logit_BY[:, 0], batch.labels_BL[:, 0])

    def merged(self, sync: ProcessGroup) -> dict[str, Any]:
        """The reports over the rows of all trainers, which all call this: the first label's, then `labels`.

        Histograms and sums are added over trainers, and a group's rows are brought together, so the split of the rows
        cannot bias the result. `labels` (report by name) is there when there are several; `slices` (by column of
        `data.slice_metrics_by`, the first label's report for each of its most frequent values) when there are columns.
        """
        has_groups = sum(sync.all_gather(int(self._has_groups))) > 0
        reports = []
        for column, (clicks, grouped) in enumerate(zip(self._clicks, self._grouped, strict=True)):
            report: dict[str, Any] = {}
            counted: list[ClickMetrics | WeightedMetrics] = [clicks, *self._weighted[column : column + 1]]
            for metrics in counted:
                for array in metrics.arrays():
                    sync.all_reduce(array)
                report |= asdict(metrics.report())
            if has_groups:
                report |= asdict(merge_groups(grouped, sync).report())
            reports.append(report)
        several = {"labels": dict(zip(self.labels, reports, strict=True))} if len(reports) > 1 else {}
        columns = sorted({c for found in gather_json(sync, list(self._slices)) for c in found})
        slices = {c: self._slices.get(c, _Slices()).merged(sync) for c in columns}
        return {**reports[0], **several, **({"slices": slices} if slices else {})}


class _Slices:
    """Rows by the value of one column; a value is known by its hash, so that trainers agree without talking."""

    def __init__(self) -> None:
        self._rows = GroupedMetrics()
        self._names: dict[int, str] = {}

    def update(self, value_B: NDArray[np.object_], logit_B: Any, label_B: Any) -> None:
        values, at_B = np.unique(np.array([_text(v) for v in value_B]), return_inverse=True)
        hashes = np.array([xxhash.xxh3_64_intdigest(v.encode()) for v in values.tolist()], np.uint64).view(np.int64)
        self._names.update(zip(hashes.tolist(), values.tolist(), strict=True))
        self._rows.update(hashes[at_B], logit_B, label_B)

    def merged(self, sync: ProcessGroup) -> list[dict[str, Any]]:
        """The most frequent values with their reports, the most frequent first."""
        names: dict[int, str] = {}
        for found in gather_json(sync, {str(k): v for k, v in self._names.items()}):
            names.update({int(k): v for k, v in found.items()})
        reports: list[list[Any]] = []
        for rows in meet(self._rows, sync):
            if rows is not None:
                part = GroupedMetrics()
                part.update(*rows)
                reports += [[names[k], asdict(r)] for k, r in part.by_group().items()]
        every = [item for found in gather_json(sync, reports) for item in found]
        every.sort(key=lambda item: (-item[1]["rows"], item[0]))
        return [{"value": json.loads(text), **report} for text, report in every[:_SLICES_REPORTED]]


def _text(value: Any) -> str:
    """A slice's value as JSON, so that null and "null" differ."""
    return json.dumps(value.decode(errors="backslashreplace") if isinstance(value, bytes) else value)


def gather_json(sync: ProcessGroup, value: Any) -> list[Any]:
    """Every trainer's value (of JSON types), by rank; all trainers call this."""
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = sync.all_gather(len(mine))
    ends = np.cumsum(sizes)
    whole = np.zeros(int(ends[-1]), np.int64)  # a byte in eight: bytes that are summed must not carry over
    whole[ends[sync.rank] - sizes[sync.rank] : ends[sync.rank]] = mine
    sync.all_reduce(whole)
    text = whole.astype(np.uint8).tobytes()
    return [json.loads(text[end - size : end]) for end, size in zip(ends.tolist(), sizes, strict=True)]


def meet(grouped: GroupedMetrics, sync: ProcessGroup, rows_per_merge: int = _ROWS_PER_MERGE) -> Iterator[Rows | None]:
    """All-to-all by group hash: yields each partition's rows on exactly one rank, `None` elsewhere.

    Groups are dealt out into parts of about `rows_per_merge` rows. A part's rows meet on all trainers: each writes its
    own stretch of an array of zeros, and the arrays are summed.
    """
    num_parts = -(-sum(sync.all_gather(grouped.num_rows)) // rows_per_merge)
    for part in range(num_parts):
        mine = grouped.rows(part, num_parts)
        counts = sync.all_gather(len(mine[0]))
        start, size = sum(counts[: sync.rank]), sum(counts)
        rows = (np.zeros(size, np.int64), np.zeros(size, np.float32), np.zeros(size, np.float32))
        pairs: list[tuple[NDArray[Any], NDArray[Any]]] = list(zip(rows, mine, strict=True))
        for whole, values in pairs:
            whole[start : start + len(values)] = values
            sync.all_reduce(whole)
        yield rows if part % sync.num_trainers == sync.rank else None


def merge_groups(grouped: GroupedMetrics, sync: ProcessGroup, *, rows_per_merge: int = _ROWS_PER_MERGE) -> GroupedSums:
    """Grouped AUC over the rows of all trainers, which all call this."""
    sums = GroupedSums()
    for rows in meet(grouped, sync, rows_per_merge):
        if rows is not None:
            sums.add(rows)
    sync.all_reduce(sums.sums)
    return sums


def evaluate(
    program: DenseProgram,
    client: Client,
    sync: ProcessGroup,
    batches: Iterator[Batch],
    *,
    tables: Tables | None = None,
    labels: Sequence[str] = ("click",),
    weighted: bool = False,
    on_rows: Callable[[int], None] | None = None,
    is_to_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Metrics over the batches of all trainers (`Scores.merged`); every trainer gets the same.

    Args:
        program: scores the rows.
        client: pulls their keys.
        sync: all trainers.
        batches: this trainer's; those without rows are passed over.
        tables: of the batches; None: no feature has an admission threshold of its own.
        labels: names, see `Scores`.
        weighted: see `Scores`.
        on_rows: told how many rows were scored, batch by batch.
        is_to_stop: asked before each batch. A trainer that is to stop breaks off, and then all of them do: so whoever
            tells one to stop must tell all, or these wait for the others' rows.

    Raises:
        BrokenOffError: on all trainers, when one broke off.
    """
    scores = Scores(labels, weighted=weighted)
    broken_off = False
    usable = (b for b in batches if b.num_rows)
    with EmbeddingPipeline(client, usable, max_staleness_steps=PULL_AHEAD, tables=tables, only_pulls=True) as exchange:
        for batch, rows in exchange:
            if is_to_stop():
                broken_off = True
                break
            scores.update(batch, program.predict(batch, rows))
            exchange.skip()
            if on_rows is not None:
                on_rows(batch.num_rows)
    sync.long_barrier()  # some may have had more rows
    if max(sync.all_gather(int(broken_off))):
        raise BrokenOffError
    return scores.merged(sync)
