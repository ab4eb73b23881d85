"""Who gets which seat, and what a seat remembers of its child and of the agent before."""

from __future__ import annotations

import pytest

from paddlewheel.trainer.coordinator.members import ChildState, Seat, Seats
from paddlewheel.trainer.coordinator.messages import Heard, Joined, Member, Refuse, Role
from paddlewheel.trainer.job.exit_codes import EXIT_FIX_JOB, EXIT_RETRY


def joined(session: int, role: Role, rank: int | None = None) -> Joined:
    return Joined(session, role, rank, f"host{session}", 100 + session)


def seated(seats: Seats, session: int, role: Role, rank: int | None = None) -> Seat:
    seat = seats.place(joined(session, role, rank), 1.0)
    assert isinstance(seat, Seat)
    return seat


@pytest.fixture
def seats() -> Seats:
    return Seats(num_servers=2, num_trainers=3)


@pytest.fixture
def seat(seats: Seats) -> Seat:
    """With an agent, and a child that was told to start at second 5."""
    seat = seated(seats, 1, Role.TRAINER, 0)
    seat.start_child(5.0)
    return seat


def test_servers_come_before_trainers_and_both_by_rank(seats: Seats) -> None:
    names = ["pserver 0", "pserver 1", "trainer 0", "trainer 1", "trainer 2"]
    assert [str(member) for member in seats] == names
    assert len(seats) == 5
    for role, number in ((Role.PSERVER, 2), (Role.TRAINER, 3)):
        assert [seat.member.rank for seat in seats.of(role)] == list(range(number))
    assert seats.first_trainer.member == Member(Role.TRAINER, 0)


def test_endpoints_are_by_rank_in_whatever_order_agents_come(seats: Seats) -> None:
    for session, rank in ((1, 1), (2, 0)):
        seated(seats, session, Role.PSERVER, rank).port = 7000 + rank
    assert seats.server_endpoints == ["host2:7000", "host1:7001"]


def test_whoever_asks_for_no_rank_gets_the_lowest_free_seat_of_its_role(seats: Seats) -> None:
    seated(seats, 1, Role.TRAINER, 1)
    assert [seated(seats, session, Role.TRAINER).member.rank for session in (2, 3)] == [0, 2]
    refused = seats.place(joined(4, Role.TRAINER), 1.0)
    assert refused == Refuse(4, "every trainer seat is taken", EXIT_RETRY)
    assert seats.of_session(4) is None
    assert [seated(seats, session, Role.PSERVER).member.rank for session in (5, 6)] == [0, 1]


def test_a_seat_that_the_job_does_not_have(seats: Seats) -> None:
    refused = seats.place(joined(1, Role.PSERVER, 2), 1.0)  # there is a trainer 2
    assert refused == Refuse(1, "there is no pserver 2: the job has 2, counted from 0", EXIT_FIX_JOB)
    assert len(seats) == 5


def test_a_seat_that_is_taken_names_who_has_it(seats: Seats) -> None:
    seated(seats, 1, Role.TRAINER, 2)
    refused = seats.place(joined(9, Role.TRAINER, 2), 1.0)
    assert refused == Refuse(9, "trainer 2 is already there (process 101 on host1)", EXIT_RETRY)
    holder = seats.of_session(1)
    assert holder is seats[Member(Role.TRAINER, 2)]


def test_no_session_is_nobodys_seat(seats: Seats) -> None:
    """Though every free seat has the session None."""
    assert seats.of_session(None) is None


def test_who_comes_after_a_loss_inherits_nothing(seats: Seats, seat: Seat) -> None:
    seat.identity, seat.child_phase, seat.progress, seat.port = "old", "saving", {"step": 9}, 7
    seat.hear(Heard(1, child_memory_bytes=5, child_stopped=True))
    seat.lose_agent()
    assert (seat.state, seat.child, seats.of_session(1)) == ("lost", ChildState.ENDED, None)
    assert seats.place(joined(2, Role.TRAINER), 8.0) == Seat(seat.member, 2, "host2", 102, heard_at=8.0)
    assert seats.first_trainer.state == "waiting"


@pytest.mark.parametrize("child", [ChildState.NONE, ChildState.ENDED])
def test_losing_an_agent_ends_no_child_that_does_not_run(seat: Seat, child: ChildState) -> None:
    seat.child, seat.available = child, True
    seat.lose_agent()
    assert (seat.child, seat.available) == (child, False)
    assert not seat.has_child


def test_a_new_child_begins_afresh(seat: Seat) -> None:
    seat.child_ready(6.0)
    seat.child_phase, seat.child, seat.available, seat.lost = "saving", ChildState.ENDED, True, True
    seat.hear(Heard(1, child_stopped=True))
    seat.start_child(9.0)
    assert (seat.child, seat.child_phase, seat.moved_at) == (ChildState.STARTING, "", 9.0)
    assert not seat.available
    assert not seat.lost
    seat.hear(Heard(1, child_stopped=True))
    assert seat.num_stopped_heartbeats == 1


def test_only_the_first_ready_of_a_starting_child_counts(seat: Seat) -> None:
    seat.child_ready(6.0)
    seat.child_ready(7.0)
    assert (seat.child, seat.moved_at) == (ChildState.READY, 6.0)
    seat.child = ChildState.ENDED
    seat.child_ready(8.0)
    assert seat.child is ChildState.ENDED


def test_heartbeats_of_a_stopped_child_count_only_in_a_row(seat: Seat) -> None:
    counts = []
    for stopped in (True, True, False, True):
        seat.hear(Heard(1, 5, stopped, 10, 2.5))
        counts.append(seat.num_stopped_heartbeats)
    assert counts == [1, 2, 0, 1]
    assert (seat.child_memory_bytes, seat.memory_limit_bytes, seat.seconds_to_limit) == (5, 10, 2.5)


@pytest.mark.parametrize(
    ("changed", "moved"), [({"step": 2}, 7.0), ({"rows": 11}, 7.0), ({"epoch": 1}, 7.0), ({"loss": 0.4}, 6.0)]
)
def test_progress_that_repeats_itself_is_no_move(seat: Seat, changed: dict, moved: float) -> None:
    """A trainer that stands still goes on reporting: the coordinator must see through that."""
    said = {"event": "progress", "step": 1, "rows": 10, "epoch": 0, "loss": 0.5}
    seat.take_progress(said, 6.0)
    assert seat.moved_at == 6.0
    seat.take_progress(said | changed, 7.0)
    assert (seat.moved_at, seat.progress) == (moved, said | changed)


def test_one_word_for_the_status(seats: Seats) -> None:
    words = [seats.first_trainer.state]
    seat = seated(seats, 1, Role.TRAINER, 0)
    words.append(seat.state)
    seat.start_child(1.0)
    words.append(seat.state)
    seat.child_ready(2.0)
    words.append(seat.state)
    seat.child_phase = "evaluating"
    words.append(seat.state)
    seat.child = ChildState.ENDED  # whose last phase means nothing any more
    words.append(seat.state)
    assert words == ["absent", "waiting", "starting", "ready", "evaluating", "ended"]
