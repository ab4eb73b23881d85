"""Dashboards, described once: what Grafana shows and what `preview` draws without it.

Queries use `$job_name` and `$__rate_interval`, which Grafana fills in; `Panel.queries_for` does so elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from paddlewheel.trainer.telemetry.catalogue import JOB_PHASES

_J = 'job_name=~"$job_name"'
_WIDTH = 24  # columns of Grafana's grid


@dataclass(frozen=True)
class Query:
    """One PromQL expression; legend in Grafana's `{{label}}` notation."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One chart or figure.

    Attributes:
        title: what it shows.
        queries: one or more.
        unit: Grafana's name of the unit (short, bytes, s, percentunit, ops, rowsps is not one).
        kind: a chart over time, the last value as a figure, or which of some states was when.
        width: columns of 24.
        stacked: areas on top of each other.
        help: what a reader should know, shown as the panel's description.
        states: names of the values 0, 1, ... of a state timeline.
    """

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "state-timeline"] = "timeseries"
    width: int = 12
    stacked: bool = False
    help: str = ""
    states: tuple[str, ...] = ()

    def queries_for(self, job_name: str, rate_interval: str) -> list[Query]:
        """The queries with the variables filled in."""
        return [
            Query(
                query.expression.replace("$job_name", job_name).replace("$__rate_interval", rate_interval), query.legend
            )
            for query in self.queries
        ]


@dataclass(frozen=True)
class Dashboard:
    """One page of panels."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def _q(expression: str, legend: str = "") -> Query:
    return Query(expression.replace("JOB", _J), legend)


def _stat(title: str, expression: str, unit: str = "short", text: str = "") -> Panel:
    return Panel(title, (_q(expression),), unit, "stat", width=4, help=text)


def _chart(
    title: str, *queries: Query, unit: str = "short", width: int = 12, stacked: bool = False, text: str = ""
) -> Panel:
    return Panel(title, queries, unit, "timeseries", width, stacked, text)


_PHASE_SHARE = _q(
    "sum by (phase) (rate(paddlewheel_trainer_step_phase_seconds_sum{JOB}[$__rate_interval])) "
    "/ ignoring (phase) group_left sum(rate(paddlewheel_trainer_step_phase_seconds_sum{JOB}[$__rate_interval]))",
    "{{phase}}",
)


_PHASE = _q(
    "sum by (job_name) ("
    + " or ".join(f'{number} * paddlewheel_job_phase{{JOB, phase="{name}"}}' for number, name in enumerate(JOB_PHASES))
    + ")",
    "{{job_name}}",
)
"""The number of the phase that a job is in."""
_PHASES = Panel("Phase", (_PHASE,), kind="state-timeline", states=JOB_PHASES)


def _quantiles(metric: str, by: str = "") -> tuple[Query, ...]:
    labels = f"le, {by}" if by else "le"
    suffix = f" {{{{{by}}}}}" if by else ""
    return tuple(
        _q(
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{JOB}}[$__rate_interval])))",
            f"p{round(100 * q)}{suffix}",
        )
        for q in (0.5, 0.99)
    )


