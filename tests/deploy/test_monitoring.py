"""Generated files are current, and every query of a dashboard is one that Prometheus understands."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.deploy.monitoring import preview
from paddlewheel.deploy.monitoring.__main__ import FOLDER, generated
from paddlewheel.deploy.monitoring.dashboards import DASHBOARDS, Dashboard, to_grafana
from paddlewheel.trainer.coordinator.state_machine import Phase
from paddlewheel.trainer.telemetry.catalogue import BY_NAME, JOB_PHASES, Kind


@pytest.mark.parametrize("path", generated(), ids=lambda path: path.name)
def test_generated_files_are_current(path: Path) -> None:
    assert path.read_text("utf-8") == generated()[path], "run python -m paddlewheel.deploy.monitoring"


def test_the_catalogue_knows_the_phases_of_a_job() -> None:
    assert tuple(phase.value for phase in Phase) == JOB_PHASES


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_queries_use_metrics_of_the_catalogue(dashboard: Dashboard) -> None:
    for panel in dashboard.panels:
        for query in panel.queries:
            for name in re.findall(r"paddlewheel_\w+", query.expression):
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                assert name in BY_NAME or BY_NAME[base].kind is Kind.HISTOGRAM, f"{name} in {panel.title}"
            labels = set(re.findall(r"{{(\w+)}}", query.legend))
            assert labels <= {"job_name", "role", "rank", *_labels_of(query.expression)}, panel.title


def _labels_of(expression: str) -> set[str]:
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"paddlewheel_\w+", expression)}
    metrics = [BY_NAME[name] for name in names if name in BY_NAME]
    return {label.name for metric in metrics for label in metric.labels}


def test_every_counter_and_histogram_of_the_catalogue_is_on_some_dashboard() -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for query in panel.queries
        for name in re.findall(r"paddlewheel_\w+", query.expression)
    }
    left_out = {
        "paddlewheel_agent_worker_starts_total",  # the attempt says the same
        "paddlewheel_agent_worker_log_lines_total",  # logs are read as logs
        "paddlewheel_trainer_bad_rows_total",  # bad steps are shown
    }
    behind = {metric.name for metric in BY_NAME.values() if metric.kind is not Kind.GAUGE} - shown
    assert behind == left_out


@pytest.mark.needs("promtool")
def test_queries_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"q{i}", "expr": query.expression}
        for i, query in enumerate(
            query
            for dashboard in DASHBOARDS
            for panel in dashboard.panels
            for query in panel.queries_for("a-job", "1m")
        )
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_panels_of_grafana_do_not_overlap(dashboard: Dashboard) -> None:
    board = to_grafana(dashboard)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert json.loads(json.dumps(board)) == board


def test_phases_are_a_timeline_of_states() -> None:
    panels = {panel["title"]: panel for board in DASHBOARDS for panel in to_grafana(board)["panels"]}
    phase = panels["Phase"]
    assert phase["type"] == "state-timeline"
    [mapping] = phase["fieldConfig"]["defaults"]["mappings"]
    assert [mapping["options"][str(number)]["text"] for number in range(len(JOB_PHASES))] == list(JOB_PHASES)
    panel = next(panel for board in DASHBOARDS for panel in board.panels if panel.title == "Phase")
    points = [(float(at), 3.0 if at < 600 else 0.0 if at < 660 else 3.0) for at in range(0, 1200, 10)]
    drawn = preview._timeline(panel, [preview.Curve("j", tuple(points))], 0.0, 1200.0)
    bands = re.findall(r"<rect x=([\d.]+) y=[\d.]+ width=([\d.]+) .*?<title>(\w+)</title>", drawn)
    assert [name for _, _, name in bands] == ["running", "rendezvous", "running"]
    assert (
        preview._timeline(panel, [preview.Curve("j", tuple((float(at), 1.0) for at in range(40)))], 0, 40).count(
            "<rect"
        )
        == 1
    ), "points a second apart are one stretch, however short the page"
    for (x, width, _), (following, _, _) in itertools.pairwise(bands):
        assert float(x) + float(width) == pytest.approx(float(following), abs=0.2)


@given(low=st.floats(-1e6, 1e6), size=st.floats(1e-3, 1e6))
def test_ticks_are_a_few_round_numbers(low: float, size: float) -> None:
    ticks = preview.round_ticks(low, low + size)
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-6 * size <= tick <= low + size * (1 + 1e-6) for tick in ticks)
    steps = {f"{b - a:.3e}" for a, b in itertools.pairwise(ticks)}
    assert len({step[:3] for step in steps}) == 1
    assert float(steps.pop()[:3]) in {1.0, 2.0, 2.5, 5.0}


def test_values_of_labels_have_no_blanks() -> None:
    values = [value for metric in BY_NAME.values() for label in metric.labels for value in label.values or ()]
    assert len(values) > 20
    assert all(re.fullmatch(r"[a-z0-9_.]+", value) for value in values)


@pytest.mark.needs("promtool")
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    text = (FOLDER / "prometheus.yml").read_text().replace("/srv/paddlewheel/targets", str(tmp_path))
    (tmp_path / "rules.yaml").write_text((FOLDER / "rules.yaml").read_text())
    (tmp_path / "prometheus.yml").write_text(text)
    (tmp_path / "a.json").write_text("[]")
    done = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
