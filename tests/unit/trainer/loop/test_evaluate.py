"""Metrics merged over trainers equal the metrics of all rows in one place, however the rows are split."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.trainer.loop.evaluate import BrokenOffError, Scores, evaluate, merge_groups
from paddlewheel.trainer.loop.metrics import GroupedMetrics
from paddlewheel.trainer.protocol.messages import Result, to_line
from tests.support.fakes import CountingTables, LabelPredictor, ThreadGroup


def on_all(num_trainers: int, work) -> list:
    with ThreadPoolExecutor(num_trainers) as pool:
        return list(pool.map(work, ThreadGroup.of(num_trainers)))


def batch_of(label: np.ndarray, group: np.ndarray | None, **slices: np.ndarray) -> Batch:
    return Batch(
        len(label), np.zeros((len(label), 0), np.float32), label, {}, (), group_B=group, slice_metrics_by=slices
    )


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logit = rng.standard_normal((900, 2)).astype(np.float32)
    label = (rng.random((900, 2)) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    return logit, label, rng.integers(0, 60, 900).astype(np.uint64)


@pytest.mark.parametrize("splits", [[450, 450], [0, 900], [100, 0, 800]])
def test_all_trainers_get_the_metrics_of_all_rows(rows, splits: list[int]) -> None:
    logit, label, group = rows
    alone = Scores(["click", "buy"])
    alone.update(batch_of(label, group), logit)
    [expected] = on_all(1, alone.merged)
    ends = np.cumsum(splits)

    def one_trainer(sync: ThreadGroup) -> dict:
        scores = Scores(["click", "buy"])
        start, end = ends[sync.rank] - splits[sync.rank], ends[sync.rank]
        for at in range(start, end, 128):
            part = slice(at, min(at + 128, end))
            scores.update(batch_of(label[part], group[part]), logit[part])
        return scores.merged(sync)

    reports = on_all(len(splits), one_trainer)
    for report in reports:
        assert set(report["labels"]) == {"click", "buy"}
        assert report["labels"]["click"] == {k: v for k, v in report.items() if k != "labels"}
        for name in ("click", "buy"):
            for key, value in expected["labels"][name].items():
                if key != "bands":
                    assert report["labels"][name][key] == pytest.approx(value, rel=1e-12), (name, key)
        assert report["rows"] == 900
        assert report["groups"] > 0
    assert reports[0]["labels"]["buy"]["auc"] != reports[0]["auc"]


@pytest.mark.parametrize("splits", [[900], [300, 0, 600]])
def test_sample_weights_count_where_there_are_any(rows, splits: list[int]) -> None:
    logit, label, _ = rows
    weight = np.random.default_rng(1).exponential(size=900).astype(np.float32)
    ends = np.cumsum(splits)

    def one_trainer(sync: ThreadGroup) -> dict:
        scores = Scores(["click", "buy"], weighted=True)
        part = slice(ends[sync.rank] - splits[sync.rank], ends[sync.rank])
        scores.update(replace(batch_of(label[part], None), sample_weight_B=weight[part]), logit[part])
        return scores.merged(sync)

    for report in on_all(len(splits), one_trainer):
        assert report["rows"] == 900
        assert report["weight"] == pytest.approx(weight.sum(), rel=1e-6)
        for column, name in enumerate(("click", "buy")):
            told = report["labels"][name]
            expected = roc_auc_score(label[:, column], logit[:, column], sample_weight=weight)
            assert abs(told["weighted_auc"] - expected) <= told["weighted_auc_error_bound"] < 1e-3
            assert abs(told["weighted_auc"] - told["auc"]) > 1e-4


def test_groups_meet_in_several_parts(rows) -> None:
    logit, label, group = rows
    whole = GroupedMetrics()
    whole.update(group, logit[:, 0], label[:, 0])

    def one_trainer(sync: ThreadGroup) -> float | None:
        grouped = GroupedMetrics()
        mine = slice(sync.rank, None, sync.num_trainers)
        grouped.update(group[mine], logit[mine, 0], label[mine, 0])
        return merge_groups(grouped, sync, rows_per_merge=100).report().gauc

    assert on_all(3, one_trainer) == pytest.approx([whole.report().gauc] * 3)


def test_rows_without_a_group_count_in_the_rest(rows) -> None:
    logit, label, group = rows
    scores = Scores(["click"])
    scores.update(batch_of(label[:, :1], np.where(group < 30, 0, group)), logit[:, :1])
    [report] = on_all(1, scores.merged)
    kept = group >= 30
    only = Scores(["click"])
    only.update(batch_of(label[kept, :1], group[kept]), logit[kept, :1])
    [expected] = on_all(1, only.merged)
    assert report["rows"] == 900
    assert report["gauc"] == pytest.approx(expected["gauc"])
    assert "labels" not in report


def test_without_groups_there_is_no_grouped_auc(rows) -> None:
    logit, label, _ = rows
    scores = Scores(["click"])
    scores.update(batch_of(label[:, :1], None), logit[:, :1])
    assert "gauc" not in on_all(1, scores.merged)[0]


@pytest.mark.parametrize("num_trainers", [1, 3])
def test_slices_by_any_column(rows, num_trainers: int) -> None:
    logit, label, group = rows
    device = np.array([None, "null", "phone", "désk", b"\xff"], object)[np.minimum(group // 8, 4).astype(int)]

    def one_trainer(sync: ThreadGroup) -> dict:
        scores = Scores(["click"])
        mine = slice(sync.rank, None, sync.num_trainers)
        if sync.rank != 2:  # one trainer has no rows at all
            scores.update(batch_of(label[mine, :1], None, device=device[mine]), logit[mine, :1])
        return scores.merged(sync)

    reports = on_all(num_trainers, one_trainer)
    assert all(report["slices"] == reports[0]["slices"] for report in reports)
    scored = np.arange(900) % num_trainers != 2
    found = reports[0]["slices"]["device"]
    assert [r["rows"] for r in found] == sorted((r["rows"] for r in found), reverse=True)
    assert {r["value"] for r in found} == {None, "null", "phone", "désk", "\\xff"}
    for report in found:
        value = b"\xff" if report["value"] == "\\xff" else report["value"]
        mine = scored & np.array([v == value for v in device])
        assert (report["rows"], report["positives"]) == (mine.sum(), label[mine, 0].sum())
        assert report["auc"] == pytest.approx(roc_auc_score(label[mine, 0], logit[mine, 0]), abs=1e-12)


def test_only_the_most_frequent_values_are_reported() -> None:
    scores = Scores(["click"])
    value = np.array([f"v{i}" for i in range(300)] + ["often"] * 5, object)
    scores.update(batch_of(np.zeros((305, 1), np.float32), None, page=value), np.zeros((305, 1), np.float32))
    [report] = on_all(1, scores.merged)
    assert len(report["slices"]["page"]) == 100
    assert report["slices"]["page"][0] == {
        "value": "often",
        "rows": 5,
        "positives": 0,
        "auc": None,
        "logloss": pytest.approx(np.log(2)),
        "calibration": None,
    }


def test_a_score_that_is_not_finite_is_counted_and_leaves_the_rest_alone(rows) -> None:
    logit, label, group = rows
    weight = np.ones(900, np.float32)
    device = np.array(["phone", "desk"], object)[(group % 2).astype(int)]

    def report(bad: bool) -> dict:
        scored = logit.copy()
        if bad:
            scored[::90, 0] = np.nan
        mine = slice(None) if bad else np.arange(900) % 90 != 0
        batch = replace(batch_of(label[mine], group[mine], device=device[mine]), sample_weight_B=weight[mine])
        scores = Scores(["click", "buy"], weighted=True)
        scores.update(batch, scored[mine])
        return on_all(1, scores.merged)[0]

    found, expected = report(True), report(False)
    assert (found["rows"], found["rows_not_finite"], expected["rows_not_finite"]) == (890, 10, 0)
    assert found["labels"]["buy"]["rows_not_finite"] == 0
    assert found["labels"]["buy"]["rows"] == 900
    for name in ("auc", "logloss", "calibration", "weighted_auc", "weighted_logloss", "gauc"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name
    assert found["slices"] == expected["slices"]
    json.loads(to_line(Result(figures=found)), parse_constant=pytest.fail)


def _evaluated(sync: ThreadGroup, batches: list[Batch], is_to_stop) -> dict | str:
    try:
        return evaluate(LabelPredictor(), CountingTables(), sync, iter(batches), is_to_stop=is_to_stop)
    except BrokenOffError:
        return "broken off"


def test_batches_without_rows_are_passed_over(rows) -> None:
    _, label, _ = rows
    batches = [batch_of(label[:0, :1], None), batch_of(label[:50, :1], None), batch_of(label[:0, :1], None)]
    assert on_all(1, lambda sync: _evaluated(sync, batches, lambda: False))[0]["rows"] == 50


@pytest.mark.parametrize("told", [{0}, {1}, {0, 1, 2}])
def test_when_one_trainer_breaks_off_all_do(rows, told: set[int]) -> None:
    """Whoever had no rows left, or has not heard of the stop yet, must not wait for sums that never come."""
    _, label, _ = rows
    batches = [[batch_of(label[:30, :1], None)] * count for count in (4, 9, 1)]

    def one(sync: ThreadGroup) -> dict | str:
        return _evaluated(sync, batches[sync.rank], lambda: sync.rank in told)

    assert on_all(3, one) == ["broken off"] * 3


def test_an_evaluation_that_is_not_told_to_stop_is_whole(rows) -> None:
    _, label, _ = rows
    reports = on_all(2, lambda sync: _evaluated(sync, [batch_of(label[:30, :1], None)], lambda: False))
    assert [r["rows"] for r in reports] == [60, 60]
