"""Negative down-sampling: most rows without a click teach little, so only a share of them is trained on.

Legend: B batch rows, K rows kept, U unique keys of a table, P positions (0 is "no id", then the keys).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.trainer.job.train import NegativeSamplingConfig


def sample_negatives(
    batches: Iterator[Batch],
    config: NegativeSamplingConfig,
    *,
    seed: int,
    epoch: int,
) -> Iterator[Batch]:
    """Batches with a share of their rows without a click; which rows stay depends on seed, epoch and the batch's place.

    Left-out rows stay in the spans, so the ledger of rows is the same with and without sampling. A batch that would be
    left empty keeps its first row with weight 0.

    A row whose label y lies between 0 and 1 always stays. With `weight` that is all, since the rows of label 0 make up
    for themselves. With `shift`, predictions take for granted that all that is negative was thinned out: so its
    negative part 1 - y counts `keep` times, which makes it a row of weight y + (1 - y) keep and label y / weight.
    """
    for batch in batches:
        labels_BL, label_B = batch.labels_BL, batch.labels_BL[:, 0]
        keep_B = (label_B > 0) | (_draw(batch, seed, epoch) < config.keep)
        weight_B = np.ones(batch.num_rows, np.float32) if batch.sample_weight_B is None else batch.sample_weight_B
        if config.correction == "weight":
            weight_B = np.where(label_B > 0, weight_B, weight_B / np.float32(config.keep))
        elif (soft_B := (label_B > 0) & (label_B < 1)).any():
            share_B = np.where(soft_B, label_B + (1 - label_B) * np.float32(config.keep), np.float32(1))
            weight_B, labels_BL = weight_B * share_B, labels_BL.copy()
            labels_BL[:, 0] = np.where(soft_B, label_B / share_B, label_B)
        if batch.num_rows and not keep_B.any():
            keep_B[0] = True
            weight_B = np.zeros(batch.num_rows, np.float32)
        rows_K = np.flatnonzero(keep_B)
        yield _rows_of(replace(batch, labels_BL=labels_BL, sample_weight_B=weight_B.astype(np.float32)), rows_K)


def _draw(batch: Batch, seed: int, epoch: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each row, made from the seed, the epoch and the place of the batch's first row."""
    first = batch.spans[0] if batch.spans else (0, 0, 0)
    return np.random.default_rng([seed, epoch, first[0], first[1]]).random(batch.num_rows)


def _rows_of(batch: Batch, rows_K: NDArray[np.intp]) -> Batch:
    return replace(
        batch,
        num_rows=len(rows_K),
        dense_BD=batch.dense_BD[rows_K],
        labels_BL=batch.labels_BL[rows_K],
        tables={name: _keys_of(keys, rows_K) for name, keys in batch.tables.items()},
        sample_weight_B=None if batch.sample_weight_B is None else batch.sample_weight_B[rows_K],
        group_B=None if batch.group_B is None else batch.group_B[rows_K],
    )


def _keys_of(keys: TableKeys, rows_K: NDArray[np.intp]) -> TableKeys:
    """The keys that the rows use, in the same order, and positions among those."""
    single = keys.single_BF[rows_K]
    lists = {name: index[rows_K] for name, index in keys.index.items() if name not in keys.single_names}
    used_P = np.zeros(len(keys.keys_U) + 1, np.bool_)
    for index in (single, *lists.values()):
        used_P[index] = True
    used_P[0] = False
    place_P = np.where(used_P, np.cumsum(used_P), 0).astype(np.int32)
    lists = {name: _trim(place_P[index]) for name, index in lists.items()}
    single = np.ascontiguousarray(place_P[single])
    singles = {name: single[:, at] for at, name in enumerate(keys.single_names)}
    return TableKeys(
        keys_U=keys.keys_U[used_P[1:]],
        index={name: singles[name] if name in singles else lists[name] for name in keys.index},
        single_BF=single,
        single_names=keys.single_names,
        weights={n: np.ascontiguousarray(w[rows_K][:, : lists[n].shape[1]]) for n, w in keys.weights.items()},
    )


def _trim(index_KL: NDArray[np.int32]) -> NDArray[np.int32]:
    """Without columns that no row uses any more; at least one column."""
    used = np.flatnonzero(index_KL.any(axis=0))
    return np.ascontiguousarray(index_KL[:, : used[-1] + 1 if len(used) else 1])
