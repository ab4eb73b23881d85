"""The mapping from what children say to metrics, and the registry held against the catalogue."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paddlewheel.pserver.messages import Remark, ServerSpec
from paddlewheel.trainer.protocol.messages import Durations, Ready, Result, TableFigures, WorkerEvent
from paddlewheel.trainer.telemetry import DurationHistogram, Series, Telemetry, probes
from paddlewheel.trainer.telemetry.agent import memory_limit_bytes
from paddlewheel.trainer.telemetry.catalogue import BY_NAME, CATALOGUE, COMMON_LABELS, MAX_OPEN_VALUES, Kind, of_role
from paddlewheel.trainer.telemetry.probes import gpu_probe
from tests.support.plans import progress


def scrape(telemetry: Telemetry) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value, read back from the text that Prometheus gets."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(telemetry.registry).decode()):
        for sample in family.samples:
            key = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in COMMON_LABELS))
            assert set(sample.labels) >= set(COMMON_LABELS), sample
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def value(telemetry: Telemetry, name: str, **labels: str) -> float:
    return scrape(telemetry)[f"paddlewheel_{name}"][tuple(sorted(labels.items()))]


READY = Ready(step=0, bad_steps=0, bad_rows=0, load_seconds=0.0)


def trainer() -> Telemetry:
    telemetry = Telemetry("trainer", "job", rank=0, version="1", clock=lambda: 1000.0)
    telemetry.worker_started(1)
    return telemetry


@pytest.mark.parametrize("role", ["trainer", "pserver"])
def test_a_registry_serves_exactly_the_families_of_its_catalogue_page(role: str) -> None:
    telemetry = Telemetry(role, "job", rank=0)
    served = {family.name: family for family in telemetry.series.collect()}
    expected = {metric.name.removesuffix("_total"): metric for metric in of_role(role)}
    assert set(served) == set(expected)
    for name, family in served.items():
        assert (family.type, family.documentation) == (expected[name].kind.value, expected[name].help)


def test_names_follow_the_convention() -> None:
    units = ("_seconds", "_bytes", "_ratio")
    for metric in CATALOGUE:
        assert metric.name.startswith("paddlewheel_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.kind is not Kind.HISTOGRAM or metric.name.endswith(units), metric.name
        assert not {label.name for label in metric.labels} & {*COMMON_LABELS, "job", "instance", "le"}, metric.name
        assert metric.help.endswith("."), metric.name


def test_no_process_can_serve_an_unbounded_number_of_series() -> None:
    for role in ("trainer", "pserver", "coordinator"):
        assert sum(metric.num_series_bound for metric in of_role(role)) < 500, role
    series = Series([BY_NAME["paddlewheel_job_table_bytes"]], dict.fromkeys(COMMON_LABELS, ""))
    for i in range(10 * MAX_OPEN_VALUES):
        series.set("paddlewheel_job_table_bytes", i, table=f"t{i}")
    (family,) = series.collect()
    assert len(family.samples) == MAX_OPEN_VALUES + 1
    assert "other" in {sample.labels["table"] for sample in family.samples}


def test_a_value_outside_of_a_closed_set_is_dropped() -> None:
    telemetry = trainer()
    before = scrape(telemetry)
    telemetry.observe(Remark(level="debug", message="x"))
    telemetry.series.add("paddlewheel_agent_worker_failures_total", reason="full moon")
    after = scrape(telemetry)
    assert {name: set(samples) for name, samples in before.items()} == {n: set(s) for n, s in after.items()}


def test_counters_grow_over_children_and_never_go_back() -> None:
    telemetry = trainer()
    telemetry.observe(progress(step=10, own_rows=100, bad_steps=1))
    telemetry.observe(progress(step=15, own_rows=150, bad_steps=1))
    telemetry.worker_exited(-9, expected=False)
    assert value(telemetry, "trainer_rows_total") == 150
    telemetry.worker_started(2)
    telemetry.observe(Ready(step=10, bad_steps=1, bad_rows=7, load_seconds=0.0))  # restored from its checkpoint
    assert value(telemetry, "trainer_rows_total") == 150
    telemetry.observe(progress(step=12, own_rows=20, bad_steps=1))
    assert value(telemetry, "trainer_rows_total") == 170
    assert value(telemetry, "trainer_steps_total") == 17
    assert value(telemetry, "trainer_bad_steps_total") == 1
    assert value(telemetry, "agent_worker_starts_total") == 2
    assert value(telemetry, "agent_worker_failures_total", reason="signal") == 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(0, 1000)),
            st.tuples(st.just("start"), st.integers(0, 5)),
            st.tuples(st.just("rows"), st.integers(-5, 10**12)),
        ),
        max_size=30,
    )
)
def test_no_order_of_events_makes_a_counter_go_back(steps: list[tuple[str, Any]]) -> None:
    telemetry = trainer()
    seen: dict[tuple[str, Any], float] = {}
    for kind, number in steps:
        if kind == "start":
            telemetry.worker_exited(0, expected=True)
            telemetry.worker_started(number)
            telemetry.observe(READY.model_copy(update={"step": number}))
        elif kind == "step":
            telemetry.observe(progress(step=number))
        else:
            telemetry.observe(progress(own_rows=number, pulled_bytes=number))
        for family in telemetry.series.collect():
            for sample in family.samples:
                if sample.name.endswith(("_total", "_bucket", "_count", "_sum")):
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    assert sample.value >= seen.get(key, 0.0)
                    seen[key] = sample.value


def test_twenty_restarts_make_no_new_series() -> None:
    telemetry = trainer()
    histogram = DurationHistogram()
    numbers = []
    for attempt in range(1, 21):
        telemetry.worker_started(attempt)
        histogram.observe(0.01)
        telemetry.observe(READY)
        telemetry.observe(progress(loss=0.5, auc=0.7, own_rows=10, durations={"wait": histogram.message()}))
        telemetry.observe(Remark(level="error", message="?"))
        telemetry.worker_measured(1e9, 3.0)
        telemetry.worker_exited(75, expected=False)
        numbers.append({name: set(samples) for name, samples in scrape(telemetry).items()})
    assert all(number == numbers[0] for number in numbers)
    assert value(telemetry, "agent_worker_failures_total", reason="retry") == 20
    # An agent process that is started again serves the same series.
    assert set(scrape(trainer())) <= set(numbers[0])


def test_histograms_of_a_worker_arrive_whole() -> None:
    telemetry = trainer()
    worker = DurationHistogram()
    for seconds in (0.0004, 0.001, 0.0011, 0.3, 100.0):
        worker.observe(seconds)
    telemetry.observe(progress(durations={"compute": worker.message(), "servers_pull": worker.message()}))
    telemetry.observe(progress(durations={"compute": worker.message()}))  # nothing new
    found = scrape(telemetry)
    buckets = found["paddlewheel_trainer_step_phase_seconds_bucket"]
    at = {
        bound: buckets[("le", bound), ("phase", "compute")] for bound in ("0.0005", "0.001", "0.0025", "10.0", "+Inf")
    }
    assert at == {"0.0005": 1, "0.001": 2, "0.0025": 3, "10.0": 4, "+Inf": 5}
    assert found["paddlewheel_trainer_step_phase_seconds_count"][(("phase", "compute"),)] == 5
    total = found["paddlewheel_trainer_step_phase_seconds_sum"][(("phase", "compute"),)]
    assert math.isclose(total, worker.sum_seconds)
    assert found["paddlewheel_trainer_pull_seconds_count"][()] == 5


@pytest.mark.parametrize(
    "event",
    [
        progress(loss=math.nan, auc=math.inf),
        progress(durations={"wait": Durations(counts=(1,), sum_seconds=1.0)}),
        progress(durations={"wait": Durations(counts=(1,) * 14, sum_seconds=math.nan)}),
        Result(figures={"eval": 3}),
        Result(figures={"eval": {"auc": "high"}}),
        Result(figures={}),
    ],
    ids=["loss", "counts", "sum", "evaluation", "auc", "nothing"],
)
def test_figures_that_are_none_raise_nothing(event: WorkerEvent) -> None:
    telemetry = trainer()
    telemetry.observe(event)
    assert value(telemetry, "trainer_rows_total") == 0


def test_gauges_follow_the_last_event_and_the_worker() -> None:
    telemetry = Telemetry("trainer", "job", clock=lambda: 1234.0)
    assert value(telemetry, "agent_joined") == 0
    telemetry.joined(3)
    telemetry.worker_started(7)
    telemetry.observe(READY)
    telemetry.worker_measured(5e8, 1.5)
    telemetry.observe(progress(loss=0.5, auc=0.71, staleness_steps=2))
    telemetry.observe(Result(figures={"eval": {"auc": 0.8, "logloss": 0.4}}))
    assert value(telemetry, "agent_joined") == value(telemetry, "agent_worker_ready") == 1
    assert (value(telemetry, "trainer_loss"), value(telemetry, "trainer_auc")) == (0.5, 0.71)
    assert (value(telemetry, "trainer_eval_auc"), value(telemetry, "trainer_staleness_steps")) == (0.8, 2)
    assert value(telemetry, "agent_last_event_timestamp_seconds") == 1234
    assert value(telemetry, "agent_worker_memory_bytes") == 5e8
    (sample,) = [s for f in telemetry.series.collect() for s in f.samples if s.name == "paddlewheel_trainer_loss"]
    assert sample.labels == {"job_name": "job", "role": "trainer", "rank": "3"}
    processes = {
        (sample.name, sample.labels["process"]): sample.value
        for family in telemetry.collect()
        for sample in family.samples
        if sample.name.startswith("process_")
    }
    assert processes["process_resident_memory_bytes", "worker"] == 5e8
    assert 0 < processes["process_resident_memory_bytes", "agent"] != 5e8
    assert processes["process_cpu_seconds_total", "worker"] == value(telemetry, "agent_worker_cpu_seconds_total")
    telemetry.worker_exited(0, expected=True)
    telemetry.left()
    for name in ("agent_joined", "agent_worker_up", "agent_worker_ready", "agent_worker_memory_bytes"):
        assert value(telemetry, name) == 0, name


def test_a_probe_is_asked_only_while_the_worker_runs_and_may_fail() -> None:
    asked = []
    telemetry = Telemetry("pserver", "job", rank=0)

    def probe(series: Series) -> None:
        asked.append(series)
        series.set("paddlewheel_pserver_uptime_seconds", 5)
        if len(asked) == 2:
            raise OSError("connection refused")

    scrape(telemetry)
    telemetry.worker_started(1)
    scrape(telemetry)
    assert not asked
    telemetry.worker_ready(probe)
    assert value(telemetry, "pserver_uptime_seconds") == 5
    assert value(telemetry, "pserver_uptime_seconds") == 0
    assert value(telemetry, "pserver_probe_failures_total") == 1
    telemetry.worker_exited(-9, expected=False)
    scrape(telemetry)
    assert len(asked) == 3


class FakeNvml(types.ModuleType):
    """As much of nvidia-ml-py as is used: two GPUs, the second of which may fail."""

    NVMLError = type("NVMLError", (Exception,), {})
    broken = False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.broken and index == 1:
            raise self.NVMLError("fell off the bus")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=(handle + 1) << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(gpu=40 + handle)


def test_gpus_are_shown_where_a_driver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    telemetry = Telemetry("trainer", "job", rank=0, probe=gpu_probe())
    telemetry.worker_started(1)
    assert "paddlewheel_trainer_gpu_memory_bytes" not in scrape(telemetry)
    telemetry.observe(READY)
    assert value(telemetry, "trainer_gpu_memory_bytes", gpu="1") == 2 << 30
    assert value(telemetry, "trainer_gpu_utilization_ratio", gpu="0") == 0.4
    nvml.broken = True
    assert value(telemetry, "trainer_gpu_utilization_ratio", gpu="1") == 0.41, "the last reading stays"


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_probe() is None


PAGE = """\
# TYPE rpc_socket_count gauge
rpc_socket_count 7
cost_profiler_pserver_server_pull_sparse_count {pulls}
cost_profiler_pserver_server_push_sparse_count 5
rpc_server_{port}_uptime 12.5
rpc_server_{port}_paddle_distributed_ps_service_service_error 2
rpc_server_{port}_paddle_distributed_ps_service_service_concurrency 1
rpc_server_{port}_paddle_distributed_ps_service_service{{quantile="0.99"}} 26315
"""


def test_the_servers_page_becomes_metrics_with_sane_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([PAGE.format(port=7, pulls=10), PAGE.format(port=7, pulls=12), PAGE.format(port=7, pulls=3)])

    def read(host: str, port: int, *, timeout_seconds: float) -> dict[str, float]:
        lines = (line.rpartition(" ") for line in next(pages).splitlines() if not line.startswith("#"))
        return {name: float(number) for name, _, number in lines}

    monkeypatch.setattr(probes, "brpc_metrics", read)
    spec = ServerSpec(endpoints=("10.0.0.1:9", "[::1]:7"), rank=1, tables={})
    telemetry = Telemetry("pserver", "job", rank=1)
    telemetry.worker_started(1)
    telemetry.worker_ready(probes.ServerProbe.of_worker(spec))
    found = scrape(telemetry)
    assert found["paddlewheel_pserver_requests_total"] == {(("operation", "pull"),): 10, (("operation", "push"),): 5}
    assert found["paddlewheel_pserver_request_latency_seconds"][(("quantile", "0.99"),)] == 0.026315
    assert found["paddlewheel_pserver_request_errors_total"][()] == 2
    assert value(telemetry, "pserver_requests_total", operation="pull") == 12
    telemetry.worker_started(2)
    telemetry.worker_ready(probes.ServerProbe.of_worker(spec))
    assert value(telemetry, "pserver_requests_total", operation="pull") == 15, "a new server counts from 0"


def test_the_memory_limit_is_the_containers_if_there_is_one(tmp_path: Path) -> None:
    machine = memory_limit_bytes(tmp_path)
    assert machine > 1 << 28
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit_bytes(tmp_path) == machine
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_limit_bytes(tmp_path) == 1 << 20
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(1 << 62))  # cgroup v1's way to say none
    assert memory_limit_bytes(tmp_path) == machine


def test_new_keys_are_followed_by_table_and_feature_and_the_memory_limit_is_foreseen() -> None:
    times = iter(range(0, 1000, 5))
    # The clock on the wall goes back, as it may at any time: what is foreseen does not depend on it.
    wall = iter(range(10**6, 0, -100))
    telemetry = Telemetry(
        "trainer", "job", rank=0, clock=lambda: float(next(wall)), monotonic=lambda: float(next(times))
    )
    telemetry.worker_started(1)
    table = TableFigures(keys=(), bytes=0, new=5, admitted=None, evicted=0, shard_skew=None)
    telemetry.observe(progress(tables={"t": table}, new_keys_of_features={"a": 4, "b": 1}))
    more = table.model_copy(update={"new": 8})
    telemetry.observe(progress(tables={"t": more}, new_keys_of_features={"c": 3}))
    found = {
        (sample.name, sample.labels.get("table") or sample.labels.get("feature")): sample.value
        for family in telemetry.collect()
        for sample in family.samples
        if "new_keys" in sample.name
    }
    assert found == {
        ("paddlewheel_trainer_new_keys_total", "t"): 8,
        ("paddlewheel_trainer_feature_new_keys_total", "a"): 4,
        ("paddlewheel_trainer_feature_new_keys_total", "b"): 1,
        ("paddlewheel_trainer_feature_new_keys_total", "c"): 3,
    }
    limit = telemetry.memory_limit_bytes
    for share in range(10, 20):
        left = telemetry.worker_measured(share * limit // 40, 0.0)
    assert left == pytest.approx((40 - 19) * 5.0, rel=1e-3)


def test_a_scrape_asks_a_server_for_its_page_and_nothing_else() -> None:
    """Key counts walk through tables that a load or a day boundary may be rebuilding: the server would crash."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        port = listener.getsockname()[1]

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        heard.append(connection.recv(4096))
                        body = PAGE.format(port=port, pulls=1).encode()
                        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                        connection.sendall(head.encode() + body)

        thread = threading.Thread(target=serve)
        thread.start()
        telemetry = Telemetry("pserver", "job", rank=0)
        telemetry.worker_started(1)
        spec = ServerSpec(endpoints=(f"127.0.0.1:{port}",), rank=0, tables={"t": {}, "u": {}})
        telemetry.worker_ready(probes.ServerProbe.of_worker(spec))
        assert value(telemetry, "pserver_requests_total", operation="pull") == 1
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert [line.split(b"\r\n")[0] for line in heard] == [b"GET /brpc_metrics HTTP/1.1"]


def test_trainer_0_tells_how_many_keys_there_are_and_how_even_they_lie() -> None:
    from paddlewheel.trainer.telemetry.job import JobTelemetry

    telemetry = JobTelemetry("job", dict)
    unsaid = {"bytes": 0, "new": 0, "admitted": None, "evicted": 0, "shard_skew": None}
    counted = {"t": (30, 10), "empty": (0, 0), "not counted": ()}
    telemetry._take_tables({name: {"keys": keys, **unsaid} for name, keys in counted.items()})
    found = {
        (sample.name, sample.labels["table"]): sample.value
        for family in telemetry.series.collect()
        for sample in family.samples
        if sample.name in {"paddlewheel_job_table_keys", "paddlewheel_job_server_skew_ratio"}
    }
    assert found == {
        ("paddlewheel_job_table_keys", "t"): 40,
        ("paddlewheel_job_server_skew_ratio", "t"): 1.5,
        ("paddlewheel_job_table_keys", "empty"): 0,
        ("paddlewheel_job_server_skew_ratio", "empty"): 1,
    }
