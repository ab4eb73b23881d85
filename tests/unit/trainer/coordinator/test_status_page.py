"""The status page without a browser: the snapshot, the curves, the routes."""

from __future__ import annotations

import gzip
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.coordinator.page import Curves, StatusPage, snapshot
from paddlewheel.trainer.protocol.messages import Durations, Progress, TableFigures
from paddlewheel.trainer.telemetry import JobTelemetry
from tests.support.plans import progress


def as_proto(told: Progress) -> pb.Progress:
    target = pb.Progress()
    wire.fill(target, told)
    return target


def status(**fields: Any) -> pb.JobStatus:
    told = progress(rows=10, total_rows=40, loss=0.5, durations={"wait": Durations(counts=(1,), sum_seconds=1.0)})
    base = {
        "name": "job",
        "mode": "train",
        "phase": "running",
        "attempt": 2,
        "num_restarts": 1,
        "elapsed_seconds": 12.5,
        "progress": as_proto(told),
        "checkpoint": pb.CheckpointStatus(step=-1),
        "members": [
            pb.MemberStatus(role=pb.ROLE_PSERVER, rank=0, host="h", port=1, state="ready", worker_memory_bytes=2**40),
            pb.MemberStatus(role=pb.ROLE_TRAINER, rank=0, state="ready", heartbeat_age_seconds=0.25),
            pb.MemberStatus(role=pb.ROLE_TRAINER, rank=1, state="lost", heartbeat_age_seconds=60),
        ],
        "entries": [pb.LogEntry(number=1, time_seconds=1.0, level="info", text="<b>hello</b>")],
    }
    return pb.JobStatus(**{**base, **fields})


def test_a_snapshot_has_every_field_as_plain_numbers() -> None:
    empty = snapshot(pb.JobStatus())
    assert (empty["progress"], empty["result"], empty["members"], empty["over"]) == (None, None, [], False)
    assert (empty["checkpoint"]["step"], empty["outcome"]["exit_code"]) == (-1, 0)
    full = snapshot(status())
    assert [(m["role"], m["rank"], m["state"]) for m in full["members"]] == [
        ("pserver", 0, "ready"),
        ("trainer", 0, "ready"),
        ("trainer", 1, "lost"),
    ]
    assert full["members"][0]["seconds_to_limit"] is None  # it does not grow; not: full at once
    assert full["members"][0]["worker_memory_bytes"] == 2**40  # not the text that protobuf makes of it
    assert full["progress"] == progress(rows=10, total_rows=40, loss=0.5).model_dump(exclude={"event", "durations"})
    assert full["entries"][0]["number"] == 1


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), max_size=400), st.sampled_from([2, 10, 32]))
def test_curves_stay_small_and_in_order(steps: list[tuple[float, float]], limit: int) -> None:
    curves = Curves(limit)
    now = 0.0
    for pause, loss in steps:
        now += pause
        curves.add(now, progress(rows=int(now), loss=loss))
    told = curves.to_json()
    assert len(told["seconds"]) < limit
    assert told["seconds"] == sorted(told["seconds"])
    assert len({len(column) for column in told.values()}) == 1
    assert set(told["auc"]) <= {None}
    json.dumps(told, allow_nan=False)


def test_curves_cover_the_whole_run() -> None:
    curves = Curves(100)
    for second in range(10_000):
        curves.add(float(second), progress(rows=second, loss=1.0))
    seconds = curves.to_json()["seconds"]
    gaps = [b - a for a, b in itertools.pairwise(seconds)]
    assert len(seconds) > 30
    assert seconds[-1] > 9_700
    assert max(gaps) < 400


def ask(page: StatusPage, path: str, **environ: str) -> tuple[str, dict[str, str], bytes]:
    said: dict[str, Any] = {}

    def start(status_line: str, headers: list[tuple[str, str]]) -> None:
        said.update(status=status_line, headers=dict(headers))

    request = {"REQUEST_METHOD": "GET", "PATH_INFO": path, **environ}
    body = b"".join(page.routes()[path](request, start))
    return said["status"], said["headers"], body


