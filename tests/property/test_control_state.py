"""The coordinator's decisions under thousands of orders of events: simulated agents, random losses, no clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.trainer.coordinator import messages
from paddlewheel.trainer.coordinator.members import ChildState
from paddlewheel.trainer.coordinator.messages import Member, Role
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.row_ledger import prove
from paddlewheel.trainer.coordinator.state_machine import Control, Phase
from paddlewheel.trainer.job.control import ControlConfig

LIMITS = ControlConfig(
    heartbeat_seconds=0.5,
    silence_seconds=4,
    gather_seconds=1000,
    start_seconds=50,
    step_seconds=30,
    max_restarts=1,
    backoff_seconds=1,
)


NUM_EPOCHS = 2
SIZES = {0: 3, 1: 1, 2: 2, 3: 2}


@dataclass
class Child:
    """What a simulated agent's child does: starting, ready, then gone. A trainer trains epochs and saves after each."""

    incarnation: int
    epoch: int = 0
    ready: bool = False
    doing: str = "open"
    """open an epoch, train, save, commit (trainer 0) or wait for that (the others), end"""
    spans: list[list[int]] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    asked: bool = False
    replies: deque[dict[str, Any]] = field(default_factory=deque)
    num_commits: int = 0


@dataclass
class Agent:
    """A simulated agent: obeys commands one by one; its events wait in a queue until the world delivers them."""

    member: Member
    session: int | None = None
    frozen: bool = False
    finished: int | None = None
    child: Child | None = None
    commands: deque[Any] = field(default_factory=deque)
    events: deque[Any] = field(default_factory=deque)


