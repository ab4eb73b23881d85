"""A real Prometheus server scrapes a real job: targets, counters, rules, dashboards, and what a scrape costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paddlewheel.data_pipeline.synthetic import generate
from paddlewheel.deploy.monitoring.dashboards import DASHBOARDS
from paddlewheel.deploy.monitoring.preview import Prometheus, render
from tests.support.chromium import screenshot
from tests.support.prometheus_server import prometheus_server

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
PICTURES = os.environ.get("PADDLEWHEEL_TEST_PICTURES")
ROLES = ["coordinator-0", "pserver-0", "pserver-1", "trainer-0", "trainer-1"]


def write_job(folder: Path) -> Path:
    generate(folder / "data", rows=60_000, seed=1)
    job = yaml.safe_load((ROOT / "jobs" / "quickstart.yaml").read_text())
    job["name"] = "watched"
    job["run_dir"] = str(folder / "run")
    job["data"] |= {"train": str(folder / "data" / "train"), "eval": str(folder / "data" / "eval"), "batch_rows": 256}
    job["train"] |= {"epochs": 15}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


@pytest.mark.needs("prometheus", "chromium")
def test_a_job_is_found_scraped_and_drawn(tmp_path: Path, eventually: Callable[..., None]) -> None:
    job = write_job(tmp_path)
    targets = tmp_path / "run" / "targets"
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / "rules.yaml")]
    config["scrape_configs"][0]["file_sd_configs"] = [{"files": [str(targets / "*.json")], "refresh_interval": "1s"}]
    targets.mkdir(parents=True)
    with prometheus_server(config, tmp_path) as (prometheus, _address):
        started = time.time()
        run = subprocess.Popen(
            [sys.executable, "-m", "paddlewheel.deploy.cli", "train", str(job)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            up = 'sum(up{job="paddlewheel"})'
            eventually(lambda: one(prometheus, up) == len(ROLES), seconds=120, what="all roles are scraped")
            rate = "job_name:paddlewheel_trainer_rows:rate1m"
            eventually(lambda: one(prometheus, rate), seconds=120, what="rows are trained")
            status = json.load(urllib.request.urlopen(page_of(targets) + "/status.json", timeout=10))
            assert status["name"] == "watched"
            names = {result["metric"]["instance"] for result in query(prometheus, 'up{job="paddlewheel"}')}
            assert names == {f"watched-{role}" for role in ROLES}
            rules = prometheus.get("/api/v1/rules")["groups"]
            assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}
            figures = {
                name: {r["metric"]["instance"]: float(r["value"][1]) for r in query(prometheus, name)}
                for name in ("scrape_samples_scraped", "scrape_duration_seconds")
            }
        finally:
            try:
                _, said = run.communicate(timeout=200)
            except subprocess.TimeoutExpired:
                run.kill()
                raise
        assert run.returncode == 0, said.decode()[-2000:]
        result = json.loads((tmp_path / "run" / "result.json").read_text())["result"]
        last = 'sum(last_over_time(paddlewheel_trainer_rows_total{job_name="watched"}[10m]))'
        # The last scrape may be a second before the end.
        assert 0.5 * result["rows"] < one(prometheus, last) <= result["rows"]
        assert not list(targets.iterdir()), "a job that is over has no targets"
        page = tmp_path / "dashboards.html"
        page.write_text(render(prometheus, "watched", started, time.time(), rate_interval="15s"))
        assert_drawn(page.read_text())
        picture = screenshot(page.as_uri(), tmp_path / "dashboards.png", width=1300, height=2600)
        if PICTURES:
            Path(PICTURES, "dashboards.png").write_bytes(picture.read_bytes())
            Path(PICTURES, "scrapes.json").write_text(json.dumps(figures, indent=1))
        for instance, seconds in figures["scrape_duration_seconds"].items():
            assert seconds < 2.0, (instance, seconds)
        for instance, number in figures["scrape_samples_scraped"].items():
            assert number < 250, (instance, number)


def assert_drawn(page: str) -> None:
    """Every panel has data but those of what this machine or job has not."""
    expected_empty = {
        *("GPU use", "GPU memory"),
        "AUC of the new day",  # it is not trained by days
        "Keys, fullest shard over average",  # its only checkpoint comes at its end
        "Keys that had to go per second",  # its tables have no bound
    }
    may_be_empty = {"Time until the memory limit"}  # while servers do not grow
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            if panel.title in may_be_empty:
                continue
            start = page.index(f"<h2>{panel.title}</h2>")
            inside = page[start : page.index("</div>", start)]
            assert ("no data" in inside) == (panel.title in expected_empty), f"{dashboard.name}: {panel.title}"


def page_of(targets: Path) -> str:
    (group,) = json.loads((targets / "watched-coordinator-0.json").read_text())
    return f"{group['labels']['__scheme__']}://{group['targets'][0]}"


def query(prometheus: Prometheus, expression: str) -> list[dict]:
    return prometheus.get("/api/v1/query", query=expression)["result"]


def one(prometheus: Prometheus, expression: str) -> float:
    found = query(prometheus, expression)
    return float(found[0]["value"][1]) if found else 0.0


def test_the_kubernetes_configuration_names_instances_by_role_and_rank(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """Debian's Prometheus is built without Kubernetes: its pods come as a file, with the same labels."""
    config = yaml.safe_load((MONITORING / "prometheus-kubernetes.yml").read_text())
    scrape = config["scrape_configs"][0]
    del scrape["kubernetes_sd_configs"]
    config["rule_files"] = []
    meta = "__meta_kubernetes_pod"
    pods = [
        {
            "targets": [f"10.0.0.{number}:1"],
            "labels": {
                f"{meta}_annotation_prometheus_io_scrape": "true" if component else "false",
                f"{meta}_annotation_prometheus_io_port": "9400",
                f"{meta}_annotation_prometheus_io_scheme": "http",
                f"{meta}_phase": phase,
                f"{meta}_ip": f"127.0.0.{number}",
                f"{meta}_label_paddlewheel_dev_job": "criteo",
                f"{meta}_label_app_kubernetes_io_component": component,
                f"{meta}_label_batch_kubernetes_io_job_completion_index": rank,
                "__meta_kubernetes_namespace": "ads",
            },
        }
        for number, component, rank, phase in [
            (1, "trainer", "3", "Running"),
            (2, "pserver", "0", "Running"),
            (3, "trainer", "4", "Succeeded"),
            (4, "", "", "Running"),
        ]
    ]
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    scrape["file_sd_configs"] = [{"files": [str(tmp_path / "pods.json")]}]
    with prometheus_server(config, tmp_path) as (prometheus, _address):
        found: list[dict] = []

        def discovered() -> bool:
            found[:] = prometheus.get("/api/v1/targets", state="active")["activeTargets"]
            return bool(found)

        eventually(discovered, seconds=30, what="targets are discovered")
    assert sorted((t["labels"]["instance"], t["labels"]["namespace"], t["scrapeUrl"]) for t in found) == [
        ("criteo-pserver-0", "ads", "http://127.0.0.2:9400/metrics"),
        ("criteo-trainer-3", "ads", "http://127.0.0.1:9400/metrics"),
    ]
