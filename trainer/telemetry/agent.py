"""An agent's metrics: what its worker reports, what the agent sees of it, and what a running server answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from paddlewheel.trainer.telemetry.catalogue import COMMON_LABELS, PHASES, SECONDS_BOUNDS, of_role
from paddlewheel.trainer.telemetry.forecast import MemoryForecast
from paddlewheel.trainer.telemetry.series import Series, with_labels

Probe = Callable[[Series], None]
"""Asks something at the time of a scrape and writes the answers; raises OSError or ValueError when there is none."""


_COUNTS = ("bad_steps", "bad_rows", "pulled_bytes", "pushed_bytes", "pulled_keys", "skipped_rows", "truncated_ids")
"""Fields of a progress event that are counts since the worker's start, and counters here."""


class Telemetry(Collector):
    """Metrics of one pserver or trainer agent. Callable from any thread; nothing a worker says makes it raise.

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
            reason = {64: "fix_job", 75: "retry"}.get(code, "signal" if code < 0 else "other")
            self._add("agent_worker_failures_total", reason=reason)

    # -- what the worker says

    def observe(self, event: Mapping[str, Any]) -> None:
        """Takes one event of the worker. Fields that are missing, null or not numbers change nothing."""
        self._set("agent_last_event_timestamp_seconds", self._clock())
        kind = event.get("event")
        if kind == "log" and event.get("level") in {"warning", "error"}:
            self._add("agent_worker_log_lines_total", level=str(event["level"]))
        if self.role != "trainer":
            return
        if kind == "ready":
            self.worker_ready()
            # Steps of a restored checkpoint were not taken by this worker.
            for name in ("step", "bad_steps", "bad_rows"):
                counter = "trainer_steps_total" if name == "step" else f"trainer_{name}_total"
                self.series.rebase(f"paddlewheel_{counter}", _number(event.get(name)) or 0.0)
        elif kind == "progress":
            self._progress(event)
        elif kind == "result":
            self._evaluation(event.get("eval"))
        elif kind == "evaluation":
            self._evaluation(event)
        elif kind == "validation":
            self._set("trainer_validation_auc", event.get("auc"))
            self._set("trainer_validation_logloss", event.get("logloss"))

    def _evaluation(self, report: Any) -> None:
        if isinstance(report, Mapping):
            self._set("trainer_eval_auc", report.get("auc"))
            self._set("trainer_eval_logloss", report.get("logloss"))

    def _progress(self, event: Mapping[str, Any]) -> None:
        for name in ("epoch", "loss", "auc", "staleness_steps", "ready_batches"):
            self._set(f"trainer_{name}", event.get(name))
        self._follow("trainer_rows_total", event.get("own_rows"))
        self._follow("trainer_steps_total", event.get("step"))
        for name in _COUNTS:
            self._follow(f"trainer_{name}_total", event.get(name))
        self._growth(event)
        durations = event.get("durations")
        if isinstance(durations, Mapping):
            for phase in PHASES:
                self._histogram("trainer_step_phase_seconds", durations.get(phase), phase=phase)
            self._histogram("trainer_pull_seconds", durations.get("servers_pull"))
            self._histogram("trainer_push_seconds", durations.get("servers_push"))
            self._histogram("trainer_lease_seconds", durations.get("lease"))

    def _growth(self, event: Mapping[str, Any]) -> None:
        """What this trainer makes the tables grow by."""
        tables, features = event.get("tables"), event.get("new_keys_of_features")
        for table, found in tables.items() if isinstance(tables, Mapping) else ():
            if isinstance(found, Mapping):
                self._follow("trainer_new_keys_total", found.get("new"), table=str(table))
        for feature, count in features.items() if isinstance(features, Mapping) else ():
            self._follow("trainer_feature_new_keys_total", count, feature=str(feature))

    # -- inside

    def _set(self, name: str, value: Any, **labels: str) -> None:
        number = _number(value)
        if number is not None:
            self.series.set(f"paddlewheel_{name}", number, **labels)

    def _add(self, name: str, **labels: str) -> None:
        self.series.add(f"paddlewheel_{name}", 1.0, **labels)

    def _follow(self, name: str, reading: Any, **labels: str) -> None:
        number = _number(reading)
        if number is not None:
            self.series.follow(f"paddlewheel_{name}", number, **labels)

    def _histogram(self, name: str, said: Any, **labels: str) -> None:
        if not isinstance(said, Mapping) or not isinstance(said.get("counts"), list):
            return
        readings = [_number(count) for count in (*said["counts"], said.get("sum_seconds"))]
        numbers = [reading for reading in readings if reading is not None]
        if len(numbers) == len(SECONDS_BOUNDS) + 2 == len(readings):
            self.series.follow_histogram(f"paddlewheel_{name}", numbers[:-1], numbers[-1], **labels)

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
