"""The loss curve in bounded memory, and the report that a person looks at."""

from __future__ import annotations

import itertools
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from paddlewheel.deploy.reports import learning_curves
from paddlewheel.deploy.reports.learning_curves import LearningReportError
from paddlewheel.trainer.distributed.process_group import SingleGroup
from paddlewheel.trainer.loop.evaluate import Scores
from paddlewheel.trainer.loop.loss_curve import LossCurve


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 100, 1000])
def test_a_curve_holds_the_mean_of_every_stride_of_steps(steps: int) -> None:
    losses = np.random.default_rng(0).random(steps)
    curve = LossCurve(most_points=8)
    for step, loss in enumerate(losses, start=11):
        curve.add(step, float(loss))
    drawn = curve.to_json()
    stride = drawn["stride"]
    assert drawn["first_step"] == 11
    assert len(drawn["loss"]) < 8
    assert len(drawn["loss"]) == steps // stride
    whole = losses[: len(drawn["loss"]) * stride].reshape(-1, stride)
    np.testing.assert_allclose(drawn["loss"], whole.mean(axis=1))


def test_an_empty_curve() -> None:
    assert LossCurve().to_json() == {"first_step": None, "stride": 1, "loss": []}


def evaluation(labels: list[str], *, clicks: bool = True) -> dict:
    from paddlewheel.data_pipeline.batch import Batch

    rng = np.random.default_rng(1)
    logit = rng.standard_normal((4000, len(labels))).astype(np.float32) - 2
    label = (rng.random(logit.shape) < 1 / (1 + np.exp(-logit))).astype(np.float32) * clicks
    device = np.array([None, "<b>&", "phone", *[f"v{i}" for i in range(30)]], object)[rng.integers(0, 33, 4000)]
    scores = Scores(labels)
    scores.update(
        Batch(
            4000,
            np.zeros((4000, 0), np.float32),
            label,
            {},
            (),
            group_B=rng.integers(1, 50, 4000).astype(np.uint64),
            slice_metrics_by={"device / kind": device},
        ),
        logit,
    )
    return scores.merged(SingleGroup())


def run_dir(path: Path, **result) -> Path:
    path.mkdir(exist_ok=True)
    (path / "result.json").write_text(json.dumps({"exit_code": 0, "result": {"rows": 4000, "steps": 40, **result}}))
    return path


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_whole_run_is_drawn_and_the_page_holds_everything(tmp_path: Path) -> None:
    final = evaluation(["click", "buy"])
    curve = {"first_step": 1, "stride": 2, "loss": [0.7 - 0.01 * i for i in range(20)]}
    run = run_dir(
        tmp_path / "run",
        curve=curve,
        eval=final,
        evaluations=[{"step": s, **final} for s in (10, 20, 30)],
        best={"step": 20, "auc": 0.7},
        stopped_early=True,
    )
    files = learning_curves.write(run, tmp_path / "out")
    assert [f.name for f in files] == [
        "report.html",
        "training.png",
        "reliability-click.png",
        "reliability-buy.png",
        "slices-device%20%2f%20kind.png",
    ]
    for image in files[1:]:
        width, height = size_of_png(image)
        assert min(width, height) > 200
    page = files[0].read_text()
    assert page.count("<img") == 4
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page
    assert f"{final['labels']['buy']['auc']:.5f}" in page
    assert 'src="http' not in page  # one file, nothing to fetch


def test_a_run_with_undefined_metrics_is_drawn(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", eval=evaluation(["click"], clicks=False), evaluations=[])
    page = learning_curves.write(run, tmp_path / "out")[0].read_text()
    assert "undefined" in page
    assert ">nan<" not in page


def test_an_evaluation_alone_is_drawn(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", eval=evaluation(["click"]))
    assert [f.name for f in learning_curves.write(run, tmp_path / "out")][:2] == ["report.html", "reliability.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no result.json"),
        ("{", "cannot be read"),
        ('{"exit_code": 75}', "cannot be read"),
        ('{"result": {"rows": 0, "steps": 0}}', "neither a loss curve nor an evaluation"),
    ],
)
def test_nothing_to_draw_is_said(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "result.json").write_text(text)
    with pytest.raises(LearningReportError, match=message):
        learning_curves.write(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LearningReportError, match=r"pip install 'paddlewheel\[plot\]'"):
        learning_curves.write(run_dir(tmp_path / "run", eval=evaluation(["click"])), tmp_path / "out")


def test_wilson_intervals_hold_the_rate_and_stay_within_one() -> None:
    for total in (1, 10, 1000):
        for successes in {0, 1, total // 2, total}:
            low, high = learning_curves._wilson(successes, total)
            assert 0 <= low <= successes / total <= high <= 1
    low, high = learning_curves._wilson(50, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)  # a published value


@pytest.mark.parametrize("steps", [3, 36, 123_456, 40_000_000])
def test_labels_are_round_numbers_and_do_not_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    drawn, save = [], learning_curves._save
    monkeypatch.setattr(learning_curves, "_save", lambda figure, path: drawn.append(figure) or save(figure, path))
    report = evaluation(["click"])
    curve = {
        "first_step": 1,
        "stride": max(1, steps // 100),
        "loss": [0.5 + 1 / (i + 3) for i in range(min(steps, 100))],
    }
    result = {"rows": 9, "steps": steps, "eval": report, "curve": curve}
    (tmp_path / "result.json").write_text(json.dumps({"result": result}))
    learning_curves.write(tmp_path, tmp_path / "out")
    assert len(drawn) == 3
    for figure in drawn:
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                labels = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
                boxes = [label.get_window_extent() for label in labels]
                inside = [b for b in boxes if axes.bbox.expanded(1.15, 1.15).overlaps(b)]
                assert not [1 for a, b in itertools.combinations(inside, 2) if a.overlaps(b)], axes.get_title()
    for axes in drawn[0].axes:
        steps_shown = [label.get_text() for label in axes.get_xticklabels()]
        assert len(steps_shown) >= 2
        assert all(re.fullmatch(r"[\u2212-]?[\d,]+", text) for text in steps_shown)
    shown = [label.get_text() for label in drawn[1].axes[1].get_xticklabels()]
    assert {"5 %", "10 %", "20 %"} <= set(shown)
