"""Day boundaries are carried out once each, wherever a run is interrupted and goes on."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.data_pipeline.days import parse_day, parse_days
from paddlewheel.pserver.config import TableConfig
from paddlewheel.trainer.job.days import DaysError, choose
from paddlewheel.trainer.worker.day_boundaries import Boundaries


def _tables(*every: int | None) -> dict[str, TableConfig]:
    return {str(n): TableConfig(lifecycle={"every_rows": rows}) for n, rows in enumerate(every)}


@given(
    every=st.lists(st.integers(5, 40), min_size=1, max_size=3),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    data=st.data(),
)
def test_an_interrupted_run_has_the_boundaries_of_an_undisturbed_one(every: list[int], steps: list[int], data) -> None:
    """Checkpoints are made before the boundaries of their step; a loss goes back to one and carries them out again."""

    def carried_out(losses: set[int]) -> list[tuple[str, int]]:
        boundaries, log, place, rows = Boundaries(_tables(*every), by_days=False), [], 0, 0
        saved = (0, 0, boundaries.state(), 0)
        left = set(losses)
        while place < len(steps):
            if place in left:
                left.remove(place)
                place, rows, state, length = saved
                boundaries = Boundaries(_tables(*every), by_days=False)
                boundaries.load_state(state, rows)
                del log[length:]
            else:
                rows += steps[place]
                place += 1
                due = boundaries.due(rows)
                if due or place % 7 == 0:
                    saved = (place, rows, boundaries.state(), len(log))
            due = boundaries.due(rows)
            log += [(name, rows) for name in due]
            boundaries.carried_out(due, rows)
            assert boundaries.due(rows) == ()
        assert boundaries.counts == {str(n): rows // size for n, size in enumerate(every)}
        return log

    assert carried_out(data.draw(st.sets(st.integers(0, len(steps) - 1)))) == carried_out(set())


def test_tables_have_boundaries_of_their_own_and_only_by_one_clock() -> None:
    by_rows = Boundaries(_tables(10, None, 30), by_days=False)
    assert by_rows.due(9) == ()
    assert by_rows.due(12) == ("0",)
    by_rows.carried_out(["0"], 12)
    assert by_rows.due(19) == ()
    assert by_rows.due(30) == ("0", "2")
    by_days = Boundaries(_tables(None, None), by_days=True)
    assert by_days.due(1) == ("0", "1")
    # another clock, or none before: nothing is made up for
    by_days.load_state(by_rows.state(), 4)
    assert by_days.due(4) == ()
    assert by_days.due(5) == ("0", "1")
    by_rows.load_state(None, 45)
    assert by_rows.due(45) == ()
    assert by_rows.due(50) == ("0",)


def days(*numbers: int) -> tuple[dt.date, ...]:
    return tuple(dt.date(2026, 1, number) for number in numbers)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2026-01-01..2026-01-03", days(1, 2, 3)), ("20260102", days(2)), ("2026-01-30 .. 2026-01-31", days(30, 31))],
)
def test_ranges_of_days(text: str, expected: tuple[dt.date, ...]) -> None:
    assert parse_days(text) == expected


@pytest.mark.parametrize("text", ["", "2026-02-30", "2026-1-1", "01.02.2026", "2026-01-01T0", "2026-01-02..2026-01-01"])
def test_what_is_no_day_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no day|ends before"):
        parse_days(text)
    assert parse_day(" 2026-01-01 ") == dt.date(2026, 1, 1)


def test_a_run_goes_on_after_the_days_that_are_trained() -> None:
    present = days(1, 2, 3, 5)
    everything = {"trained": (), "current": None, "skip_missing": False}
    assert choose(days(1, 2), present, **everything) == days(1, 2)
    assert choose(days(2, 3), present, **{**everything, "trained": days(1, 2)}) == days(1, 2, 3)
    assert choose(days(1, 2), present, **{**everything, "trained": days(1, 2)}) == days(1, 2)
    assert choose(days(3, 4, 5), present, **{**everything, "skip_missing": True}) == days(3, 5)
    # a trained day's data may be gone
    assert choose(days(1, 2), days(2), **{**everything, "trained": days(1)}) == days(1, 2)
    # in the middle of a day
    assert choose(days(2, 3), present, trained=days(1), current=days(2)[0], skip_missing=False) == days(1, 2, 3)


@pytest.mark.parametrize(
    ("wanted", "changes", "message"),
    [
        (days(3, 4), {}, "no data for 2026-01-04"),
        (days(4), {"skip_missing": True}, "none of these days"),
        (days(1, 3), {"trained": days(2)}, "2026-01-01 lies before 2026-01-02"),
        (days(3), {"trained": days(1), "current": days(2)[0]}, r"middle of 2026-01-02.*--days 2026-01-02..2026-01-03"),
        (days(1), {"current": days(2)[0]}, "2026-01-01 lies before 2026-01-02"),
    ],
)
def test_days_that_cannot_be_trained_are_refused(wanted, changes: dict, message: str) -> None:
    arguments = {"trained": (), "current": None, "skip_missing": False} | changes
    with pytest.raises(DaysError, match=message):
        choose(wanted, days(1, 2, 3, 5), **arguments)


def test_a_step_that_passes_several_multiples_makes_one_boundary() -> None:
    """Rows that cannot be used were between them: nothing was trained that the first boundary could set apart."""
    boundaries = Boundaries(_tables(10, 25), by_days=False)
    assert boundaries.due(9) == ()
    assert boundaries.due(57) == ("0", "1")
    boundaries.carried_out(("0", "1"), 57)
    assert (boundaries.counts, boundaries.due(59)) == ({"0": 1, "1": 1}, ())
    assert boundaries.due(60) == ("0",)
    again = Boundaries(_tables(10, 25), by_days=False)
    again.load_state(boundaries.state(), 57)
    assert (again.due(59), again.due(75)) == ((), ("0", "1"))