def test_routes() -> None:
    page = StatusPage("job", status, facts={"version": "1", "tables": {"default": {"width": 8}}})
    page.curves.add(1.0, progress(rows=5))
    code, headers, body = ask(page, "/status.json", HTTP_ACCEPT_ENCODING="gzip, br")
    assert (code, headers["Content-Encoding"]) == ("200 OK", "gzip")
    told = json.loads(gzip.decompress(body))
    assert told["curves"]["rows"] == [5.0]
    assert told["facts"]["tables"] == {"default": {"width": 8}}
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        code, headers, body = ask(page, path)
        assert headers["Content-Type"].startswith(kind)
        assert int(headers["Content-Length"]) == len(body) > 500
        for outside in (b"http://", b"https://", b"//cdn"):
            assert outside not in body.replace(b"http://www.w3.org/2000/svg", b""), path
    assert b"paddlewheel_job_rows{" in ask(page, "/metrics")[2]


def test_numbers_that_json_lacks_become_null() -> None:
    page = StatusPage("job", lambda: status(elapsed_seconds=float("nan")))
    assert json.loads(ask(page, "/status.json")[2])["elapsed_seconds"] is None


def metrics(telemetry: JobTelemetry) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(generate_latest(telemetry.registry).decode()):
        for sample in family.samples:
            extra = {k: v for k, v in sample.labels.items() if k not in {"job_name", "role", "rank"}}
            found[" ".join([sample.name, *extra.values()])] = sample.value
    return found


def test_the_jobs_metrics() -> None:
    now = status()
    telemetry = JobTelemetry("job", lambda: snapshot(now), checkpoint_interval_seconds=600, clock=lambda: 1000.0)
    found = metrics(telemetry)
    expected = {
        "phase running": 1,
        "phase over": 0,
        "attempt": 2,
        "restarts_total": 1,
        "members trainer": 1,
        "members_expected trainer": 2,
        "members pserver": 1,
        "heartbeat_timestamp_seconds": 1000 - 0.25,
        "rows": 10,
        "rows_expected": 40,
        "checkpoint_step": -1,
        "checkpoint_timestamp_seconds": 1000 - 12.5,
        "checkpoint_interval_seconds": 600,
        "exit_code": -1,
    }
    assert {name: found[f"paddlewheel_job_{name}"] for name in expected} == expected
    now = status(over=True, outcome=pb.Outcome(exit_code=75), num_restarts=3, phase="over")
    found = metrics(telemetry)
    assert (found["paddlewheel_job_exit_code"], found["paddlewheel_job_restarts_total"]) == (75, 3)


def test_the_coordinators_registry_serves_exactly_its_catalogue() -> None:
    from paddlewheel.trainer.telemetry.catalogue import of_role

    telemetry = JobTelemetry("job", lambda: snapshot(status()))
    served = {family.name for family in telemetry.series.collect()}
    assert served == {metric.name.removesuffix("_total") for metric in of_role("coordinator")}
    table = TableFigures(keys=(3, 5), bytes=800, new=9, admitted=6, evicted=2, shard_skew=1.5)
    telemetry.update(snapshot(status(progress=as_proto(progress(rows=1, total_rows=2, tables={"t": table})))))
    assert all(family.samples for family in telemetry.series.collect()), "every one has a value"


@pytest.mark.parametrize("missing", ["progress", "members", "entries"])
def test_a_status_with_gaps_breaks_nothing(missing: str) -> None:
    partial = status()
    partial.ClearField(missing)
    page = StatusPage("job", lambda: partial)
    assert ask(page, "/status.json")[0] == ask(page, "/metrics")[0] == "200 OK"


def test_tables_have_series_of_their_own_and_evicted_keys_only_rise() -> None:
    def said(evicted: int, **changes: Any) -> dict[str, Any]:
        table = {"keys": (3,), "bytes": 800, "new": 9, "admitted": 6, "evicted": evicted, "shard_skew": 1.5, **changes}
        told = progress(rows=1, total_rows=2, tables={"t": TableFigures(**table)})
        return snapshot(status(progress=as_proto(told)))

    telemetry = JobTelemetry("job", lambda: said(0))
    telemetry.update(said(2))
    telemetry.update(said(1, admitted=None))  # trainer 0 has started again; no checkpoint was read yet
    values = {
        sample.name: sample.value
        for family in telemetry.series.collect()
        for sample in family.samples
        if sample.labels.get("table") == "t"
    }
    assert values == {
        "paddlewheel_job_table_keys": 3,
        "paddlewheel_job_server_skew_ratio": 1,
        "paddlewheel_job_table_bytes": 800,
        "paddlewheel_job_admitted_keys": 6,
        "paddlewheel_job_shard_skew_ratio": 1.5,
        "paddlewheel_job_evicted_keys_total": 3,
    }
