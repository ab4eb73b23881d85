"""The coordinator's metrics: the job as a whole, from its status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from paddlewheel.trainer.telemetry.catalogue import COMMON_LABELS, JOB_PHASES, of_role
from paddlewheel.trainer.telemetry.series import Series, with_labels

_P = "paddlewheel_job_"


class JobTelemetry(Collector):
    """Metrics of the coordinator. Nothing is kept but counters: every scrape asks for the status.

    Args:
        job: name of the job.
        status: returns `trainer.coordinator.page.snapshot` of now; called from the HTTP server's threads.
        checkpoint_interval_seconds: what the job asks for; None: only a final checkpoint.
        clock: Unix time, for tests.
    """

    def __init__(
        self,
        job: str,
        status: Callable[[], Mapping[str, Any]],
        *,
        checkpoint_interval_seconds: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._status, self._clock = status, clock
        self.series = Series(of_role("coordinator"), dict(zip(COMMON_LABELS, (job, "coordinator", "0"), strict=True)))
        for name in ("rows", "rows_expected", "progress_timestamp_seconds"):
            self.series.set(f"{_P}{name}", 0)
        self.series.set(f"{_P}checkpoint_interval_seconds", checkpoint_interval_seconds or 0)
        self._process = ProcessCollector(registry=None)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, status: Mapping[str, Any]) -> None:
        """Takes one status."""
        put, follow = self.series.set, self.series.follow
        for phase in JOB_PHASES:
            put(f"{_P}phase", status["phase"] == phase, phase=phase)
        put(f"{_P}attempt", status["attempt"])
        follow(f"{_P}restarts_total", status["num_restarts"])
        put(f"{_P}elapsed_seconds", status["elapsed_seconds"])
        members = status["members"]
        for role in ("pserver", "trainer"):
            of_role = [member for member in members if member["role"] == role]
            put(f"{_P}members_expected", len(of_role), member_role=role)
            put(f"{_P}members", sum(_is_there(member) for member in of_role), member_role=role)
        now = self._clock()
        ages = [member["heartbeat_age_seconds"] for member in members if _is_there(member)]
        put(f"{_P}heartbeat_timestamp_seconds", now - max(ages) if ages else 0)
        if status["progress"]:  # while the job starts again, the last position stays
            put(f"{_P}rows", status["progress"]["rows"])
            put(f"{_P}rows_expected", status["progress"]["total_rows"])
            self._take_tables(status["progress"]["tables"])
        if status["phase"] == "running":
            put(f"{_P}progress_timestamp_seconds", now - status["progress_age_seconds"])
        checkpoint = status["checkpoint"]
        put(f"{_P}checkpoint_step", checkpoint["step"])
        put(f"{_P}checkpoint_timestamp_seconds", now - (checkpoint["age_seconds"] or status["elapsed_seconds"]))
        put(f"{_P}checkpoint_duration_seconds", checkpoint["last_seconds"])
        follow(f"{_P}checkpoints_total", checkpoint["num_committed"], result="committed")
        follow(f"{_P}checkpoints_total", checkpoint["num_failed"], result="failed")
        put(f"{_P}exit_code", status["outcome"]["exit_code"] if status["over"] else -1)

    def _take_tables(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """How large the tables are, as trainer 0 says."""
        for table, found in tables.items():
            for name, field in (
                ("table_bytes", "bytes"),
                ("admitted_keys", "admitted"),
                ("shard_skew_ratio", "shard_skew"),
            ):
                if found[field] is not None:
                    self.series.set(f"{_P}{name}", found[field], table=table)
            if keys := found["keys"]:
                total = sum(keys)
                self.series.set(f"{_P}table_keys", total, table=table)
                self.series.set(f"{_P}server_skew_ratio", max(keys) * len(keys) / total if total else 1.0, table=table)
            self.series.follow(f"{_P}evicted_keys_total", found["evicted"], table=table)

    def collect(self) -> Iterator[Family]:
        """All families, as of now. Part of the Collector interface."""
        self.update(self._status())
        yield from self.series.collect()
        yield from with_labels(self._process.collect(), self.series.common)

    def describe(self) -> Iterator[Family]:
        """Names only: registering asks nothing."""
        return self.series.collect()


def _is_there(member: Mapping[str, Any]) -> bool:
    return member["state"] not in {"lost", "absent"}
