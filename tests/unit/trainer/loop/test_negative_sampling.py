"""Which rows stay, what stays of their keys, and that predictions are calibrated again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paddlewheel.data_pipeline.batch import Batch, Span, TableKeys
from paddlewheel.trainer.job.train import NegativeSamplingConfig, logit_shift
from paddlewheel.trainer.loop.negative_sampling import sample_negatives


def batch_of(rows: int, rate: float = 0.2, seed: int = 1, start: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    keys = rng.integers(1, 2**63, 40, dtype=np.uint64)
    single = rng.integers(0, 41, (rows, 2)).astype(np.int32)
    lengths = rng.integers(0, 4, rows)
    lists = np.where(np.arange(4) < lengths[:, None], rng.integers(1, 41, (rows, 4)), 0).astype(np.int32)
    return Batch(
        num_rows=rows,
        dense_BD=rng.standard_normal((rows, 3)).astype(np.float32),
        labels_BL=(rng.random((rows, 1)) < rate).astype(np.float32),
        tables={
            "t": TableKeys(
                keys,
                {"a": single[:, 0], "tags": lists, "b": single[:, 1]},
                single,
                ("a", "b"),
                {"tags": (lists * 0.5).astype(np.float32)},
            )
        },
        spans=(Span(0, start, rows),),
        group_B=np.arange(rows, dtype=np.uint64),
        num_skipped_rows=2,
    )


def keys_of_row(batch: Batch, row: int, feature: str) -> list[int]:
    table = batch.tables["t"]
    padded = np.concatenate([np.zeros(1, np.uint64), table.keys_U])  # a list would make it float
    ids = np.atleast_1d(table.index[feature][row])
    return [int(padded[i]) for i in ids if i]


def sampled(batch: Batch, **config) -> tuple[Batch, int]:
    [result] = sample_negatives(iter([batch]), NegativeSamplingConfig(**config), seed=5, epoch=0)
    return result, batch.num_rows - result.num_rows


def test_every_click_stays_with_its_own_keys_and_values() -> None:
    batch = batch_of(300)
    result, left_out = sampled(batch, keep=0.25)
    kept = result.group_B.astype(int)  # the group says which row it was
    assert result.num_rows == len(kept) == 300 - left_out
    assert set(np.flatnonzero(batch.labels_BL[:, 0])) <= set(kept)
    assert 0.15 < (result.labels_BL == 0).sum() / (batch.labels_BL == 0).sum() < 0.35
    np.testing.assert_array_equal(result.dense_BD, batch.dense_BD[kept])
    np.testing.assert_array_equal(result.labels_BL, batch.labels_BL[kept])
    table = result.tables["t"]
    assert table.single_BF.flags.c_contiguous
    assert list(table.index) == ["a", "tags", "b"]
    assert len(set(table.keys_U.tolist())) == len(table.keys_U)
    for new, old in enumerate(kept):
        for feature in ("a", "b", "tags"):
            assert keys_of_row(result, new, feature) == keys_of_row(batch, old, feature)
        width = table.index["tags"].shape[1]
        np.testing.assert_array_equal(table.weights["tags"][new], batch.tables["t"].weights["tags"][old, :width])
    used = {key for new in range(len(kept)) for f in ("a", "b", "tags") for key in keys_of_row(result, new, f)}
    assert used == set(table.keys_U.tolist())  # nothing is pulled for rows that are not there
    assert (result.spans, result.num_skipped_rows) == (batch.spans, 2)


def test_the_draw_repeats_and_changes_with_epoch_and_place() -> None:
    config = NegativeSamplingConfig(keep=0.5)

    def kept(epoch: int, start: int = 0) -> list[int]:
        [result] = sample_negatives(iter([batch_of(100, start=start)]), config, seed=1, epoch=epoch)
        return result.group_B.tolist()

    assert kept(0) == kept(0)
    assert kept(0) != kept(1)
    assert kept(0) != kept(0, start=100)


def test_a_batch_is_never_left_without_rows() -> None:
    result, left_out = sampled(batch_of(6, rate=0.0), keep=1e-9)
    assert (result.num_rows, left_out) == (1, 5)
    assert result.sample_weight_B.tolist() == [0.0]
    assert result.tables["t"].index["tags"].shape[1] >= 1


def test_keeping_all_changes_nothing() -> None:
    batch = batch_of(50)
    result, left_out = sampled(batch, keep=1.0)
    assert left_out == 0
    np.testing.assert_array_equal(result.labels_BL, batch.labels_BL)
    for row in range(50):
        assert keys_of_row(result, row, "tags") == keys_of_row(batch, row, "tags")


@pytest.mark.parametrize("given", [None, np.linspace(0.5, 2, 300).astype(np.float32)])
def test_weights_make_up_for_what_is_left_out(given: np.ndarray | None) -> None:
    batch = replace(batch_of(300), sample_weight_B=given)
    result, _ = sampled(batch, keep=0.25, correction="weight")
    kept = result.group_B.astype(int)
    before = np.ones(300, np.float32) if given is None else given
    expected = np.where(batch.labels_BL[kept, 0] > 0, 1.0, 4.0) * before[kept]
    np.testing.assert_allclose(result.sample_weight_B, expected)


def test_the_shift_makes_rates_true_again() -> None:
    """With a share w of negatives, odds are 1 / w times too high: He et al., 2014, q = p / (p + (1 - p) / w)."""
    clicks, others, keep = 30.0, 970.0, 0.1
    p = clicks / (clicks + others * keep)
    shifted = np.log(p / (1 - p)) + logit_shift(NegativeSamplingConfig(keep=keep))
    assert 1 / (1 + np.exp(-shifted)) == pytest.approx(0.03)
    assert 1 / (1 + np.exp(-shifted)) == pytest.approx(p / (p + (1 - p) / keep))
    assert logit_shift(None) == 0.0
    assert logit_shift(NegativeSamplingConfig(keep=keep, correction="weight")) == 0.0


@pytest.mark.parametrize("correction", ["shift", "weight"])
@pytest.mark.parametrize("keep", [0.1, 0.5])
def test_soft_labels_keep_the_rate_that_the_correction_takes_for_granted(correction: str, keep: float) -> None:
    """What training sees, put right again as predictions are, is the mean label of all rows."""
    rng = np.random.default_rng(4)
    soft = rng.beta(0.5, 2, 20_000)
    label = np.where(rng.random(20_000) < 0.5, (soft > 0.8) * 1.0, soft).astype(np.float32)
    label[label < 0.02] = 0
    batch = replace(batch_of(20_000), labels_BL=label[:, None])
    result, left_out = sampled(batch, keep=keep, correction=correction)
    kept = result.group_B.astype(int)
    assert set(np.flatnonzero(label)) <= set(kept), "only rows without any click are left out"
    assert left_out > 0
    seen, weight = result.labels_BL[:, 0].astype(np.float64), result.sample_weight_B.astype(np.float64)
    assert 0 <= seen.min() <= seen.max() <= 1
    odds = (weight @ seen) / (weight @ (1 - seen))
    if correction == "shift":
        odds *= keep
    assert odds / (1 + odds) == pytest.approx(label.mean(), rel=0.03)
    hard = label[kept] == seen
    assert hard.all() == (correction == "weight")
    assert hard[(label[kept] == 0) | (label[kept] == 1)].all()
