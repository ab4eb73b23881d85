"""`paddlewheel status` and `paddlewheel role`, as separate processes on one machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from paddlewheel.deploy.cli import run
from paddlewheel.trainer.distributed.subprocesses import port_of, reserve_port


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A coordinator that waits for its roles, and its address."""
    job = tmp_path / "job.yaml"
    data = {"train": str(tmp_path), "labels": ["y"], "sparse": [{"name": "a"}]}
    job.write_text(yaml.safe_dump({"name": "waiting", "run_dir": str(tmp_path / "run"), "data": data}))
    with reserve_port("127.0.0.1") as holder:
        address = f"127.0.0.1:{port_of(holder)}"
        command = [sys.executable, "-m", "paddlewheel.deploy.cli", "role", "coordinator", str(job), "--listen", address]
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            yield address, process
            process.kill()


def test_a_waiting_job_is_told(
    coordinator: tuple[str, subprocess.Popen[bytes]],
    capsys: pytest.CaptureFixture[str],
    eventually: Callable[..., None],
) -> None:
    address, process = coordinator
    eventually(lambda: run(["status", address]) == 0, seconds=60, what="the coordinator answers")
    told = capsys.readouterr().out
    assert "waiting (train): rendezvous" in told
    assert "pserver 0: absent" in told
    assert "trainer 0: absent" in told
    assert run(["status", address, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["name"], status["phase"], len(status["members"])) == ("waiting", "rendezvous", 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with reserve_port("127.0.0.1") as holder:  # bound, but nobody listens
        address = f"127.0.0.1:{port_of(holder)}"
        for arguments in (["status", address], ["status", address, "--watch"]):
            assert run(arguments) == 75
            assert f"no coordinator answers at {address}" in capsys.readouterr().err
