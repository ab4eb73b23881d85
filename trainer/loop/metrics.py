"""Click metrics that stream and merge exactly: AUC with a proven error bound, logloss, calibration; weighted; by group.

A label is 0, 1, or (`data.label_rule: {soft: true}`) anything between. A row with label y is then worth y positive and
1 - y negative rows of the same score: that gives each metric below its meaning, and is the only such reading for which
logloss stays what a model is trained on. So the best logloss is no longer 0, the best AUC no longer 1.

A row whose score is not finite has no place in any sum: it is left out, and counted (`rows_not_finite`).

Legend: B batch rows, N buckets, K bands of the reliability diagram, R rows kept, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Rows = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]

# Bands of the reliability diagram: half a unit of log-odds each, so that small click rates are told apart too.
BAND_EDGES = np.arange(-8.0, 8.5, 0.5)


@dataclass(frozen=True)
class Band:
    """Rows whose prediction lies in one band of log-odds.

    Attributes:
        rows: how many.
        positives: their summed label: how many have label 1.
        prediction: mean predicted probability.
    """

    rows: int
    positives: float
    prediction: float


@dataclass(frozen=True)
class ClickReport:
    """What a set of scored rows says. A value that the rows leave undefined is None, never 0.

    Attributes:
        rows: rows scored.
        positives: their summed label: rows whose label is 1.
        rows_not_finite: further rows, left out of all else, whose score is not a finite number.
        auc: area under the ROC curve, ties counted one half; None when only one class was seen.
        auc_error_bound: no exact AUC of the same scores differs from `auc` by more than this.
        logloss: mean negative log-likelihood in nats; None without rows.
        normalised_entropy: logloss / entropy of the rate of positives (He et al., 2014): below 1 is better than
            predicting that rate everywhere; None when only one class was seen.
        calibration: sum of predictions / sum of labels (also called PCOC); None without positives.
        calibration_error: mean over rows of |mean prediction - mean label| of their band; None without rows.
        bands: non-empty bands of the reliability diagram, lowest predictions first.
    """

    rows: int
    positives: float
    rows_not_finite: int
    auc: float | None
    auc_error_bound: float | None
    logloss: float | None
    normalised_entropy: float | None
    calibration: float | None
    calibration_error: float | None
    bands: Sequence[Band]


class ClickMetrics:
    """Accumulates scored rows in fixed memory; any split of the rows merges to the same report.

    AUC is the Mann-Whitney statistic over a histogram of float32 logits. A bucket is the leading `bits` bits of the
    logit's order-preserving integer form, so its width is relative: 2**-(bits - 9) of the logit. Only pairs that share
    a bucket can be counted wrongly, each by at most one half, which gives `auc_error_bound`.

    Every row counts once, whatever its sample weight: `WeightedMetrics` is for those.
    """

    def __init__(self, bits: int = 20) -> None:
        self._shift = np.uint32(32 - bits)
        self.positives_N, self.negatives_N = np.zeros(1 << bits), np.zeros(1 << bits)
        self.sums = np.zeros(1, np.float64)  # logloss
        self.not_finite = np.zeros(1, np.int64)
        bands = len(BAND_EDGES) + 1
        self.band_rows_K = np.zeros(bands, np.int64)
        self.band_positives_K, self.band_predictions_K = np.zeros(bands), np.zeros(bands)

    def arrays(self) -> tuple[NDArray[np.int64] | NDArray[np.float64], ...]:
        """Everything accumulated; adding these arrays, element by element, merges."""
        bands = (self.band_rows_K, self.band_positives_K, self.band_predictions_K)
        return (self.positives_N, self.negatives_N, self.sums, self.not_finite, *bands)

    def update(self, logit_B: Floats, label_B: Floats) -> None:
        """Add rows. `logit_B` are log-odds, `label_B` lie in [0, 1]."""
        finite_B = np.isfinite(logit_B)
        self.not_finite[0] += np.count_nonzero(~finite_B)
        logit_B, label_B = _float32(logit_B[finite_B]), np.asarray(label_B, np.float64)[finite_B]
        size = len(self.positives_N)
        bucket_B = _bucket(logit_B, self._shift)
        self.positives_N += np.bincount(bucket_B, label_B, minlength=size)
        self.negatives_N += np.bincount(bucket_B, 1 - label_B, minlength=size)
        loss_B, prediction_B = _loss_and_prediction(logit_B, label_B)
        self.sums[0] += float(np.sum(loss_B))
        band_B = np.searchsorted(BAND_EDGES, logit_B, side="right")
        bands = len(self.band_rows_K)
        self.band_rows_K += np.bincount(band_B, minlength=bands)
        self.band_positives_K += np.bincount(band_B, label_B, minlength=bands)
        self.band_predictions_K += np.bincount(band_B, weights=prediction_B, minlength=bands)

    def decay(self, factor: float) -> None:
        """Forget part of the past, for a running view: everything shrinks by `factor`, numbers of rows rounded down."""
        for array in self.arrays():
            array[...] = (array * factor).astype(array.dtype)

    def merge(self, other: ClickMetrics) -> None:
        """Add what `other` saw; both must have the same number of bits."""
        for array, more in zip(self.arrays(), other.arrays(), strict=True):
            np.add(array, more, out=array)

    def report(self) -> ClickReport:
        """The metrics of all rows added so far.

        AUC: P(score+ > score-) + P(tie) / 2 over all pairs (Mann and Whitney, 1947; Hanley and McNeil, 1982).
        """
        rows, positives = int(self.band_rows_K.sum()), _count(self.positives_N.sum())
        auc, bound = _auc(self.positives_N, self.negatives_N)
        logloss = float(self.sums[0]) / rows if rows else None
        bands = [
            Band(int(r), _count(p), float(s) / int(r))
            for r, p, s in zip(self.band_rows_K, self.band_positives_K, self.band_predictions_K, strict=True)
            if r
        ]
        gap = float(np.abs(self.band_predictions_K - self.band_positives_K).sum())
        return ClickReport(
            rows=rows,
            positives=positives,
            rows_not_finite=int(self.not_finite[0]),
            auc=auc,
            auc_error_bound=bound,
            logloss=logloss,
            normalised_entropy=_normalised_entropy(logloss, rows, positives),
            calibration=float(self.band_predictions_K.sum()) / positives if positives else None,
            calibration_error=gap / rows if rows else None,
            bands=bands,
        )


@dataclass(frozen=True)
class WeightedReport:
    """What scored rows say when each counts as much as its sample weight. Undefined values are None.

    Attributes:
        weight: summed weight of the rows.
        weighted_auc: weight of the pairs in which the positive scores higher (ties one half) over that of all pairs; a
            pair weighs the product of its rows' weights. None when only one class has weight.
        weighted_auc_error_bound: as `ClickReport.auc_error_bound`.
        weighted_logloss: weighted mean of the negative log-likelihood in nats; None without weight.
        weighted_calibration: weighted sum of predictions / weighted sum of labels; None without positives.
    """

    weight: float
    weighted_auc: float | None
    weighted_auc_error_bound: float | None
    weighted_logloss: float | None
    weighted_calibration: float | None


class WeightedMetrics:
    """`ClickMetrics` for rows with weights; any split of the rows merges to the same report but for rounding."""

    def __init__(self, bits: int = 20) -> None:
        self._shift = np.uint32(32 - bits)
        self.positives_N, self.negatives_N = np.zeros(1 << bits), np.zeros(1 << bits)
        self.sums = np.zeros(2)  # logloss, predictions

    def arrays(self) -> tuple[NDArray[np.float64], ...]:
        """Everything accumulated; adding these arrays, element by element, merges."""
        return self.positives_N, self.negatives_N, self.sums

    def update(self, logit_B: Floats, label_B: Floats, weight_B: Floats) -> None:
        """Add rows: log-odds (those that are not finite are left out), labels in [0, 1], weights (finite, >= 0)."""
        finite_B = np.isfinite(logit_B)
        logit_B = _float32(logit_B[finite_B])
        label_B, weight_B = np.asarray(label_B, np.float64)[finite_B], np.asarray(weight_B, np.float64)[finite_B]
        bucket_B = _bucket(logit_B, self._shift)
        size = len(self.positives_N)
        self.positives_N += np.bincount(bucket_B, weight_B * label_B, minlength=size)
        self.negatives_N += np.bincount(bucket_B, weight_B * (1 - label_B), minlength=size)
        loss_B, prediction_B = _loss_and_prediction(logit_B, label_B)
        self.sums += weight_B @ loss_B, weight_B @ prediction_B

    def report(self) -> WeightedReport:
        """The metrics of all rows added so far."""
        auc, bound = _auc(self.positives_N, self.negatives_N)
        positives = float(self.positives_N.sum())
        weight = positives + float(self.negatives_N.sum())
        loss, prediction = self.sums.tolist()
        return WeightedReport(
            weight=weight,
            weighted_auc=auc,
            weighted_auc_error_bound=bound,
            weighted_logloss=loss / weight if weight else None,
            weighted_calibration=prediction / positives if positives else None,
        )


@dataclass(frozen=True)
class GroupReport:
    """What the rows of one group say; undefined values are None. positives: their summed label."""

    rows: int
    positives: float
    auc: float | None
    logloss: float
    calibration: float | None


@dataclass(frozen=True)
class GroupedReport:
    """AUC within groups, averaged (Zhu et al., 2017, Optimized cost per click in Taobao, eq. 13).

    Attributes:
        gauc: mean of the groups' AUC, weighted by their rows; None when no group has both classes.
        gauc_by_clicks: the same, weighted by their positives.
        groups: groups with both classes, which are the ones that count.
        groups_left_out: groups with one class only. (A row whose label is neither 0 nor 1 brings both.)
    """

    gauc: float | None
    gauc_by_clicks: float | None
    groups: int
    groups_left_out: int


class GroupedMetrics:
    """Exact metrics by group. A group's AUC needs all its rows, so rows are kept: 16 bytes each.

    Groups are any int64, for example keys or positions of a slice's value. Any split of the rows merges to the same
    report: `parts` deals the groups out so that a merge never needs more than one part in memory.
    """

    def __init__(self) -> None:
        self._group: list[NDArray[np.int64]] = []
        self._logit: list[NDArray[np.float32]] = []
        self._label: list[NDArray[np.float32]] = []

    @property
    def num_rows(self) -> int:
        """Rows kept."""
        return sum(len(g) for g in self._group)

    def update(self, group_B: NDArray[np.generic], logit_B: Floats, label_B: Floats) -> None:
        """Add rows: groups as int64 or uint64 [B], log-odds [B], labels in [0, 1] [B]. Scores that are not finite are
        left out.
        """
        finite_B = np.isfinite(logit_B)
        self._group.append(np.ascontiguousarray(group_B).view(np.int64)[finite_B])
        self._logit.append(np.asarray(logit_B, np.float32)[finite_B])
        self._label.append(np.asarray(label_B, np.float32)[finite_B])

    def merge(self, other: GroupedMetrics) -> None:
        """Add what `other` saw."""
        self._group += other._group
        self._logit += other._logit
        self._label += other._label

    def rows(self, part: int = 0, num_parts: int = 1) -> Rows:
        """Groups, logits and labels [R] of the rows whose group falls into one part of `num_parts`."""
        if not self._group:
            return np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32)
        group_R, logit_R, label_R = (
            np.concatenate(self._group),
            np.concatenate(self._logit),
            np.concatenate(self._label),
        )
        if num_parts > 1:
            mixed_R = (group_R.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
            mine_R = mixed_R % np.uint64(num_parts) == part
            group_R, logit_R, label_R = group_R[mine_R], logit_R[mine_R], label_R[mine_R]
        return group_R, logit_R, label_R

    def by_group(self) -> dict[int, GroupReport]:
        """The report of every group."""
        group_G, sums = _group_sums(self.rows())
        result = {}
        for group, rows, positives, wins, loss, prediction in zip(group_G.tolist(), *sums, strict=True):
            pairs = positives * (rows - positives)
            result[group] = GroupReport(
                rows=int(rows),
                positives=_count(positives),
                auc=float(wins / pairs) if pairs else None,
                logloss=float(loss / rows),
                calibration=float(prediction / positives) if positives else None,
            )
        return result

    def report(self) -> GroupedReport:
        """AUC within groups over all groups."""
        sums = GroupedSums()
        sums.add(self.rows())
        return sums.report()


class GroupedSums:
    """What grouped AUC needs of groups whose rows were complete; sums of trainers or of parts add up."""

    def __init__(self) -> None:
        self.sums = np.zeros(6)  # groups, groups left out, rows, rows * auc, clicks, clicks * auc

    def add(self, rows: Rows) -> None:
        """Add groups, with all their rows."""
        _, (rows_G, positives_G, wins_G, _, _) = _group_sums(rows)
        pairs_G = positives_G * (rows_G - positives_G)
        both_G = pairs_G > 0
        auc_G = wins_G[both_G] / pairs_G[both_G]
        weights = (rows_G[both_G], positives_G[both_G])
        self.sums[0] += len(auc_G)
        self.sums[1] += len(rows_G) - len(auc_G)
        for place, weight_G in zip((2, 4), weights, strict=True):
            self.sums[place] += weight_G.sum()
            self.sums[place + 1] += float(weight_G @ auc_G)

    def report(self) -> GroupedReport:
        """AUC within groups over everything added."""
        groups, left_out, rows, by_rows, clicks, by_clicks = self.sums.tolist()
        return GroupedReport(
            gauc=by_rows / rows if groups else None,
            gauc_by_clicks=by_clicks / clicks if groups else None,
            groups=int(groups),
            groups_left_out=int(left_out),
        )


def _group_sums(rows: Rows) -> tuple[NDArray[np.int64], tuple[Floats, Floats, Floats, Floats, Floats]]:
    """Groups [G], and of each: rows, positives, won pairs (ties one half), summed logloss, summed predictions."""
    group_R, logit_R, label_R = rows
    if not len(group_R):
        empty = np.zeros(0)
        return np.zeros(0, np.int64), (empty, empty, empty, empty, empty)
    order_R = np.lexsort((logit_R, group_R))
    group_R, logit_R = group_R[order_R], logit_R[order_R]
    positive_R = label_R[order_R].astype(np.float64)
    new_group_R = np.concatenate([[True], group_R[1:] != group_R[:-1]])
    new_run_R = new_group_R | np.concatenate([[True], logit_R[1:] != logit_R[:-1]])  # equal scores within a group
    start_G, start_runs = np.flatnonzero(new_group_R), np.flatnonzero(new_run_R)
    positives_of_run = np.add.reduceat(positive_R, start_runs)
    negatives_of_run = np.add.reduceat(1 - positive_R, start_runs)
    run_of_group_G = np.searchsorted(start_runs, start_G)
    negatives_before = np.cumsum(negatives_of_run) - negatives_of_run
    runs_per_group_G = np.diff(np.append(run_of_group_G, len(start_runs)))
    below = negatives_before - np.repeat(negatives_before[run_of_group_G], runs_per_group_G)
    wins_G = np.add.reduceat(positives_of_run * (below + negatives_of_run / 2), run_of_group_G)
    loss_R, prediction_R = _loss_and_prediction(logit_R, positive_R)
    sums = [np.add.reduceat(x, start_G) for x in (np.ones(len(group_R)), positive_R, loss_R, prediction_R)]
    return group_R[start_G], (sums[0], sums[1], wins_G, sums[2], sums[3])


def _float32(logit_B: Floats) -> NDArray[np.float32]:
    return np.ascontiguousarray(logit_B, dtype=np.float32)


def _count(value: float) -> float:
    """A sum of labels: a whole number as one, as with labels 0 and 1."""
    return int(value) if float(value).is_integer() else float(value)


def _loss_and_prediction(logit_B: Floats, label_B: Floats) -> tuple[Floats, Floats]:
    """Negative log-likelihood and probability of each row, in float64 and without overflow."""
    wide_B = logit_B.astype(np.float64)
    softplus_B = np.logaddexp(0.0, wide_B)
    return softplus_B - label_B * wide_B, np.exp(wide_B - softplus_B)


def _normalised_entropy(logloss: float | None, rows: int, positives: float) -> float | None:
    if logloss is None or not 0 < positives < rows:
        return None
    rate = positives / rows
    return float(logloss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def _auc(positives_N: NDArray[np.generic], negatives_N: NDArray[np.generic]) -> tuple[float | None, float | None]:
    """AUC of a histogram of scores, and the bound of its error; None, None with one class only."""
    # float64 holds counts exactly up to 2**53 pairs a bucket; beyond that the rounding is relative 1e-16
    plus_N, minus_N = positives_N.astype(np.float64), negatives_N.astype(np.float64)
    pairs = float(plus_N.sum()) * float(minus_N.sum())
    if not pairs:
        return None, None
    ties = float(np.dot(plus_N, minus_N))
    wins = float(np.dot(plus_N, np.cumsum(minus_N) - minus_N))
    return (wins + ties / 2) / pairs, ties / 2 / pairs


def _bucket(logit_B: NDArray[np.float32], shift: np.uint32) -> NDArray[np.int64]:
    """The leading bits of each logit's order-preserving integer form."""
    return (_ordered(logit_B) >> shift).astype(np.int64)


def _ordered(value_B: NDArray[np.float32]) -> NDArray[np.uint32]:
    """float32 as uint32 with the same order: flip all bits of negatives, the sign bit of the rest."""
    bits_B = (value_B + np.float32(0.0)).view(np.uint32)  # -0.0 + 0.0 is +0.0: both zeros share one place
    return np.where(bits_B >> np.uint32(31), ~bits_B, bits_B | np.uint32(1 << 31))
