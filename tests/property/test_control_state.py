"""The coordinator's decisions under thousands of orders of events: simulated agents, random losses, no clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.pserver.messages import WorkerError
from paddlewheel.trainer.coordinator import messages
from paddlewheel.trainer.coordinator.members import WorkerState
from paddlewheel.trainer.coordinator.messages import Role, RoleRank
from paddlewheel.trainer.coordinator.row_ledger import prove
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.coordinator.state_machine import JobStateMachine, Phase
from paddlewheel.trainer.protocol.messages import (
    CommitRequest,
    Committed,
    CursorReply,
    CursorRequest,
    EpochReply,
    LeaseReply,
    LeaseRequest,
    NotCommitted,
    Reply,
    Request,
    Result,
    StopTraining,
    TrainerReply,
    TrainerRequest,
)
from tests.support.plans import epoch_request, plan

LIMITS = {
    "heartbeat_seconds": 0.5,
    "heartbeat_timeout_seconds": 4,
    "rendezvous_timeout_seconds": 1000,
    "startup_timeout_seconds": 50,
    "step_timeout_seconds": 30,
    "max_restarts": 1,
    "backoff_seconds": 1,
}


NUM_EPOCHS = 2
SIZES = {0: 3, 1: 1, 2: 2, 3: 2}


@dataclass
class Worker:
    """What a simulated agent's worker does: starting, ready, then gone. A trainer trains epochs and saves after
    each.
    """

    attempt: int
    epoch: int = 0
    ready: bool = False
    doing: str = "open"
    """open an epoch, train, save, commit (trainer 0) or wait for that (the others), end"""
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    asked: bool = False
    replies: deque[TrainerReply] = field(default_factory=deque)
    num_commits: int = 0


@dataclass
class Agent:
    """A simulated agent: obeys commands one by one; its events wait in a queue until the world delivers them."""

    role_rank: RoleRank
    session: int | None = None
    frozen: bool = False
    finished: int | None = None
    worker: Worker | None = None
    commands: deque[Any] = field(default_factory=deque)
    events: deque[Any] = field(default_factory=deque)


class World:
    """Agents around one JobStateMachine, and checks on everything it does."""

    def __init__(self, num_servers: int, num_trainers: int) -> None:
        self.now = 0.0
        job = plan(num_servers, num_trainers, train={"epochs": NUM_EPOCHS}, control=LIMITS)
        self.control = JobStateMachine(job, self.now)
        role_ranks = [RoleRank(Role.PSERVER, r) for r in range(num_servers)] + [
            RoleRank(Role.TRAINER, r) for r in range(num_trainers)
        ]
        self.agents = [Agent(role_rank) for role_rank in role_ranks]
        self.num_sessions = 0
        self.num_overs = 0
        self.commits: deque[messages.Commit] = deque()
        self.committed: dict[str, Any] = {}  # cursors by draft
        self.newest: str | None = None
        self.stop_asked = False

    # -- what the control does

    def give(self, event: messages.Event) -> None:
        was_over = self.control.phase is Phase.OVER
        actions = self.control.handle(event, self.now)
        for action in actions:
            self._check(action)
            agent = next((a for a in self.agents if a.session == getattr(action, "session", None)), None)
            match action:
                case messages.JobFinished():
                    self.num_overs += 1
                    assert not was_over
                case messages.Commit():
                    assert not self.commits, "two commits at once"
                    self.commits.append(action)
                case messages.Log() | messages.Discard() | messages.CheckpointDone():
                    pass
                case _ if agent is None:
                    assert isinstance(action, (messages.Refuse, messages.Finish)), f"{action} to a session that is gone"
                case messages.Refuse() | messages.CloseSession():
                    self._hang_up(agent)
                case _:
                    agent.commands.append(action)
        assert self.num_overs <= 1

    def _check(self, action: messages.Action) -> None:
        match action:
            case messages.StartWorker(session=session, spec=spec):
                assert not self.commits, "a new attempt before it is known what was committed"
                if isinstance(spec, TrainerSpec):
                    assert spec.restore == self.newest, "not the newest checkpoint"
                agent = next(a for a in self.agents if a.session == session)
                assert not any(isinstance(c, messages.StartWorker) for c in agent.commands), "told twice to start"
                assert agent.worker is None, "told to start a second worker"
                if agent.role_rank.role is Role.TRAINER:
                    servers = list(self.control.members.of(Role.PSERVER))
                    assert all(member.worker is WorkerState.READY for member in servers), "trainers before servers"
            case messages.JobFinished(outcome=outcome):
                self._check_outcome(outcome)

    def _check_outcome(self, outcome: messages.Outcome) -> None:
        trainers = list(self.control.members.of(Role.TRAINER))
        if outcome.exit_code == 0:
            assert self.control.result is not None
            assert all(member.worker is WorkerState.ENDED for member in trainers)
            line, draft = [], self.newest
            while draft is not None:
                line.insert(0, self.committed[draft])
                draft = line[0]["parent"]
            proofs = prove(dict.fromkeys(range(NUM_EPOCHS), SIZES), line)
            assert all(proof.is_exact for proof in proofs), proofs
        else:
            assert outcome.cause
        if outcome.exit_code in {130, 143}:
            assert self.stop_asked
        if outcome.exit_code == 75 and not self.stop_asked:
            assert self.control.num_restarts >= LIMITS["max_restarts"] or "not all roles" in outcome.cause
        # No worker that an agent could still end is left running.
        for agent in self.agents:
            if agent.session is not None and agent.worker is not None:
                member = self.control.members[agent.role_rank]
                assert not member.has_worker

    def _hang_up(self, agent: Agent) -> None:
        """The coordinator closes the agent's stream: the agent ends its worker and exits, to be started again."""
        session = agent.session
        agent.session, agent.worker, agent.frozen = None, None, False
        agent.commands.clear()
        agent.events.clear()
        if session is not None:
            self.give(messages.Left(session))

    # -- what the world does

    def join(self, agent: Agent) -> None:
        if agent.session is None and agent.finished is None:
            self.num_sessions += 1
            agent.session, agent.frozen = self.num_sessions, False
            agent.events.append(messages.Available(agent.session, 7000 + self.num_sessions))
            self.give(messages.Joined(agent.session, agent.role_rank.role, agent.role_rank.rank, "h", 1))

    def obey(self, agent: Agent) -> None:
        if agent.session is None or agent.frozen or not agent.commands:
            return
        match agent.commands.popleft():
            case messages.StartWorker(attempt=attempt):
                epoch = self.committed[self.newest]["position"]["epoch"] if self.newest else 0
                agent.worker = Worker(attempt, epoch, doing="open" if epoch < NUM_EPOCHS else "save")
                agent.events.append(messages.WorkerStarted(agent.session, attempt, 9))
            case messages.StopWorker(attempt=attempt) if agent.worker is not None and agent.worker.attempt == attempt:
                self._end_worker(agent, -9, expected=True)
            case messages.SendToWorker(command=StopTraining()) if agent.worker is not None:
                self._end_worker(agent, 143)
            case messages.SendToWorker(command=Reply(answer=answer)) if agent.worker is not None:
                agent.worker.replies.append(answer)
            case messages.Finish(exit_code=code):
                agent.finished = code
                self._hang_up(agent)

    def _end_worker(self, agent: Agent, code: int, *, expected: bool = False) -> None:
        assert agent.worker is not None
        assert agent.session is not None
        agent.events.append(messages.WorkerExited(agent.session, agent.worker.attempt, code, expected))
        agent.events.append(messages.Available(agent.session, 8000 + agent.session))
        agent.worker = None

    def deliver(self, agent: Agent) -> None:
        if agent.session is not None and not agent.frozen and agent.events:
            self.give(agent.events.popleft())

    def work(self, agent: Agent) -> None:
        """The worker gets ready, then makes steps; a trainer ends after three, a server when told."""
        worker, session = agent.worker, agent.session
        if worker is None or session is None or agent.frozen:
            return
        if not worker.ready:
            worker.ready = True
            agent.events.append(messages.WorkerReady(session, worker.attempt))
            return
        if agent.role_rank.role is Role.PSERVER or self.control.phase is not Phase.RUNNING:
            return
        if worker.asked:
            if worker.replies:
                worker.asked = False
                self._hear(agent, worker, worker.replies.popleft())
            return
        step = worker.epoch + (worker.doing in {"save", "commit"} and worker.epoch < NUM_EPOCHS)
        match worker.doing:
            case "open":
                self._ask(agent, worker, epoch_request(SIZES, worker.epoch))
            case "train":
                self._ask(agent, worker, LeaseRequest(epoch=worker.epoch))
            case "save":
                spans = tuple(worker.spans)
                self._ask(agent, worker, CursorRequest(step=step, epoch=worker.epoch, spans=spans, skipped=()))
                worker.spans = []
            case "wait":
                first = next(a for a in self.agents if a.role_rank == RoleRank(Role.TRAINER, 0)).worker
                if first is None or first.num_commits > worker.num_commits:
                    self._next_epoch(worker)
            case "end":
                agent.events.append(messages.WorkerEvent(session, worker.attempt, Result(figures={"rows": 1})))
                self._end_worker(agent, 0)

    @staticmethod
    def _ask(agent: Agent, worker: Worker, ask: TrainerRequest) -> None:
        assert agent.session is not None
        agent.events.append(messages.WorkerEvent(agent.session, worker.attempt, Request(id=7, ask=ask)))
        worker.asked = True

    def _hear(self, agent: Agent, worker: Worker, reply: TrainerReply) -> None:
        match worker.doing, reply:
            case "open", EpochReply(done=done):
                worker.done, worker.doing = dict(done), "train"
            case "train", LeaseReply(slices=slices):
                for index in slices:
                    start = worker.done.get(index, 0)
                    worker.spans.append((worker.epoch, index, start, SIZES[index] - start))
                if not slices:
                    worker.doing = "save"
            case "save", CursorReply() if agent.role_rank.rank == 0:
                worker.doing = "commit"
                draft = f"/d/{reply.draft}"
                self._ask(agent, worker, CommitRequest(step=reply.cursor["step"], draft=draft, seconds=1.0))
            case "save", CursorReply():
                worker.doing = "wait"
            case "commit", Committed() | NotCommitted():
                self._next_epoch(worker)
            case _:
                raise AssertionError(reply)

    @staticmethod
    def _next_epoch(worker: Worker) -> None:
        worker.num_commits += 1
        worker.epoch += 1
        worker.doing = "open" if worker.epoch < NUM_EPOCHS else "end"

    def commit(self, *, fails: bool = False) -> None:
        """The commit that is under way ends."""
        if not self.commits:
            return
        commit = self.commits.popleft()
        if fails:
            self.give(messages.CommitFinished(commit, error="disk full"))
        else:
            self.newest = commit.cursor.draft
            self.committed[self.newest] = commit.cursor.body
            self.give(messages.CommitFinished(commit, path=self.newest))

    def crash(self, agent: Agent, code: int) -> None:
        if agent.worker is not None and agent.session is not None and not agent.frozen:
            if code == 64:
                said = WorkerError(kind="job", message="m")
                agent.events.append(messages.WorkerEvent(agent.session, agent.worker.attempt, said))
            self._end_worker(agent, code)

    def die(self, agent: Agent) -> None:
        if agent.session is not None:
            self._hang_up(agent)

    def stop(self) -> None:
        self.stop_asked = True
        self.give(messages.StopRequested("asked", 143))

    def wait(self, seconds: float) -> None:
        """Time passes in ticks; agents that are not frozen send heartbeats."""
        for _ in range(max(1, round(seconds / 0.5))):
            self.now += min(seconds, 0.5)
            for agent in self.agents:
                if agent.session is not None and not agent.frozen:
                    self.give(messages.Heartbeat(agent.session))
            self.give(messages.Tick())

    def settle(self) -> None:
        """Everybody behaves from now on: the job must come to an end."""
        for _ in range(400):
            if self.control.phase is Phase.OVER:
                return
            for agent in self.agents:
                self.join(agent)
                self.obey(agent)
                self.work(agent)
                while agent.events and agent.session is not None and not agent.frozen:
                    self.deliver(agent)
            self.commit()
            self.wait(0.5)
        raise AssertionError(f"the job does not end: {self.control.phase}, {self.control.members}")


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "join",
                "join",
                "obey",
                "obey",
                "deliver",
                "deliver",
                "work",
                "work",
                "crash",
                "die",
                "freeze",
                "thaw",
                "wait",
                "long",
                "stop",
                "commit",
                "commit",
                "ask",
            ]
        ),
        st.integers(0, 5),
    ),
    max_size=120,
)


