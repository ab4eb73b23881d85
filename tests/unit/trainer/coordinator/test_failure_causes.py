"""Which of several observations is named as the cause, in whatever order they come; when a checkpoint is asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paddlewheel.trainer.coordinator import messages
from paddlewheel.trainer.coordinator.messages import Role, WorkerEvent, WorkerExited
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.state_machine import JobStateMachine, Phase
from paddlewheel.trainer.job.control import ControlConfig

SERVER, TRAINER = 1, 2


def running(**job: Any) -> JobStateMachine:
    """A job of one server (session 1) and one trainer (session 2) that trains."""
    plan = JobPlan(
        name="j", num_servers=1, num_trainers=1, run_dir="/r", job=job, tables={}, control=ControlConfig(max_restarts=0)
    )
    control = JobStateMachine(plan, 0.0)
    for session, role in ((SERVER, Role.PSERVER), (TRAINER, Role.TRAINER)):
        control.handle(messages.Joined(session, role, 0, "h", 1), 0.0)
        control.handle(messages.Available(session, 7000 + session), 0.0)
    for session in (SERVER, TRAINER):
        control.handle(messages.WorkerStarted(session, 1, 9), 0.0)
        control.handle(messages.WorkerReady(session, 1), 0.0)
    assert control.phase is Phase.RUNNING
    return control


SIGNAL = WorkerEvent(SERVER, 1, {"event": "signal", "signal": "SIGTERM", "asked": False})
OWN_SIGNAL = WorkerEvent(SERVER, 1, {"event": "signal", "signal": "SIGTERM", "asked": True})


def error(kind: str) -> WorkerEvent:
    return WorkerEvent(TRAINER, 1, {"event": "error", "kind": kind, "message": "m"})


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
    return [action.line for action in actions if isinstance(action, messages.SendToWorker)]


def test_a_checkpoint_is_asked_for_by_the_clock() -> None:
    control = running(checkpoint={"every_minutes": 0.5})
    for session in (SERVER, TRAINER):
        control.handle(messages.Heartbeat(session), 29.0)
    assert told(control.handle(messages.Tick(), 29.0)) == []
    for session in (SERVER, TRAINER):
        control.handle(messages.Heartbeat(session), 30.5)
    assert told(control.handle(messages.Tick(), 30.5)) == [{"command": "checkpoint"}]
    assert told(control.handle(messages.Tick(), 30.6)) == []  # once
    assert control.checkpoint.state == "asked"


def test_a_checkpoint_that_falls_due_within_an_evaluation_is_asked_for_after_it() -> None:
    control = running(checkpoint={"every_minutes": 0.5})
    for phase, now, lines in (("evaluating", 30.5, []), ("training", 31.0, [{"command": "checkpoint"}])):
        for session in (SERVER, TRAINER):
            control.handle(messages.Heartbeat(session), now)
        control.handle(WorkerEvent(TRAINER, 1, {"event": "phase", "phase": phase}), now)
        assert told(control.handle(messages.Tick(), now)) == lines


def test_asking_twice_makes_one_checkpoint() -> None:
    control = running()
    assert told(control.handle(messages.CheckpointAsked(), 1.0)) == [{"command": "checkpoint"}]
    assert told(control.handle(messages.CheckpointAsked(), 1.0)) == []


def test_no_checkpoint_while_the_model_is_evaluated() -> None:
    control = running()
    control.handle(WorkerEvent(TRAINER, 1, {"event": "phase", "phase": "evaluating"}), 1.0)
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
    assert line == {"command": "stop", "checkpoint": True}
    plan = {"fingerprint": "f", "order": "o", "seed": 1, "slices": [[0, 10]]}
    control.handle(WorkerEvent(TRAINER, 1, {"event": "request", "id": 1, "what": "epoch", "epoch": 0, **plan}), 1.0)
    spans = [[0, 0, 0, 4]]
    said = {"event": "request", "id": 2, "what": "cursor", "step": 3, "epoch": 0, "spans": spans}
    (reply,) = told(control.handle(WorkerEvent(TRAINER, 1, said), 1.0))
    assert reply["cursor"]["position"]["done"] == [[0, 4]]
    for now in (5.0, 9.5):  # past stop_seconds
        control.handle(messages.Heartbeat(SERVER), now)
        control.handle(messages.Heartbeat(TRAINER), now)
        control.handle(messages.Tick(), now)
    assert control.phase is Phase.STOPPING
    said = {"event": "request", "id": 3, "what": "commit", "step": 3, "draft": f"/c/{reply['draft']}"}
    (commit,) = control.handle(WorkerEvent(TRAINER, 1, said), 9.6)
    assert isinstance(commit, messages.Commit)
    control.handle(messages.CommitFinished(commit, path="/c/step-3"), 9.7)
    control.handle(WorkerExited(TRAINER, 1, 143), 9.8)
    control.handle(WorkerExited(SERVER, 1, 0, True), 9.9)
    assert control.outcome == messages.Outcome(143, "asked")
    assert control.checkpoint.step == 3


def test_a_request_that_makes_no_sense_is_refused() -> None:
    control = running()
    for said in (
        {"what": "dance"},
        {"what": "lease", "epoch": 0},
        {"what": "lease"},
        {"what": "commit", "step": 1, "draft": "x"},
        {"what": "epoch", "epoch": 0, "fingerprint": "f", "order": "o", "seed": 1, "slices": [[0]]},
        {"what": "cursor", "step": "x", "epoch": 0, "spans": [[1]]},
    ):
        (reply,) = told(control.handle(WorkerEvent(TRAINER, 1, {"event": "request", "id": 5, **said}), 1.0))
        assert reply["reply"] == 5
        assert reply["error"]
        assert reply["kind"] == "runtime"


def test_a_request_while_the_attempt_is_ended_gets_no_answer() -> None:
    """A refusal would be reported as an error of the job, and the job would not start again."""
    control = running()
    control.handle(WorkerExited(SERVER, 1, -9), 1.0)
    assert control.phase is Phase.ABORTING
    said = {"event": "request", "id": 5, "what": "lease", "epoch": 0}
    assert control.handle(WorkerEvent(TRAINER, 1, said), 1.0) == []


def test_an_order_to_the_servers_hosts_is_answered_when_all_have_answered() -> None:
    plan = JobPlan(name="j", num_servers=2, num_trainers=1, run_dir="/r", job={}, tables={})
    control = JobStateMachine(plan, 0.0)
    role_ranks = [(1, Role.PSERVER, 0), (2, Role.PSERVER, 1), (3, Role.TRAINER, 0)]
    for session, role, rank in role_ranks:
        control.handle(messages.Joined(session, role, rank, "h", 1), 0.0)
        control.handle(messages.Available(session, 7000 + session), 0.0)
    for session, _, _ in role_ranks:
        control.handle(messages.WorkerReady(session, 1, f"process {session}"), 0.0)

    def ask(number: int) -> list[messages.Action]:
        order = {"event": "request", "id": number, "what": "hosts", "order": {"order": "prepare"}}
        return control.handle(messages.WorkerEvent(3, 1, order), 1.0)

    assert ask(7) == [messages.HostRequest(session, 1, {"order": "prepare"}) for session in (1, 2)]
    refused = ask(8)[-1]
    assert isinstance(refused, messages.SendToWorker)
    assert "one at a time" in refused.line["error"]
    assert control.handle(messages.HostResponse(2, 1, {"n": 2}), 1.0) == []
    assert control.handle(messages.HostResponse(1, 0, {"n": 0}), 1.0) == [], "of an earlier attempt"
    assert control.handle(messages.HostResponse(1, 1, {"n": 1}), 1.0) == [
        messages.SendToWorker(3, 1, {"reply": 7, "answers": [{"n": 1}, {"n": 2}]})
    ]
    assert control.handle(messages.HostResponse(1, 1, {"n": 1}), 1.0) == []


def test_trainers_are_told_which_processes_their_servers_are() -> None:
    plan = JobPlan(name="j", num_servers=1, num_trainers=1, run_dir="/r", job={}, tables={})
    control = JobStateMachine(plan, 0.0)
    for session, role in ((SERVER, Role.PSERVER), (TRAINER, Role.TRAINER)):
        control.handle(messages.Joined(session, role, 0, "h", 1), 0.0)
        control.handle(messages.Available(session, 7000 + session), 0.0)
    started = control.handle(messages.WorkerReady(SERVER, 1, "pid 4"), 0.0)
    assert [a.spec["server_identities"] for a in started if isinstance(a, messages.StartWorker)] == [["pid 4"]]
