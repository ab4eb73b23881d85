"""An agent's metrics: what its worker reports, what the agent sees of it, and what a running server answers."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from paddlewheel.pserver.messages import Remark
from paddlewheel.trainer.protocol.messages import (
    Durations,
    Evaluation,
    Progress,
    Ready,
    Result,
    Validation,
    WorkerEvent,
)
from paddlewheel.trainer.telemetry.catalogue import COMMON_LABELS, PHASES, SECONDS_BOUNDS, of_role
from paddlewheel.trainer.telemetry.forecast import MemoryForecast
from paddlewheel.trainer.telemetry.series import Series, with_labels

Probe = Callable[[Series], None]
"""Asks something at the time of a scrape and writes the answers; raises OSError or ValueError when there is none."""


_COUNTS = ("bad_steps", "bad_rows", "pulled_bytes", "pushed_bytes", "pulled_keys", "skipped_rows", "truncated_ids")
"""Fields of a progress event that are counts since the worker's start, and counters here."""


class Telemetry(Collector):
    """Metrics of one pserver or trainer agent. Callable from any thread.

    Args:
        role: pserver or trainer.
        job: name of the job.
        rank: its rank, as soon as it is known; else `joined` tells it.
        version: of paddlewheel.
        probe: asked at each scrape while a worker is ready, unless `worker_ready` names another.
        clock: Unix time, for tests.
        monotonic: seconds of a clock that never goes back, for tests.
    """

    def __init__(
        self,
        role: str,
        job: str,
        *,
        rank: int | None = None,
        version: str = "",
        probe: Probe | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role = role
        self._clock, self._monotonic = clock, monotonic
        self._default_probe = probe
        values = (job, role, "" if rank is None else str(rank))
        self.series = Series(of_role(role), dict(zip(COMMON_LABELS, values, strict=True)))
        self._probe: Probe | None = None
        self._process = ProcessCollector(registry=None)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._set("agent_info", 1, version=version)
        self.memory_limit_bytes = memory_limit_bytes()
        self._forecast = MemoryForecast()
        self._set("agent_memory_limit_bytes", self.memory_limit_bytes)
        self.series.set("paddlewheel_agent_memory_limit_seconds", math.inf)
        for name in (
            "joined",
            "attempt",
            "worker_up",
            "worker_ready",
            "worker_memory_bytes",
            "last_event_timestamp_seconds",
        ):
            self._set(f"agent_{name}", 0)

    # -- what the agent does

    def joined(self, rank: int) -> None:
        """The coordinator has given this agent its member."""
        self.series.common["rank"] = str(rank)
        self._set("agent_joined", 1)

    def left(self) -> None:
        """The coordinator is gone, or the job over."""
        self._set("agent_joined", 0)

    def worker_started(self, attempt: int) -> None:
        """A new worker: its counters begin at 0."""
        self._probe = None
        self._forecast.clear()
        self.series.begin_anew()
        self._set("agent_attempt", attempt)
        self._set("agent_worker_up", 1)
        self._set("agent_worker_ready", 0)
        self._add("agent_worker_starts_total")

    def worker_ready(self, probe: Probe | None = None) -> None:
        """The worker works. From now until it ends, `probe` is called at each scrape."""
        self._probe = probe or self._default_probe
        self._set("agent_worker_ready", 1)

    def worker_stopping(self) -> None:
        """The agent ends the worker: it need not answer any more."""
        self._probe = None

    def worker_measured(self, memory_bytes: float, cpu_seconds: float) -> float | None:
        """What the kernel says of the worker. Returns the seconds until its memory reaches the limit, if it grows."""
        self._set("agent_worker_memory_bytes", memory_bytes)
        self._follow("agent_worker_cpu_seconds_total", cpu_seconds)
        self._forecast.add(self._monotonic(), memory_bytes)
        left = self._forecast.seconds_until(self.memory_limit_bytes)
        self.series.set("paddlewheel_agent_memory_limit_seconds", math.inf if left is None else left)
        return left

    def worker_exited(self, code: int, *, expected: bool) -> None:
        """The worker has ended. code: negative for a signal. expected: the agent ended it."""
        self._probe = None
        gone = ["agent_worker_up", "agent_worker_ready", "agent_worker_memory_bytes"]
        for name in [*gone, *(["pserver_uptime_seconds"] if self.role == "pserver" else [])]:
            self._set(name, 0)
        if code != 0 and not expected:
            reason = {os.EX_USAGE: "fix_job", os.EX_TEMPFAIL: "retry"}.get(code, "signal" if code < 0 else "other")
            self._add("agent_worker_failures_total", reason=reason)

    # -- what the worker says

    def observe(self, event: WorkerEvent) -> None:
        """Takes one event of the worker."""
        self._set("agent_last_event_timestamp_seconds", self._clock())
        match event:
            case Remark(level="warning" | "error" as level):
                self._add("agent_worker_log_lines_total", level=level)
            case Ready() if self.role == "trainer":
                self.worker_ready()
                # Steps of a restored checkpoint were not taken by this worker.
                restored = {"steps": event.step, "bad_steps": event.bad_steps, "bad_rows": event.bad_rows}
                for name, reading in restored.items():
                    self.series.rebase(f"paddlewheel_trainer_{name}_total", reading)
            case Progress():
                self._progress(event)
            case Result(figures={"eval": dict(report)}) | Evaluation(report=report):
                self._set("trainer_eval_auc", report.get("auc"))
                self._set("trainer_eval_logloss", report.get("logloss"))
            case Validation(report=report):
                self._set("trainer_validation_auc", report.get("auc"))
                self._set("trainer_validation_logloss", report.get("logloss"))

    def _progress(self, event: Progress) -> None:
        for name in ("epoch", "loss", "auc", "staleness_steps", "ready_batches"):
            self._set(f"trainer_{name}", getattr(event, name))
        self._follow("trainer_rows_total", event.own_rows)
        self._follow("trainer_steps_total", event.step)
        for name in _COUNTS:
            self._follow(f"trainer_{name}_total", getattr(event, name))
        for table, found in event.tables.items():
            self._follow("trainer_new_keys_total", found.new, table=table)
        for feature, count in event.new_keys_of_features.items():
            self._follow("trainer_feature_new_keys_total", count, feature=feature)
        for phase in PHASES:
            self._histogram("trainer_step_phase_seconds", event.durations.get(phase), phase=phase)
        self._histogram("trainer_pull_seconds", event.durations.get("servers_pull"))
        self._histogram("trainer_push_seconds", event.durations.get("servers_push"))
        self._histogram("trainer_lease_seconds", event.durations.get("lease"))

    # -- inside

    def _set(self, name: str, value: Any, **labels: str) -> None:
        number = _number(value)
        if number is not None:
            self.series.set(f"paddlewheel_{name}", number, **labels)

    def _add(self, name: str, **labels: str) -> None:
        self.series.add(f"paddlewheel_{name}", 1.0, **labels)

    def _follow(self, name: str, reading: float, **labels: str) -> None:
        if math.isfinite(reading):
            self.series.follow(f"paddlewheel_{name}", float(reading), **labels)

    def _histogram(self, name: str, told: Durations | None, **labels: str) -> None:
        if told is not None and len(told.counts) == len(SECONDS_BOUNDS) + 1 and math.isfinite(told.sum_seconds):
            self.series.follow_histogram(f"paddlewheel_{name}", told.counts, told.sum_seconds, **labels)

    def collect(self) -> Iterator[Family]:
        """All families; asks the worker first, if there is a probe. Part of the Collector interface."""
        if (probe := self._probe) is not None:
            try:
                probe(self.series)
            except (OSError, RuntimeError, ValueError):
                if self.role == "pserver" and self._probe is probe:
                    self._set("pserver_uptime_seconds", 0)
                    self._add("pserver_probe_failures_total")
        yield from self.series.collect()
        yield from with_labels(self._processes(), self.series.common)

    def _processes(self) -> Iterator[Family]:
        """The usual metrics of the agent's own process, and beside them what is known of the worker's."""
        worker = {
            "process_resident_memory_bytes": "paddlewheel_agent_worker_memory_bytes",
            "process_cpu_seconds_total": "paddlewheel_agent_worker_cpu_seconds_total",
        }
        for family in with_labels(self._process.collect(), {"process": "agent"}):
            for sample in list(family.samples):
                if sample.name in worker:
                    value = self.series.value(worker[sample.name])
                    family.samples.append(sample._replace(labels={"process": "worker"}, value=value))
            yield family

    def describe(self) -> Iterator[Family]:
        """Names only: registering asks nothing."""
        return self.series.collect()


def memory_limit_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory limit of this process's container (cgroup v2 or v1), or else the machine's memory."""
    total = int(psutil.virtual_memory().total)
    for file in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        try:
            return min(total, int(file.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
