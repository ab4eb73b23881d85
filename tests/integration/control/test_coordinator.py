"""A real coordinator, and clients that say what they should not. It needs no agents for that."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
from paddlewheel.trainer.coordinator import journal
from paddlewheel.trainer.coordinator.security import CHANNEL_OPTIONS
from tests.support.plans import plan

VERSION = importlib.metadata.version("paddlewheel")


@dataclass
class Coordinator:
    process: subprocess.Popen[bytes]
    stub: pb_grpc.CoordinatorStub
    run_dir: Path

    def is_alive(self) -> bool:
        """It ticks: a watcher gets a second answer, which only a tick brings."""
        watching = self.stub.WatchStatus(pb.StatusRequest(min_interval_seconds=0.01), timeout=20)
        found = [next(watching), next(watching)]
        watching.cancel()
        return found[1].elapsed_seconds > found[0].elapsed_seconds


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    control = {"heartbeat_seconds": 0.1, "heartbeat_timeout_seconds": 2.0}
    job = plan(run_dir=tmp_path, control=control)
    read_end, write_end = os.pipe()
    (tmp_path / "plan.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "paddlewheel.trainer.coordinator", "--plan", str(tmp_path / "plan.json")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--announce", str(write_end)], stdout=log, pass_fds=[write_end])
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        port = json.loads(pipe.readline())["port"]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        yield Coordinator(process, pb_grpc.CoordinatorStub(channel), tmp_path)
    process.terminate()
    process.wait(timeout=30)


def refused(call: object, *words: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(call) if hasattr(call, "__next__") else call()  # type: ignore[operator]
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, error.value
    for word in words:
        assert word in error.value.details()


def test_times_that_are_none_are_refused_and_the_clock_goes_on(coordinator: Coordinator) -> None:
    stub = coordinator.stub
    for value in [math.nan] * 20 + [1e300, -1.0, math.inf]:
        refused(stub.WatchStatus(pb.StatusRequest(min_interval_seconds=value)), "min_interval_seconds")
        refused(lambda v=value: stub.CheckpointNow(pb.CheckpointRequest(timeout_seconds=v)), "timeout_seconds")
    assert coordinator.is_alive()


def test_a_job_cannot_be_stopped_with_success(coordinator: Coordinator) -> None:
    for code in (256, 1, -1):
        refused(lambda c=code: coordinator.stub.StopJob(pb.StopRequest(exit_code=c)), "exit_code")
    assert coordinator.is_alive()
    coordinator.stub.StopJob(pb.StopRequest(exit_code=130))
    assert coordinator.process.wait(timeout=30) == 130


def attend(coordinator: Coordinator, *messages: pb.AgentMessage) -> list[pb.AgentCommand]:
    """What an agent is told until it is cut off."""
    commands = []
    try:
        for command in coordinator.stub.Attend(iter([*messages, *[pb.AgentMessage(heartbeat=pb.Heartbeat())] * 2])):
            commands += [command] if command.WhichOneof("command") != "pulse" else []
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017
    return commands


@pytest.mark.parametrize("version", ["", "0.0.1", VERSION + ".dev1"])
def test_an_agent_of_another_version_gets_no_member_and_is_told_why(coordinator: Coordinator, version: str) -> None:
    join = pb.Join(role=pb.ROLE_TRAINER, host="127.0.0.1", pid=1, version=version)
    (command,) = attend(coordinator, pb.AgentMessage(join=join))
    assert command.refused.exit_code == 64
    assert VERSION in command.refused.reason
    assert "install the same version" in command.refused.reason


def test_an_agent_that_says_what_cannot_be_is_dropped_and_the_others_go_on(coordinator: Coordinator) -> None:
    join = pb.AgentMessage(join=pb.Join(role=pb.ROLE_TRAINER, host="127.0.0.1", pid=1, version=VERSION))
    for wrong in (
        pb.AgentMessage(worker_event=pb.WorkerEvent(attempt=0)),
        pb.AgentMessage(leaving=pb.Leaving(signal=77)),
        pb.AgentMessage(heartbeat=pb.Heartbeat(seconds_to_limit=math.nan)),
    ):
        commands = attend(coordinator, join, wrong)
        assert [command.WhichOneof("command") for command in commands] == ["welcome"]
    assert attend(coordinator, pb.AgentMessage(heartbeat=pb.Heartbeat())) == []
    assert coordinator.is_alive()


def test_a_journal_that_is_removed_is_told(coordinator: Coordinator) -> None:
    assert coordinator.is_alive()
    (coordinator.run_dir / "journal.jsonl").unlink()
    for status in coordinator.stub.WatchStatus(pb.StatusRequest(min_interval_seconds=0.05), timeout=30):
        if any("was removed while the job runs" in entry.text for entry in status.entries):
            break
    coordinator.process.terminate()
    coordinator.process.wait(timeout=30)
    records = journal.read(coordinator.run_dir / "journal.jsonl").records
    assert records[-1].what == "over"
