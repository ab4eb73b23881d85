"""Each alert fires on what it is for and keeps quiet otherwise, by Prometheus's own rule engine (promtool)."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddlewheel.trainer.telemetry.catalogue import BY_NAME, Kind
from tests.support.needs import require

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "monitoring" / "rules.yaml"
RUNBOOK = ROOT / "deploy" / "RUNBOOK.md"


@dataclass(frozen=True)
class Case:
    """Series (minute by minute, in promtool's notation) that make an alert fire, and series that do not."""

    alert: str
    at: str
    fires: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str]
    summary: str
    severity: str = "warning"
    common: dict[str, str] = field(default_factory=dict)


def series(name: str, **labels: str) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in {"job_name": "j", **labels}.items())
    return f"paddlewheel_{name}{{{inside}}}"


def trainer(name: str, rank: str = "0", **labels: str) -> str:
    return series(f"trainer_{name}", role="trainer", rank=rank, **labels)


def server(name: str, rank: str = "0", **labels: str) -> str:
    return series(name, role="pserver", rank=rank, **labels)


def job(name: str, **labels: str) -> str:
    return series(f"job_{name}", role="coordinator", rank="0", **labels)


RUNNING = {job("phase", phase="running"): "1x60"}
OF_JOB = {"job_name": "j"}
OF_COORDINATOR = {"job_name": "j", "role": "coordinator", "rank": "0"}
OF_SERVER = {"job_name": "j", "role": "pserver", "rank": "0"}

