"""Click metrics against scikit-learn and NumPy, merged in any order, on ties and on one class only."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from paddlewheel.trainer.loop.metrics import BAND_EDGES, ClickMetrics, GroupedMetrics, GroupedSums, WeightedMetrics


def _report(logit: np.ndarray, label: np.ndarray, *, parts: int = 1, bits: int = 20):
    whole = ClickMetrics(bits)
    for logits, labels in zip(np.array_split(logit, parts), np.array_split(label, parts), strict=True):
        part = ClickMetrics(bits)
        part.update(logits, labels)
        whole.merge(part)
    return whole.report()


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_agrees_with_scikit_learn(scale: float) -> None:
    rng = np.random.default_rng(3)
    logit = (rng.standard_normal(20_000) * scale).astype(np.float32)
    label = (rng.random(20_000) < 1 / (1 + np.exp(-logit / scale))).astype(np.float32)
    report = _report(logit, label, parts=7)
    assert report.auc_error_bound is not None
    assert report.auc_error_bound < 1e-3
    assert report.auc == pytest.approx(roc_auc_score(label, logit), abs=min(2e-6, report.auc_error_bound))
    probability = 1 / (1 + np.exp(-logit.astype(np.float64)))
    assert report.calibration == pytest.approx(probability.sum() / label.sum(), rel=1e-9)
    if scale < 30:
        assert report.logloss == pytest.approx(log_loss(label, probability), rel=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(-40, 40, width=32), st.booleans()), min_size=2, max_size=60),
    bits=st.sampled_from([10, 12, 14, 10, 12, 14, 20]),  # seldom 20: a million buckets for each part
    parts=st.integers(1, 5),
)
def test_exact_auc_is_never_further_away_than_the_bound(rows: list[tuple[float, bool]], bits: int, parts: int) -> None:
    logit = np.array([r[0] for r in rows], np.float32)
    label = np.array([r[1] for r in rows], np.float32)
    report = _report(logit, label, parts=parts, bits=bits)
    assert report.rows == len(rows)
    if 0 < label.sum() < len(rows):
        assert report.auc is not None
        assert report.auc_error_bound is not None
        assert abs(report.auc - roc_auc_score(label, logit)) <= report.auc_error_bound + 1e-12
    else:
        assert report.auc is None


def test_the_bound_is_needed() -> None:
    """Two scores that few bits cannot tell apart: the AUC is off, and the bound says by how much at most."""
    report = _report(np.array([1.0, 1.001], np.float32), np.array([0, 1]), bits=10)
    assert (report.auc, report.auc_error_bound) == (0.5, 0.5)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_leaves_auc_undefined(label: float) -> None:
    report = _report(np.array([0.5, -0.5], np.float32), np.full(2, label))
    assert report.auc is None
    assert (report.calibration is None) == (label == 0.0)


def test_no_rows_leave_everything_undefined() -> None:
    report = ClickMetrics().report()
    assert report.rows == 0
    assert (report.auc, report.logloss, report.normalised_entropy) == (None, None, None)
    assert (report.calibration, report.calibration_error, list(report.bands)) == (None, None, [])


def test_reports_are_plain_values() -> None:
    logit, label = _clicks(100)
    grouped = _grouped(np.arange(100) % 7, logit, label)
    reports = [_report(logit, label), grouped.report(), *grouped.by_group().values()]
    for report in map(asdict, reports):
        assert json.loads(json.dumps(report)) == report
        assert {type(v) for v in report.values()} <= {int, float, list, type(None)}


def test_both_zeros_tie() -> None:
    assert _report(np.array([-0.0, 0.0], np.float32), np.array([0, 1])).auc == 0.5


def test_decay_forgets() -> None:
    metrics = ClickMetrics(12)
    metrics.update(np.array([1.0] * 10, np.float32), np.zeros(10))
    metrics.decay(0.5)
    assert metrics.report().rows == 5


def _clicks(rows: int, seed: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logit = (2 * rng.standard_normal(rows) - 1).astype(np.float32)
    return logit, (rng.random(rows) < 1 / (1 + np.exp(-0.7 * logit))).astype(np.float32)


def _weighted(logit: np.ndarray, label: np.ndarray, weight: np.ndarray):
    metrics = WeightedMetrics()
    for part in np.array_split(np.arange(len(logit)), 5):
        metrics.update(logit[part], label[part], weight[part])
    return metrics.report()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), zeros=st.floats(0, 0.9), scale=st.sampled_from([1e-6, 1.0, 1e4]))
def test_weighted_metrics_agree_with_scikit_learn(seed: int, zeros: float, scale: float) -> None:
    logit, label = _clicks(2_000, seed)
    logit = np.round(logit * 16) / np.float32(16)  # in one bucket only where equal, so the AUC is exact
    rng = np.random.default_rng(seed)
    weight = (scale * rng.exponential(size=2_000) * (rng.random(2_000) >= zeros)).astype(np.float32)
    report = _weighted(logit, label, weight)
    probability = 1 / (1 + np.exp(-logit.astype(np.float64)))
    expected = roc_auc_score(label, logit, sample_weight=weight)
    assert report.weighted_auc == pytest.approx(expected, rel=1e-9)
    assert 0 < report.weighted_auc_error_bound < 0.05
    assert report.weighted_logloss == pytest.approx(log_loss(label, probability, sample_weight=weight), rel=1e-6)
    wide = weight.astype(np.float64)
    assert report.weighted_calibration == pytest.approx(wide @ probability / (wide @ label), rel=1e-9)
    assert report.weight == pytest.approx(wide.sum(), rel=1e-12)


def test_equal_weights_change_nothing_and_weights_are_not_ignored() -> None:
    logit, label = _clicks(3_000)
    plain, flat = _report(logit, label), _weighted(logit, label, np.full(3_000, 0.25, np.float32))
    pairs = [(plain.auc, flat.weighted_auc), (plain.logloss, flat.weighted_logloss)]
    for expected, found in [*pairs, (plain.calibration, flat.weighted_calibration)]:
        assert found == pytest.approx(expected, rel=1e-12)
    whole = np.random.default_rng(1).integers(0, 3, 3_000)  # a weight of 2 is the row twice, 0 is no row
    repeated, heavy = _report(logit.repeat(whole), label.repeat(whole)), _weighted(logit, label, whole)
    assert heavy.weighted_auc == pytest.approx(repeated.auc, rel=1e-12)
    assert heavy.weighted_logloss == pytest.approx(repeated.logloss, rel=1e-12)
    assert abs(heavy.weighted_auc - plain.auc) > 1e-4


@pytest.mark.parametrize(("positive", "negative"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_without_weight_on_a_class_weighted_auc_is_undefined(positive: float, negative: float) -> None:
    report = _weighted(np.array([1.0, -1.0], np.float32), np.array([1, 0]), np.array([positive, negative]))
    assert (report.weighted_auc, report.weighted_auc_error_bound) == (None, None)
    assert (report.weighted_logloss is None) == (positive + negative == 0)
    assert (report.weighted_calibration is None) == (positive == 0)


def test_normalised_entropy_compares_with_the_constant_rate() -> None:
    logit, label = _clicks(5000)
    constant = np.full(len(label), label.mean(), np.float64)
    expected = log_loss(label, 1 / (1 + np.exp(-logit.astype(np.float64)))) / log_loss(label, constant)
    assert _report(logit, label, parts=3).normalised_entropy == pytest.approx(expected, rel=1e-6)
    assert _report(logit, np.ones_like(label)).normalised_entropy is None
    at_rate = _report(np.full(4, np.log(1 / 3), np.float32), np.array([1, 0, 0, 0]))
    assert at_rate.normalised_entropy == pytest.approx(1.0)


def test_bands_of_the_reliability_diagram() -> None:
    logit, label = _clicks(5000)
    probability = 1 / (1 + np.exp(-logit.astype(np.float64)))
    report = _report(logit, label, parts=4)
    where = np.digitize(logit, BAND_EDGES)
    error, at = 0.0, 0
    for band in range(len(BAND_EDGES) + 1):
        inside = where == band
        if inside.any():
            assert report.bands[at].rows == inside.sum()
            assert report.bands[at].positives == label[inside].sum()
            assert report.bands[at].prediction == pytest.approx(probability[inside].mean())
            error += abs(probability[inside].sum() - label[inside].sum())
            at += 1
    assert at == len(report.bands)
    assert report.calibration_error == pytest.approx(error / len(label))


def _grouped(group: np.ndarray, logit: np.ndarray, label: np.ndarray, parts: int = 1) -> GroupedMetrics:
    whole = GroupedMetrics()
    for rows in np.array_split(np.random.default_rng(1).permutation(len(group)), parts):
        part = GroupedMetrics()
        part.update(group[rows], logit[rows], label[rows])
        whole.merge(part)
    return whole


@pytest.mark.parametrize("parts", [1, 5])
def test_metrics_by_group_agree_with_scikit_learn(parts: int) -> None:
    logit, label = _clicks(3000)
    logit = np.round(logit, 1)  # ties
    keys = np.random.default_rng(2).integers(2**63, 2**64, 300, dtype=np.uint64)  # beyond int64
    group = keys[np.minimum(np.random.default_rng(3).geometric(0.02, 3000), 299)]
    grouped = _grouped(group, logit, label, parts)
    reports = grouped.by_group()
    weights, clicks, aucs, left_out = [], [], [], 0
    for value in np.unique(group):
        mine, report = group == value, reports[int(value.astype(np.int64))]
        assert (report.rows, report.positives) == (mine.sum(), label[mine].sum())
        probability = 1 / (1 + np.exp(-logit[mine].astype(np.float64)))
        assert report.logloss == pytest.approx(log_loss(label[mine], probability, labels=[0, 1]), rel=1e-6)
        if 0 < report.positives < report.rows:
            expected = roc_auc_score(label[mine], logit[mine])
            assert report.auc == pytest.approx(expected, abs=1e-12)
            assert report.calibration == pytest.approx(probability.sum() / label[mine].sum())
            aucs.append(expected)
            weights.append(report.rows)
            clicks.append(report.positives)
        else:
            assert report.auc is None
            left_out += 1
    total = grouped.report()
    assert left_out > 0
    assert (total.groups, total.groups_left_out) == (len(aucs), left_out)
    assert total.gauc == pytest.approx(np.average(aucs, weights=weights))
    assert total.gauc_by_clicks == pytest.approx(np.average(aucs, weights=clicks))


def test_groups_in_parts_are_whole_and_add_up() -> None:
    logit, label = _clicks(2000)
    group = np.random.default_rng(2).integers(0, 90, 2000)
    grouped = _grouped(group, logit, label)
    parts = [grouped.rows(part, 7) for part in range(7)]
    assert min(len(set(rows[0].tolist())) for rows in parts) > 0
    assert sum(len(set(rows[0].tolist())) for rows in parts) == len(set(group.tolist()))
    sums = GroupedSums()
    for rows in parts:
        sums.add(rows)
    whole = grouped.report()
    assert sums.report().gauc == pytest.approx(whole.gauc)
    assert sums.report().groups == whole.groups


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_groups_of_one_class_leave_grouped_auc_undefined(label: float) -> None:
    report = _grouped(np.array([1, 1, 2]), np.array([0.1, 0.2, 0.3], np.float32), np.full(3, label)).report()
    assert (report.gauc, report.gauc_by_clicks, report.groups, report.groups_left_out) == (None, None, 0, 2)


def test_no_groups_at_all() -> None:
    assert GroupedMetrics().report().gauc is None
    assert GroupedMetrics().by_group() == {}


def _halves(label: np.ndarray, weight: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Each row as a positive one of weight y and a negative one of weight 1 - y: labels [2 R] and weights [2 R]."""
    weight = np.ones(len(label)) if weight is None else weight.astype(np.float64)
    y = label.astype(np.float64)
    return np.repeat([1.0, 0.0], len(label)), np.concatenate([weight * y, weight * (1 - y)])


