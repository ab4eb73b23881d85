"""The arithmetic of a projection."""

from __future__ import annotations

from paddlewheel.deploy.bench.speed.report import Case
from paddlewheel.deploy.bench.speed.tables import Nodes, project


def _case(system: str, keys: int, **facts: float) -> Case:
    names = {"bytes": "bytes/key", "server": "server_CPU_s/M", "client": "client_CPU_s/M"}
    return Case(
        f"{system} {keys}", {"system": system, "keys": keys}, "keys/s", [1.0], {names[k]: [v] for k, v in facts.items()}
    )


def made_up_cases() -> list[Case]:
    cases = [
        _case(system, 10, bytes=999, server=0.5, client=9) for system in ("insert", "save", "load", "pull", "push")
    ]
    cases += [
        _case("insert", 100, bytes=180),
        _case("save", 100, bytes=100, server=4.0),
        _case("load", 100, server=1.0),
        _case("verify", 100, client=0.1),
        _case("day boundary", 100, server=0.02),
        _case("pull", 100, server=0.25),
        _case("push", 100, server=0.75),
    ]
    return cases


def test_a_projection_follows_from_the_largest_size() -> None:
    nodes = Nodes(memory_bytes=10**12, cores=10, disk_bytes_per_second=1e9, full=0.5)
    lines = project(made_up_cases(), 10**10, nodes, 200.0)  # 2 TB in servers of 0.5 TB: 4, of 2,500 M keys each
    assert "2.00 TB of memory, so 4 servers" in lines[0]
    assert "10,000,000,000 keys x 200 bytes (as every plan has it; measured here: 180)" in lines[0]
    assert "with 2,500 M keys each" in lines[0]
    assert "10,000 CPU s a server, 1,000 s on 10 cores; it writes 250 GB, 250 s" in lines[1]
    assert "the longer of the two, 1,000 s" in lines[1]
    assert "250 s on 10 cores; it reads 250 GB" in lines[2]
    assert "1,000 s, and 1.00 TB to read, 1,000 s" in lines[3]
    assert "50 s on one core, 5.0 s on 10" in lines[4]
    assert "-50% and +50%" in lines[5]
    assert "4.0 M pulled or 1.3 M pushed keys/s" in lines[5]
