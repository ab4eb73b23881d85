"""The report: what a journal proves, told from made-up journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddlewheel.trainer.coordinator import run_report
from paddlewheel.trainer.coordinator.journal import Content, Journal, seal
from tests.support.plans import record


def build_report(records: list[dict[str, Any]], newest: dict[str, Any] | None = None) -> run_report.Report:
    """Of records; `newest` is the cursor of the newest checkpoint."""
    content = Content(tuple(record(**found) for found in records))
    return run_report.build_report(content, run_report.Newest("/c/newest", newest) if newest else None)


def cursor(draft: str, parent: str | None, step: int, spans: list[list[int]], epoch: int, rows: int) -> dict[str, Any]:
    body = {"draft": draft, "parent": parent, "step": step, "spans": spans, "rows": rows}
    return {**body, "skipped": [], "position": {"epoch": epoch, "done": []}}


def commit(time: float, attempt: int, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"time": time, "what": "committing", "attempt": attempt, "cursor": body},
        {
            "time": time + 0.1,
            "what": "committed",
            "attempt": attempt,
            "step": body["step"],
            "draft": body["draft"],
            "path": f"/c/step-{body['step']}",
            "save_seconds": 0.5,
            "commit_seconds": 0.1,
        },
    ]


def opened(time: float, number: int, parent: str | None, rows: int, restore: str | None = None) -> list[dict[str, Any]]:
    fields = {"attempt": number, "parent": parent, "rows": rows, "restore": restore}
    return [
        {"time": time, "what": "attempt", **fields, "num_servers": 2, "num_trainers": 2},
        {"time": time + 1, "what": "running", "attempt": number},
        {"time": time + 1, "what": "epoch", "attempt": number, "epoch": 0, "slices": ((0, 2, 10),)},
    ]


RUN = [{"time": 0.0, "what": "run", "resume": "auto"}]
OVER = [{"time": 50.0, "what": "over", "exit_code": 0, "cause": "", "failed_role": "", "rows": 20, "draft": "b"}]
HALF = cursor("a", None, 1, [[0, 0, 0, 10]], 0, 10)
WHOLE = cursor("b", "a", 2, [[0, 1, 0, 10]], 1, 20)


def lost(time: float, number: int, rows: int) -> list[dict[str, Any]]:
    said = {
        "cause": "trainer 1 was killed",
        "failed_role": "trainer 1",
        "step": 1,
        "rows": rows,
        "halting_seconds": 0.5,
    }
    return [{"time": time, "what": "lost", "attempt": number, **said}]


def test_a_loss_is_told_with_its_cost() -> None:
    records = [
        *RUN,
        *opened(1, 1, None, 0),
        *commit(10, 1, HALF),
        *lost(14, 1, rows=16),
        *opened(20, 2, "a", 10, "/c/step-1"),
        *commit(30, 2, WHOLE),
        *OVER,
    ]
    report = build_report(records)
    assert report.exact
    assert report.steps == [1, 2]
    assert report.epochs[0].is_exact
    first, second = report.attempts
    assert (first.rows_replayed, first.failed_role, first.restored, second.restored) == (6, "trainer 1", None, 1)
    assert first.down_seconds == pytest.approx(21 - 13.5)
    assert first.repeated_seconds == pytest.approx(13.5 - 10.1)
    assert second.cause == ""
    assert report.outcome == {"exit_code": 0, "cause": "", "failed_role": ""}
    assert report.checkpoint_seconds == pytest.approx(1.2)


def test_a_lost_coordinator_is_told() -> None:
    records = [
        *RUN,
        *opened(1, 1, None, 0),
        *commit(10, 1, HALF),
        {"time": 15.0, "what": "run", "resume": "auto"},
        *opened(16, 2, "a", 10, "/c/step-1"),
    ]
    first, second = build_report(records).attempts
    assert first.failed_role == "coordinator"
    assert first.rows_replayed is None
    assert second.ended is None


def test_a_row_trained_twice_is_found() -> None:
    again = cursor("b", "a", 2, [[0, 0, 5, 5], [0, 1, 0, 10]], 1, 25)
    report = build_report([*RUN, *opened(1, 1, None, 0), *commit(10, 1, HALF), *commit(20, 1, again), *OVER])
    assert not report.exact
    assert report.epochs[0].num_repeated == 5


def test_a_row_left_out_is_found() -> None:
    gap = cursor("b", "a", 2, [[0, 1, 0, 9]], 1, 19)
    report = build_report([*RUN, *opened(1, 1, None, 0), *commit(10, 1, HALF), *commit(20, 1, gap), *OVER])
    assert not report.exact
    assert report.epochs[0].num_missing == 1


def test_an_epoch_that_goes_on_is_no_mistake() -> None:
    report = build_report([*RUN, *opened(1, 1, None, 0), *commit(10, 1, HALF)], HALF)
    assert report.exact
    assert report.epochs[0].num_missing == 10
    assert report.outcome is None


def test_only_the_final_line_counts() -> None:
    """A checkpoint that was found damaged, and the rows in it, are no part of the final model."""
    damaged = cursor("x", "a", 2, [[0, 1, 0, 7]], 0, 17)
    records = [
        *RUN,
        *opened(1, 1, None, 0),
        *commit(10, 1, HALF),
        *commit(11, 1, damaged),
        *opened(20, 2, "a", 10, "/c/step-1"),
    ]
    assert build_report(records).steps == [1]
    report = build_report([*records, *commit(30, 2, WHOLE), *OVER])
    assert report.steps == [1, 2]
    assert report.exact


def test_a_fresh_start_begins_another_line() -> None:
    records = [*RUN, *opened(1, 1, None, 0), *commit(10, 1, HALF), {"time": 12.0, "what": "run", "resume": "never"}]
    new = [*commit(22, 2, cursor("n", None, 1, [[0, 0, 0, 10], [0, 1, 0, 10]], 1, 20)), {**OVER[0], "draft": "n"}]
    report = build_report([*records, *opened(20, 2, None, 0), *new])
    assert report.exact
    assert report.steps == [1]
    assert len(report.attempts) == 1


def test_a_folder_without_a_journal(tmp_path: Path) -> None:
    with pytest.raises(run_report.NoHistoryError, match=r"journal\.jsonl"):
        run_report.report(tmp_path)


# ----------------------------------------------------------------------------------------- what proves nothing is told

FINISHED = [
    *RUN,
    *opened(1, 1, None, 0),
    *commit(10, 1, HALF),
    *lost(14, 1, rows=16),
    *opened(20, 2, "a", 10, "/c/step-1"),
    *commit(30, 2, WHOLE),
    *OVER,
]


def test_a_run_that_goes_on_is_proven_by_its_newest_checkpoint_or_not_at_all() -> None:
    records = FINISHED[:-1]
    assert build_report(records, WHOLE).verdict == "exact"
    report = build_report(records)
    assert (report.verdict, report.reasons) != ("exact", ())
    assert "neither the outcome of the run nor a checkpoint" in report.reasons[0]


def test_a_commit_that_nobody_lived_to_write_down_counts() -> None:
    records = [record for record in FINISHED[:-1] if record.get("draft") != "b"]
    report = build_report(records, WHOLE)
    assert (report.verdict, report.steps) == ("exact", [1, 2])


@pytest.mark.parametrize("what", ["committing", "epoch"])
def test_a_record_that_the_proof_needs_is_missed(what: str) -> None:
    for number in (0, -1):
        records = list(FINISHED)
        places = [place for place, record in enumerate(records) if record["what"] == what]
        kinds = {"epoch": places, "committing": [places[number]]}
        records = [record for place, record in enumerate(records) if place not in kinds[what]]
        for newest in (WHOLE, None):
            report = build_report(records, newest)
            assert report.verdict == "not proven"
            assert any("is missing" in reason for reason in report.reasons), report.reasons


def test_an_outcome_or_a_checkpoint_that_tells_of_another_end_is_no_proof() -> None:
    over = {**OVER[0], "draft": "c"}
    assert "ended with the checkpoint 'c'" in build_report([*FINISHED[:-1], over]).reasons[0]
    assert "/c/newest, is missing" in build_report(FINISHED, cursor("d", "b", 3, [], 1, 20)).reasons[0]
    assert "is not the one that the journal tells of" in build_report(FINISHED, {**WHOLE, "rows": 19}).reasons[0]
    assert build_report([*RUN, *opened(1, 1, None, 0)]).reasons == ("no checkpoint was committed",)


def test_a_row_trained_twice_is_certain_also_where_a_record_is_missing() -> None:
    again = cursor("b", "a", 2, [[0, 0, 5, 5], [0, 1, 0, 10], [0, 0, 0, 7]], 1, 25)
    report = build_report([*RUN, *opened(1, 1, None, 0), *commit(20, 1, again), *OVER])
    assert report.verdict == "not exact"


def test_the_journal_keeps_what_a_checkpoint_adds_not_the_whole_position() -> None:
    whole = {**HALF, "job": {"a": 1}, "days": ["d"], "position": {"epoch": 0, "seed": 3, "done": [[0, 10]] * 100_000}}
    assert run_report.told_of(whole) == {**HALF, "position": {"epoch": 0, "seed": 3}}


def written(folder: Path) -> bytes:
    journal = Journal(folder / "journal.jsonl")
    for found in FINISHED:
        journal.write(record(**found))
    journal.close()
    return (folder / "journal.jsonl").read_bytes()


def test_no_flipped_bit_and_no_lost_record_makes_a_report_say_more_than_was_trained(tmp_path: Path) -> None:
    """Every bit of the journal, and every record: exact with all rows, or not proven; never exact with fewer."""
    content = written(tmp_path)
    path = tmp_path / "journal.jsonl"
    assert run_report.report(tmp_path).exact
    verdicts = set()

    def look(changed: bytes) -> None:
        path.write_bytes(changed)
        report = run_report.report(tmp_path)
        verdicts.add(report.verdict)
        if report.exact:
            assert [proof.num_trained for proof in report.epochs] == [20]
            assert report.steps == [1, 2]

    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        look(bytes(flipped))
    lines = content.splitlines(keepends=True)
    for first in range(len(lines)):
        for last in range(first + 1, len(lines) + 1):
            if last - first < len(lines):
                look(b"".join(lines[:first] + lines[last:]))
        look(b"".join(lines[: first + 1])[:-9] if first else b"".join(lines[:2])[:-9])
    assert verdicts == {"exact", "not proven"}


def test_a_line_that_was_changed_is_no_record_even_if_it_can_be_read(tmp_path: Path) -> None:
    content = written(tmp_path)
    (tmp_path / "journal.jsonl").write_bytes(content.replace(b"[[0, 1, 0, 10]]", b"[[0, 1, 0, 11]]"))
    report = run_report.report(tmp_path)
    assert report.verdict == "not proven"
    assert report.lost_records == 1
    sealed = seal({"what": "run", "record": 1, "time": 1.0})
    assert seal({"what": "run", "record": 1, "time": 1.0}) == sealed
