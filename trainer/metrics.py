"""Click metrics that stream and merge exactly: AUC with a proven error bound, logloss, calibration.

Legend: B batch rows, N buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class ClickReport:
    """What a set of scored rows says. A value that the rows leave undefined is None, never 0.

    Attributes:
        rows: rows scored.
        positives: rows whose label is 1.
        auc: area under the ROC curve, ties counted one half; None when only one class was seen.
        auc_error_bound: no exact AUC of the same scores differs from `auc` by more than this.
        logloss: mean negative log-likelihood in nats; None without rows.
        calibration: sum of predictions / sum of labels; None without positives.
    """

    rows: int
    positives: int
    auc: float | None
    auc_error_bound: float | None
    logloss: float | None
    calibration: float | None


class ClickMetrics:
    """Accumulates scored rows in fixed memory; any split of the rows merges to the same report.

    AUC is the Mann-Whitney statistic over a histogram of float32 logits. A bucket is the leading `bits` bits of the
    logit's order-preserving integer form, so its width is relative: 2**-(bits - 9) of the logit. Only pairs that share
    a bucket can be counted wrongly, each by at most one half, which gives `auc_error_bound`.
    """

    def __init__(self, bits: int = 20) -> None:
        self._shift = np.uint32(32 - bits)
        self.positives_N = np.zeros(1 << bits, np.int64)
        self.negatives_N = np.zeros(1 << bits, np.int64)
        self.sums = np.zeros(2, np.float64)  # logloss, predictions

    def update(self, logit_B: Floats, label_B: Floats) -> None:
        """Add rows. `logit_B` are log-odds (must be finite), `label_B` are 0 or 1."""
        logit_B = np.ascontiguousarray(logit_B, dtype=np.float32)
        positive_B = np.asarray(label_B) > 0.5
        size = len(self.positives_N)
        bucket_B = (_ordered(logit_B) >> self._shift).astype(np.int64)
        self.positives_N += np.bincount(bucket_B[positive_B], minlength=size)
        self.negatives_N += np.bincount(bucket_B[~positive_B], minlength=size)
        wide_B = logit_B.astype(np.float64)
        softplus_B = np.logaddexp(0.0, wide_B)
        self.sums[0] += float(np.sum(softplus_B - np.where(positive_B, wide_B, 0.0)))
        self.sums[1] += float(np.sum(np.exp(wide_B - softplus_B)))

    def decay(self, factor: float) -> None:
        """Forget part of the past, for a running view: counts shrink by `factor` and are rounded down."""
        self.positives_N = (self.positives_N * factor).astype(np.int64)
        self.negatives_N = (self.negatives_N * factor).astype(np.int64)
        self.sums *= factor

    def merge(self, other: ClickMetrics) -> None:
        """Add what `other` saw; both must have the same number of bits."""
        self.positives_N += other.positives_N
        self.negatives_N += other.negatives_N
        self.sums += other.sums

    def report(self) -> ClickReport:
        """The metrics of all rows added so far.

        AUC: P(score+ > score-) + P(tie) / 2 over all pairs (Mann and Whitney, 1947; Hanley and McNeil, 1982).
        """
        positives, negatives = int(self.positives_N.sum()), int(self.negatives_N.sum())
        rows = positives + negatives
        auc = bound = None
        if positives and negatives:
            # float64 holds these counts exactly up to 2**53 pairs a bucket; beyond that the rounding is relative 1e-16
            below_N = np.cumsum(self.negatives_N) - self.negatives_N
            ties = float(np.dot(self.positives_N.astype(np.float64), self.negatives_N.astype(np.float64)))
            wins = float(np.dot(self.positives_N.astype(np.float64), below_N.astype(np.float64)))
            pairs = float(positives) * float(negatives)
            auc, bound = (wins + ties / 2) / pairs, ties / 2 / pairs
        return ClickReport(
            rows=rows,
            positives=positives,
            auc=auc,
            auc_error_bound=bound,
            logloss=self.sums[0] / rows if rows else None,
            calibration=float(self.sums[1]) / positives if positives else None,
        )


def _ordered(value_B: NDArray[np.float32]) -> NDArray[np.uint32]:
    """float32 as uint32 with the same order: flip all bits of negatives, the sign bit of the rest."""
    bits_B = (value_B + np.float32(0.0)).view(np.uint32)  # -0.0 + 0.0 is +0.0: both zeros share one place
    return np.where(bits_B >> np.uint32(31), ~bits_B, bits_B | np.uint32(1 << 31))
