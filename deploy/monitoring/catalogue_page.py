"""The reference page of metrics, from their catalogue. The documentation site is built with it."""

from __future__ import annotations

from paddlewheel.trainer.telemetry.catalogue import (
    CATALOGUE,
    COMMON_LABELS,
    MAX_OPEN_VALUES,
    SECONDS_BOUNDS,
    Metric,
    Source,
    of_role,
)

_TITLES = {
    Source.AGENT: "Every server and trainer",
    Source.TRAINER: "Trainers",
    Source.PSERVER: "Servers",
    Source.COORDINATOR: "The coordinator: the job as a whole",
}


def render() -> str:
    """The page, in Markdown."""
    bounds = ", ".join(f"{bound:g}" for bound in SECONDS_BOUNDS)
    most = {role: sum(m.num_series_bound for m in of_role(role)) for role in ("trainer", "pserver", "coordinator")}
    lines = [
        "# Metrics",
        "",
        "From `trainer/telemetry/catalogue.py`; tests hold it against what is served.",
        "",
        f"Every series carries `{'`, `'.join(COMMON_LABELS)}` beside the labels named here. They stay the same when a",
        "role starts again, so restarts make no new series. Counters never go back while a process lives. Beside",
        "these, each process serves the usual `process_*` metrics of its agent (not of the Paddle worker). Histograms",
        f"have the buckets {bounds} seconds.",
        "",
        f"Labels marked * take values from the job; after {MAX_OPEN_VALUES} of them the rest is counted as `other`.",
        "The most series that one process can serve: "
        + ", ".join(f"{role} {number}" for role, number in most.items())
        + ".",
    ]
    for source, title in _TITLES.items():
        lines += ["", f"## {title}", "", "| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
        lines += [_row(metric) for metric in CATALOGUE if metric.source is source]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    labels = "; ".join(
        f"`{label.name}`*" if label.values is None else f"`{label.name}`: {', '.join(label.values)}"
        for label in metric.labels
    )
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |"
