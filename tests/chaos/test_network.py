"""Roles in two network namespaces, as on two hosts; the cable between them is cut, for good or for a moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paddlewheel.trainer.coordinator import run_report
from paddlewheel.trainer.coordinator.resume import read_journal
from tests.chaos.driver import EPOCHS, ROOT, check_folder, job_file

pytestmark = [pytest.mark.needs("virtual cables"), pytest.mark.slow, pytest.mark.timeout(600)]

_PORT = 7070


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class Hosts:
    """Two namespaces with a cable: `left` has 10.77.0.1, `right` has 10.77.0.2."""

    left, right = "10.77.0.1", "10.77.0.2"

    def __init__(self) -> None:
        tag = f"pw{os.getpid() % 100000}"
        self.names = {self.left: f"{tag}l", self.right: f"{tag}r"}
        for name in self.names.values():
            ip("netns", "add", name)
        one, two = self.names[self.left], self.names[self.right]
        ip("link", "add", one, "netns", one, "type", "veth", "peer", "name", two, "netns", two)
        for address, name in self.names.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cable(self, state: str) -> None:
        """Up or down."""
        ip("-n", self.names[self.left], "link", "set", self.names[self.left], state)

    def limit(self, rate: str) -> None:
        """Bits a second that the cable carries each way, as tc writes them."""
        for name in self.names.values():
            queue = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", name, *queue], check=True, timeout=30)

    def carried(self) -> int:
        """Bytes that the cable has carried so far, both ways."""
        total = 0
        for name in self.names.values():
            command = ["ip", "-n", name, "-json", "-statistics", "link", "show", "dev", name]
            found = subprocess.run(command, check=True, capture_output=True, timeout=30)
            total += json.loads(found.stdout)[0]["stats64"]["tx"]["bytes"]
        return total

    def close(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=30)


class Cluster:
    """Coordinator, servers and trainer 0 on the left, trainer 1 on the right; lost roles are started again."""

    def __init__(self, hosts: Hosts, job: Path, run_dir: Path) -> None:
        self.hosts, self.run_dir = hosts, run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        listen = f"{hosts.left}:{_PORT}"
        self.commands = {"coordinator": (hosts.left, ["coordinator", str(job), "--listen", listen])}
        for role, rank, host in [
            ("pserver", 0, hosts.left),
            ("pserver", 1, hosts.left),
            ("trainer", 0, hosts.left),
            ("trainer", 1, hosts.right),
        ]:
            words = [role, "--coordinator", listen, "--rank", str(rank), "--host", host]
            self.commands[f"{role}-{rank}"] = (host, words)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.codes: dict[str, int] = {}
        for name in self.commands:
            self.start(name)

    def start(self, name: str) -> None:
        host, words = self.commands[name]
        with (self.run_dir / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self.hosts.names[host],
                    sys.executable,
                    "-m",
                    "paddlewheel.deploy.cli",
                    "role",
                    *words,
                ],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def look_after(self) -> None:
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[name]
                if process.returncode == 75:
                    self.start(name)
                else:
                    self.codes[name] = process.returncode

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}\n{self.logs()}"
            self.look_after()
            time.sleep(0.05)

    def num_records(self, what: str) -> int:
        return sum(record.what == what for record in read_journal(self.run_dir / "journal.jsonl"))

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.run_dir.glob("*.log"))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def cluster(click_data: Path, tmp_path: Path) -> Iterator[Cluster]:
    hosts = Hosts()
    found = Cluster(hosts, job_file(tmp_path, click_data), tmp_path / "run")
    yield found
    found.close()
    hosts.close()


def finish(cluster: Cluster) -> run_report.Report:
    cluster.wait_until(lambda: not cluster.processes, "the end of all roles")
    assert set(cluster.codes.values()) == {0}, (cluster.codes, cluster.logs())
    return check_folder(cluster.run_dir, cluster.run_dir / "checkpoints", EPOCHS)


def write_down(name: str, report: run_report.Report, detect_seconds: float) -> None:
    if path := os.environ.get("PADDLEWHEEL_CHAOS_LOG"):
        line = {
            "scenario": name,
            "restarts": len(report.attempts) - 1,
            "detect_seconds": round(detect_seconds, 2),
            "down_seconds": round(sum(story.down_seconds for story in report.attempts), 2),
            "rows_replayed": sum(story.rows_replayed or 0 for story in report.attempts),
            "causes": [story.cause for story in report.attempts if story.cause],
            "exact": report.exact,
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_a_cut_cable_costs_a_restart(cluster: Cluster) -> None:
    cluster.wait_until(lambda: cluster.num_records("committed") >= 2, "two checkpoints")
    cluster.hosts.cable("down")
    cut_at = time.time()
    cluster.wait_until(lambda: cluster.num_records("lost") >= 1, "the loss to be noticed", seconds=60)
    cluster.hosts.cable("up")
    report = finish(cluster)
    lost = next(r for r in read_journal(cluster.run_dir / "journal.jsonl") if r.what == "lost")
    detected = lost.time - lost.halting_seconds - cut_at
    write_down("cut_cable", report, detected)
    assert detected < 15, lost
    assert "trainer 1" in report.attempts[0].cause


def test_16_bits_halve_what_a_slow_cable_carries(click_data: Path, tmp_path: Path) -> None:
    """Most of what it carries is the AllReduce of 1.4 MB a step; the rest are pulls and pushes."""
    num_bytes = {}
    for wire in ("float32", "bfloat16"):
        folder = tmp_path / wire
        hosts = Hosts()
        hosts.limit("50mbit")
        model = {"kind": "deepfm", "tower": [400, 400, 400]}
        job = job_file(folder, click_data, model=model, train={"allreduce_dtype": wire, "epochs": 1})
        cluster = Cluster(hosts, job, folder / "run")
        try:
            cluster.wait_until(lambda c=cluster: not c.processes, "the end of all roles")
            assert set(cluster.codes.values()) == {0}, (cluster.codes, cluster.logs())
            num_bytes[wire] = hosts.carried()
        finally:
            cluster.close()
            hosts.close()
        over = next(r for r in read_journal(folder / "run" / "journal.jsonl") if r.what == "over")
        result = over.result
        assert result["rows"] == result["expected_rows"]
    assert num_bytes["bfloat16"] < 0.7 * num_bytes["float32"], num_bytes


def test_a_cable_that_is_out_for_a_second_costs_nothing(cluster: Cluster) -> None:
    cluster.wait_until(lambda: cluster.num_records("committed") >= 2, "two checkpoints")
    cluster.hosts.cable("down")
    time.sleep(1.0)
    cluster.hosts.cable("up")
    report = finish(cluster)
    write_down("cable_out_for_a_second", report, float("nan"))
    assert len(report.attempts) == 1
