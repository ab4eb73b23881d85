"""How many restarts a job gets: as many in a row as it may, unless they got it further."""

from __future__ import annotations

from typing import Any

import pytest

from paddlewheel.trainer.coordinator.messages import (
    Available,
    Commit,
    CommitFinished,
    JobFinished,
    Joined,
    Role,
    SendToWorker,
    StartWorker,
    Tick,
    WorkerEvent,
    WorkerExited,
    WorkerReady,
)
from paddlewheel.trainer.coordinator.state_machine import JobStateMachine
from paddlewheel.trainer.protocol.messages import CommitRequest, CursorRequest, Reply, Request, TrainerRequest
from tests.support.plans import epoch_request, plan

SIZES = {0: 40, 1: 40}


class Job:
    """One server, one trainer, an epoch of 80 rows."""

    def __init__(self, max_restarts: int = 2) -> None:
        job = plan(train={"epochs": 1}, control={"max_restarts": max_restarts, "backoff_seconds": 1})
        self.now, self.actions, self.control = 0.0, [], JobStateMachine(job, 0.0)
        self.num_attempts = 0
        for session, role in ((1, Role.PSERVER), (2, Role.TRAINER)):
            self.give(Joined(session, role, 0, "h", session))
            self.give(Available(session, 7000 + session))

    def give(self, event: Any) -> None:
        self.actions += self.control.handle(event, self.now)

    def take(self, kind: type) -> list[Any]:
        found = [action for action in self.actions if isinstance(action, kind)]
        self.actions = [action for action in self.actions if not isinstance(action, kind)]
        return found

    def ask(self, number: int, ask: TrainerRequest) -> Any:
        self.give(WorkerEvent(2, self.num_attempts, Request(id=number, ask=ask)))
        commands = [action.command for action in self.take(SendToWorker)]
        return next((c.answer for c in commands if isinstance(c, Reply) and c.id == number), None)

    def attempt(self, rows: int, *, step: int, save: bool = True) -> bool:
        """Starts, trains the next rows of slice 0, commits step, and crashes; False: the job is over instead."""
        for _ in range(100):
            if self.take(StartWorker):
                break
            if self.take(JobFinished):
                return False
            self.now += 1
            self.give(Tick())
        self.num_attempts += 1
        attempt = self.num_attempts
        self.give(WorkerReady(1, attempt))
        assert self.take(StartWorker), "the trainer's turn"
        self.give(WorkerReady(2, attempt))
        done = dict(self.ask(1, epoch_request(SIZES)).done)
        if save:
            spans = ((0, 0, done.get(0, 0), rows),) if rows else ()
            reply = self.ask(2, CursorRequest(step=step, epoch=0, spans=spans, skipped=()))
            self.ask(3, CommitRequest(step=step, draft=f"/d/{reply.draft}", seconds=1.0))
            [commit] = self.take(Commit)
            self.give(CommitFinished(commit, path=f"/c/step-{step}"))
        for session in (2, 1):
            self.give(WorkerExited(session, attempt, 1))
            self.give(Available(session, 8000 + session))
        return True


def count(job: Job, plan: list[tuple[int, int]], *, save: bool = True) -> int:
    for rows, step in plan:
        if not job.attempt(rows, step=step, save=save):
            break
    return job.num_attempts


def test_saving_again_what_was_restored_is_no_progress() -> None:
    """Else a job that fails after its last step would be started again for ever."""
    job = Job(max_restarts=2)
    assert count(job, [(10, 1), *[(0, 1)] * 9]) == 1 + 2
    assert job.control.outcome.exit_code == 75


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_without_checkpoints_restarts_are_those_allowed(max_restarts: int) -> None:
    assert count(Job(max_restarts), [(0, 0)] * 9, save=False) == 1 + max_restarts


def test_every_row_further_begins_the_count_anew() -> None:
    job = Job(max_restarts=1)
    assert count(job, [(4, step) for step in range(1, 9)]) == 8, "each attempt got four rows further"


def test_a_pause_of_progress_is_counted_from_the_last_row() -> None:
    job = Job(max_restarts=2)
    assert count(job, [(4, 1), (0, 1), (4, 2), (0, 2), (0, 2), (0, 2), (0, 2)]) == 3 + 2