def _soft(seed: int, rows: int = 3_000) -> tuple[np.ndarray, np.ndarray]:
    """Logits that share a bucket only where they are equal, and labels of which a third are 0 or 1."""
    rng = np.random.default_rng(seed)
    logit = np.round(16 * (2 * rng.standard_normal(rows) - 1)).astype(np.float32) / np.float32(16)
    label = rng.beta(0.6, 1.4, rows)
    return logit, np.where(rng.random(rows) < 0.33, label > 0.5, label).astype(np.float32)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), parts=st.integers(1, 4))
def test_a_soft_label_is_a_positive_and_a_negative_row(seed: int, parts: int) -> None:
    logit, label = _soft(seed)
    report = _report(logit, label, parts=parts)
    halves, weight = _halves(label)
    twice = np.tile(logit, 2).astype(np.float64)
    probability = 1 / (1 + np.exp(-twice))
    assert report.auc == pytest.approx(roc_auc_score(halves, twice, sample_weight=weight), abs=1e-12)
    logloss = log_loss(halves, probability, sample_weight=weight)
    assert report.logloss == pytest.approx(logloss, rel=1e-9)
    rate = label.astype(np.float64).mean()
    assert report.normalised_entropy == pytest.approx(
        logloss / log_loss(halves, np.full(len(halves), rate), sample_weight=weight), rel=1e-9
    )
    assert report.calibration == pytest.approx(probability[: len(label)].mean() / rate, rel=1e-9)
    assert report.positives == pytest.approx(label.sum(dtype=np.float64), rel=1e-12)
    band = np.searchsorted(BAND_EDGES, logit, side="right")
    gaps = [abs((probability[: len(label)] - label)[band == b].sum()) for b in np.unique(band)]
    assert report.calibration_error == pytest.approx(sum(gaps) / len(label), rel=1e-6)
    assert sum(b.positives for b in report.bands) == pytest.approx(report.positives)


