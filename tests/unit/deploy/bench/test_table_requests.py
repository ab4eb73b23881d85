"""Requests to our table without servers: the cases that are measured, and what is made of them."""

from __future__ import annotations

import pytest

from paddlewheel.deploy.bench.speed.report import Case
from paddlewheel.deploy.bench.speed.table_requests import Load, _speedups, requests
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.native import MemoryTable, NativeError

CONFIG = TableConfig(width=4, shards=6)
LOAD = Load(table_keys=3000, keys_per_call=1000, seconds=0.01, seed=1)


@pytest.mark.needs("our own tables")
def test_every_number_of_threads_and_clients_is_measured_and_then_each_size_of_the_growth() -> None:
    report = requests(config=CONFIG, threads=[1, 2], clients=[1, 3], load=LOAD, growth=[5000, 2500], say=lambda _: None)
    together = [case for case in report.cases if case.params["system"] != "insert"]
    assert {(c.params["system"], c.params["threads"], c.params["clients"]) for c in together} == {
        (system, threads, clients) for system in ("pull", "push") for threads in (1, 2) for clients in (1, 3)
    }
    grown = [case for case in report.cases if case.params["system"] == "insert"]
    assert [case.params["keys"] for case in grown] == [2500, 5000]
    assert all((case.fact("worst_CPU_ms") or 0) >= (case.fact("p99.9_CPU_ms") or 0) > 0 for case in grown)
    assert all(case.median > 0 and (case.fact("worst_wall_ms") or 0) > 0 for case in report.cases)


@pytest.mark.needs("our own tables")
def test_the_error_of_a_request_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NativeError("no such key")

    monkeypatch.setattr(MemoryTable, "pull", fail)
    with pytest.raises(NativeError, match="no such key"):
        requests(config=CONFIG, threads=[1], clients=[2], load=LOAD, growth=[], say=lambda _: None)


def test_rates_are_compared_with_one_client_and_one_thread() -> None:
    def case(threads: int, clients: int, rate: float) -> Case:
        return Case(
            f"{threads} {clients}", {"system": "pull", "threads": threads, "clients": clients}, "keys/s", [rate]
        )

    assert list(_speedups([case(1, 1, 2.0), case(8, 1, 11.0)])) == [
        "pull, times the rate of one client with one thread (threads x clients): 1 x 1: 1.0, 8 x 1: 5.5."
    ]
    assert list(_speedups([case(8, 1, 11.0)])) == []