DASHBOARDS: tuple[Dashboard, ...] = (
    Dashboard(
        "overview",
        "paddlewheel: job",
        (
            _stat("Rows per second", "sum(rate(paddlewheel_trainer_rows_total{JOB}[$__rate_interval]))"),
            _stat(
                "Rows done",
                "sum(paddlewheel_job_rows{JOB}) / sum(paddlewheel_job_rows_expected{JOB})",
                "percentunit",
                "Of all epochs.",
            ),
            _stat("AUC, recent rows", "avg(paddlewheel_trainer_auc{JOB})", "none"),
            _stat(
                "Roles there",
                "sum(paddlewheel_job_members{JOB}) / sum(paddlewheel_job_members_expected{JOB})",
                "percentunit",
            ),
            _stat("Checkpoint age", "time() - max(paddlewheel_job_checkpoint_timestamp_seconds{JOB})", "s"),
            _stat("Restarts", "sum(paddlewheel_job_restarts_total{JOB})"),
            _chart(
                "Rows per second",
                _q("sum by (rank) (rate(paddlewheel_trainer_rows_total{JOB}[$__rate_interval]))", "trainer {{rank}}"),
                stacked=True,
            ),
            _chart("Loss", _q("avg by (job_name) (paddlewheel_trainer_loss{JOB})", "{{job_name}}"), unit="none"),
            _chart("AUC of recent rows", _q("paddlewheel_trainer_auc{JOB}", "trainer {{rank}}"), unit="none"),
            _chart("Share of the step", _PHASE_SHARE, unit="percentunit", stacked=True),
            _PHASES,
            _chart(
                "Memory",
                _q("sum by (role) (paddlewheel_agent_worker_memory_bytes{JOB})", "{{role}}s"),
                unit="bytes",
                stacked=True,
            ),
        ),
    ),
    Dashboard(
        "servers",
        "paddlewheel: servers",
        (
            _chart(
                "Requests per second",
                _q(
                    "sum by (rank, operation) (rate(paddlewheel_pserver_requests_total{JOB}[$__rate_interval]))",
                    "{{operation}} {{rank}}",
                ),
                unit="ops",
            ),
            _chart(
                "Request latency, longest of a hundred",
                _q('paddlewheel_pserver_request_latency_seconds{JOB, quantile="0.99"}', "server {{rank}}"),
                unit="s",
                text="Over the last ten seconds, as brpc computes it.",
            ),
            _chart(
                "Keys",
                _q("paddlewheel_job_table_keys{JOB}", "{{table}}"),
                stacked=True,
                text="By table, on all servers.",
            ),
            _chart(
                "Keys, most loaded server over average",
                _q("paddlewheel_job_server_skew_ratio{JOB}", "{{table}}"),
                unit="none",
            ),
            _chart(
                "New keys per second",
                _q("sum by (table) (rate(paddlewheel_trainer_new_keys_total{JOB}[$__rate_interval]))", "{{table}}"),
                unit="none",
                text="As trainers see them: a little above what the servers create.",
            ),
            _chart(
                "New keys per second, by feature",
                _q(
                    "topk(8, sum by (feature) "
                    "(rate(paddlewheel_trainer_feature_new_keys_total{JOB}[$__rate_interval])))",
                    "{{feature}}",
                ),
                unit="none",
                text="The features that make the tables grow.",
            ),
            _chart(
                "Keys with an embedding, and evicted ones",
                _q("paddlewheel_job_admitted_keys{JOB}", "{{table}}, admitted"),
                _q("sum by (table) (paddlewheel_job_evicted_keys_total{JOB})", "{{table}}, evicted"),
                text="Admitted as of the last checkpoint, evicted since the trainer started.",
            ),
            _chart(
                "Rows of the tables",
                _q("paddlewheel_job_table_bytes{JOB}", "{{table}}"),
                unit="bytes",
                stacked=True,
                text="Bytes of the rows themselves; servers need 1.7 times that.",
            ),
            _chart(
                "Keys, fullest shard over average",
                _q("paddlewheel_job_shard_skew_ratio{JOB}", "{{table}}"),
                unit="none",
                text="As of the last checkpoint.",
            ),
            _chart(
                "Time until the memory limit",
                _q('paddlewheel_agent_memory_limit_seconds{JOB, role="pserver"} < +Inf', "server {{rank}}"),
                unit="s",
                text="At the growth of the last ten minutes; nothing while a server does not grow steadily.",
            ),
            _chart(
                "Memory",
                _q('paddlewheel_agent_worker_memory_bytes{JOB, role="pserver"}', "server {{rank}}"),
                _q('max(paddlewheel_agent_memory_limit_bytes{JOB, role="pserver"})', "limit"),
                unit="bytes",
            ),
            _chart(
                "Processor cores",
                _q(
                    'rate(paddlewheel_agent_worker_cpu_seconds_total{JOB, role="pserver"}[$__rate_interval])',
                    "server {{rank}}",
                ),
                unit="none",
            ),
            _chart("Requests in flight", _q("paddlewheel_pserver_requests_in_flight{JOB}", "server {{rank}}")),
            _chart("Connections", _q("paddlewheel_pserver_connections{JOB}", "server {{rank}}")),
            _chart(
                "Errors per second",
                _q("rate(paddlewheel_pserver_request_errors_total{JOB}[$__rate_interval])", "answers, {{rank}}"),
                _q("rate(paddlewheel_pserver_probe_failures_total{JOB}[$__rate_interval])", "probes, {{rank}}"),
            ),
            _chart("Uptime", _q("paddlewheel_pserver_uptime_seconds{JOB}", "server {{rank}}"), unit="s"),
            _chart(
                "Keys that had to go per second",
                _q(
                    "rate(paddlewheel_pserver_table_evicted_keys_total{JOB}[$__rate_interval])",
                    "{{table}}, server {{rank}}",
                ),
            ),
        ),
    ),
    Dashboard(
        "trainers",
        "paddlewheel: trainers",
        (
            _chart("Share of the step", _PHASE_SHARE, unit="percentunit", stacked=True),
            _chart(
                "Step phases, longest of a hundred",
                _quantiles("paddlewheel_trainer_step_phase_seconds", "phase")[1],
                unit="s",
            ),
            _chart("Pull", *_quantiles("paddlewheel_trainer_pull_seconds"), unit="s"),
            _chart("Push", *_quantiles("paddlewheel_trainer_push_seconds"), unit="s"),
            _chart(
                "Traffic with the servers",
                _q("sum(rate(paddlewheel_trainer_pulled_bytes_total{JOB}[$__rate_interval]))", "pulled"),
                _q("sum(rate(paddlewheel_trainer_pushed_bytes_total{JOB}[$__rate_interval]))", "pushed"),
                unit="Bps",
            ),
            _chart(
                "Steps per second",
                _q("rate(paddlewheel_trainer_steps_total{JOB}[$__rate_interval])", "trainer {{rank}}"),
                unit="none",
            ),
            _chart(
                "Staleness",
                _q("paddlewheel_trainer_staleness_steps{JOB}", "trainer {{rank}}"),
                text="Batches whose push was not applied when the last pull began.",
            ),
            _chart("Skipped steps", _q("paddlewheel_trainer_bad_steps_total{JOB}", "trainer {{rank}}")),
            _chart(
                "Memory",
                _q('paddlewheel_agent_worker_memory_bytes{JOB, role="trainer"}', "trainer {{rank}}"),
                _q('max(paddlewheel_agent_memory_limit_bytes{JOB, role="trainer"})', "limit"),
                unit="bytes",
            ),
            _chart(
                "Processor cores",
                _q(
                    'rate(paddlewheel_agent_worker_cpu_seconds_total{JOB, role="trainer"}[$__rate_interval])',
                    "trainer {{rank}}",
                ),
                unit="none",
            ),
            _chart(
                "GPU use",
                _q("paddlewheel_trainer_gpu_utilization_ratio{JOB}", "trainer {{rank}}, GPU {{gpu}}"),
                unit="percentunit",
            ),
            _chart(
                "GPU memory",
                _q("paddlewheel_trainer_gpu_memory_bytes{JOB}", "trainer {{rank}}, GPU {{gpu}}"),
                unit="bytes",
            ),
        ),
    ),
    Dashboard(
        "data",
        "paddlewheel: data",
        (
            _stat("Epoch", "max(paddlewheel_trainer_epoch{JOB}) + 1"),
            _stat("Rows trained", "sum(paddlewheel_trainer_rows_total{JOB})", text="Repeated ones included."),
            _stat("Rows left out", "sum(paddlewheel_trainer_skipped_rows_total{JOB})"),
            _stat("Ids cut off", "sum(paddlewheel_trainer_truncated_ids_total{JOB})"),
            _stat("AUC of the new day", "avg(paddlewheel_trainer_validation_auc{JOB})", "none", "Before training it."),
            _chart("Position", _q("paddlewheel_job_rows{JOB}", "done"), _q("paddlewheel_job_rows_expected{JOB}", "of")),
            _chart(
                "Waiting for data and pulls",
                _q(
                    'rate(paddlewheel_trainer_step_phase_seconds_sum{JOB, phase="wait"}[$__rate_interval])',
                    "trainer {{rank}}",
                ),
                unit="percentunit",
                text="Share of a trainer's time. Near 0: data keeps up.",
            ),
            _chart("Waiting for the next rows", *_quantiles("paddlewheel_trainer_lease_seconds"), unit="s"),
            _chart("Batches ready", _q("paddlewheel_trainer_ready_batches{JOB}", "trainer {{rank}}")),
            _chart(
                "Unique keys per batch and table",
                _q(
                    "sum(rate(paddlewheel_trainer_pulled_keys_total{JOB}[$__rate_interval])) "
                    "/ sum(rate(paddlewheel_trainer_steps_total{JOB}[$__rate_interval]))",
                    "keys",
                ),
            ),
        ),
    ),
    Dashboard(
        "recovery",
        "paddlewheel: recovery",
        (
            _stat("Attempt", "max(paddlewheel_job_attempt{JOB})"),
            _stat("Restarts", "sum(paddlewheel_job_restarts_total{JOB})"),
            _stat("Last checkpoint, step", "max(paddlewheel_job_checkpoint_step{JOB})"),
            _stat("Took", "max(paddlewheel_job_checkpoint_duration_seconds{JOB})", "s"),
            _chart(
                "Checkpoint age",
                _q("time() - paddlewheel_job_checkpoint_timestamp_seconds{JOB}", "age"),
                _q("paddlewheel_job_checkpoint_interval_seconds{JOB} > 0", "interval asked for"),
                unit="s",
                text="The work that is at stake.",
            ),
            _chart("Checkpoints", _q("paddlewheel_job_checkpoints_total{JOB}", "{{result}}")),
            _chart(
                "Position", _q("paddlewheel_job_rows{JOB}", "rows"), text="Falls back to the checkpoint on a restart."
            ),
            _PHASES,
            _chart("Roles", _q("paddlewheel_job_members{JOB}", "{{member_role}}s")),
            _chart(
                "Silence", _q("time() - (paddlewheel_job_heartbeat_timestamp_seconds{JOB} > 0)", "longest"), unit="s"
            ),
            _chart(
                "Workers that failed",
                _q("sum by (role, reason) (paddlewheel_agent_worker_failures_total{JOB})", "{{role}}: {{reason}}"),
            ),
            _chart(
                "Seconds since the slowest trainer moved",
                _q(
                    "(time() - (paddlewheel_job_progress_timestamp_seconds{JOB} > 0)) "
                    'and on (job_name) (paddlewheel_job_phase{JOB, phase="running"} == 1)',
                    "age",
                ),
                unit="s",
            ),
        ),
    ),
)


