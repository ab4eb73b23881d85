"""The report: what a journal proves, told from made-up journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.coordinator import history


def cursor(draft: str, parent: str | None, step: int, spans: list[list[int]], epoch: int, rows: int) -> dict[str, Any]:
    body = {"draft": draft, "parent": parent, "step": step, "spans": spans, "rows": rows}
    return {**body, "skipped": [], "position": {"epoch": epoch, "done": []}}


def commit(time: float, incarnation: int, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"time": time, "what": "committing", "incarnation": incarnation, "cursor": body},
        {
            "time": time + 0.1,
            "what": "committed",
            "incarnation": incarnation,
            "step": body["step"],
            "draft": body["draft"],
            "path": f"/c/step-{body['step']}",
            "save_seconds": 0.5,
            "commit_seconds": 0.1,
        },
    ]


def opened(time: float, number: int, parent: str | None, rows: int, restore: str | None = None) -> list[dict[str, Any]]:
    fields = {"incarnation": number, "parent": parent, "rows": rows, "restore": restore}
    return [
        {"time": time, "what": "incarnation", **fields, "num_servers": 2, "num_trainers": 2},
        {"time": time + 1, "what": "running", "incarnation": number},
        {"time": time + 1, "what": "epoch", "incarnation": number, "epoch": 0, "slices": [[0, 10], [1, 10]]},
    ]


RUN = [{"time": 0.0, "what": "run", "resume": "auto"}]
OVER = [{"time": 50.0, "what": "over", "exit_code": 0, "cause": "", "culprit": "", "rows": 20}]
HALF = cursor("a", None, 1, [[0, 0, 0, 10]], 0, 10)
WHOLE = cursor("b", "a", 2, [[0, 1, 0, 10]], 1, 20)


def lost(time: float, number: int, rows: int) -> list[dict[str, Any]]:
    said = {"cause": "trainer 1 was killed", "culprit": "trainer 1", "step": 1, "rows": rows, "halting_seconds": 0.5}
    return [{"time": time, "what": "lost", "incarnation": number, **said}]


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
    report = history.tell(records)
    assert report.exact
    assert report.steps == [1, 2]
    assert report.epochs[0].is_exact
    first, second = report.incarnations
    assert (first.rows_replayed, first.culprit, first.restored, second.restored) == (6, "trainer 1", None, 1)
    assert first.down_seconds == pytest.approx(21 - 13.5)
    assert first.repeated_seconds == pytest.approx(13.5 - 10.1)
    assert second.cause == ""
    assert report.outcome == {"exit_code": 0, "cause": "", "culprit": ""}
    assert report.checkpoint_seconds == pytest.approx(1.2)


def test_a_lost_coordinator_is_told() -> None:
    records = [
        *RUN,
        *opened(1, 1, None, 0),
        *commit(10, 1, HALF),
        {"time": 15.0, "what": "run", "resume": "auto"},
        *opened(16, 2, "a", 10, "/c/step-1"),
    ]
    first, second = history.tell(records).incarnations
    assert first.culprit == "coordinator"
    assert first.rows_replayed is None
    assert second.ended is None


def test_a_row_trained_twice_is_found() -> None:
    again = cursor("b", "a", 2, [[0, 0, 5, 5], [0, 1, 0, 10]], 1, 25)
    report = history.tell([*RUN, *opened(1, 1, None, 0), *commit(10, 1, HALF), *commit(20, 1, again), *OVER])
    assert not report.exact
    assert report.epochs[0].num_repeated == 5


def test_a_row_left_out_is_found() -> None:
    gap = cursor("b", "a", 2, [[0, 1, 0, 9]], 1, 19)
    report = history.tell([*RUN, *opened(1, 1, None, 0), *commit(10, 1, HALF), *commit(20, 1, gap), *OVER])
    assert not report.exact
    assert report.epochs[0].num_missing == 1


def test_an_epoch_that_goes_on_is_no_mistake() -> None:
    report = history.tell([*RUN, *opened(1, 1, None, 0), *commit(10, 1, HALF)])
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
    assert history.tell(records).steps == [1]
    report = history.tell([*records, *commit(30, 2, WHOLE), *OVER])
    assert report.steps == [1, 2]
    assert report.exact


def test_a_fresh_start_begins_another_line() -> None:
    records = [*RUN, *opened(1, 1, None, 0), *commit(10, 1, HALF), {"time": 12.0, "what": "run", "resume": "never"}]
    new = [*commit(22, 2, cursor("n", None, 1, [[0, 0, 0, 10], [0, 1, 0, 10]], 1, 20)), *OVER]
    report = history.tell([*records, *opened(20, 2, None, 0), *new])
    assert report.exact
    assert report.steps == [1]
    assert len(report.incarnations) == 1


def test_a_folder_without_a_journal(tmp_path: Path) -> None:
    with pytest.raises(history.NoHistoryError, match=r"journal\.jsonl"):
        history.report(tmp_path)
