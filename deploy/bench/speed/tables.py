"""How a table behaves as it grows: memory, inserts, pulls, pushes, saves, loads and day boundaries, size by size.

One pair (or more) of servers takes key after key; at each size everything is measured on the way, and the save of that
size is loaded into empty servers. Server CPU seconds stand beside the wall clock: neighbours disturb them less.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from paddlewheel.deploy.bench.speed import machine
from paddlewheel.deploy.bench.speed.report import Case, Report
from paddlewheel.deploy.bench.speed.runs import now
from paddlewheel.pserver import saved_tables, sizing
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.local import LocalServers, local_servers

Say = Callable[[str], None]
_TABLE = "bench"
_KEYS_PER_INSERT, _KEYS_PER_CALL, _NUM_CALLS = 100_000, 17_000, 60
_GIB = 1 << 30


@dataclass(frozen=True)
class Nodes:
    """Machines of a projection, one server each. `full`: share of the memory that tables may take."""

    memory_bytes: int = 64 * _GIB
    cores: int = 16
    disk_bytes_per_second: float = 1e9
    full: float = 0.8


def project(cases: Sequence[Case], num_keys: int, nodes: Nodes, planned: float) -> list[str]:
    """What the largest measured size lets expect of `num_keys`, as sentences that hold the arithmetic.

    `planned`: bytes of memory a key, from the model that every capacity plan uses.

    Assumptions: servers share nothing, so each works on its keys as here; a save or load keeps all cores of a server
    busy (a shard is written by one thread, so there must be more shards than cores); figures per key stay as they are.
    """
    largest = max(case.params["keys"] for case in cases)
    here = {case.params["system"]: case for case in cases if case.params["keys"] == largest}

    def fact(system: str, name: str) -> float:
        value = here[system].fact(name)
        assert value is not None, (system, name)
        return value

    memory = num_keys * planned
    num_servers = max(1, -(-int(memory) // int(nodes.memory_bytes * nodes.full)))
    share = num_keys / num_servers
    written = share * fact("save", "bytes/key")
    lines = [
        (
            f"Projection, not measured: {num_keys:,} keys x {planned:.0f} bytes (as every plan has it; measured here: "
            f"{fact('insert', 'bytes/key'):.0f}) = "
            f"{memory / 1e12:.2f} TB of memory, so {num_servers} servers of {nodes.memory_bytes / _GIB:.0f} GiB filled "
            f"to {nodes.full:.0%}, with {share / 1e6:,.0f} M keys each."
        )
    ]
    for what, verb in (("save", "writes"), ("load", "reads")):
        cpu = share / 1e6 * fact(what, "server_CPU_s/M")
        wall, disk = cpu / nodes.cores, written / nodes.disk_bytes_per_second
        lines.append(
            f"A {what}: {share / 1e6:,.0f} M keys x {fact(what, 'server_CPU_s/M'):.2f} CPU s = {cpu:,.0f} CPU s a "
            f"server, {wall:,.0f} s on {nodes.cores} cores; it {verb} {written / 1e9:,.0f} GB, {disk:,.0f} s at "
            f"{nodes.disk_bytes_per_second / 1e9:g} GB/s: the longer of the two, {max(wall, disk):,.0f} s."
        )
    checked = num_keys / 1e6 * fact("verify", "client_CPU_s/M")
    read = num_servers * written / nodes.disk_bytes_per_second
    lines.append(
        f"Verifying by one trainer: {num_keys / 1e6:,.0f} M keys x {fact('verify', 'client_CPU_s/M'):.2f} CPU s = "
        f"{checked:,.0f} s, and {num_servers * written / 1e12:.2f} TB to read, {read:,.0f} s."
    )
    boundary = share / 1e6 * fact("day boundary", "server_CPU_s/M")
    lines.append(
        f"A day boundary: {share / 1e6:,.0f} M keys x {fact('day boundary', 'server_CPU_s/M'):.3f} CPU s = "
        f"{boundary:,.0f} s on one core, {boundary / nodes.cores:,.1f} s on {nodes.cores}."
    )
    pull, push = (1e6 / fact(what, "server_CPU_s/M") for what in ("pull", "push"))
    lines.append(
        f"Pulls and pushes do not depend on the size but by {_growth(cases, 'pull')} and {_growth(cases, 'push')} in "
        f"CPU time from the smallest to the largest here; a core serves {pull / 1e6:.1f} M pulled or {push / 1e6:.1f} "
        f"M pushed keys/s."
    )
    return lines


def _growth(cases: Sequence[Case], system: str) -> str:
    sizes = sorted((c.params["keys"], c.fact("server_CPU_s/M") or 0.0) for c in cases if c.params["system"] == system)
    return f"{sizes[-1][1] / sizes[0][1] - 1:+.0%}" if sizes[0][1] else "an unknown share"


def tables(
    *,
    sizes: Sequence[int],
    num_servers: int,
    config: TableConfig,
    engines: Sequence[Literal["paddlewheel", "paddle"]],
    work_directory: Path | None,
    projected_keys: int,
    nodes: Nodes,
    seed: int,
    say: Say,
) -> Report:
    """Everything at every size (keys, rising), with each engine; needs `bytes/key` of memory and disk a key."""
    environment, date = machine.describe(), now()
    rising = sorted(set(sizes))
    report = Report(
        "tables", date, environment, _config(rising, num_servers, config, seed, projected_keys, engines), []
    )
    report.notes = [
        (
            f"{num_servers} servers, one client. bytes/key of insert and load is what the servers' resident memory "
            "grew by, of save what is on disk. p99.9 and worst are of single calls, as the client sees them."
        ),
        (
            "Inserts count the keys that were new at this size. Pulls and pushes: "
            f"{_NUM_CALLS} calls of {_KEYS_PER_CALL:,} keys each."
        ),
    ]
    for engine in engines:
        of_engine = config.model_copy(update={"engine": engine})
        cases = _measure(rising, num_servers, of_engine, work_directory, seed, _Measuring(say, engine))
        payload = saved_tables.saved_row_bytes(config) if engine == "paddlewheel" else saved_tables.row_bytes(config)
        report.cases += cases
        report.notes += [
            (
                f"{engine}: a key's row is {payload} bytes (the key and every float beside it). Times that after "
                f"inserting: {_ratios(cases, 'insert', payload)}; after loading: {_ratios(cases, 'load', payload)}."
            ),
            *project(cases, projected_keys, nodes, sizing.bytes_per_key(of_engine)),
        ]
    return report


def _measure(
    rising: Sequence[int],
    num_servers: int,
    config: TableConfig,
    work_directory: Path | None,
    seed: int,
    measuring: _Measuring,
) -> list[Case]:
    with tempfile.TemporaryDirectory(prefix="paddlewheel-tables-", dir=work_directory) as name:
        folder = Path(name)
        with (
            local_servers({_TABLE: config}, num_servers, folder) as servers,
            Client({_TABLE: config}, servers.endpoints, seed=seed, pull_timeout_seconds=120.0) as client,
        ):
            client.pull(_TABLE, mixed_keys(1, 1000))
            empty = _resident(servers)
            reached = 0
            for size in rising:
                _grow(measuring, client, servers, reached, size, empty, config)
                reached = size
                _use(measuring, client, servers, size, seed, config)
                saved = _save(measuring, client, servers, folder / f"size-{size}", size)
                with measuring("verify", size, size, servers):
                    saved_tables.verify(saved)
                if client.can_mark():
                    _save_beside(measuring, client, servers, folder / f"beside-{size}", size, seed, config)
        for size in rising:
            _load(measuring, folder / f"size-{size}", size, num_servers, config, seed, folder)
            shutil.rmtree(folder / f"size-{size}")
    return sorted(measuring.cases, key=lambda case: _ORDER.index(case.params["system"]))


_ORDER = (
    "insert",
    "pull",
    "push",
    "count",
    "save",
    "verify",
    "mark",
    "save beside pushes",
    "push beside a save",
    "load",
    "day boundary",
)


def _config(
    sizes: Sequence[int],
    num_servers: int,
    config: TableConfig,
    seed: int,
    projected_keys: int,
    engines: Sequence[str],
) -> dict[str, Any]:
    table = config.model_dump(mode="json")
    return {
        "keys": list(sizes),
        "servers": num_servers,
        "engines": list(engines),
        "seed": seed,
        "projected_keys": projected_keys,
        "table": table,
    }


def _ratios(cases: Sequence[Case], system: str, payload: int) -> str:
    found = [(c.params["keys"], c.fact("bytes/key") or 0.0) for c in cases if c.params["system"] == system]
    return ", ".join(f"{value / payload:.2f} at {keys:,} keys" for keys, value in found)


@dataclass
class _Measuring:
    """Times a piece of work on this process's clock, with the CPU seconds of the servers and of this process."""

    say: Say
    engine: str
    cases: list[Case] = field(default_factory=list)

    @contextmanager
    def __call__(self, system: str, size: int, num_keys: int, servers: LocalServers) -> Iterator[dict[str, float]]:
        facts: dict[str, float] = {}
        cpu, own, started = _cpu_seconds(servers), time.process_time(), time.perf_counter()
        yield facts
        seconds = time.perf_counter() - started
        facts["server_CPU_s/M"] = (_cpu_seconds(servers) - cpu) / num_keys * 1e6
        facts["client_CPU_s/M"] = (time.process_time() - own) / num_keys * 1e6
        facts["seconds"] = seconds
        case = Case(
            f"{self.engine}: {system}, {size:,} keys",
            {"system": system, "keys": size, "engine": self.engine},
            "keys/s",
            [num_keys / seconds],
            {name: [value] for name, value in facts.items()},
        )
        self.cases.append(case)
        self.say(f"{case.name}: {case.median:,.0f} keys/s, {seconds:,.1f} s")

    def add(self, name: str, value: float) -> None:
        """One more figure of the piece of work before."""
        self.cases[-1].facts[name] = [value]

    def add_calls(self, seconds: Sequence[float]) -> None:
        """How long the single calls of the piece of work before took."""
        self.add("p99.9_ms", float(np.quantile(seconds, 0.999)) * 1e3)
        self.add("worst_ms", max(seconds) * 1e3)


