"""Click metrics against scikit-learn, merged in any order, on ties and on one class only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from trainer.metrics import ClickMetrics


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
    bits=st.sampled_from([10, 14, 20]),
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
    assert (report.rows, report.auc, report.logloss, report.calibration) == (0, None, None, None)


def test_both_zeros_tie() -> None:
    assert _report(np.array([-0.0, 0.0], np.float32), np.array([0, 1])).auc == 0.5


def test_decay_forgets() -> None:
    metrics = ClickMetrics(12)
    metrics.update(np.array([1.0] * 10, np.float32), np.zeros(10))
    metrics.decay(0.5)
    assert metrics.report().rows == 5
