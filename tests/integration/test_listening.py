"""What a real job listens on: SECURITY.md says that by default it is loopback alone, and what each port is for."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from paddlewheel.data_pipeline import synthetic
from tests.chaos.driver import ChaosJob, job_file

ROOT = Path(__file__).parents[2]

DOCUMENTED = {
    "paddlewheel.trainer.coordinator": ("coordinator (gRPC)", "metrics, status page (HTTP)"),
    "paddlewheel.trainer.agent.agent": ("health (gRPC)", "metrics, status page (HTTP)"),
    "paddlewheel.pserver.server_process": ("a server's own (brpc)",),
    "key_value_store.py": ("the trainers' store",),
    "paddlewheel.trainer.worker": (
        "AllReduce (gloo, any port)",
        "AllReduce with `train.allreduce_dtype` in 16 bits (any port)",
    ),
}
"""The rows of the table, by the process that listens."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_listens_on_loopback_alone_and_on_nothing_that_is_not_documented(tmp_path: Path) -> None:
    synthetic.generate(tmp_path / "data", 40_000, 5)
    sections = {"metrics": {"enabled": True}, "train": {"epochs": 50, "allreduce_dtype": "bfloat16"}}
    job = ChaosJob(job_file(tmp_path, tmp_path / "data", **sections), seed=0)
    try:
        job.wait_for_step(3)
        found: dict[str, set[str]] = defaultdict(set)
        numbers: dict[str, int] = defaultdict(int)
        for process in psutil.Process(job.process.pid).children(recursive=True):
            try:
                words = process.cmdline()
                listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            except psutil.NoSuchProcess:
                continue
            names = [name for name in DOCUMENTED if any(word == name or word.endswith(f"/{name}") for word in words)]
            for connection in listening:
                assert len(names) == 1, f"nobody has documented the port of {words}"
                found[names[0]].add(connection.laddr.ip.removeprefix("::ffff:"))  # gRPC's way to say IPv4
                numbers[names[0]] += 1
        assert found.pop("paddlewheel.trainer.worker", set()) <= {
            "127.0.0.1"
        }  # gloo listens only while its peers connect
        assert found == {name: {"127.0.0.1"} for name in DOCUMENTED if name != "paddlewheel.trainer.worker"}
        assert numbers["paddlewheel.trainer.coordinator"] == 2
        assert numbers["paddlewheel.trainer.agent.agent"] == 2 * 4
        assert numbers["paddlewheel.pserver.server_process"] == 2
        assert numbers["key_value_store.py"] == 1
    finally:
        job.close()
    table = (ROOT / "deploy" / "SECURITY.md").read_text()
    for rows in DOCUMENTED.values():
        for row in rows:
            assert f"| {row} |" in table, row
