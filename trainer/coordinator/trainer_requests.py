"""What trainers ask the coordinator for, and what becomes of it: epochs, leases, and checkpoints from cursor to commit.

It holds the books (row_ledger.py) and knows what is saved. It says when an attempt cannot go on; ending it is for
`state_machine.JobStateMachine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlewheel.trainer.coordinator.failure_causes import Cause, Severity
from paddlewheel.trainer.coordinator.members import Member, Membership
from paddlewheel.trainer.coordinator.messages import (
    CheckpointDone,
    Commit,
    CommitFinished,
    Discard,
    HostRequest,
    Outbox,
    Role,
    RoleRank,
    SendToWorker,
)
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.records import CommitFailed, EpochBegan
from paddlewheel.trainer.coordinator.resume import StartPoint, identity
from paddlewheel.trainer.coordinator.row_ledger import RowLedger, RowLedgerError, runs_of
from paddlewheel.trainer.protocol.messages import (
    CommitRequest,
    Committed,
    CursorReply,
    CursorRequest,
    EpochReply,
    EpochRequest,
    HostAnswer,
    HostOrder,
    HostsReply,
    HostsRequest,
    LeaseReply,
    LeaseRequest,
    NotCommitted,
    Refusal,
    Reply,
    Request,
    SaveCheckpoint,
    SaveFailed,
    TrainerReply,
)


@dataclass
class CheckpointState:
    """What the status tells of checkpoints."""

    state: str = "idle"
    """idle, asked, saving or committing."""
    step: int = -1
    path: str = ""
    committed_at: float = 0.0
    seconds: float = 0.0
    num_committed: int = 0
    num_failed: int = 0


class Requests:
    """Answers trainers, and carries a checkpoint from the wish for it to its commit.

    Args:
        plan: the job.
        members: where answers go.
        outbox: takes the answers and orders.
        start: where training begins.
        now: as of `JobStateMachine`.
    """

    def __init__(self, plan: JobPlan, members: Membership, outbox: Outbox, start: StartPoint, now: float) -> None:
        self._plan, self._members, self._outbox = plan, members, outbox
        self.restore = start.path or plan.restore
        """Where the next attempt begins: the newest checkpoint."""
        self.checkpoint = CheckpointState()
        if start.path and start.cursor:
            self.checkpoint = CheckpointState(step=start.cursor["step"], path=start.path, committed_at=now)
        facts: dict[str, Any] = {"job": identity(plan.job)}
        if plan.days is not None:
            facts["days"] = list(plan.days)
        self._facts = facts
        self._ledger = RowLedger(plan.job.cluster.trainers, plan.num_epochs, start.cursor, facts)
        self._attempt = 0
        self._asking: dict[int, int] = {}  # the number of each trainer's request for the cursor that is under way
        self._hosts: tuple[int, dict[int, HostAnswer]] | None = None  # request of trainer 0; answers by server
        self._committing: Commit | None = None
        self._commit_request: tuple[int, int] | None = None  # attempt and number of trainer 0's request
        self._due_at: float | None = None

    # -- an attempt's begin and end

    def begin(self, attempt: int) -> None:
        """An attempt begins; nobody finishes the drafts of the one before."""
        self._attempt = attempt
        if self._plan.mode == "train" and attempt > 1:
            self._outbox.do(Discard(f".step-*-attempt-{attempt - 1}-draft-*"))
        self._ledger.begin(attempt)
        self._asking, self._hosts, self.checkpoint.state = {}, None, "idle"

    def go_back(self, start: StartPoint, now: float) -> None:
        """The checkpoint to begin with was damaged: the next attempt begins with another one, or with nothing."""
        self.restore = start.path
        state = self.checkpoint
        state.step, state.path, state.committed_at = -1, "", 0.0
        if start.path and start.cursor:
            state.step, state.path, state.committed_at = start.cursor["step"], start.path, now
        self._ledger = RowLedger(self._plan.job.cluster.trainers, self._plan.num_epochs, start.cursor, self._facts)
        for note in start.notes:
            self._outbox.note("warning", note)

    def lose(self) -> None:
        """The attempt is lost. A commit that has begun is not."""
        if self.checkpoint.state in {"asked", "saving"}:
            error = f"attempt {self._attempt} was lost before it was saved"
            self._outbox.do(CheckpointDone(error=error))
        if self._committing is None:
            self.checkpoint.state = "idle"

    def end(self) -> None:
        """The job is over."""
        if self.checkpoint.state != "idle":
            self._outbox.do(CheckpointDone(error="the job is over"))
            self.checkpoint.state = "idle"

    @property
    def is_saving(self) -> bool:
        """Whether trainers are at a checkpoint, or the coordinator."""
        return self.checkpoint.state in {"saving", "committing"}

    @property
    def is_committing(self) -> bool:
        """Whether a commit is under way, which outlives its attempt."""
        return self._committing is not None

    @property
    def committed_draft(self) -> str | None:
        """The name under which the newest checkpoint was made; None before the first."""
        cursor = self._ledger.cursor
        return str(cursor["draft"]) if cursor else None

    @property
    def committed_rows(self) -> int:
        """Rows that the newest checkpoint has seen."""
        cursor = self._ledger.cursor
        return int(cursor["rows"]) if cursor else 0

    # -- when to save

    def plan_next_checkpoint(self, now: float) -> None:
        """The time until the next checkpoint by the clock counts from now."""
        minutes = self._plan.job.checkpoint.every_minutes if self._plan.mode == "train" else None
        self._due_at = now + 60.0 * minutes if minutes is not None else None

    def is_due(self, now: float) -> bool:
        """Whether the clock asks for a checkpoint. Says so once; the time is set anew when that one is settled."""
        if self._due_at is None or now < self._due_at:
            return False
        self._due_at = None
        return True

    def ask_for_checkpoint(self) -> None:
        """Has the trainers save, unless they are at it."""
        first = self._members.first_trainer
        if self.checkpoint.state == "idle" and first.has_worker:
            self.checkpoint.state = "asked"
            self._outbox.do(SendToWorker(first.agent, self._attempt, SaveCheckpoint()))

    # -- requests

    def answer(self, member: Member, request: Request, now: float) -> Cause | None:
        """Answers a request, now or when the others are as far; returns what ends the attempt, if that does."""
        try:
            if member.role_rank.role is not Role.TRAINER:
                raise RowLedgerError("only trainers ask")
            match request.ask:
                case EpochRequest() as asked:
                    self._open_epoch(member, request.id, asked)
                case LeaseRequest(epoch=epoch):
                    slices = self._ledger.lease(member.role_rank.rank, epoch)
                    self._reply(member, request.id, LeaseReply(slices=tuple(slices)))
                case CursorRequest() as asked:
                    self._report_cursor(member, request.id, asked)
                case HostsRequest(order=order):
                    self._ask_hosts(member, request.id, order)
                case CommitRequest() | SaveFailed() as asked:
                    return self._commit(member, request.id, asked, now)
        except RowLedgerError as error:
            self._outbox.note("error", f"{member.role_rank}: {error}")
            self._reply(member, request.id, Refusal(error=str(error), kind=error.kind))
        return None

    def take_host_response(self, server: Member, answer: HostAnswer) -> None:
        """What the agent of a server has made of trainer 0's order; trainer 0 hears when all have answered."""
        if self._hosts is None or server.role_rank.role is not Role.PSERVER:
            return
        number, answers = self._hosts
        answers[server.role_rank.rank] = answer
        if len(answers) == self._plan.job.cluster.servers:
            self._hosts = None
            by_rank = tuple(answers[rank] for rank in sorted(answers))
            self._reply(self._members.first_trainer, number, HostsReply(answers=by_rank))

    def commit_finished(self, event: CommitFinished, now: float) -> Cause | None:
        """What became of a commit; returns what ends the attempt, if that does."""
        cursor, first = event.commit.cursor, self._members.first_trainer
        committed = not event.error
        self._ledger.commit_finished(cursor, committed=committed)
        self._committing = None
        state = self.checkpoint
        if committed:
            self.restore = event.path
            state.step, state.path, state.committed_at = cursor.step, event.path, now
            state.seconds, state.num_committed = event.commit.seconds, state.num_committed + 1
            self._outbox.note("info", f"checkpoint of step {cursor.step} committed: {event.path}")
            self._outbox.do(CheckpointDone(cursor.step, event.path))
        else:
            state.num_failed += 1
            self._outbox.do(Discard(cursor.draft))
            self._outbox.note(
                "error",
                f"no checkpoint of step {cursor.step}: {event.error}",
                CommitFailed(attempt=self._attempt, step=cursor.step, error=event.error),
            )
            self._outbox.do(CheckpointDone(cursor.step, error=event.error))
        request, self._commit_request = self._commit_request, None
        if request is None or request[0] != self._attempt:
            return None
        state.state = "idle"
        self.plan_next_checkpoint(now)
        if committed:
            self._reply(first, request[1], Committed(path=event.path))
            return None
        on_failure = self._plan.job.checkpoint.on_failure
        stop = event.is_for_good or self._ledger.is_last(cursor) or on_failure == "stop"
        self._reply(first, request[1], NotCommitted(error=event.error, stop=stop))
        text = f"could not save the checkpoint of step {cursor.step}: {event.error}"
        weight = Severity.FIX_JOB if event.is_for_good else Severity.LOSS
        return Cause(weight, text, first.role_rank) if stop else None

    def _open_epoch(self, member: Member, number: int, asked: EpochRequest) -> None:
        done, plan = self._ledger.open_epoch(asked)
        self._reply(member, number, EpochReply(done=tuple(sorted(done.items()))))
        if plan is None:
            return
        days, epoch = self._plan.days, asked.epoch
        left = plan.num_rows - sum(done.values())
        rows = f"{left:,} of {plan.num_rows:,} rows" if done else f"{left:,} rows"
        record = EpochBegan(
            attempt=self._attempt,
            epoch=epoch,
            fingerprint=plan.fingerprint,
            order=plan.order,
            seed=plan.seed,
            slices=runs_of(plan.sizes),
            day=days[epoch] if days is not None else None,
        )
        what = f"epoch {epoch + 1}" if record.day is None else f"day {epoch + 1} ({record.day})"
        self._outbox.note("info", f"{what} of {self._plan.num_epochs} begins: {rows} to train", record)

    def _report_cursor(self, member: Member, number: int, asked: CursorRequest) -> None:
        self._asking[member.role_rank.rank] = number
        if self.checkpoint.state in {"idle", "asked"}:
            self.checkpoint.state = "saving"
        cursor = self._ledger.report(member.role_rank.rank, asked)
        if cursor is None:
            return
        asking, self._asking = self._asking, {}
        reply = CursorReply(cursor=dict(cursor.body), draft=cursor.draft)
        for rank, its_number in asking.items():
            self._reply(self._members[RoleRank(Role.TRAINER, rank)], its_number, reply)

    def _ask_hosts(self, member: Member, number: int, order: HostOrder) -> None:
        """Passes an order of trainer 0 to the agents of all servers."""
        if self._hosts is not None or member.role_rank.rank != 0:
            raise RowLedgerError("only trainer 0 gives orders to the servers' hosts, one at a time")
        self._hosts = (number, {})
        for server in self._members.of(Role.PSERVER):
            if server.session is not None:
                self._outbox.do(HostRequest(server.session, self._attempt, order))

    def _commit(self, member: Member, number: int, asked: CommitRequest | SaveFailed, now: float) -> Cause | None:
        cursor = self._ledger.pending
        if cursor is None or self._committing is not None or asked.step != cursor.step or member.role_rank.rank != 0:
            raise RowLedgerError("a commit was asked for that fits no cursor")
        self._commit_request = (self._attempt, number)
        if isinstance(asked, SaveFailed):
            error, is_for_good = f"saving failed: {asked.error}", asked.kind == "job"
            return self.commit_finished(CommitFinished(Commit(cursor, 0.0), error=error, is_for_good=is_for_good), now)
        if asked.draft.rstrip("/").rpartition("/")[2] != cursor.draft:
            raise RowLedgerError(f"the draft {asked.draft} is not {cursor.draft}")
        self.checkpoint.state = "committing"
        self._committing = Commit(cursor, asked.seconds)
        self._outbox.do(self._committing)
        return None

    def _reply(self, member: Member, number: int, answer: TrainerReply) -> None:
        if member.has_worker:
            self._outbox.do(SendToWorker(member.agent, self._attempt, Reply(id=number, answer=answer)))
