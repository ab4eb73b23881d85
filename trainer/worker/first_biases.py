"""Output biases with which training begins: predictions then have the labels' rates as their means.

Clicks are rare, and a model that begins at probability 1/2 spends its first hundreds of steps on nothing but going down
to their rate, with all its weights and embeddings. So trainer 0 counts the labels of some rows before the first step,
and sets the bias of each output such that the mean prediction over some of them is the label's rate.

Legend: B batch rows, Y labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset, Slice
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import Tables
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.loop.embedding_pipeline import class_arguments

Array = NDArray[np.float64]

_ROWS_COUNTED, _ROWS_PREDICTED = 65_536, 2_048
_PLACES = 32
_LARGEST_SHIFT, _ROUNDS, _CLOSE = 40.0, 30, 1e-4


@dataclass(frozen=True)
class Sample:
    """Rows of the training data.

    Attributes:
        batches: some of them, with rows.
        rate_Y: mean label, by sample weight, of all rows looked at; never quite 0 or 1.
        num_rows: how many those were.
    """

    batches: Sequence[Batch]
    rate_Y: Array
    num_rows: int


def first_biases(
    program: DenseProgram, client: Client, data: Dataset, config: DataConfig, tables: Tables
) -> tuple[Array, dict[str, Any]] | None:
    """Sets the program's output biases.

    Args:
        program: not trained yet.
        client: pulls the rows' keys.
        data: what the job begins to train on.
        config: of the job. The rows looked at are a function of data and config.
        tables: of the job.

    Returns:
        The biases [Y], and what a checkpoint should say about them; None (and nothing is set) when the model has no
        output biases, or the data no usable row.

    Raises:
        DataError: rows cannot be used, and the job does not say to leave them out.
    """
    if not program.output_biases:
        return None
    sample = take_sample(data, config)
    if sample is None:
        return None
    biases_Y = fit(program, client, sample, tables)
    names = list(config.labels)
    told = {
        "rows": sample.num_rows,
        "label_rates": dict(zip(names, sample.rate_Y.tolist(), strict=True)),
        "biases": dict(zip(names, biases_Y.tolist(), strict=True)),
    }
    return biases_Y, told


def take_sample(data: Dataset, config: DataConfig) -> Sample | None:
    """Up to 65,536 rows, from places all over the data; None when none of them can be used."""
    # rows that training will put into quarantine are not to be there twice
    on_bad_row = "skip" if config.on_bad_row == "quarantine" else config.on_bad_row
    reading = config.model_copy(update={"on_bad_row": on_bad_row, "slice_metrics_by": (), "group": None})
    kept: list[Batch] = []
    sums_Y, weight, num_rows, num_kept = np.zeros(len(config.labels)), 0.0, 0, 0
    with Loader(data, reading, _places(data), seed=0, epoch=0, training=False) as loader:
        for batch in loader:
            if not batch.num_rows:
                continue
            weight_B = _weights(batch)
            sums_Y += weight_B @ batch.labels_BL.astype(np.float64)
            weight += float(weight_B.sum())
            num_rows += batch.num_rows
            if num_kept < _ROWS_PREDICTED:
                kept.append(batch)
                num_kept += batch.num_rows
    if weight <= 0:
        return None
    least = 0.5 / (num_rows + 1)  # a label that was not seen at all is rare, not impossible
    return Sample(kept, np.clip(sums_Y / weight, least, 1 - least), num_rows)


def fit(program: DenseProgram, client: Client, sample: Sample, tables: Tables | None = None) -> Array:
    """Sets the biases such that the mean prediction over the sample's batches is its rate; returns them, [Y].

    Label by label, because one label's prediction may be a factor in the next one's. A bias need not move its log-odds
    one to one, so each is moved as if it did until the mean is right.
    """
    configs = tables or {}
    pulled = [
        {n: client.pull(n, k.keys_U, **class_arguments(k, configs.get(n))) for n, k in batch.tables.items()}
        for batch in sample.batches
    ]
    weight_R = np.concatenate([_weights(batch) for batch in sample.batches])
    if weight_R.sum() <= 0:
        weight_R = np.ones(len(weight_R))
    biases_Y = program.read_output_biases()
    for y, rate in enumerate(sample.rate_Y.tolist()):
        for _ in range(_ROUNDS):
            scored = [program.predict(batch, rows)[:, y] for batch, rows in zip(sample.batches, pulled, strict=True)]
            logit_R = np.concatenate(scored).astype(np.float64)
            known_R = np.isfinite(logit_R) & (weight_R > 0)
            if not known_R.any():
                break
            shift = shift_to(rate, logit_R[known_R], weight_R[known_R])
            if abs(shift) < _CLOSE:
                break
            biases_Y[y] = np.clip(biases_Y[y] + shift, -_LARGEST_SHIFT, _LARGEST_SHIFT)
            program.set_output_biases(biases_Y)
    return biases_Y


def shift_to(rate: float, logit_R: Array, weight_R: Array) -> float:
    """What, added to all log-odds, makes the weighted mean probability equal to the rate; by bisection."""
    low, high = -_LARGEST_SHIFT - float(np.abs(logit_R).max()), _LARGEST_SHIFT + float(np.abs(logit_R).max())
    total = weight_R.sum()
    for _ in range(80):
        middle = (low + high) / 2
        mean = float(weight_R @ np.exp(-np.logaddexp(0.0, -(logit_R + middle)))) / total
        low, high = (middle, high) if mean < rate else (low, middle)
    return (low + high) / 2


def _weights(batch: Batch) -> Array:
    if batch.sample_weight_B is None:
        return np.ones(batch.num_rows)
    return np.asarray(batch.sample_weight_B, np.float64)


def _places(data: Dataset) -> list[Slice]:
    """The first rows of slices that lie evenly spread over the files: data may be sorted by anything."""
    slices = data.slices()
    if data.num_rows <= _ROWS_COUNTED:
        return list(slices)
    chosen = np.unique(np.linspace(0, len(slices) - 1, min(len(slices), _PLACES)).round().astype(int)).tolist()
    rows = -(-_ROWS_COUNTED // len(chosen))
    return [replace(slices[at], num_rows=min(slices[at].num_rows, rows)) for at in chosen]
