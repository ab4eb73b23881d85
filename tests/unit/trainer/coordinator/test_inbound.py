"""What agents and observers say, number by number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import inbound, messages
from paddlewheel.trainer.protocol.messages import MessageError


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -1.0, 86_401.0])
def test_times_that_no_clock_knows_are_refused(value: float) -> None:
    with pytest.raises(MessageError, match=r"min_interval_seconds is .* from 0 to 86400"):
        inbound.watch_interval_seconds(pb.StatusRequest(min_interval_seconds=value))
    with pytest.raises(MessageError, match="timeout_seconds"):
        inbound.checkpoint_timeout_seconds(pb.CheckpointRequest(timeout_seconds=value))


def test_ordinary_times_pass_and_no_timeout_means_for_ever() -> None:
    assert inbound.watch_interval_seconds(pb.StatusRequest(min_interval_seconds=0.25)) == 0.25
    assert inbound.checkpoint_timeout_seconds(pb.CheckpointRequest()) is None


@pytest.mark.parametrize("code", [256, -1, 1, 512, 2**31 - 1, 128])
def test_a_stop_with_a_code_that_is_no_stop_is_refused(code: int) -> None:
    with pytest.raises(MessageError, match="exits with one of 64, 75, 129, 130, 143"):
        inbound.stop_of(pb.StopRequest(exit_code=code))


def test_nobody_can_stop_a_job_with_success() -> None:
    assert inbound.stop_of(pb.StopRequest()).exit_code == 143
    with pytest.raises(ValueError, match="exit_code is 0"):
        messages.StopRequested("please", 0)
    assert all(0 < code < 256 for code in messages.STOP_CODES)


MESSAGES = [
    pb.AgentMessage(heartbeat=pb.Heartbeat(worker_cpu_seconds=math.nan)),
    pb.AgentMessage(heartbeat=pb.Heartbeat(worker_memory_bytes=-1)),
    pb.AgentMessage(heartbeat=pb.Heartbeat(memory_limit_bytes=-1)),
    pb.AgentMessage(heartbeat=pb.Heartbeat(seconds_to_limit=math.nan)),
    pb.AgentMessage(available=pb.Available(port=0)),
    pb.AgentMessage(available=pb.Available(port=65_536)),
    pb.AgentMessage(worker_started=pb.WorkerStarted(pid=2**40)),
    pb.AgentMessage(worker_started=pb.WorkerStarted(pid=0)),
    pb.AgentMessage(worker_exited=pb.WorkerExited(exit_code=2**20)),
    pb.AgentMessage(worker_event=pb.WorkerEvent()),
    pb.AgentMessage(worker_event=pb.WorkerEvent(phase=pb.PhaseChanged(phase="dancing"))),
    pb.AgentMessage(worker_event=pb.WorkerEvent(result=pb.Result(figures=pb.Document(json="{")))),
    pb.AgentMessage(worker_event=pb.WorkerEvent(result=pb.Result(figures=pb.Document(json="7")))),
    pb.AgentMessage(worker_event=pb.WorkerEvent(result=pb.Result())),
    pb.AgentMessage(worker_event=pb.WorkerEvent(request=pb.Request(id=1))),
    pb.AgentMessage(host_response=pb.HostResponse()),
    pb.AgentMessage(leaving=pb.Leaving(signal=99)),
    pb.AgentMessage(leaving=pb.Leaving(signal=9)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_what_no_agent_can_mean_is_refused(message: pb.AgentMessage) -> None:
    with pytest.raises(MessageError):
        inbound.event_of(1, message)


@pytest.mark.parametrize(
    "join",
    [
        pb.Join(host="h"),
        pb.Join(role=7, host="h"),
        pb.Join(role=pb.ROLE_TRAINER, host=""),
        pb.Join(role=pb.ROLE_TRAINER, host="a b"),
        pb.Join(role=pb.ROLE_TRAINER, host="h\n"),
        pb.Join(role=pb.ROLE_TRAINER, host="h" * 300),
        pb.Join(role=pb.ROLE_TRAINER, host="h", pid=-1),
    ],
    ids=["no role", "unknown role", "no host", "blank", "line end", "long", "pid"],
)
def test_a_join_that_names_nobody_is_refused(join: pb.Join) -> None:
    with pytest.raises(MessageError):
        inbound.joined(1, pb.AgentMessage(join=join))
    for other in (None, pb.AgentMessage(heartbeat=pb.Heartbeat())):
        with pytest.raises(MessageError, match="must be a Join"):
            inbound.joined(1, other)


@given(st.floats(), st.floats(), st.integers(-(2**63), 2**63 - 1))
def test_every_heartbeat_is_an_event_of_finite_numbers_or_refused(cpu: float, left: float, memory: int) -> None:
    beat = pb.Heartbeat(worker_cpu_seconds=cpu, seconds_to_limit=left, worker_memory_bytes=memory)
    try:
        event = inbound.event_of(1, pb.AgentMessage(heartbeat=beat))
    except MessageError:
        return
    assert isinstance(event, messages.Heartbeat)
    assert event.worker_memory_bytes >= 0
    assert event.seconds_to_limit is not None
    assert event.seconds_to_limit >= 0