CASES = [
    Case(
        "PaddlewheelStalled",
        "10m",
        {trainer("rows_total"): "0+6000x4 24000x20"},
        {trainer("rows_total"): "0+6000x30"},
        OF_JOB,
        "j is running but has trained no row for two minutes",
        "critical",
        RUNNING,
    ),
    Case(
        "PaddlewheelNotStarting",
        "12m",
        {job("phase", phase="rendezvous"): "1x5 0x20", job("phase", phase="starting_servers"): "0x5 1x20"},
        {job("phase", phase="rendezvous"): "1x5 0x20", job("phase", phase="running"): "0x5 1x20"},
        OF_JOB,
        "j has been waiting for its roles for ten minutes",
        "critical",
    ),
    Case(
        "PaddlewheelRestarting",
        "30m",
        {job("restarts_total"): "0+1x5 5x40"},
        {job("restarts_total"): "0 1x60"},
        OF_COORDINATOR,
        "j started again 5 times in half an hour",
    ),
    Case(
        "PaddlewheelMemberMissing",
        "15m",
        {job("members", member_role="trainer"): "2x6 1x20"},
        {job("members", member_role="trainer"): "2x6 1x1 2x20"},
        {"job_name": "j", "member_role": "trainer"},
        "j lacks a trainer",
        common={job("members_expected", member_role="trainer"): "2x30", job("elapsed_seconds"): "0+60x30"},
    ),
    Case(
        "PaddlewheelScrapeDown",
        "5m",
        {'up{job="paddlewheel",instance="j-trainer-0"}': "1 0x10"},
        {'up{job="paddlewheel",instance="j-trainer-0"}': "1 0 1x10", 'up{job="other",instance="x"}': "0x10"},
        {"job": "paddlewheel", "instance": "j-trainer-0"},
        "j-trainer-0 does not answer on its metrics port",
    ),
    Case(
        "PaddlewheelLossNotFinite",
        "10m",
        {trainer("bad_steps_total"): "0x5 2x10", trainer("bad_steps_total", "1"): "0x5 2x10"},
        {trainer("bad_steps_total"): "2x15"},
        OF_JOB,
        "j skipped 2 steps whose loss or gradient was not finite",
        "critical",
    ),
    Case(
        "PaddlewheelAucDrop",
        "40m",
        {trainer("auc"): "0.76x30 0.70x30", trainer("auc", "1"): "0.78x30 0.72x30"},
        {trainer("auc"): "0.76x30 0.75x30", trainer("auc", "1"): "0.78x30 0.77x30"},
        OF_JOB,
        "the running AUC of j fell to 0.710, 0.02 below its best of the last hour",
        "critical",
    ),
    Case(
        "PaddlewheelServerMemory",
        "10m",
        {server("agent_worker_memory_bytes"): "86x20"},
        {server("agent_worker_memory_bytes"): "84x20"},
        {"job_name": "j", "rank": "0"},
        "server 0 of j uses 86% of its memory",
        "critical",
        {server("agent_memory_limit_bytes"): "100x20"},
    ),
    Case(
        "PaddlewheelServerMemorySoon",
        "50m",
        {server("agent_worker_memory_bytes"): "0+1x60"},
        {server("agent_worker_memory_bytes"): "50x60"},
        OF_SERVER,
        "server 0 of j will run out of memory within four hours",
        common={server("agent_memory_limit_bytes"): "100x60", job("elapsed_seconds"): "0+60x60"},
    ),
    Case(
        "PaddlewheelTableFull",
        "20m",
        {server("pserver_table_evicted_keys_total", table="t"): "0+60x30"},
        {server("pserver_table_evicted_keys_total", table="t"): "7x30"},
        OF_SERVER | {"table": "t"},
        "table t of j is full: server 0 lets 1 keys/s go",
    ),
    Case(
        "PaddlewheelServerErrors",
        "5m",
        {server("pserver_request_errors_total"): "0x2 4x10"},
        {server("pserver_request_errors_total"): "4x15"},
        OF_SERVER,
        "server 0 of j answered 4 requests with an error",
    ),
    Case(
        "PaddlewheelServerDeaf",
        "6m",
        {server("pserver_probe_failures_total"): "0+4x10"},
        {server("pserver_probe_failures_total"): "0 1x10"},
        OF_SERVER,
        "server 0 of j does not answer its agent",
    ),
    Case(
        "PaddlewheelPullSlow",
        "15m",
        {trainer("pull_seconds_bucket", le="1"): "0x30", trainer("pull_seconds_bucket", le="2.5"): "0+100x30"},
        {trainer("pull_seconds_bucket", le="1"): "0+100x30", trainer("pull_seconds_bucket", le="2.5"): "0+100x30"},
        OF_JOB,
        "one pull in a hundred of j takes 2.485s",
        common={trainer("pull_seconds_bucket", le="+Inf"): "0+100x30"},
    ),
    Case(
        "PaddlewheelServerSkew",
        "15m",
        {job("server_skew_ratio", table="item"): "1.8x20"},
        {job("server_skew_ratio", table="item"): "1.4x20"},
        {"job_name": "j", "table": "item"},
        "table item of j is unevenly spread: one server holds 1.8 times the mean",
        common={job("table_keys", table="item"): "1000000x20"},
    ),
    Case(
        "PaddlewheelShardSkew",
        "5m",
        {job("shard_skew_ratio", table="item"): "3x10", job("table_keys", table="item"): "2000000x10"},
        {job("shard_skew_ratio", table="item"): "3x10", job("table_keys", table="item"): "500x10"},
        {"job_name": "j", "table": "item"},
        "one shard of table item of j holds 3 times the mean",
    ),
    Case(
        "PaddlewheelTrainerSkew",
        "25m",
        {trainer("rows_total"): "0+1000x30", trainer("rows_total", "1"): "0+400x30"},
        {trainer("rows_total"): "0+1000x30", trainer("rows_total", "1"): "0+600x30"},
        OF_JOB,
        "a trainer of j trains less than half as many rows as another",
    ),
    Case(
        "PaddlewheelCheckpointTooOld",
        "30m",
        {job("checkpoint_timestamp_seconds"): "0x40"},
        {job("checkpoint_timestamp_seconds"): "0x10 660x40"},
        OF_COORDINATOR,
        "the last checkpoint of j is 30m 0s old: that much work is at stake",
        "critical",
        {**RUNNING, job("checkpoint_interval_seconds"): "600x40"},
    ),
    Case(
        "PaddlewheelCheckpointFailed",
        "20m",
        {job("checkpoints_total", result="failed"): "0x10 1x20"},
        {job("checkpoints_total", result="failed"): "1x30", job("checkpoints_total", result="committed"): "0+1x30"},
        {**OF_COORDINATOR, "result": "failed"},
        "a checkpoint of j failed",
        "critical",
    ),
    Case(
        "PaddlewheelRowsSkipped",
        "30m",
        {trainer("skipped_rows_total"): "0+20x30"},
        {trainer("skipped_rows_total"): "0+5x30"},
        OF_JOB,
        "j left out 600 rows of its data in half an hour, more than one in a hundred",
        common={trainer("rows_total"): "0+1000x30"},
    ),
    Case(
        "PaddlewheelWorkerFailing",
        "10m",
        {server("agent_worker_failures_total", reason="fix_job"): "0x5 1x10"},
        {server("agent_worker_failures_total", reason="retry"): "0x5 1x10"},
        {**OF_SERVER, "reason": "fix_job"},
        "pserver 0 of j says that the job, its data or its environment is wrong",
        "critical",
    ),
]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str | Path) -> None:
    require("promtool")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_are_well_formed() -> None:
    promtool("check", "rules", RULES)


def test_every_alert_has_a_case_and_a_section_in_the_runbook() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts == {case.alert for case in CASES}
    sections = set(re.findall(r"^### (Paddlewheel\w+)$", RUNBOOK.read_text(), flags=re.MULTILINE))
    assert alerts == sections


def test_rules_use_only_metrics_of_the_catalogue_and_recorded_ones() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        names = set(re.findall(r"\b[a-z_:]*paddlewheel_[a-z0-9_:]+", rule["expr"]))
        for name in names:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            known = name in BY_NAME or (base in BY_NAME and BY_NAME[base].kind is Kind.HISTOGRAM)
            assert known or name in recorded, f"{name} in {rule.get('alert') or rule.get('record')}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_alert(case: Case, tmp_path: Path) -> None:
    alert = {
        "exp_labels": {**case.labels, "severity": case.severity},
        "exp_annotations": {"summary": case.summary},
    }
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": s, "values": v} for s, v in {**case.common, **given}.items()],
            "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}],
        }
        for given, expected in ((case.fires, [alert]), (case.quiet, []))
    ]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)
