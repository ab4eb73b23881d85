"""The coordinator's decisions as a pure state machine: events and the time go in, actions come out. No gRPC, no clock.

Seats and incarnations. A job has S server seats and T trainer seats; an agent that joins takes one. As soon as every
seat's agent is there and has no child, an *incarnation* opens: servers start, and when all are ready, the trainers.

    GATHERING -> SERVERS -> TRAINERS -> RUNNING -> DRAINING -> OVER       every trainer has left with code 0
                    |           |          |--> STOPPING -> DRAINING -> OVER        someone asked for an ordered stop
                    +-----------+----------+--> HALTING -> GATHERING (after a pause) or OVER      something was lost

In HALTING every child is ended; what is heard meanwhile helps to tell the cause from its consequences (causes.py).
"""

from __future__ import annotations

import enum
import math
import signal
from dataclasses import replace
from typing import Any

from paddlewheel.trainer.coordinator import failure_causes
from paddlewheel.trainer.coordinator.failure_causes import IN_ORDER, Cause, Causes, Weight
from paddlewheel.trainer.coordinator.members import ChildState, Seat, Seats
from paddlewheel.trainer.coordinator.messages import (
    Action,
    Available,
    CheckpointAsked,
    CheckpointDone,
    ChildExited,
    ChildReady,
    ChildSaid,
    ChildStarted,
    Drop,
    Event,
    Examine,
    Examined,
    Finish,
    Heard,
    HostAnswered,
    Joined,
    Leaving,
    Left,
    Outbox,
    Outcome,
    Over,
    Refuse,
    Role,
    Settled,
    StartChild,
    StopChild,
    StopRequested,
    TellChild,
    Tick,
    Welcome,
)
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.resume import Start
from paddlewheel.trainer.coordinator.trainer_requests import CheckpointState, Requests
from paddlewheel.trainer.job.exit_codes import EXIT_DONE, EXIT_FIX_JOB, EXIT_RETRY, describe_exit


class Phase(str, enum.Enum):
    """Where the job stands; see the module's picture."""

    GATHERING = "gathering"
    SERVERS = "starting servers"
    TRAINERS = "starting trainers"
    RUNNING = "running"
    STOPPING = "stopping"
    DRAINING = "draining"
    HALTING = "halting"
    OVER = "over"

    def __str__(self) -> str:
        return self.value