def _timed(calls: list[float], call: Callable[[], object]) -> None:
    started = time.perf_counter()
    call()
    calls.append(time.perf_counter() - started)


def _grow(
    measuring: _Measuring,
    client: Client,
    servers: LocalServers,
    reached: int,
    size: int,
    empty_bytes: int,
    config: TableConfig,
) -> None:
    gradients_UW = np.full((_KEYS_PER_INSERT, config.pull_width), 0.1, np.float32)
    ones_U = np.ones(_KEYS_PER_INSERT, np.float32)
    calls: list[float] = []
    with measuring("insert", size, size - reached, servers):
        for start in range(reached + 1, size + 1, _KEYS_PER_INSERT):
            keys_U = mixed_keys(start, min(start + _KEYS_PER_INSERT, size + 1))
            n = len(keys_U)
            started = time.perf_counter()
            client.push(_TABLE, keys_U, gradients_UW[:n], ones_U[:n], 0 * ones_U[:n])
            calls.append(time.perf_counter() - started)
    measuring.add("bytes/key", (_resident(servers) - empty_bytes) / size)
    measuring.add_calls(calls)


def _use(
    measuring: _Measuring, client: Client, servers: LocalServers, size: int, seed: int, config: TableConfig
) -> None:
    rng = np.random.default_rng(seed)
    count = min(_KEYS_PER_CALL, size)
    asked = []
    for _ in range(_NUM_CALLS):
        start = int(rng.integers(1, size - count + 2))
        asked.append(rng.permutation(mixed_keys(start, start + count)))
    gradients_UW, ones_U = np.full((count, config.pull_width), 0.01, np.float32), np.ones(count, np.float32)
    for system, call in (
        ("pull", lambda keys_U: client.pull(_TABLE, keys_U)),
        ("push", lambda keys_U: client.push(_TABLE, keys_U, gradients_UW, ones_U, ones_U)),
    ):
        calls: list[float] = []
        with measuring(system, size, count * _NUM_CALLS, servers):
            for keys_U in asked:
                _timed(calls, partial(call, keys_U))
        measuring.add_calls(calls)
    with measuring("count", size, size, servers):
        found = sum(client.num_keys()[_TABLE])
    assert found == size, (found, size)