@settings(max_examples=1500)
@given(num_servers=st.integers(1, 2), num_trainers=st.integers(1, 3), moves=MOVES, ready=st.booleans(), codes=st.data())
def test_every_order_of_events_ends_well(
    num_servers: int, num_trainers: int, moves: list[Any], ready: bool, codes: Any
) -> None:
    world = World(num_servers, num_trainers)
    if ready:  # begin with a running job, so that failures also hit the later phases
        for agent in world.agents:
            world.join(agent)
        for _ in range(20):
            if world.control.phase is Phase.RUNNING:
                break
            for agent in world.agents:
                world.obey(agent)
                world.work(agent)
                world.deliver(agent)
                world.deliver(agent)
        assert world.control.phase is Phase.RUNNING
    for name, number in moves:
        agent = world.agents[number % len(world.agents)]
        match name:
            case "crash":
                world.crash(agent, codes.draw(st.sampled_from([1, -9, -6, 64, 75])))
            case "freeze":
                agent.frozen = agent.session is not None
            case "thaw":
                agent.frozen = False
            case "wait":
                world.wait(0.5)
            case "long":
                world.wait(5.0)
            case "stop":
                if number == 0:
                    world.stop()
            case "commit":
                world.commit(fails=number == 0)
            case "ask":
                world.give(messages.CheckpointAsked())
            case _:
                getattr(world, name)(agent)
    world.settle()
    assert world.num_overs == 1


@settings(max_examples=300)
@given(num_servers=st.integers(1, 3), num_trainers=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_without_losses_every_order_of_arrival_ends_with_success(
    num_servers: int, num_trainers: int, seed: int
) -> None:
    order = random.Random(seed)
    world = World(num_servers, num_trainers)
    for _ in range(3000):
        agent = order.choice(world.agents)
        order.choice([world.join, world.obey, world.work, world.deliver])(agent)
        world.commit()
        if world.control.phase is Phase.OVER:
            break
    world.settle()
    assert world.control.outcome == messages.Outcome(0)
    assert world.control.num_restarts == 0
    assert world.control.attempt == 1
