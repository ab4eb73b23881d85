"""The coordinator's decisions as a pure state machine: events and the time go in, actions come out. No gRPC, no clock.

Membership and attempts. A job expects S servers and T trainers as members; an agent that joins becomes one of them.
When every member's agent is present and has no worker, an *attempt* opens: servers start, and when all are ready, the
trainers.

    RENDEZVOUS -> SERVERS -> TRAINERS -> RUNNING -> DRAINING -> OVER       every trainer has left with code 0
                    |           |          |--> STOPPING -> DRAINING -> OVER        someone asked for an ordered stop
                    +-----------+----------+--> ABORTING -> RENDEZVOUS (after a pause) or OVER      something was lost

In ABORTING every worker is ended; what is reported meanwhile helps to tell the cause from its consequences
(failure_causes.py).
"""

from __future__ import annotations

import enum
import math
import signal
from dataclasses import replace
from typing import Any

from paddlewheel.pserver.messages import Remark, ServerSpec, SignalReceived, WorkerError
from paddlewheel.trainer.coordinator import failure_causes
from paddlewheel.trainer.coordinator.failure_causes import IN_ORDER, Cause, FailureAnalysis, Severity
from paddlewheel.trainer.coordinator.members import Member, Membership, WorkerState
from paddlewheel.trainer.coordinator.messages import (
    Action,
    Available,
    CheckpointAsked,
    CheckpointDone,
    CloseSession,
    CommitFinished,
    Event,
    Examine,
    Examined,
    Finish,
    Heartbeat,
    HostResponse,
    JobFinished,
    Joined,
    Leaving,
    Left,
    Outbox,
    Outcome,
    Refuse,
    Role,
    SendToWorker,
    StartWorker,
    StopRequested,
    StopWorker,
    Tick,
    Welcome,
    WorkerEvent,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.records import (
    AttemptLost,
    AttemptOpened,
    BoundaryNoted,
    DayNoted,
    Record,
    StopOrdered,
    TrainersRunning,
)
from paddlewheel.trainer.coordinator.resume import StartPoint
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.coordinator.trainer_requests import CheckpointState, Requests
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE, EXIT_DONE, describe_exit
from paddlewheel.trainer.protocol import messages as protocol


class Phase(str, enum.Enum):
    """Where the job stands; see the module's picture."""

    RENDEZVOUS = "rendezvous"
    SERVERS = "starting_servers"
    TRAINERS = "starting_trainers"
    RUNNING = "running"
    STOPPING = "stopping"
    DRAINING = "draining"
    ABORTING = "aborting"
    OVER = "over"

    def __str__(self) -> str:
        """For messages."""
        return self.value.replace("_", " ")


class JobStateMachine:
    """Decides everything about one job. `handle` is the only way in; the public attributes are for the status.

    Args:
        plan: the job.
        now: seconds of the clock that `handle` is told.
        start: where training begins.
        attempt: of the run before; its numbers are not used again.
        version: of paddlewheel, which agents must have too; None: theirs does not matter.
    """

    def __init__(
        self,
        plan: JobPlan,
        now: float,
        start: StartPoint | None = None,
        attempt: int = 0,
        version: str | None = None,
    ) -> None:
        self.plan = plan
        self._version = version
        self.limits = plan.job.control
        self.members = Membership(plan.job.cluster.servers, plan.job.cluster.trainers)
        self.phase = Phase.RENDEZVOUS
        self.attempt = attempt
        self.num_restarts = 0
        self.result: protocol.Result | None = None
        self.outcome: Outcome | None = None
        self._outbox = Outbox()
        self._requests = Requests(plan, self.members, self._outbox, start or StartPoint(), now)
        self._load_seconds: float | None = None  # of this attempt's restore
        self._since = now  # when the phase began
        self._not_before = now  # end of the pause before the next attempt
        self._num_fruitless = 0  # restarts in a row without a checkpoint of more rows than it began with
        self._rows_at_start = 0  # of the checkpoint that this attempt began with
        self._causes = FailureAnalysis()
        self._stop: StopRequested | None = None
        self._doubt: Cause | None = None  # while the checkpoint is looked at that could not be restored
        self._last_tick = now

    # -- entry

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event that happened at time now (seconds, never going back); returns what to do, in order."""
        self._outbox.take()  # nothing is sent of an event that raised
        if self.phase is Phase.OVER:
            self._handle_after_the_end(event)
        else:
            member = self.members.of_session(getattr(event, "session", None))
            if member is not None:
                member.heard_at = now
            self._dispatch(event, member, now)
            self._advance(now)
        return self._outbox.take()

    @property
    def progress(self) -> protocol.Progress | None:
        """Trainer 0's last progress event."""
        return self.members.first_trainer.progress

    @property
    def checkpoint(self) -> CheckpointState:
        """What is known of checkpoints."""
        return self._requests.checkpoint

    @property
    def committed_draft(self) -> str | None:
        """The name under which the model's newest checkpoint was made; None before the first."""
        return self._requests.committed_draft

    # -- events

    def _dispatch(self, event: Event, member: Member | None, now: float) -> None:  # noqa: C901, PLR0912 -- one line for each event
        match event:
            case Joined():
                self._join(event, now)
            case StopRequested():
                self._request_stop(event, now)
            case CheckpointAsked():
                self._ask_for_checkpoint()
            case CommitFinished():
                self._commit_finished(event, now)
            case Examined():
                self._examined(event, now)
            case Tick():
                self._watch(now)
            case _ if member is None:
                pass  # a session without a member: refused, dropped, or replaced
            case Left():
                self._lose(member, "lost its agent (the connection broke)", now)
            case Leaving(signal=number):
                self._request_stop(
                    StopRequested(f"{member.role_rank} was sent {signal.Signals(number).name}", 128 + number), now
                )
            case Available(port=port):
                member.port, member.available, member.worker_pid = port, True, 0
            case Heartbeat():
                member.hear(event)
                if member.num_stopped_heartbeats == 2 and member.has_worker:
                    self._fail(Cause(Severity.LOSS, "is stopped (SIGSTOP or a debugger)", member.role_rank), now)
            case WorkerStarted() | WorkerReady() | WorkerEvent() | WorkerExited() | HostResponse() if (
                event.attempt != self.attempt
            ):
                pass
            case HostResponse(answer=answer):
                self._requests.take_host_response(member, answer)
            case WorkerStarted(pid=pid):
                member.worker_pid = pid
            case WorkerReady(server_uid=server_uid):
                member.server_uid = server_uid
                member.worker_ready(now)
            case WorkerEvent(event=said):
                self._take_worker_event(member, said, now)
            case WorkerExited():
                self._worker_exited(member, event, now)

    def _join(self, event: Joined, now: float) -> None:
        if self._version is not None and event.version != self._version:
            reason = (
                f"its paddlewheel is {event.version or 'of an unknown version'}, the coordinator's {self._version}:"
                " install the same version on every machine of the job"
            )
            self._note("error", f"a {event.role} on {event.host} is refused: {reason}")
            self._do(Refuse(event.session, reason, EX_USAGE))
            return
        member = self.members.place(event, now)
        if isinstance(member, Refuse):
            self._do(member)
            return
        self._do(Welcome(event.session, member.role_rank.rank))
        self._note("debug", f"{member.role_rank} is there: process {event.pid} on {event.host}")

    def _take_worker_event(self, member: Member, event: protocol.WorkerEvent, now: float) -> None:
        match event:
            case protocol.Ready():
                if member is self.members.first_trainer:
                    self._load_seconds = event.load_seconds
                member.worker_ready(now)
            case protocol.Progress():
                member.take_progress(event, now)
            case protocol.PhaseChanged(phase=phase):
                member.worker_phase, member.moved_at = phase, now
            case protocol.Result():
                member.moved_at = now
                if member.role_rank.rank == 0:
                    self.result = event
            case WorkerError():
                self._fail(failure_causes.of_error(member, event), now)
            case SignalReceived(signal=name, asked=False):
                self._signalled(member, name, now)
            case protocol.DayTrained():
                member.moved_at = now
                record = DayNoted(attempt=self.attempt, **_fields(event))
                self._note("info", _sentence_of_day(event), record)
            case protocol.Boundary():
                member.moved_at = now
                self._note("info", _sentence_of_boundary(event), BoundaryNoted(attempt=self.attempt, **_fields(event)))
            case Remark():
                self._note(event.level, f"{member.role_rank}: {event.message}")
            case protocol.Request():
                member.moved_at = now
                if (
                    self.phase is not Phase.ABORTING
                ):  # its worker, about to be ended, would report a refusal as an error
                    self._end_if(self._requests.answer(member, event, now), now)

    def _signalled(self, member: Member, name: str, now: float) -> None:
        """Somebody but its agent told a server to stop. It will end in order, which tells nothing of why."""
        cause = Cause(Severity.LOSS, f"was sent {name} by somebody, and stopped", member.role_rank)
        if self.phase is Phase.ABORTING:
            self._causes.add(cause)
        elif self.phase not in {Phase.STOPPING, Phase.DRAINING} and self.result is None:
            self._fail(cause, now)

    def _commit_finished(self, event: CommitFinished, now: float) -> None:
        if not event.error and event.commit.cursor.body["rows"] > self._rows_at_start:
            self._num_fruitless = 0
        cause = self._requests.commit_finished(event, now)
        if self.phase is not Phase.ABORTING:
            self._end_if(cause, now)

    def _ask_for_checkpoint(self) -> None:
        doing = self.members.first_trainer.worker_phase
        if self.plan.mode != "train" or self.phase is not Phase.RUNNING or doing == "evaluating":
            self._do(CheckpointDone(error=f"the job is not training (it is {doing or self.phase})"))
        else:
            self._requests.ask_for_checkpoint()

    def _worker_exited(self, member: Member, event: WorkerExited, now: float) -> None:
        member.worker = WorkerState.ENDED
        in_order = event.code in IN_ORDER
        if self.phase is Phase.ABORTING:
            has_spoken = self._causes.has_heard_of(member.role_rank)  # its end then tells nothing new
            if not event.expected and not has_spoken and (not in_order or member.role_rank.role is Role.PSERVER):
                self._causes.add(failure_causes.of_exit(member, event))
            self._causes.add_detail(member.role_rank, event.log_tail)
        elif member.role_rank.role is Role.TRAINER:
            leaving = self.phase in {Phase.STOPPING, Phase.DRAINING}
            if (
                event.code == EXIT_DONE
                and self.phase is Phase.RUNNING
                and member.role_rank.rank == 0
                and self.result is None
            ):
                self._fail(Cause(Severity.CRASH, "ended without a result", member.role_rank, event.log_tail), now)
            elif not (leaving and (in_order or event.expected)) and event.code != EXIT_DONE:
                self._fail(failure_causes.of_exit(member, event), now)
            elif self.phase in {Phase.SERVERS, Phase.TRAINERS}:
                self._fail(Cause(Severity.CRASH, "ended before it was ready", member.role_rank, event.log_tail), now)
        elif self.phase is Phase.DRAINING:
            if not in_order and not event.expected:
                self._note(
                    "warning", f"{member.role_rank} {describe_exit(event.code)} when it was to stop; training was over"
                )
        elif in_order and self.result is not None:
            pass  # stopped by a trainer at the end of its work
        elif not in_order or self.phase is not Phase.STOPPING:
            self._fail(failure_causes.of_exit(member, event), now)

    def _request_stop(self, request: StopRequested, now: float) -> None:
        if self._stop is not None or self.phase in {Phase.DRAINING, Phase.ABORTING}:
            self._stop = self._stop or request
            return
        self._stop = request
        self._note("warning", f"stopping the job: {request.reason}", StopOrdered(reason=request.reason))
        if self.phase is Phase.RUNNING:
            self._enter(Phase.STOPPING, now)
            for member in self.members.of(Role.TRAINER):
                if member.has_worker:
                    stop = protocol.StopTraining(checkpoint=self.plan.mode == "train")
                    self._do(SendToWorker(member.agent, self.attempt, stop))
        else:
            self._abort(now)

    # -- time

    def _watch(self, now: float) -> None:
        pause = now - self._last_tick
        self._last_tick = now
        if pause > self.limits.heartbeat_timeout_seconds / 2:
            # It was the coordinator that slept (stopped, or the machine was): nobody could be heard meanwhile.
            for member in self.members.values():
                member.heard_at += pause
                member.moved_at += pause
        for member in self.members.values():
            if member.session is not None and now - member.heard_at > self.limits.heartbeat_timeout_seconds:
                self._do(CloseSession(member.session))
                self._lose(member, f"sent no heartbeat for {self.limits.heartbeat_timeout_seconds:g} s", now)
        if self.phase in {Phase.SERVERS, Phase.TRAINERS, Phase.RUNNING}:
            for member in self.members.values():
                training = self.phase is Phase.RUNNING
                self._end_if(failure_causes.of_delay(member, self.members, self.limits, now, training=training), now)
        if (
            self.phase is Phase.RUNNING
            and self.members.first_trainer.worker_phase != "evaluating"
            and self._requests.is_due(now)
        ):
            self._ask_for_checkpoint()
        if (
            self.phase is Phase.RENDEZVOUS
            and now - max(self._since, self._not_before) > self.limits.rendezvous_timeout_seconds
        ):
            missing = ", ".join(str(m) for m, member in self.members.items() if not member.available)
            self._fail(
                Cause(
                    Severity.LOSS,
                    f"not all roles came within {self.limits.rendezvous_timeout_seconds:g} s; missing: {missing}",
                ),
                now,
            )

    def _lose(self, member: Member, how: str, now: float) -> None:
        had_worker = member.has_worker
        member.lose_agent()
        if self.phase is Phase.RENDEZVOUS or (not had_worker and self.phase in {Phase.DRAINING, Phase.STOPPING}):
            self._note("warning", f"{member.role_rank} {how}")
        elif self.phase is Phase.DRAINING:
            self._note("warning", f"{member.role_rank} {how}; training was over")
        elif self.phase is Phase.ABORTING:
            if had_worker:
                self._causes.add(Cause(Severity.LOSS, how, member.role_rank))
        else:
            self._fail(Cause(Severity.LOSS, how, member.role_rank), now)

    # -- transitions

    def _advance(self, now: float) -> None:
        """Moves on from the phase if it is complete or its time is up; more than once if need be."""
        steps = {
            Phase.RENDEZVOUS: self._leave_rendezvous,
            Phase.SERVERS: self._leave_servers,
            Phase.TRAINERS: self._leave_trainers,
            Phase.RUNNING: self._leave_running,
            Phase.STOPPING: self._leave_stopping,
            Phase.DRAINING: self._leave_draining,
            Phase.ABORTING: self._leave_aborting,
        }
        before: Phase | None = None
        while before is not self.phase and self.phase is not Phase.OVER:
            before = self.phase
            steps[before](now)

    def _leave_rendezvous(self, now: float) -> None:
        if (
            now >= self._not_before
            and not self._requests.is_committing
            and all(member.available for member in self.members.values())
        ):
            self._open(now)

    def _leave_servers(self, now: float) -> None:
        if all(member.worker is WorkerState.READY for member in self.members.of(Role.PSERVER)):
            self._start_trainers(now)

    def _leave_trainers(self, now: float) -> None:
        if all(member.worker is WorkerState.READY for member in self.members.of(Role.TRAINER)):
            self._enter(Phase.RUNNING, now)
            for member in self.members.of(Role.TRAINER):
                member.moved_at = now
            self._requests.plan_next_checkpoint(now)
            record = TrainersRunning(attempt=self.attempt, load_seconds=self._load_seconds)
            self._note("info", f"all {self.plan.job.cluster.trainers} trainers are ready", record)

    def _leave_running(self, now: float) -> None:
        if all(member.worker is WorkerState.ENDED for member in self.members.of(Role.TRAINER)):
            self._drain(now)

    def _leave_stopping(self, now: float) -> None:
        late = [str(member.role_rank) for member in self.members.of(Role.TRAINER) if member.has_worker]
        if not late:
            self._drain(now)
            return
        saving_seconds = self.limits.final_checkpoint_timeout_seconds if self._requests.is_saving else 0
        if now - self._since > self.limits.stop_seconds + saving_seconds:
            limit = f"{now - self._since:.0f} s"
            self._note("warning", f"{', '.join(late)} did not stop within {limit} and will be killed")
            self._abort(now)

    def _leave_draining(self, now: float) -> None:
        if self._all_gone(now, self.limits.drain_seconds):
            stop = self._stop if self.result is None else None
            self._finish(Outcome(stop.exit_code, stop.reason) if stop else Outcome(EXIT_DONE))

    def _leave_aborting(self, now: float) -> None:
        if self._doubt is None and self._all_gone(now, self.limits.kill_grace_seconds):
            self._conclude_attempt(now)

    def _open(self, now: float) -> None:
        self.attempt += 1
        self._causes = FailureAnalysis()
        self.result = None
        self._requests.begin(self.attempt)
        self._rows_at_start = self._requests.committed_rows
        self._enter(Phase.SERVERS, now)
        restore = self._requests.restore
        restored = f", from {restore}" if restore else ""
        num_servers, num_trainers = self.plan.job.cluster.servers, self.plan.job.cluster.trainers
        self._note(
            "info",
            f"attempt {self.attempt} begins: {num_servers} servers, {num_trainers} trainers{restored}",
            AttemptOpened(
                attempt=self.attempt,
                restore=restore,
                parent=self._requests.committed_draft,
                rows=self._rows_at_start,
                num_servers=num_servers,
                num_trainers=num_trainers,
            ),
        )
        for member in self.members.values():
            member.progress = None
        endpoints = self.members.server_endpoints
        for member in self.members.of(Role.PSERVER):
            rank = member.role_rank.rank
            staging = self.plan.host_staging(rank, restore)
            self._start(member, self.plan.server_spec(endpoints, rank, self.attempt), now, staging)

    def _start_trainers(self, now: float) -> None:
        self._enter(Phase.TRAINERS, now)
        self._note("info", f"all {self.plan.job.cluster.servers} servers are ready")
        endpoints, first = self.members.server_endpoints, self.members.first_trainer
        restore = self._requests.restore
        store = f"{first.host}:{first.port}"
        server_uids = [member.server_uid for member in self.members.of(Role.PSERVER)]
        for member in self.members.of(Role.TRAINER):
            rank = member.role_rank.rank
            spec = self.plan.trainer_spec(endpoints, server_uids, store, rank, self.attempt, restore)
            self._start(member, spec, now)

    def _start(
        self,
        member: Member,
        spec: ServerSpec | TrainerSpec,
        now: float,
        staging: protocol.HostStaging | None = None,
    ) -> None:
        member.start_worker(now)
        self._do(StartWorker(member.agent, self.attempt, spec, staging))

    def _drain(self, now: float) -> None:
        self._enter(Phase.DRAINING, now)
        for member in self.members.values():
            if member.has_worker:
                self._do(StopWorker(member.agent, self.attempt, self.limits.drain_seconds))

    def _fail(self, cause: Cause, now: float) -> None:
        if self.phase is not Phase.ABORTING:
            self._note("error", cause.sentence)
        self._causes.add(cause)
        self._abort(now)

    def _end_if(self, cause: Cause | None, now: float) -> None:
        if cause is not None:
            self._fail(cause, now)

    def _abort(self, now: float) -> None:
        if self.phase is Phase.ABORTING:
            return
        self._enter(Phase.ABORTING, now)
        self._requests.lose()
        for member in self.members.values():
            if member.has_worker:
                self._do(StopWorker(member.agent, self.attempt, self.limits.kill_grace_seconds))

    def _all_gone(self, now: float, grace_seconds: float) -> bool:
        """Whether no worker is left. An agent that has not ended its worker well after the grace is lost."""
        if now - self._since > grace_seconds + self.limits.heartbeat_timeout_seconds:
            for member in self.members.values():
                if member.session is not None and member.has_worker:
                    self._do(CloseSession(member.session))
                    self._lose(member, "did not end its worker when told to", now)
        return not self._requests.is_committing and not any(member.has_worker for member in self.members.values())

    def _conclude_attempt(self, now: float) -> None:
        """After ABORTING: says why, and decides whether to start again."""
        cause = self._causes.best
        if self._stop is not None:
            detail = f"{cause.sentence}\n{cause.detail}".strip() if cause else ""
            self._finish(Outcome(self._stop.exit_code, self._stop.reason, detail=detail))
            return
        assert cause is not None, "halted without a cause"
        failed_role = str(cause.role_rank) if cause.role_rank else ""
        progress = self.progress
        record = AttemptLost(
            attempt=self.attempt,
            failed_role=failed_role,
            cause=cause.sentence,
            halting_seconds=now - self._since,
            step=progress.step if progress is not None else 0,
            rows=progress.rows if progress is not None else 0,
        )
        self._note("debug", f"attempt {self.attempt} is lost: {cause.sentence}", record)
        restore = self._requests.restore
        if cause.of_restore and self.plan.mode == "train" and restore is not None:
            self._doubt = cause
            self._do(Examine(restore))
        else:
            self._go_on_or_end(cause, now)

    def _examined(self, event: Examined, now: float) -> None:
        """The job is at fault only if the checkpoint is whole: else the one before it is restored."""
        cause, self._doubt = self._doubt, None
        assert cause is not None
        if self._stop is not None:
            self._finish(Outcome(self._stop.exit_code, self._stop.reason, detail=cause.sentence))
            return
        if event.refusal:
            cause = replace(cause, text=f"{cause.text}; {event.refusal}")
        elif event.error:
            self._note("warning", f"{self._requests.restore} cannot be looked at: {event.error}")
            cause = replace(cause, weight=Severity.LOSS)
        elif event.start is not None and event.start.path != self._requests.restore:
            self._requests.go_back(event.start, now)
            cause = replace(cause, weight=Severity.LOSS)
        self._go_on_or_end(cause, now)

    def _go_on_or_end(self, cause: Cause, now: float) -> None:
        failed_role = str(cause.role_rank) if cause.role_rank else ""
        if cause.weight is Severity.FIX_JOB:
            self._finish(Outcome(EX_USAGE, cause.sentence, failed_role, cause.detail))
        elif self._num_fruitless >= self.limits.max_restarts:
            again = f" (after {self.num_restarts} restarts)" if self.num_restarts else ""
            self._finish(Outcome(EX_TEMPFAIL, cause.sentence + again, failed_role, cause.detail))
        else:
            doubled = math.pow(2, min(self._num_fruitless, 64))  # of a thousand there is no float
            pause = min(self.limits.backoff_seconds * doubled, self.limits.max_backoff_seconds)
            self._num_fruitless += 1
            self.num_restarts += 1
            self._not_before = now + pause
            self._note(
                "warning",
                f"attempt {self.attempt} is lost ({cause.sentence}); starting again in {pause:g} s"
                f" (restart {self._num_fruitless} of {self.limits.max_restarts} in a row)",
            )
            self._enter(Phase.RENDEZVOUS, now)

    def _finish(self, outcome: Outcome) -> None:
        self._requests.end()
        self.phase = Phase.OVER
        self.outcome = outcome
        for member in self.members.values():
            if member.session is not None:
                self._do(Finish(member.session, outcome.exit_code, outcome.cause))
        self._do(JobFinished(outcome))

    def _handle_after_the_end(self, event: Event) -> None:
        assert self.outcome is not None
        if isinstance(event, Joined):
            self._do(Finish(event.session, self.outcome.exit_code, self.outcome.cause))
        elif isinstance(event, CheckpointAsked):
            self._do(CheckpointDone(error="the job is over"))
        elif isinstance(event, Left):
            member = self.members.of_session(event.session)
            if member is not None:
                member.session = None

    # -- small things

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now

    def _do(self, action: Action) -> None:
        self._outbox.do(action)

    def _note(self, level: str, text: str, record: Record | None = None) -> None:
        self._outbox.note(level, text, record)


def _fields(event: protocol.DayTrained | protocol.Boundary) -> dict[str, Any]:
    """The event's fields, without its tag, for a record."""
    return {name: value for name, value in event if name != "event"}


def _sentence_of_day(told: protocol.DayTrained) -> str:
    scores = told.validation or {}
    known = {name: scores.get(key) for name, key in (("AUC", "auc"), ("logloss", "logloss"))}
    before = ", ".join(f"{name} {value:.4f}" for name, value in known.items() if isinstance(value, (int, float)))
    keys = ", ".join(f"{name} {table.keys:,} keys ({table.new:+,})" for name, table in told.tables.items())
    return f"day {told.day} is trained: {told.rows:,} rows{', ' + before if before else ''}; {keys}"


def _sentence_of_boundary(told: protocol.Boundary) -> str:
    evicted = ", ".join(f"{name} {table.evicted:,} of {table.before:,} keys" for name, table in told.tables.items())
    again = " (again, after a restore)" if told.redone else ""
    after = f"day {told.day}" if told.day is not None else f"{told.rows:,} rows"
    return f"day boundary after {after}{again}; evicted: {evicted}"