class World:
    """Agents around one Control, and checks on everything it does."""

    def __init__(self, num_servers: int, num_trainers: int) -> None:
        plan = JobPlan(
            name="j",
            num_servers=num_servers,
            num_trainers=num_trainers,
            run_dir="/r",
            job={"train": {"epochs": NUM_EPOCHS}},
            tables={},
            control=LIMITS,
        )
        self.now = 0.0
        self.control = Control(plan, self.now)
        members = [Member(Role.PSERVER, r) for r in range(num_servers)] + [
            Member(Role.TRAINER, r) for r in range(num_trainers)
        ]
        self.agents = [Agent(member) for member in members]
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
                case messages.Over():
                    self.num_overs += 1
                    assert not was_over
                case messages.Commit():
                    assert not self.commits, "two commits at once"
                    self.commits.append(action)
                case messages.Note() | messages.Discard() | messages.CheckpointDone():
                    pass
                case _ if agent is None:
                    assert isinstance(action, (messages.Refuse, messages.Finish)), f"{action} to a session that is gone"
                case messages.Refuse() | messages.Drop():
                    self._hang_up(agent)
                case _:
                    agent.commands.append(action)
        assert self.num_overs <= 1

    def _check(self, action: messages.Action) -> None:
        match action:
            case messages.StartChild(session=session, spec=spec):
                assert not self.commits, "a new incarnation before it is known what was committed"
                assert spec.get("restore", self.newest) == self.newest, "not the newest checkpoint"
                agent = next(a for a in self.agents if a.session == session)
                assert not any(isinstance(c, messages.StartChild) for c in agent.commands), "told twice to start"
                assert agent.child is None, "told to start a second child"
                if agent.member.role is Role.TRAINER:
                    servers = list(self.control.seats.of(Role.PSERVER))
                    assert all(seat.child is ChildState.READY for seat in servers), "trainers before servers"
            case messages.Over(outcome=outcome):
                self._check_outcome(outcome)

    def _check_outcome(self, outcome: messages.Outcome) -> None:
        trainers = list(self.control.seats.of(Role.TRAINER))
        if outcome.exit_code == 0:
            assert self.control.result is not None
            assert all(seat.child is ChildState.ENDED for seat in trainers)
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
            assert self.control.num_restarts >= LIMITS.max_restarts or "not all roles" in outcome.cause
        # No child that an agent could still end is left running.
        for agent in self.agents:
            if agent.session is not None and agent.child is not None:
                seat = self.control.seats[agent.member]
                assert not seat.has_child

    def _hang_up(self, agent: Agent) -> None:
        """The coordinator closes the agent's stream: the agent ends its child and exits, to be started again."""
        session = agent.session
        agent.session, agent.child, agent.frozen = None, None, False
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
            self.give(messages.Joined(agent.session, agent.member.role, agent.member.rank, "h", 1))

    def obey(self, agent: Agent) -> None:
        if agent.session is None or agent.frozen or not agent.commands:
            return
        match agent.commands.popleft():
            case messages.StartChild(incarnation=incarnation):
                epoch = self.committed[self.newest]["position"]["epoch"] if self.newest else 0
                agent.child = Child(incarnation, epoch, doing="open" if epoch < NUM_EPOCHS else "save")
                agent.events.append(messages.ChildStarted(agent.session, incarnation, 9))
            case messages.StopChild(incarnation=incarnation) if (
                agent.child is not None and agent.child.incarnation == incarnation
            ):
                self._end_child(agent, -9, expected=True)
            case messages.TellChild(line={"command": "stop"}) if agent.child is not None:
                self._end_child(agent, 143)
            case messages.TellChild(line=line) if agent.child is not None and "reply" in line:
                agent.child.replies.append(line)
            case messages.Finish(exit_code=code):
                agent.finished = code
                self._hang_up(agent)

    def _end_child(self, agent: Agent, code: int, *, expected: bool = False) -> None:
        assert agent.child is not None
        assert agent.session is not None
        agent.events.append(messages.ChildExited(agent.session, agent.child.incarnation, code, expected))
        agent.events.append(messages.Available(agent.session, 8000 + agent.session))
        agent.child = None

    def deliver(self, agent: Agent) -> None:
        if agent.session is not None and not agent.frozen and agent.events:
            self.give(agent.events.popleft())

    def work(self, agent: Agent) -> None:
        """The child gets ready, then makes steps; a trainer ends after three, a server when told."""
        child, session = agent.child, agent.session
        if child is None or session is None or agent.frozen:
            return
        if not child.ready:
            child.ready = True
            agent.events.append(messages.ChildReady(session, child.incarnation))
            return
        if agent.member.role is Role.PSERVER or self.control.phase is not Phase.RUNNING:
            return
        if child.asked:
            if child.replies:
                child.asked = False
                self._hear(agent, child, child.replies.popleft())
            return
        step = child.epoch + (child.doing in {"save", "commit"} and child.epoch < NUM_EPOCHS)
        match child.doing:
            case "open":
                slices = [list(piece) for piece in SIZES.items()]
                self._ask(agent, child, "epoch", fingerprint="f", order="o", seed=1, slices=slices)
            case "train":
                self._ask(agent, child, "lease")
            case "save":
                self._ask(agent, child, "cursor", step=step, spans=child.spans)
                child.spans = []
            case "wait":
                first = next(a for a in self.agents if a.member == Member(Role.TRAINER, 0)).child
                if first is None or first.num_commits > child.num_commits:
                    self._next_epoch(child)
            case "end":
                agent.events.append(messages.ChildSaid(session, child.incarnation, {"event": "result", "rows": 1}))
                self._end_child(agent, 0)

    @staticmethod
    def _ask(agent: Agent, child: Child, what: str, **fields: Any) -> None:
        assert agent.session is not None
        said = {"event": "request", "id": 7, "what": what, "epoch": child.epoch, **fields}
        agent.events.append(messages.ChildSaid(agent.session, child.incarnation, said))
        child.asked = True

    def _hear(self, agent: Agent, child: Child, reply: dict[str, Any]) -> None:
        assert "error" not in reply or reply.get("committed") is False, reply
        match child.doing:
            case "open":
                child.done, child.doing = dict(reply["done"]), "train"
            case "train":
                for index in reply["slices"]:
                    start = child.done.get(index, 0)
                    child.spans.append([child.epoch, index, start, SIZES[index] - start])
                if not reply["slices"]:
                    child.doing = "save"
            case "save" if agent.member.rank == 0:
                child.doing = "commit"
                self._ask(
                    agent, child, "commit", step=reply["cursor"]["step"], draft=f"/d/{reply['draft']}", seconds=1.0
                )
            case "save":
                child.doing = "wait"
            case "commit":
                self._next_epoch(child)

    @staticmethod
    def _next_epoch(child: Child) -> None:
        child.num_commits += 1
        child.epoch += 1
        child.doing = "open" if child.epoch < NUM_EPOCHS else "end"

    def commit(self, *, fails: bool = False) -> None:
        """The commit that is under way ends."""
        if not self.commits:
            return
        commit = self.commits.popleft()
        if fails:
            self.give(messages.Settled(commit, error="disk full"))
        else:
            self.newest = commit.cursor.draft
            self.committed[self.newest] = commit.cursor.body
            self.give(messages.Settled(commit, path=self.newest))

    def crash(self, agent: Agent, code: int) -> None:
        if agent.child is not None and agent.session is not None and not agent.frozen:
            if code == 64:
                said = {"event": "error", "kind": "job", "message": "m"}
                agent.events.append(messages.ChildSaid(agent.session, agent.child.incarnation, said))
            self._end_child(agent, code)

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
                    self.give(messages.Heard(agent.session))
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
        raise AssertionError(f"the job does not end: {self.control.phase}, {self.control.seats}")


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
    assert world.control.incarnation == 1