class Control:
    """Decides everything about one job. `handle` is the only way in; the public attributes are for the status.

    Args:
        plan: the job.
        now: seconds of the clock that `handle` is told.
        start: where training begins.
        incarnation: of the run before; its numbers are not used again.
        version: of paddlewheel, which agents must have too; None: theirs does not matter.
    """

    def __init__(
        self,
        plan: JobPlan,
        now: float,
        start: Start | None = None,
        incarnation: int = 0,
        version: str | None = None,
    ) -> None:
        self.plan = plan
        self._version = version
        self.limits = plan.control
        self.seats = Seats(plan.num_servers, plan.num_trainers)
        self.phase = Phase.GATHERING
        self.incarnation = incarnation
        self.num_restarts = 0
        self.result: dict[str, Any] | None = None
        self.outcome: Outcome | None = None
        self._outbox = Outbox()
        self._requests = Requests(plan, self.seats, self._outbox, start or Start(), now)
        self._load_seconds: float | None = None  # of this incarnation's restore
        self._since = now  # when the phase began
        self._not_before = now  # end of the pause before the next incarnation
        self._num_fruitless = 0  # restarts in a row without a checkpoint of more rows than it began with
        self._rows_at_start = 0  # of the checkpoint that this incarnation began with
        self._causes = Causes()
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
            seat = self.seats.of_session(getattr(event, "session", None))
            if seat is not None:
                seat.heard_at = now
            self._dispatch(event, seat, now)
            self._advance(now)
        return self._outbox.take()

    @property
    def progress(self) -> dict[str, Any]:
        """Trainer 0's last progress event."""
        return self.seats.first_trainer.progress

    @property
    def checkpoint(self) -> CheckpointState:
        """What is known of checkpoints."""
        return self._requests.checkpoint

    @property
    def committed_draft(self) -> str | None:
        """The name under which the model's newest checkpoint was made; None before the first."""
        draft: str | None = self._requests.starting_point["parent"]
        return draft

    # -- events

    def _dispatch(self, event: Event, seat: Seat | None, now: float) -> None:  # noqa: C901, PLR0912 -- one line for each event
        match event:
            case Joined():
                self._join(event, now)
            case StopRequested():
                self._request_stop(event, now)
            case CheckpointAsked():
                self._ask_for_checkpoint()
            case Settled():
                self._settled(event, now)
            case Examined():
                self._examined(event, now)
            case Tick():
                self._watch(now)
            case _ if seat is None:
                pass  # a session without a seat: refused, dropped, or replaced
            case Left():
                self._lose(seat, "lost its agent (the connection broke)", now)
            case Leaving(signal=number):
                self._request_stop(
                    StopRequested(f"{seat.member} was sent {signal.Signals(number).name}", 128 + number), now
                )
            case Available(port=port):
                seat.port, seat.available, seat.child_pid = port, True, 0
            case Heard():
                seat.hear(event)
                if seat.num_stopped_heartbeats == 2 and seat.has_child:
                    self._fail(Cause(Weight.LOSS, "is stopped (SIGSTOP or a debugger)", seat.member), now)
            case ChildStarted() | ChildReady() | ChildSaid() | ChildExited() | HostAnswered() if (
                event.incarnation != self.incarnation
            ):
                pass
            case HostAnswered(answer=answer):
                self._requests.take_host_answer(seat, answer)
            case ChildStarted(pid=pid):
                seat.child_pid = pid
            case ChildReady(identity=identity):
                seat.identity = identity
                seat.child_ready(now)
            case ChildSaid(event=said):
                self._child_said(seat, said, now)
            case ChildExited():
                self._child_exited(seat, event, now)

    def _join(self, event: Joined, now: float) -> None:
        if self._version is not None and event.version != self._version:
            reason = (
                f"its paddlewheel is {event.version or 'of an unknown version'}, the coordinator's {self._version}:"
                " install the same version on every machine of the job"
            )
            self._note("error", f"a {event.role} on {event.host} gets no seat: {reason}")
            self._do(Refuse(event.session, reason, EXIT_FIX_JOB))
            return
        seat = self.seats.place(event, now)
        if isinstance(seat, Refuse):
            self._do(seat)
            return
        self._do(Welcome(event.session, seat.member.rank))
        self._note("debug", f"{seat.member} is there: process {event.pid} on {event.host}")

    def _child_said(self, seat: Seat, said: dict[str, Any], now: float) -> None:
        kind = said.get("event")
        if kind == "ready":
            if seat is self.seats.first_trainer:
                self._load_seconds = said.get("load_seconds")
            seat.child_ready(now)
        elif kind == "progress":
            seat.take_progress(said, now)
        elif kind == "phase":
            seat.child_phase, seat.moved_at = str(said.get("phase", "")), now
        elif kind == "result":
            seat.moved_at = now
            if seat.member.rank == 0:
                self.result = said
        elif kind == "error":
            self._fail(failure_causes.of_error(seat, said), now)
        elif kind == "signal" and not said.get("asked"):
            self._signalled(seat, str(said.get("signal")), now)
        elif kind in {"day", "boundary"}:
            seat.moved_at = now
            record = {**said, "what": kind, "incarnation": self.incarnation}
            del record["event"]
            self._note("info", _sentence_of_day(said) if kind == "day" else _sentence_of_boundary(said), record)
        elif kind == "log":
            level = str(said.get("level", "info"))
            self._note(level, f"{seat.member}: {said.get('message', '')}")
        elif kind == "request":
            seat.moved_at = now
            if self.phase is not Phase.HALTING:  # its child, about to be ended, would report a refusal as an error
                self._end_if(self._requests.answer(seat, said, now), now)

    def _signalled(self, seat: Seat, name: str, now: float) -> None:
        """Somebody but its agent told a server to stop. It will end in order, which tells nothing of why."""
        cause = Cause(Weight.LOSS, f"was sent {name} by somebody, and stopped", seat.member)
        if self.phase is Phase.HALTING:
            self._causes.add(cause)
        elif self.phase not in {Phase.STOPPING, Phase.DRAINING} and self.result is None:
            self._fail(cause, now)

    def _settled(self, event: Settled, now: float) -> None:
        if not event.error and event.commit.cursor.body["rows"] > self._rows_at_start:
            self._num_fruitless = 0
        cause = self._requests.settle(event, now)
        if self.phase is not Phase.HALTING:
            self._end_if(cause, now)

    def _ask_for_checkpoint(self) -> None:
        doing = self.seats.first_trainer.child_phase
        if self.plan.mode != "train" or self.phase is not Phase.RUNNING or doing == "evaluating":
            self._do(CheckpointDone(error=f"the job is not training (it is {doing or self.phase})"))
        else:
            self._requests.ask_for_checkpoint()

    def _child_exited(self, seat: Seat, event: ChildExited, now: float) -> None:
        seat.child = ChildState.ENDED
        in_order = event.code in IN_ORDER
        if self.phase is Phase.HALTING:
            has_spoken = self._causes.has_heard_of(seat.member)  # its end then tells nothing new
            if not event.expected and not has_spoken and (not in_order or seat.member.role is Role.PSERVER):
                self._causes.add(failure_causes.of_exit(seat, event))
            self._causes.add_detail(seat.member, event.log_tail)
        elif seat.member.role is Role.TRAINER:
            leaving = self.phase in {Phase.STOPPING, Phase.DRAINING}
            if (
                event.code == EXIT_DONE
                and self.phase is Phase.RUNNING
                and seat.member.rank == 0
                and self.result is None
            ):
                self._fail(Cause(Weight.CRASH, "ended without a result", seat.member, event.log_tail), now)
            elif not (leaving and (in_order or event.expected)) and event.code != EXIT_DONE:
                self._fail(failure_causes.of_exit(seat, event), now)
            elif self.phase in {Phase.SERVERS, Phase.TRAINERS}:
                self._fail(Cause(Weight.CRASH, "ended before it was ready", seat.member, event.log_tail), now)
        elif self.phase is Phase.DRAINING:
            if not in_order and not event.expected:
                self._note(
                    "warning", f"{seat.member} {describe_exit(event.code)} when it was to stop; training was over"
                )
        elif in_order and self.result is not None:
            pass  # stopped by a trainer at the end of its work
        elif not in_order or self.phase is not Phase.STOPPING:
            self._fail(failure_causes.of_exit(seat, event), now)

    def _request_stop(self, request: StopRequested, now: float) -> None:
        if self._stop is not None or self.phase in {Phase.DRAINING, Phase.HALTING}:
            self._stop = self._stop or request
            return
        self._stop = request
        self._note("warning", f"stopping the job: {request.reason}", {"what": "stop", "reason": request.reason})
        if self.phase is Phase.RUNNING:
            self._enter(Phase.STOPPING, now)
            for seat in self.seats.of(Role.TRAINER):
                if seat.has_child:
                    line = {"command": "stop", "checkpoint": self.plan.mode == "train"}
                    self._do(TellChild(seat.agent, self.incarnation, line))
        else:
            self._halt(now)

    # -- time

    def _watch(self, now: float) -> None:
        pause = now - self._last_tick
        self._last_tick = now
        if pause > self.limits.silence_seconds / 2:
            # It was the coordinator that slept (stopped, or the machine was): nobody could be heard meanwhile.
            for seat in self.seats.values():
                seat.heard_at += pause
                seat.moved_at += pause
        for seat in self.seats.values():
            if seat.session is not None and now - seat.heard_at > self.limits.silence_seconds:
                self._do(Drop(seat.session))
                self._lose(seat, f"sent no heartbeat for {self.limits.silence_seconds:g} s", now)
        if self.phase in {Phase.SERVERS, Phase.TRAINERS, Phase.RUNNING}:
            for seat in self.seats.values():
                training = self.phase is Phase.RUNNING
                self._end_if(failure_causes.of_delay(seat, self.seats, self.limits, now, training=training), now)
        if (
            self.phase is Phase.RUNNING
            and self.seats.first_trainer.child_phase != "evaluating"
            and self._requests.is_due(now)
        ):
            self._ask_for_checkpoint()
        if self.phase is Phase.GATHERING and now - max(self._since, self._not_before) > self.limits.gather_seconds:
            missing = ", ".join(str(m) for m, seat in self.seats.items() if not seat.available)
            self._fail(
                Cause(Weight.LOSS, f"not all roles came within {self.limits.gather_seconds:g} s; missing: {missing}"),
                now,
            )

    def _lose(self, seat: Seat, how: str, now: float) -> None:
        had_child = seat.has_child
        seat.lose_agent()
        if self.phase is Phase.GATHERING or (not had_child and self.phase in {Phase.DRAINING, Phase.STOPPING}):
            self._note("warning", f"{seat.member} {how}")
        elif self.phase is Phase.DRAINING:
            self._note("warning", f"{seat.member} {how}; training was over")
        elif self.phase is Phase.HALTING:
            if had_child:
                self._causes.add(Cause(Weight.LOSS, how, seat.member))
        else:
            self._fail(Cause(Weight.LOSS, how, seat.member), now)

    # -- transitions

    def _advance(self, now: float) -> None:
        """Moves on from the phase if it is complete or its time is up; more than once if need be."""
        steps = {
            Phase.GATHERING: self._leave_gathering,
            Phase.SERVERS: self._leave_servers,
            Phase.TRAINERS: self._leave_trainers,
            Phase.RUNNING: self._leave_running,
            Phase.STOPPING: self._leave_stopping,
            Phase.DRAINING: self._leave_draining,
            Phase.HALTING: self._leave_halting,
        }
        before: Phase | None = None
        while before is not self.phase and self.phase is not Phase.OVER:
            before = self.phase
            steps[before](now)

    def _leave_gathering(self, now: float) -> None:
        if (
            now >= self._not_before
            and not self._requests.is_committing
            and all(seat.available for seat in self.seats.values())
        ):
            self._open(now)

    def _leave_servers(self, now: float) -> None:
        if all(seat.child is ChildState.READY for seat in self.seats.of(Role.PSERVER)):
            self._start_trainers(now)

    def _leave_trainers(self, now: float) -> None:
        if all(seat.child is ChildState.READY for seat in self.seats.of(Role.TRAINER)):
            self._enter(Phase.RUNNING, now)
            for seat in self.seats.of(Role.TRAINER):
                seat.moved_at = now
            self._requests.plan_next_checkpoint(now)
            record = {"what": "running", "incarnation": self.incarnation, "load_seconds": self._load_seconds}
            self._note("info", f"all {self.plan.num_trainers} trainers are ready", record)

    def _leave_running(self, now: float) -> None:
        if all(seat.child is ChildState.ENDED for seat in self.seats.of(Role.TRAINER)):
            self._drain(now)

    def _leave_stopping(self, now: float) -> None:
        late = [str(seat.member) for seat in self.seats.of(Role.TRAINER) if seat.has_child]
        if not late:
            self._drain(now)
            return
        saving_seconds = self.limits.stop_save_seconds if self._requests.is_saving else 0
        if now - self._since > self.limits.stop_seconds + saving_seconds:
            limit = f"{now - self._since:.0f} s"
            self._note("warning", f"{', '.join(late)} did not stop within {limit} and will be killed")
            self._halt(now)

    def _leave_draining(self, now: float) -> None:
        if self._all_gone(now, self.limits.drain_seconds):
            stop = self._stop if self.result is None else None
            self._finish(Outcome(stop.exit_code, stop.reason) if stop else Outcome(EXIT_DONE))

    def _leave_halting(self, now: float) -> None:
        if self._doubt is None and self._all_gone(now, self.limits.halt_seconds):
            self._settle(now)

    def _open(self, now: float) -> None:
        self.incarnation += 1
        self._causes = Causes()
        self.result = None
        self._requests.begin(self.incarnation)
        self._rows_at_start = self._requests.starting_point["rows"]
        self._enter(Phase.SERVERS, now)
        restore = self._requests.restore
        restored = f", from {restore}" if restore else ""
        num_servers, num_trainers = self.plan.num_servers, self.plan.num_trainers
        self._note(
            "info",
            f"incarnation {self.incarnation} begins: {num_servers} servers, {num_trainers} trainers{restored}",
            {
                "what": "incarnation",
                "incarnation": self.incarnation,
                **self._requests.starting_point,
                "num_servers": num_servers,
                "num_trainers": num_trainers,
            },
        )
        for seat in self.seats.values():
            seat.progress = {}
        endpoints = self.seats.server_endpoints
        for seat in self.seats.of(Role.PSERVER):
            self._start(seat, self.plan.server_spec(endpoints, seat.member.rank, self.incarnation, restore), now)

    def _start_trainers(self, now: float) -> None:
        self._enter(Phase.TRAINERS, now)
        self._note("info", f"all {self.plan.num_servers} servers are ready")
        endpoints, first = self.seats.server_endpoints, self.seats.first_trainer
        restore = self._requests.restore
        store = f"{first.host}:{first.port}"
        identities = [seat.identity for seat in self.seats.of(Role.PSERVER)]
        for seat in self.seats.of(Role.TRAINER):
            spec = self.plan.trainer_spec(endpoints, store, seat.member.rank, self.incarnation, restore)
            spec["server_identities"] = identities
            self._start(seat, spec, now)

    def _start(self, seat: Seat, spec: dict[str, Any], now: float) -> None:
        seat.start_child(now)
        self._do(StartChild(seat.agent, self.incarnation, spec))

    def _drain(self, now: float) -> None:
        self._enter(Phase.DRAINING, now)
        for seat in self.seats.values():
            if seat.has_child:
                self._do(StopChild(seat.agent, self.incarnation, self.limits.drain_seconds))

    def _fail(self, cause: Cause, now: float) -> None:
        if self.phase is not Phase.HALTING:
            self._note("error", cause.sentence)
        self._causes.add(cause)
        self._halt(now)

    def _end_if(self, cause: Cause | None, now: float) -> None:
        if cause is not None:
            self._fail(cause, now)

    def _halt(self, now: float) -> None:
        if self.phase is Phase.HALTING:
            return
        self._enter(Phase.HALTING, now)
        self._requests.lose()
        for seat in self.seats.values():
            if seat.has_child:
                self._do(StopChild(seat.agent, self.incarnation, self.limits.halt_seconds))

    def _all_gone(self, now: float, grace_seconds: float) -> bool:
        """Whether no child is left. An agent that has not ended its child well after the grace is lost."""
        if now - self._since > grace_seconds + self.limits.silence_seconds:
            for seat in self.seats.values():
                if seat.session is not None and seat.has_child:
                    self._do(Drop(seat.session))
                    self._lose(seat, "did not end its child when told to", now)
        return not self._requests.is_committing and not any(seat.has_child for seat in self.seats.values())

    def _settle(self, now: float) -> None:
        """After HALTING: says why, and decides whether to start again."""
        cause = self._causes.best
        if self._stop is not None:
            detail = f"{cause.sentence}\n{cause.detail}".strip() if cause else ""
            self._finish(Outcome(self._stop.exit_code, self._stop.reason, detail=detail))
            return
        assert cause is not None, "halted without a cause"
        culprit = str(cause.member) if cause.member else ""
        record = {
            "what": "lost",
            "incarnation": self.incarnation,
            "culprit": culprit,
            "cause": cause.sentence,
            "halting_seconds": now - self._since,
            "step": self.progress.get("step", 0),
            "rows": self.progress.get("rows", 0),
        }
        self._note("debug", f"incarnation {self.incarnation} is lost: {cause.sentence}", record)
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
            cause = replace(cause, weight=Weight.LOSS)
        elif event.start.path != self._requests.restore:
            self._requests.go_back(event.start, now)
            cause = replace(cause, weight=Weight.LOSS)
        self._go_on_or_end(cause, now)

    def _go_on_or_end(self, cause: Cause, now: float) -> None:
        culprit = str(cause.member) if cause.member else ""
        if cause.weight is Weight.FIX_JOB:
            self._finish(Outcome(EXIT_FIX_JOB, cause.sentence, culprit, cause.detail))
        elif self._num_fruitless >= self.limits.max_restarts:
            again = f" (after {self.num_restarts} restarts)" if self.num_restarts else ""
            self._finish(Outcome(EXIT_RETRY, cause.sentence + again, culprit, cause.detail))
        else:
            doubled = math.pow(2, min(self._num_fruitless, 64))  # of a thousand there is no float
            pause = min(self.limits.backoff_seconds * doubled, self.limits.max_backoff_seconds)
            self._num_fruitless += 1
            self.num_restarts += 1
            self._not_before = now + pause
            self._note(
                "warning",
                f"incarnation {self.incarnation} is lost ({cause.sentence}); starting again in {pause:g} s"
                f" (restart {self._num_fruitless} of {self.limits.max_restarts} in a row)",
            )
            self._enter(Phase.GATHERING, now)

    def _finish(self, outcome: Outcome) -> None:
        self._requests.end()
        self.phase = Phase.OVER
        self.outcome = outcome
        for seat in self.seats.values():
            if seat.session is not None:
                self._do(Finish(seat.session, outcome.exit_code, outcome.cause))
        self._do(Over(outcome))

    def _handle_after_the_end(self, event: Event) -> None:
        assert self.outcome is not None
        if isinstance(event, Joined):
            self._do(Finish(event.session, self.outcome.exit_code, self.outcome.cause))
        elif isinstance(event, CheckpointAsked):
            self._do(CheckpointDone(error="the job is over"))
        elif isinstance(event, Left):
            seat = self.seats.of_session(event.session)
            if seat is not None:
                seat.session = None

    # -- small things

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now

    def _do(self, action: Action) -> None:
        self._outbox.do(action)

    def _note(self, level: str, text: str, record: dict[str, Any] | None = None) -> None:
        self._outbox.note(level, text, record)


def _sentence_of_day(said: dict[str, Any]) -> str:
    scores = said.get("validation") or {}
    known = {name: scores.get(key) for name, key in (("AUC", "auc"), ("logloss", "logloss"))}
    before = ", ".join(f"{name} {value:.4f}" for name, value in known.items() if isinstance(value, (int, float)))
    tables = said.get("tables") or {}
    keys = ", ".join(f"{name} {found['keys']:,} keys ({found['new']:+,})" for name, found in tables.items())
    return f"day {said.get('day')} is trained: {said.get('rows', 0):,} rows{', ' + before if before else ''}; {keys}"


def _sentence_of_boundary(said: dict[str, Any]) -> str:
    tables = said.get("tables") or {}
    evicted = ", ".join(f"{name} {found['evicted']:,} of {found['before']:,} keys" for name, found in tables.items())
    again = " (again, after a restore)" if said.get("redone") else ""
    after = f"day {said['day']}" if said.get("day") else f"{said.get('rows', 0):,} rows"
    return f"day boundary after {after}{again}; evicted: {evicted}"
