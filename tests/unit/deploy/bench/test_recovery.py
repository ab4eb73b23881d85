"""The recovery drill's arithmetic, and the report command; a drill itself starts Paddle (tests/chaos)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlewheel.deploy.bench import recovery
from paddlewheel.deploy.cli import run
from paddlewheel.trainer.coordinator.service import Journal
from paddlewheel.trainer.job.config import JobConfig
from tests.support.plans import record

COST = recovery.Cost(
    num_keys=1_000_000,
    num_servers=2,
    detect_seconds=0.1,
    again_seconds=9.0,
    load_seconds=3.0,
    rows_replayed=5_000,
    save_seconds=3.5,
    commit_seconds=0.5,
    num_bytes=200_000_000,
    seconds=60.0,
)


def test_a_billion_keys_are_projected_by_server() -> None:
    eight = recovery.project(COST)[0]
    assert (eight.num_servers, eight.num_bytes) == (8, 200_000_000_000)
    assert eight.save_seconds == pytest.approx(1000 * 4 * 2 / 8)
    assert eight.load_seconds == pytest.approx(1000 * 3 * 2 / 8)
    assert COST.save_megabytes_per_second == pytest.approx(50)


def test_the_table_is_markdown() -> None:
    lines = list(recovery.table([COST]))
    assert lines[2] == "| 1,000,000 | 0.10 | 9.0 | 3.0 | 5,000 | 4.00 | 200.0 | 50.0 |"
    assert all(line.count("|") == 9 for line in lines[:3])
    assert recovery.to_json([COST])["costs"][0]["load_seconds"] == pytest.approx(3)


@pytest.mark.parametrize(
    ("words", "engine"),
    [([], "auto"), (["--engine", "paddle"], "paddle"), (["--engine", "paddlewheel"], "paddlewheel")],
)
def test_the_job_of_a_drill_has_the_engine_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, words: list[str], engine: str
) -> None:
    engines: list[str] = []

    def end(job: JobConfig, **_: object) -> object:
        engines.append(job.tables["default"].engine)
        raise recovery.DrillError("enough is known")

    monkeypatch.setattr(recovery, "run_local", end)
    run(["bench", "recovery", "--keys", "1000", *words])
    assert engines == [engine]


@pytest.mark.parametrize(("rows", "code", "words"), [(10, 0, "each of 10 rows once"), (9, 64, "1 of 10 left out")])
def test_report_proves_or_refutes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int, code: int, words: str
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    cursor = {"draft": "a", "parent": None, "step": 1, "spans": [[0, 0, 0, rows]], "rows": rows, "skipped": []}
    for found in (
        {"what": "run", "resume": "auto"},
        {"what": "attempt", "attempt": 1, "parent": None, "rows": 0, "restore": None},
        {"what": "running", "attempt": 1},
        {"what": "epoch", "attempt": 1, "epoch": 0, "slices": ((0, 1, 10),)},
        {"what": "committing", "attempt": 1, "cursor": {**cursor, "position": {"epoch": 1, "done": []}}},
        {"what": "committed", "attempt": 1, "step": 1, "draft": "a", "path": "/c/step-1"},
        {"what": "over", "exit_code": 0, "cause": "", "failed_role": "", "rows": rows, "draft": "a"},
    ):
        journal.write(record(**found))
    journal.close()
    assert run(["report", str(tmp_path)]) == code
    assert words in capsys.readouterr().out
    assert run(["report", str(tmp_path), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["exact"] == (code == 0)
    assert run(["report", str(tmp_path / "nothing")]) == 64
