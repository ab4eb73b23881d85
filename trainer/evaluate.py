"""Scores rows without training and merges the metrics of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from data_pipeline.batch import Batch
from pserver.client import Client
from trainer.dense_sync import DenseSync
from trainer.exchange import Exchange
from trainer.metrics import ClickMetrics
from trainer.program import DenseProgram

# An evaluation changes nothing, so pulls may run ahead as far as memory allows.
_PULL_AHEAD = 2


def evaluate(
    program: DenseProgram,
    client: Client,
    sync: DenseSync,
    batches: Iterator[Batch],
    *,
    on_rows: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Metrics over the batches of all trainers (`ClickReport` as a dict); every trainer gets the same.

    The histograms and sums are added over trainers, so the split of the rows cannot bias the result.
    """
    metrics = ClickMetrics()
    with Exchange(client, batches, max_staleness_steps=_PULL_AHEAD) as exchange:
        for batch, rows in exchange:
            logit_BY = program.predict(batch, rows)
            metrics.update(logit_BY[:, 0], batch.labels_BL[:, 0])
            exchange.skip()
            if on_rows is not None:
                on_rows(batch.num_rows)
    for array in (metrics.positives_N, metrics.negatives_N, metrics.sums):
        sync.sum(array)
    return asdict(metrics.report())
