"""Who gets which member, and what a member remembers of its worker and of the agent before."""

from __future__ import annotations

import pytest

from paddlewheel.trainer.coordinator.members import Member, Membership, WorkerState
from paddlewheel.trainer.coordinator.messages import Heartbeat, Joined, Refuse, Role, RoleRank
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE
from tests.support.plans import progress


def joined(session: int, role: Role, rank: int | None = None) -> Joined:
    return Joined(session, role, rank, f"host{session}", 100 + session)


def admitted(members: Membership, session: int, role: Role, rank: int | None = None) -> Member:
    member = members.place(joined(session, role, rank), 1.0)
    assert isinstance(member, Member)
    return member


@pytest.fixture
def members() -> Membership:
    return Membership(num_servers=2, num_trainers=3)


@pytest.fixture
def member(members: Membership) -> Member:
    """With an agent, and a worker that was told to start at second 5."""
    member = admitted(members, 1, Role.TRAINER, 0)
    member.start_worker(5.0)
    return member


def test_servers_come_before_trainers_and_both_by_rank(members: Membership) -> None:
    names = ["pserver 0", "pserver 1", "trainer 0", "trainer 1", "trainer 2"]
    assert [str(role_rank) for role_rank in members] == names
    assert len(members) == 5
    for role, number in ((Role.PSERVER, 2), (Role.TRAINER, 3)):
        assert [member.role_rank.rank for member in members.of(role)] == list(range(number))
    assert members.first_trainer.role_rank == RoleRank(Role.TRAINER, 0)


def test_endpoints_are_by_rank_in_whatever_order_agents_come(members: Membership) -> None:
    for session, rank in ((1, 1), (2, 0)):
        admitted(members, session, Role.PSERVER, rank).port = 7000 + rank
    assert members.server_endpoints == ["host2:7000", "host1:7001"]


def test_whoever_asks_for_no_rank_gets_the_lowest_free_member_of_its_role(members: Membership) -> None:
    admitted(members, 1, Role.TRAINER, 1)
    assert [admitted(members, session, Role.TRAINER).role_rank.rank for session in (2, 3)] == [0, 2]
    refused = members.place(joined(4, Role.TRAINER), 1.0)
    assert refused == Refuse(4, "every trainer member is taken", EX_TEMPFAIL)
    assert members.of_session(4) is None
    assert [admitted(members, session, Role.PSERVER).role_rank.rank for session in (5, 6)] == [0, 1]


def test_a_member_that_the_job_does_not_have(members: Membership) -> None:
    refused = members.place(joined(1, Role.PSERVER, 2), 1.0)  # there is a trainer 2
    assert refused == Refuse(1, "there is no pserver 2: the job has 2, counted from 0", EX_USAGE)
    assert len(members) == 5


def test_a_member_that_is_taken_names_who_has_it(members: Membership) -> None:
    admitted(members, 1, Role.TRAINER, 2)
    refused = members.place(joined(9, Role.TRAINER, 2), 1.0)
    assert refused == Refuse(9, "trainer 2 is already there (process 101 on host1)", EX_TEMPFAIL)
    holder = members.of_session(1)
    assert holder is members[RoleRank(Role.TRAINER, 2)]


def test_no_session_is_nobodys_member(members: Membership) -> None:
    """Though every free member has the session None."""
    assert members.of_session(None) is None


def test_who_comes_after_a_loss_inherits_nothing(members: Membership, member: Member) -> None:
    member.server_uid, member.worker_phase, member.progress, member.port = "old", "saving", progress(step=9), 7
    member.hear(Heartbeat(1, worker_memory_bytes=5, worker_stopped=True))
    member.lose_agent()
    assert (member.state, member.worker, members.of_session(1)) == ("lost", WorkerState.ENDED, None)
    assert members.place(joined(2, Role.TRAINER), 8.0) == Member(member.role_rank, 2, "host2", 102, heard_at=8.0)
    assert members.first_trainer.state == "waiting"


@pytest.mark.parametrize("worker", [WorkerState.NONE, WorkerState.ENDED])
def test_losing_an_agent_ends_no_worker_that_does_not_run(member: Member, worker: WorkerState) -> None:
    member.worker, member.available = worker, True
    member.lose_agent()
    assert (member.worker, member.available) == (worker, False)
    assert not member.has_worker


def test_a_new_worker_begins_afresh(member: Member) -> None:
    member.worker_ready(6.0)
    member.worker_phase, member.worker, member.available, member.lost = "saving", WorkerState.ENDED, True, True
    member.hear(Heartbeat(1, worker_stopped=True))
    member.start_worker(9.0)
    assert (member.worker, member.worker_phase, member.moved_at) == (WorkerState.STARTING, "", 9.0)
    assert not member.available
    assert not member.lost
    member.hear(Heartbeat(1, worker_stopped=True))
    assert member.num_stopped_heartbeats == 1


def test_only_the_first_ready_of_a_starting_worker_counts(member: Member) -> None:
    member.worker_ready(6.0)
    member.worker_ready(7.0)
    assert (member.worker, member.moved_at) == (WorkerState.READY, 6.0)
    member.worker = WorkerState.ENDED
    member.worker_ready(8.0)
    assert member.worker is WorkerState.ENDED


def test_heartbeats_of_a_stopped_worker_count_only_in_a_row(member: Member) -> None:
    counts = []
    for stopped in (True, True, False, True):
        member.hear(Heartbeat(1, 5, stopped, 10, 2.5))
        counts.append(member.num_stopped_heartbeats)
    assert counts == [1, 2, 0, 1]
    assert (member.worker_memory_bytes, member.memory_limit_bytes, member.seconds_to_limit) == (5, 10, 2.5)


@pytest.mark.parametrize(
    ("changed", "moved"), [({"step": 2}, 7.0), ({"rows": 11}, 7.0), ({"epoch": 1}, 7.0), ({"loss": 0.4}, 6.0)]
)
def test_progress_that_repeats_itself_is_no_move(member: Member, changed: dict, moved: float) -> None:
    """A trainer that stands still goes on reporting: the coordinator must see through that."""
    said = {"step": 1, "rows": 10, "epoch": 0, "loss": 0.5}
    member.take_progress(progress(**said), 6.0)
    assert member.moved_at == 6.0
    member.take_progress(progress(**said | changed), 7.0)
    assert (member.moved_at, member.progress) == (moved, progress(**said | changed))


def test_one_word_for_the_status(members: Membership) -> None:
    words = [members.first_trainer.state]
    member = admitted(members, 1, Role.TRAINER, 0)
    words.append(member.state)
    member.start_worker(1.0)
    words.append(member.state)
    member.worker_ready(2.0)
    words.append(member.state)
    member.worker_phase = "evaluating"
    words.append(member.state)
    member.worker = WorkerState.ENDED  # whose last phase means nothing any more
    words.append(member.state)
    assert words == ["absent", "waiting", "starting", "ready", "evaluating", "ended"]
