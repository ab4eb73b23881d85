"""Every plan of a job's memory is made with one model of a key, and the model holds against real servers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from paddlewheel.data_pipeline import synthetic
from paddlewheel.deploy.bench.speed.tables import Nodes, project
from paddlewheel.deploy.checks.sizing import size
from paddlewheel.deploy.cli import run
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.local import local_servers
from paddlewheel.pserver.sizing import (
    HEADROOM,
    SizingError,
    bytes_per_key,
    saved_bytes_per_key,
    server_memory_bytes,
    servers_needed,
)
from paddlewheel.trainer.job.config import JobConfig
from tests.support.needs import require
from tests.unit.deploy.bench.test_benchmark_tables import made_up_cases

RULES = ["sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [4, 16, 64])
def test_data_check_k8s_and_the_projection_plan_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, width: int
) -> None:
    synthetic.generate(tmp_path / "data", 300, seed=1)
    raw = {
        "name": "plan",
        "data": synthetic.data_section(tmp_path / "data"),
        "tables": {"default": {"width": width, "optimizer": {"rule": rule}}},
        "model": {"kind": "deepfm", "tower": [8]},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    job = JobConfig.load(tmp_path / "job.yaml")
    table = job.tables["default"]

    assert run(["data", "check", str(tmp_path / "job.yaml"), "--json"]) in {0, 3}
    (checked,) = json.loads(capsys.readouterr().out)["tables"]
    assert checked["memory_bytes"] / checked["keys"] == pytest.approx(bytes_per_key(table))
    assert checked["checkpoint_bytes"] / checked["keys"] == pytest.approx(saved_bytes_per_key(table))

    keys = 100_000_000
    rendered = size(job, {"default": keys})
    assert rendered.server_memory_bytes == pytest.approx(server_memory_bytes(keys * bytes_per_key(table), 1), abs=2**28)
    assert rendered.checkpoint_bytes == pytest.approx(keys * saved_bytes_per_key(table))

    line = project(made_up_cases(), 10**10, Nodes(), bytes_per_key(table))[0]
    assert f"10,000,000,000 keys x {bytes_per_key(table):.0f} bytes" in line


def test_data_check_asks_for_as_many_servers_as_have_the_memory_that_k8s_gives() -> None:
    for table_bytes in (0.0, 1e6, 1e9, 3e11):
        for memory in (1e9, 16e9, 64e9):
            number = servers_needed(table_bytes, memory)
            assert server_memory_bytes(table_bytes, number) <= memory
            assert number == 1 or server_memory_bytes(table_bytes, number - 1) > memory


@pytest.mark.parametrize("memory", ["0.1", "0", "-1", "nan"])
def test_a_server_with_less_memory_than_it_takes_empty_is_refused(
    memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "check", "no-such.yaml", "--server-memory-gb", memory]) == 64
    assert "no such job" not in capsys.readouterr().err
    with pytest.raises(SizingError, match="too little"):
        servers_needed(1.0, 1e8)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["paddle", "paddlewheel"])
@pytest.mark.parametrize(("rule", "width"), [("adagrad", 16), ("adam", 16), ("sgd", 64), ("adagrad_elementwise", 32)])
def test_a_further_key_of_real_servers_takes_what_the_plan_says_or_less(
    tmp_path: Path, rule: str, width: int, engine: str
) -> None:
    if engine == "paddlewheel":
        require("our own tables")
    config = TableConfig.model_validate({"width": width, "optimizer": {"rule": rule}, "engine": engine})
    gradients_UW, ones_U = np.full((20_000, config.pull_width), 0.1, np.float32), np.ones(20_000, np.float32)
    with (
        local_servers({"t": config}, 1, tmp_path) as servers,
        Client({"t": config}, servers.endpoints, seed=1, pull_timeout_seconds=120.0) as client,
    ):
        resident = []
        for start in range(0, 1_000_000, 20_000):
            keys_U = np.arange(start + 1, start + 20_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            client.push("t", keys_U, gradients_UW, ones_U, 0 * ones_U)
            if start + 20_000 in {300_000, 1_000_000}:
                client.num_keys()  # answered when the pushes before it are done
                resident.append(psutil.Process(servers.processes[0].pid).memory_info().rss)
    measured = (resident[1] - resident[0]) / 700_000
    # Paddle's table takes its memory key by key, ours by blocks, for whose last ones the plan has its headroom.
    most = HEADROOM if engine == "paddlewheel" else 1.02
    assert 0.75 * bytes_per_key(config) < measured < most * bytes_per_key(config)