def _save(
    measuring: _Measuring, client: Client, servers: LocalServers, directory: Path, size: int
) -> saved_tables.SavedTable:
    with measuring("save", size, size, servers):
        saved = client.save(directory)[_TABLE]
    measuring.add("bytes/key", saved.num_bytes / size)
    return saved


def _save_beside(
    measuring: _Measuring,
    client: Client,
    servers: LocalServers,
    directory: Path,
    size: int,
    seed: int,
    config: TableConfig,
) -> None:
    """A save of one moment while pushes go on: what it costs them, and the pause that it needs."""
    rng = np.random.default_rng(seed)
    count = min(_KEYS_PER_CALL, size)
    gradients_UW, ones_U = np.full((count, config.pull_width), 0.01, np.float32), np.ones(count, np.float32)
    done = threading.Event()
    calls: list[float] = []

    def push() -> None:
        while not done.is_set():
            start = int(rng.integers(1, size - count + 2))
            keys_U = mixed_keys(start, start + count)
            _timed(calls, partial(client.push, _TABLE, keys_U, gradients_UW, ones_U, ones_U))

    pusher = threading.Thread(target=push)
    pusher.start()
    try:
        with measuring("mark", size, size, servers):
            mark = client.mark()
        with measuring("save beside pushes", size, size, servers):
            client.save_marked(directory, mark)
    finally:
        done.set()
        pusher.join()
    measuring.cases.append(
        Case(
            f"{measuring.engine}: push beside a save, {size:,} keys",
            {"system": "push beside a save", "keys": size, "engine": measuring.engine},
            "keys/s",
            [count * len(calls) / sum(calls)],
        )
    )
    measuring.add_calls(calls)
    shutil.rmtree(directory)


def _load(
    measuring: _Measuring, directory: Path, size: int, num_servers: int, config: TableConfig, seed: int, logs: Path
) -> None:
    with (
        local_servers({_TABLE: config}, num_servers, logs) as servers,
        Client({_TABLE: config}, servers.endpoints, seed=seed) as client,
    ):
        empty = _resident(servers)
        with measuring("load", size, size, servers):
            client.load(directory)
        measuring.add("bytes/key", (_resident(servers) - empty) / size)
        with measuring("day boundary", size, size, servers):
            client.end_day()


def mixed_keys(start: int, stop: int) -> NDArray[np.uint64]:
    """The keys number start to stop - 1: mixed (the finaliser of splitmix64), all different, none 0."""
    mixed = np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _resident(servers: LocalServers) -> int:
    return sum(int(psutil.Process(process.pid).memory_info().rss) for process in servers.processes)


def _cpu_seconds(servers: LocalServers) -> float:
    return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in servers.processes)
