"""Scores rows without training and merges the metrics of all trainers.

Legend: Y labels, R rows kept for grouped metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.batch import Batch
from pserver.client import Client
from trainer.dense_sync import DenseSync
from trainer.exchange import Exchange
from trainer.metrics import ClickMetrics, GroupedMetrics, GroupedSums
from trainer.program import DenseProgram

# An evaluation changes nothing, so pulls may run ahead as far as memory allows.
_PULL_AHEAD = 2
_ROWS_PER_MERGE = 4_000_000


class Scores:
    """Metrics of every label over scored batches.

    Args:
        labels: their names, in the order of the batch's columns.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self._clicks = [ClickMetrics() for _ in self.labels]
        self._grouped = [GroupedMetrics() for _ in self.labels]
        self._has_groups = False

    def update(self, batch: Batch, logit_BY: Any) -> None:
        """Add a batch. Rows whose group is null count in everything but the grouped metrics."""
        for column, (clicks, grouped) in enumerate(zip(self._clicks, self._grouped, strict=True)):
            logit_B, label_B = logit_BY[:, column], batch.labels_BL[:, column]
            clicks.update(logit_B, label_B)
            if batch.group_B is not None:
                self._has_groups = True
                known_B = batch.group_B != 0
                grouped.update(batch.group_B[known_B], logit_B[known_B], label_B[known_B])

    def merged(self, sync: DenseSync) -> dict[str, Any]:
        """The reports over the rows of all trainers, which all call this: the first label's, then `labels`.

        Histograms and sums are added over trainers, and a group's rows are brought together, so the split of the rows
        cannot bias the result. `labels` (report by name) is there when there are several.
        """
        has_groups = sum(sync.gather(int(self._has_groups))) > 0
        reports = []
        for clicks, grouped in zip(self._clicks, self._grouped, strict=True):
            for array in clicks.arrays():
                sync.sum(array)
            report = asdict(clicks.report())
            if has_groups:
                report |= asdict(merge_groups(grouped, sync).report())
            reports.append(report)
        several = {"labels": dict(zip(self.labels, reports, strict=True))} if len(reports) > 1 else {}
        return {**reports[0], **several}


def merge_groups(grouped: GroupedMetrics, sync: DenseSync, *, rows_per_merge: int = _ROWS_PER_MERGE) -> GroupedSums:
    """Grouped AUC over the rows of all trainers, which all call this.

    Groups are dealt out into parts of about `rows_per_merge` rows. A part's rows meet on all trainers (each writes its
    own stretch of an array of zeros, and the arrays are summed), one of which computes its groups.
    """
    sums = GroupedSums()
    num_parts = -(-sum(sync.gather(grouped.num_rows)) // rows_per_merge)
    for part in range(num_parts):
        mine = grouped.rows(part, num_parts)
        counts = sync.gather(len(mine[0]))
        start = sum(counts[: sync.rank])
        size = sum(counts)
        rows = (np.zeros(size, np.int64), np.zeros(size, np.float32), np.zeros(size, np.float32))
        pairs: list[tuple[NDArray[Any], NDArray[Any]]] = list(zip(rows, mine, strict=True))
        for whole, values in pairs:
            whole[start : start + len(values)] = values
            sync.sum(whole)
        if part % sync.num_trainers == sync.rank:
            sums.add(rows)
    sync.sum(sums.sums)
    return sums


def evaluate(
    program: DenseProgram,
    client: Client,
    sync: DenseSync,
    batches: Iterator[Batch],
    *,
    labels: Sequence[str] = ("click",),
    on_rows: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Metrics over the batches of all trainers (`Scores.merged`); every trainer gets the same."""
    scores = Scores(labels)
    with Exchange(client, batches, max_staleness_steps=_PULL_AHEAD) as exchange:
        for batch, rows in exchange:
            scores.update(batch, program.predict(batch, rows))
            exchange.skip()
            if on_rows is not None:
                on_rows(batch.num_rows)
    return scores.merged(sync)