def to_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    numbers = itertools.count(1)
    return {
        "uid": f"paddlewheel-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["paddlewheel"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "tags": ["paddlewheel"],
                "title": "paddlewheel",
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "job_name",
                    "type": "query",
                    "label": "Job",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "definition": "label_values(paddlewheel_job_elapsed_seconds, job_name)",
                    "query": {
                        "query": "label_values(paddlewheel_job_elapsed_seconds, job_name)",
                        "refId": "job_name",
                    },
                    "refresh": 2,
                    "sort": 1,
                },
            ]
        },
        "panels": [
            _to_grafana(panel, next(numbers), place)
            for panel, place in zip(dashboard.panels, _places(dashboard.panels), strict=True)
        ],
    }


def _places(panels: tuple[Panel, ...]) -> Iterator[dict[str, int]]:
    """Left to right, a new row when one is full or the kind of panel changes."""
    x = y = height = 0
    for panel in panels:
        tall = 4 if panel.kind == "stat" else 8
        if x + panel.width > _WIDTH or (x and tall != height):
            x, y = 0, y + height
        height = tall
        yield {"x": x, "y": y, "w": panel.width, "h": height}
        x += panel.width


STATE_COLOURS = ("#6b7280", "#e0862b", "#f2b705", "#2b9a66", "#8e4ec6", "#3b82c4", "#c2344b", "#0f766e")
"""Of the states of a timeline, in order."""


def _appearance(panel: Panel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Defaults of a panel's fields, and its options."""
    legend = {"displayMode": "list", "placement": "bottom"}
    tooltip = {"mode": "multi", "sort": "desc"}
    if panel.kind == "stat":
        return {}, {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "none", "colorMode": "none"}
    if panel.kind == "state-timeline":
        names = {
            str(number): {"text": name, "index": number, "color": colour}
            for number, (name, colour) in enumerate(zip(panel.states, itertools.cycle(STATE_COLOURS), strict=False))
        }
        fields = {"mappings": [{"type": "value", "options": names}], "custom": {"fillOpacity": 80, "lineWidth": 0}}
        return fields, {"mergeValues": True, "showValue": "auto", "legend": legend, "tooltip": {"mode": "single"}}
    custom = {"fillOpacity": 25, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 0}
    return {"custom": {"lineWidth": 1, "showPoints": "never", **custom}}, {"legend": legend, "tooltip": tooltip}


def _to_grafana(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    fields, options = _appearance(panel)
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **fields},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": source,
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
            }
            for i, query in enumerate(panel.queries)
        ],
    }
