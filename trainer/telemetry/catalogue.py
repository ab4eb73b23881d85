"""Every metric that paddlewheel serves: one list, behind the registry, the documentation and the dashboards.

Names are `paddlewheel_<subsystem>_<what>_<unit>`; counters end in `_total` and never go back within a process. Every
series also carries `job_name`, `role` and `rank`, which stay the same when a role starts again: restarts make no new
series. Each further label has either a closed set of values, given here, or one bounded by the job (its tables, the
GPUs of a machine), of which at most `MAX_OPEN_VALUES` are kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

COMMON_LABELS = ("job_name", "role", "rank")
MAX_OPEN_VALUES = 64
"""Of a label whose values the job decides; what comes later is counted as `other`."""

SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the histograms of the training step, in seconds. Workers count in these buckets, too."""

PHASES = ("wait", "compute", "allreduce", "apply", "push")
"""Phases of a training step, in order."""
JOB_PHASES = (
    "rendezvous",
    "starting_servers",
    "starting_trainers",
    "running",
    "stopping",
    "draining",
    "aborting",
    "over",
)
LEVELS = ("warning", "error")
FAILURES = ("fix_job", "retry", "signal", "other")


class Kind(str, Enum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(str, Enum):
    """Which processes serve a metric."""

    AGENT = "agent"
    TRAINER = "trainer"
    PSERVER = "pserver"
    COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Label:
    """A label beside the common ones. values None: bounded by the job, see MAX_OPEN_VALUES."""

    name: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Metric:
    """One metric family.

    Attributes:
        name: full name, with `_total` for counters.
        kind: how it behaves.
        source: which processes serve it.
        help: what it says, with its unit.
        labels: beside the common ones.
    """

    name: str
    kind: Kind
    source: Source
    help: str
    labels: tuple[Label, ...] = ()

    @property
    def num_series_bound(self) -> int:
        """Most series that one process can serve of it; a label bounded by the job counts MAX_OPEN_VALUES + 1."""
        count = 1 if self.kind is not Kind.HISTOGRAM else len(SECONDS_BOUNDS) + 3
        for label in self.labels:
            count *= MAX_OPEN_VALUES + 1 if label.values is None else len(label.values)
        return count


def _metrics(source: Source, *rows: tuple[str, Kind, str] | tuple[str, Kind, str, Label]) -> list[Metric]:
    return [Metric(f"paddlewheel_{name}", kind, source, text, tuple(labels)) for name, kind, text, *labels in rows]


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

CATALOGUE: tuple[Metric, ...] = (
    *_metrics(
        Source.AGENT,
        ("agent_info", _G, "Always 1; the label names the version of paddlewheel.", Label("version")),
        ("agent_joined", _G, "1 while the agent is a member of the job, else 0."),
        ("agent_attempt", _G, "Number of the attempt whose worker runs or ran last; 0 before the first."),
        ("agent_worker_up", _G, "1 while the Paddle worker runs, else 0."),
        (
            "agent_worker_ready",
            _G,
            "1 while the worker runs and has said (a trainer) or shown (a server) that it is ready.",
        ),
        ("agent_worker_starts_total", _C, "Workers started by this agent process."),
        (
            "agent_worker_failures_total",
            _C,
            "Workers that ended by themselves and not with code 0: code 64, code 75, a signal, anything else.",
            Label("reason", FAILURES),
        ),
        ("agent_worker_memory_bytes", _G, "Resident memory of the worker; 0 without one."),
        (
            "agent_memory_limit_bytes",
            _G,
            "Memory that this role may use: its container's limit, or the machine's memory.",
        ),
        (
            "agent_memory_limit_seconds",
            _G,
            "Time until the worker's memory reaches the limit, at the growth of ten minutes; +Inf: none, or too far.",
        ),
        ("agent_worker_cpu_seconds_total", _C, "CPU time of all workers of this agent process."),
        ("agent_worker_log_lines_total", _C, "Log events of workers, by level.", Label("level", LEVELS)),
        ("agent_last_event_timestamp_seconds", _G, "Unix time of the worker's last event; 0 before the first."),
    ),
    *_metrics(
        Source.TRAINER,
        ("trainer_rows_total", _C, "Rows that this trainer has trained, repeated ones after a restart included."),
        ("trainer_steps_total", _C, "Steps that this trainer has taken, repeated ones included."),
        ("trainer_epoch", _G, "Epoch under way, counted from 0."),
        ("trainer_loss", _G, "Mean loss per row of the last step that was not skipped, over all trainers."),
        ("trainer_auc", _G, "AUC of recent training rows, scored before they were trained; of this trainer."),
        ("trainer_eval_auc", _G, "AUC on the evaluation data, over all trainers; after the evaluation."),
        ("trainer_eval_logloss", _G, "Mean negative log-likelihood on the evaluation data, in nats."),
        ("trainer_validation_auc", _G, "AUC of the rows of the day begun last, before they were trained (train.days)."),
        ("trainer_validation_logloss", _G, "Mean negative log-likelihood of those rows, in nats."),
        (
            "trainer_new_keys_total",
            _C,
            "Keys that this trainer was the first to pull; one that comes again before its first push counts again.",
            Label("table"),
        ),
        ("trainer_feature_new_keys_total", _C, "The same by feature, of those that bring most.", Label("feature")),
        ("trainer_bad_steps_total", _C, "Steps skipped because a loss or gradient was not finite."),
        ("trainer_bad_rows_total", _C, "Rows in those steps, over all trainers."),
        ("trainer_step_phase_seconds", _H, "Time of the phases of a step.", Label("phase", PHASES)),
        ("trainer_pull_seconds", _H, "Time of a batch's pull from all servers."),
        ("trainer_push_seconds", _H, "Time of a batch's push to all servers."),
        ("trainer_pulled_bytes_total", _C, "Bytes of embedding values pulled."),
        ("trainer_pushed_bytes_total", _C, "Bytes of gradients pushed."),
        ("trainer_pulled_keys_total", _C, "Unique keys pulled, counted per batch and table."),
        ("trainer_staleness_steps", _G, "Batches whose push the servers had not applied when the last pull began."),
        ("trainer_ready_batches", _G, "Batches read and pulled, waiting for the step."),
        ("trainer_lease_seconds", _H, "Time from asking the coordinator for the next rows until its answer."),
        ("trainer_skipped_rows_total", _C, "Rows left out because the job says so (on_bad_row, on_bad_file)."),
        ("trainer_truncated_ids_total", _C, "Ids cut off lists longer than max_length."),
        ("trainer_gpu_memory_bytes", _G, "Memory in use on a GPU that this trainer sees.", Label("gpu")),
        ("trainer_gpu_utilization_ratio", _G, "Share of time in which a kernel ran on a GPU, 0 to 1.", Label("gpu")),
    ),
    *_metrics(
        Source.PSERVER,
        (
            "pserver_requests_total",
            _C,
            "Requests served (brpc: pserver_server_<operation>_sparse).",
            Label("operation", ("pull", "push")),
        ),
        ("pserver_request_errors_total", _C, "Requests that the server answered with an error (brpc)."),
        (
            "pserver_request_latency_seconds",
            _G,
            "Latency of all requests over the last 10 seconds, as brpc computes it; quantile 1 is the longest.",
            Label("quantile", ("0.8", "0.9", "0.99", "0.999", "1")),
        ),
        ("pserver_requests_in_flight", _G, "Requests being served now (brpc)."),
        ("pserver_connections", _G, "Open sockets of the server (brpc)."),
        ("pserver_uptime_seconds", _G, "Seconds since the server began to serve (brpc); 0 while it does not answer."),
        (
            "pserver_table_keys",
            _G,
            "Keys of a table that insists on our own engine, on this server.",
            Label("table"),
        ),
        (
            "pserver_table_memory_bytes",
            _G,
            "Memory of its rows and index, and of rows kept for a save that is under way.",
            Label("table"),
        ),
        (
            "pserver_table_evicted_keys_total",
            _C,
            "Keys that had to go because the table was full (`max_keys`, `memory_gib`).",
            Label("table"),
        ),
        ("pserver_probe_failures_total", _C, "Times the running server did not answer this agent's questions."),
    ),
    *_metrics(
        Source.COORDINATOR,
        ("job_phase", _G, "1 for the phase the job is in, 0 for the others.", Label("phase", JOB_PHASES)),
        ("job_attempt", _G, "Number of the attempt; 0 before the first."),
        ("job_restarts_total", _C, "Times the job started again after a loss."),
        ("job_elapsed_seconds", _G, "Seconds since the coordinator started."),
        ("job_members", _G, "Servers and trainers that have joined.", Label("member_role", ("pserver", "trainer"))),
        ("job_members_expected", _G, "Servers and trainers of the job.", Label("member_role", ("pserver", "trainer"))),
        (
            "job_rows",
            _G,
            "Rows of all epochs that the model has been trained on; goes back to the checkpoint on a restart.",
        ),
        ("job_rows_expected", _G, "Rows of all epochs together."),
        (
            "job_progress_timestamp_seconds",
            _G,
            "Unix time at which the slowest trainer last moved, while the job is running; 0 before that.",
        ),
        ("job_checkpoint_step", _G, "Step of the last committed checkpoint; -1 before the first."),
        (
            "job_checkpoint_timestamp_seconds",
            _G,
            "Unix time of the last commit; before the first, of the coordinator's start.",
        ),
        ("job_checkpoint_duration_seconds", _G, "How long the last committed checkpoint took; 0 before the first."),
        (
            "job_checkpoints_total",
            _C,
            "Checkpoints that ended, by result.",
            Label("result", ("committed", "failed")),
        ),
        ("job_checkpoint_interval_seconds", _G, "checkpoint.every_minutes in seconds; 0: only a final checkpoint."),
        (
            "job_heartbeat_timestamp_seconds",
            _G,
            "Unix time at which the member that has been silent for longest was heard of; 0 without any.",
        ),
        ("job_table_keys", _G, "Keys of a table on all servers, as trainer 0 counted them last.", Label("table")),
        (
            "job_server_skew_ratio",
            _G,
            "Keys of a table on its fullest server over the mean of the servers, by the same count.",
            Label("table"),
        ),
        ("job_table_bytes", _G, "Bytes of a table's rows on all servers; memory is 1.7 times that.", Label("table")),
        ("job_admitted_keys", _G, "Keys that have an embedding, in the last checkpoint.", Label("table")),
        ("job_evicted_keys_total", _C, "Keys deleted at day boundaries.", Label("table")),
        (
            "job_shard_skew_ratio",
            _G,
            "Keys of a table's fullest shard over the mean, in the last checkpoint.",
            Label("table"),
        ),
        ("job_exit_code", _G, "Exit code of the job once it is over; -1 before."),
    ),
)

BY_NAME = {metric.name: metric for metric in CATALOGUE}
assert len(BY_NAME) == len(CATALOGUE)

SOURCES_OF_ROLE = {
    "trainer": (Source.AGENT, Source.TRAINER),
    "pserver": (Source.AGENT, Source.PSERVER),
    "coordinator": (Source.COORDINATOR,),
}


def of_role(role: str) -> tuple[Metric, ...]:
    """The metrics that a process of this role serves."""
    return tuple(metric for metric in CATALOGUE if metric.source in SOURCES_OF_ROLE[role])
