"""Which of several observations is named as the cause, in whatever order they come; when a checkpoint is asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paddlewheel.pserver.messages import ErrorKind, SignalReceived, WorkerError
from paddlewheel.trainer.coordinator import messages
from paddlewheel.trainer.coordinator.messages import Role, WorkerEvent, WorkerExited
from paddlewheel.trainer.coordinator.state_machine import JobStateMachine, Phase
from paddlewheel.trainer.protocol.messages import (
    CommitRequest,
    CursorReply,
    CursorRequest,
    HostDone,
    HostFailed,
    HostsReply,
    HostsRequest,
    LeaseRequest,
    PhaseChanged,
    PrepareHost,
    Refusal,
    Reply,
    Request,
    SaveCheckpoint,
    StopTraining,
    TrainerRequest,
)
from tests.support.plans import epoch_request, plan

SERVER, TRAINER = 1, 2


def running(**job: Any) -> JobStateMachine:
    """A job of one server (session 1) and one trainer (session 2) that trains."""
    control = JobStateMachine(plan(control={"max_restarts": 0}, **job), 0.0)
    for session, role in ((SERVER, Role.PSERVER), (TRAINER, Role.TRAINER)):
        control.handle(messages.Joined(session, role, 0, "h", 1), 0.0)
        control.handle(messages.Available(session, 7000 + session), 0.0)
    for session in (SERVER, TRAINER):
        control.handle(messages.WorkerStarted(session, 1, 9), 0.0)
        control.handle(messages.WorkerReady(session, 1), 0.0)
    assert control.phase is Phase.RUNNING
    return control


SIGNAL = WorkerEvent(SERVER, 1, SignalReceived(signal="SIGTERM"))
OWN_SIGNAL = WorkerEvent(SERVER, 1, SignalReceived(signal="SIGTERM", asked=True))


def error(kind: ErrorKind) -> WorkerEvent:
    return WorkerEvent(TRAINER, 1, WorkerError(kind=kind, message="m"))


def request(number: int, ask: TrainerRequest) -> WorkerEvent:
    return WorkerEvent(TRAINER, 1, Request(id=number, ask=ask))


@pytest.mark.parametrize(
    ("events", "failed_role", "words"),
    [
        ([WorkerExited(SERVER, 1, -9), error("peer"), WorkerExited(TRAINER, 1, 75)], "pserver 0", "SIGKILL"),
        ([WorkerExited(SERVER, 1, 0), error("peer"), WorkerExited(TRAINER, 1, 75)], "pserver 0", "stopped, but not by"),
        (
            [SIGNAL, WorkerExited(SERVER, 1, 0), error("peer"), WorkerExited(TRAINER, 1, 75)],
            "pserver 0",
            "was sent SIGTERM",
        ),
        ([SIGNAL, error("peer"), WorkerExited(SERVER, 1, 0, True)], "pserver 0", "was sent SIGTERM"),
        ([OWN_SIGNAL, WorkerExited(SERVER, 1, 0, True), error("runtime")], "trainer 0", "failed: m"),
        ([WorkerExited(SERVER, 1, -15), error("peer"), WorkerExited(TRAINER, 1, 75)], "pserver 0", "SIGTERM"),
        ([error("data"), WorkerExited(TRAINER, 1, 64), WorkerExited(SERVER, 1, -9)], "trainer 0", "failed: m"),
        ([error("runtime"), WorkerExited(TRAINER, 1, 75), WorkerExited(SERVER, 1, 0, True)], "trainer 0", "failed: m"),
    ],
)
def test_the_culprit_is_named_and_not_the_witness(events: list[messages.Event], failed_role: str, words: str) -> None:
    for order in itertools.permutations(events):
        if any([e for e in order if e.session == one] != [e for e in events if e.session == one] for one in (1, 2)):
            continue  # a worker's words come before its end
        control = running()
        for event in order:
            control.handle(event, 1.0)
        for now in (2.0, 20.0):
            control.handle(messages.Tick(), now)
        assert control.outcome is not None
        assert control.outcome.failed_role == failed_role, order
        assert words in control.outcome.cause


def told(actions: list[messages.Action]) -> list[Any]:
    return [action.command for action in actions if isinstance(action, messages.SendToWorker)]


def test_a_checkpoint_is_asked_for_by_the_clock() -> None:
    control = running(checkpoint={"every_minutes": 0.5})
    for session in (SERVER, TRAINER):
        control.handle(messages.Heartbeat(session), 29.0)
    assert told(control.handle(messages.Tick(), 29.0)) == []
    for session in (SERVER, TRAINER):
        control.handle(messages.Heartbeat(session), 30.5)
    assert told(control.handle(messages.Tick(), 30.5)) == [SaveCheckpoint()]
    assert told(control.handle(messages.Tick(), 30.6)) == []  # once
    assert control.checkpoint.state == "asked"


def test_a_checkpoint_that_falls_due_within_an_evaluation_is_asked_for_after_it() -> None:
    control = running(checkpoint={"every_minutes": 0.5})
    for phase, now, lines in (("evaluating", 30.5, []), ("training", 31.0, [SaveCheckpoint()])):
        for session in (SERVER, TRAINER):
            control.handle(messages.Heartbeat(session), now)
        control.handle(WorkerEvent(TRAINER, 1, PhaseChanged(phase=phase)), now)
        assert told(control.handle(messages.Tick(), now)) == lines


def test_asking_twice_makes_one_checkpoint() -> None:
    control = running()
    assert told(control.handle(messages.CheckpointAsked(), 1.0)) == [SaveCheckpoint()]
    assert told(control.handle(messages.CheckpointAsked(), 1.0)) == []


def test_no_checkpoint_while_the_model_is_evaluated() -> None:
    control = running()
    control.handle(WorkerEvent(TRAINER, 1, PhaseChanged(phase="evaluating")), 1.0)
    (done,) = control.handle(messages.CheckpointAsked(), 1.0)
    assert isinstance(done, messages.CheckpointDone)
    assert "evaluating" in done.error


def test_a_lost_attempt_answers_who_waits_for_a_checkpoint() -> None:
    control = running()
    control.handle(messages.CheckpointAsked(), 1.0)
    actions = control.handle(WorkerExited(SERVER, 1, -9), 1.0)
    assert [a.error for a in actions if isinstance(a, messages.CheckpointDone)] == [
        "attempt 1 was lost before it was saved"
    ]


def test_an_ordered_stop_saves_and_waits_longer_for_that() -> None:
    control = running(train={"epochs": 1})
    (line,) = told(control.handle(messages.StopRequested("asked"), 1.0))
    assert line == StopTraining(checkpoint=True)
    control.handle(request(1, epoch_request({0: 10})), 1.0)
    asked = CursorRequest(step=3, epoch=0, spans=((0, 0, 0, 4),), skipped=())
    (reply,) = told(control.handle(request(2, asked), 1.0))
    assert isinstance(reply.answer, CursorReply)
    assert reply.answer.cursor["position"]["done"] == [[0, 4]]
    for now in (5.0, 9.5):  # past stop_seconds
        control.handle(messages.Heartbeat(SERVER), now)
        control.handle(messages.Heartbeat(TRAINER), now)
        control.handle(messages.Tick(), now)
    assert control.phase is Phase.STOPPING
    asked = CommitRequest(step=3, draft=f"/c/{reply.answer.draft}", seconds=1.0)
    (commit,) = control.handle(request(3, asked), 9.6)
    assert isinstance(commit, messages.Commit)
    control.handle(messages.CommitFinished(commit, path="/c/step-3"), 9.7)
    control.handle(WorkerExited(TRAINER, 1, 143), 9.8)
    control.handle(WorkerExited(SERVER, 1, 0, True), 9.9)
    assert control.outcome == messages.Outcome(143, "asked")
    assert control.checkpoint.step == 3


def test_a_request_that_makes_no_sense_is_refused() -> None:
    control = running()
    without_sizes = epoch_request({0: 10}).model_copy(update={"sizes": ()})
    for asked in (
        LeaseRequest(epoch=0),
        CommitRequest(step=1, draft="x", seconds=0.0),
        without_sizes,
        epoch_request({0: 0}),
        CursorRequest(step=1, epoch=0, spans=((0, 7, 0, 1),), skipped=()),
    ):
        (reply,) = told(control.handle(request(5, asked), 1.0))
        assert reply.id == 5
        assert isinstance(reply.answer, Refusal)
        assert reply.answer.error
        assert reply.answer.kind == "runtime"


def test_a_request_while_the_attempt_is_ended_gets_no_answer() -> None:
    """A refusal would be reported as an error of the job, and the job would not start again."""
    control = running()
    control.handle(WorkerExited(SERVER, 1, -9), 1.0)
    assert control.phase is Phase.ABORTING
    assert control.handle(request(5, LeaseRequest(epoch=0)), 1.0) == []


def test_an_order_to_the_servers_hosts_is_answered_when_all_have_answered() -> None:
    control = JobStateMachine(plan(num_servers=2), 0.0)
    role_ranks = [(1, Role.PSERVER, 0), (2, Role.PSERVER, 1), (3, Role.TRAINER, 0)]
    for session, role, rank in role_ranks:
        control.handle(messages.Joined(session, role, rank, "h", 1), 0.0)
        control.handle(messages.Available(session, 7000 + session), 0.0)
    for session, _, _ in role_ranks:
        control.handle(messages.WorkerReady(session, 1, f"process {session}"), 0.0)

    def ask(number: int) -> list[messages.Action]:
        return control.handle(messages.WorkerEvent(3, 1, Request(id=number, ask=HostsRequest(order=order))), 1.0)

    order = PrepareHost(draft="d", num_bytes=(1, 2))
    assert ask(7) == [messages.HostRequest(session, 1, order) for session in (1, 2)]
    (refused,) = told(ask(8)[-1:])
    assert "one at a time" in refused.answer.error
    first, second = HostDone(), HostFailed(error="no room")
    assert control.handle(messages.HostResponse(2, 1, second), 1.0) == []
    assert control.handle(messages.HostResponse(1, 0, second), 1.0) == [], "of an earlier attempt"
    assert control.handle(messages.HostResponse(1, 1, first), 1.0) == [
        messages.SendToWorker(3, 1, Reply(id=7, answer=HostsReply(answers=(first, second))))
    ]
    assert control.handle(messages.HostResponse(1, 1, first), 1.0) == []


def test_trainers_are_told_which_processes_their_servers_are() -> None:
    control = JobStateMachine(plan(), 0.0)
    for session, role in ((SERVER, Role.PSERVER), (TRAINER, Role.TRAINER)):
        control.handle(messages.Joined(session, role, 0, "h", 1), 0.0)
        control.handle(messages.Available(session, 7000 + session), 0.0)
    started = control.handle(messages.WorkerReady(SERVER, 1, "pid 4"), 0.0)
    assert [a.spec.server_uids for a in started if isinstance(a, messages.StartWorker)] == [("pid 4",)]
