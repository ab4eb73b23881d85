"""Requests to our own table in this process, without servers: several at once on several cores, and while it grows.

Servers and connections are left out on purpose: what is seen is whether the table itself uses the cores that it has,
and whether its growth stops anybody.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paddlewheel.deploy.bench.speed import machine
from paddlewheel.deploy.bench.speed.report import Case, Report
from paddlewheel.deploy.bench.speed.runs import now
from paddlewheel.deploy.bench.speed.tables import mixed_keys
from paddlewheel.pserver import engine
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.native import MemoryTable

Say = Callable[[str], None]
_TABLE = "bench"
_KEYS_PER_INSERT = 100_000


@dataclass(frozen=True)
class Load:
    """What is asked of the table: the keys that it holds, the keys of a request, the seconds that a case lasts."""

    table_keys: int
    keys_per_call: int
    seconds: float
    seed: int


def requests(
    *,
    config: TableConfig,
    threads: Sequence[int],
    clients: Sequence[int],
    load: Load,
    growth: Sequence[int],
    say: Say,
) -> Report:
    """Pulls and pushes with every number of threads and clients; then inserts up to each size of `growth` (rising).

    threads: how many work on one request at most. clients: how many requests are under way at once.

    Raises:
        NativeError: our table cannot be had here.
    """
    told = {"threads": list(threads), "clients": list(clients), "growth": list(growth), **vars(load)}
    report = Report("requests", now(), machine.describe(), {**told, "table": config.model_dump(mode="json")}, [])
    report.notes = [
        (
            f"In one process with {os.cpu_count()} processors, without servers. threads: that may work on one request; "
            f"clients: requests under way at once, of {load.keys_per_call:,} keys each."
        ),
        "p99.9 and worst are of single requests; those in CPU time do not count waiting for a processor or a lock.",
    ]
    for case in _cases(config, threads, clients, load, sorted(set(growth))):
        report.cases.append(case)
        say(f"{case.name}: {case.median:,.0f} keys/s")
    report.notes += list(_speedups(report.cases))
    return report


def _cases(
    config: TableConfig, threads: Sequence[int], clients: Sequence[int], load: Load, growth: Sequence[int]
) -> Iterator[Case]:
    for num_threads in threads:
        with closing(_made(config, num_threads)) as table:
            for keys_U in _batches(0, load.table_keys):
                table.push(keys_U, _values(len(keys_U), config.width))
            for num_clients in clients:
                for system in ("pull", "push"):
                    yield _together(system, table, config, num_threads, num_clients, load)
    with closing(_made(config, 1)) as table:
        reached = 0
        for size in growth:
            yield _grow(table, config, reached, size, load.keys_per_call)
            reached = size


def _made(config: TableConfig, num_threads: int) -> MemoryTable:
    return MemoryTable({**engine.options(_TABLE, config), "threads": num_threads})


def _batches(reached: int, size: int, keys_per_call: int = _KEYS_PER_INSERT) -> Iterator[NDArray[np.uint64]]:
    for start in range(reached + 1, size + 1, keys_per_call):
        yield mixed_keys(start, min(start + keys_per_call, size + 1))


def _values(count: int, width: int) -> NDArray[np.float32]:
    values = np.full((count, 4 + width), 0.01, np.float32)
    values[:, :3] = 0, 1, 0
    return values


@dataclass
class _Calls:
    """How long single requests took, on the wall clock and in CPU time of the thread that asked."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def make(self, call: Callable[[], object]) -> None:
        started, cpu = time.perf_counter(), time.thread_time()
        call()
        self.cpu.append(time.thread_time() - cpu)
        self.wall.append(time.perf_counter() - started)


def _together(
    system: str, table: MemoryTable, config: TableConfig, num_threads: int, num_clients: int, load: Load
) -> Case:
    count = min(load.keys_per_call, load.table_keys)
    start = threading.Barrier(num_clients + 1)

    def client(number: int) -> _Calls:
        rng = np.random.default_rng([load.seed, number])
        values = _values(count, config.width)
        # Every request has keys of all shards, and those of one client are all over the table.
        asked = [mixed_keys(first, first + count) for first in rng.integers(1, load.table_keys - count + 2, 16)]
        calls = _Calls()
        start.wait()
        end = time.perf_counter() + load.seconds
        while time.perf_counter() < end:
            keys_U = asked[len(calls.wall) % len(asked)]
            calls.make(partial(table.pull, keys_U) if system == "pull" else partial(table.push, keys_U, values))
        return calls

    with ThreadPoolExecutor(num_clients) as pool:
        running = [pool.submit(client, number) for number in range(num_clients)]
        start.wait()
        began, cpu = time.perf_counter(), time.process_time()
        calls = [each.result() for each in running]
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    done = sum(len(each.wall) for each in calls) * count
    case = Case(
        f"{system}, {num_threads} threads, {num_clients} clients",
        {"system": system, "threads": num_threads, "clients": num_clients},
        "keys/s",
        [done / seconds],
        {"CPU_s/M": [cpu / done * 1e6], "cores": [cpu / seconds]},
    )
    _add_times(case, "wall", [s for each in calls for s in each.wall])
    return case


def _grow(table: MemoryTable, config: TableConfig, reached: int, size: int, keys_per_call: int) -> Case:
    calls = _Calls()
    values = _values(keys_per_call, config.width)
    for keys_U in _batches(reached, size, keys_per_call):
        calls.make(partial(table.push, keys_U, values[: len(keys_U)]))
    found = table.statistics()
    assert found.rows == size, (found.rows, size)
    case = Case(
        f"insert up to {size:,} keys, 1 thread, 1 client",
        {"system": "insert", "keys": size},
        "keys/s",
        [(size - reached) / sum(calls.wall)],
        {
            "CPU_s/M": [sum(calls.cpu) / (size - reached) * 1e6],
            "bytes/key": [(found.row_bytes + found.index_bytes) / size],
        },
    )
    _add_times(case, "wall", calls.wall)
    _add_times(case, "CPU", calls.cpu)
    return case


def _add_times(case: Case, clock: str, seconds: Sequence[float]) -> None:
    case.facts[f"p99.9_{clock}_ms"] = [float(np.quantile(seconds, 0.999)) * 1e3]
    case.facts[f"worst_{clock}_ms"] = [max(seconds) * 1e3]


def _speedups(cases: Sequence[Case]) -> Iterator[str]:
    """How many times the rate of one client with one thread; nothing where that was not measured."""
    for system in ("pull", "push"):
        of_system = [case for case in cases if case.params["system"] == system]
        one = [case for case in of_system if case.params["threads"] == case.params["clients"] == 1]
        if one:
            ratios = ", ".join(
                f"{case.params['threads']} x {case.params['clients']}: {case.median / one[0].median:.1f}"
                for case in of_system
            )
            yield f"{system}, times the rate of one client with one thread (threads x clients): {ratios}."