def test_predictions_that_equal_soft_labels_are_calibrated() -> None:
    p = np.random.default_rng(0).uniform(0.02, 0.6, 50_000)
    report = _report(np.log(p / (1 - p)).astype(np.float32), p.astype(np.float32))
    assert report.logloss == pytest.approx(-(p * np.log(p) + (1 - p) * np.log1p(-p)).mean(), rel=1e-6)
    assert report.calibration == pytest.approx(1, rel=1e-6)
    assert report.calibration_error < 1e-6
    assert report.normalised_entropy < 1


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_soft_labels_with_sample_weights(seed: int) -> None:
    logit, label = _soft(seed)
    weight = np.random.default_rng(seed).exponential(size=len(label)).astype(np.float32)
    report = _weighted(logit, label, weight)
    halves, by_half = _halves(label, weight)
    twice = np.tile(logit, 2).astype(np.float64)
    probability = 1 / (1 + np.exp(-twice))
    assert report.weight == pytest.approx(weight.sum(dtype=np.float64))
    assert report.weighted_auc == pytest.approx(roc_auc_score(halves, twice, sample_weight=by_half), abs=1e-9)
    assert report.weighted_logloss == pytest.approx(log_loss(halves, probability, sample_weight=by_half), rel=1e-9)
    expected = (probability[: len(label)] @ weight.astype(np.float64)) / (weight.astype(np.float64) @ label)
    assert report.weighted_calibration == pytest.approx(expected, rel=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_soft_labels_within_groups(seed: int) -> None:
    logit, label = _soft(seed, 400)
    group = np.random.default_rng(seed).integers(0, 30, 400)
    metrics = _grouped(group, logit, label)
    aucs, rows, clicks = [], [], []
    for value, report in metrics.by_group().items():
        mine = group == value
        halves, weight = _halves(label[mine])
        twice = np.tile(logit[mine], 2).astype(np.float64)
        assert report.logloss == pytest.approx(log_loss(halves, 1 / (1 + np.exp(-twice)), sample_weight=weight))
        assert report.positives == pytest.approx(label[mine].sum(dtype=np.float64))
        if 0 < label[mine].sum() < mine.sum():
            assert report.auc == pytest.approx(roc_auc_score(halves, twice, sample_weight=weight), abs=1e-9)
            aucs.append(report.auc)
            rows.append(mine.sum())
            clicks.append(label[mine].sum(dtype=np.float64))
        else:
            assert report.auc is None
    told = metrics.report()
    assert told.groups == len(aucs)
    assert told.gauc == pytest.approx(np.average(aucs, weights=rows))
    assert told.gauc_by_clicks == pytest.approx(np.average(aucs, weights=clicks))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_whose_score_is_not_finite_are_counted_and_left_out(bad: float) -> None:
    logit, label = _clicks(500)
    clean = _report(logit, label)
    assert clean.rows_not_finite == 0
    at = np.arange(0, 500, 50)
    more_logit, more_label = np.insert(logit, at, np.float32(bad)), np.insert(label, at, 1)
    report = _report(more_logit, more_label, parts=3)
    assert report.rows_not_finite == 10
    for name in ("rows", "positives", "auc", "logloss", "normalised_entropy", "calibration", "calibration_error"):
        assert getattr(report, name) == pytest.approx(getattr(clean, name), rel=1e-12), name
    weight = np.ones(510, np.float32)
    assert asdict(_weighted(more_logit, more_label, weight)) == pytest.approx(
        asdict(_weighted(logit, label, weight[:500])), rel=1e-12
    )
    assert _grouped(np.zeros(510, np.int64), more_logit, more_label).report() == (
        _grouped(np.zeros(500, np.int64), logit, label).report()
    )
