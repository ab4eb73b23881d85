"""What is seen of a running job: a bar that fits its terminal, lines of text, lines of JSON."""

from __future__ import annotations

import io
import json
import time
from datetime import datetime
from typing import Any

import pytest
from rich.console import Console

from paddlewheel.deploy.cli import run
from paddlewheel.deploy.launch.display import JsonDisplay, TerminalDisplay, TextDisplay, choose_display
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb

FIGURES = {
    "epoch": 1,
    "epochs": 1,
    "step": 100,
    "rows": 12_345_678,
    "total_rows": 45_840_617,
    "rows_per_second": 123_456.0,
    "loss": 0.4512,
    "auc": 0.7901,
    "seconds_left": 4233.0,
}


def status(**changes: Any) -> pb.JobStatus:
    progress = pb.Progress(**{**FIGURES, **changes})
    return pb.JobStatus(name="j", mode="train", phase="running", progress=progress)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (130, ["12,345,678 of 45,840,617 rows", "123,456 rows/s", "loss 0.4512", "AUC 0.7901", "1:10:33 left"], []),
        (80, ["training", "27%", "123,456 rows/s", "loss 0.4512", "AUC 0.7901", "1:10:33 left"], [" of "]),
        (60, ["training", "27%", "123,456 rows/s", "1:10:33 left"], [" of ", "AUC", "loss"]),
        (40, ["training", "27%", "1:10:33 left"], ["rows/s"]),
    ],
)
def test_the_bar_fits_its_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, shown: list[str], left_out: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    display = TerminalDisplay(Terminal())
    try:
        for said in ({}, {"seconds_left": None, "auc": None}, {"bad_steps": 3}, {}):
            display.update(status(**said))
            paper = Console(file=io.StringIO(), width=width)
            paper.print(display._progress.make_tasks_table(display._progress.tasks))
            [line] = paper.file.getvalue().splitlines()  # type: ignore[attr-defined]
            assert len(line) <= width
            assert "…" not in line
            assert ("3 bad steps" in line) == (said == {"bad_steps": 3} and width > 40)
    finally:
        display.close()
    for words in shown:
        assert words in line
    for words in left_out:
        assert words not in line


@pytest.mark.parametrize(
    ("stream", "log_format", "for_machines", "kind"),
    [
        (Terminal(), "auto", False, TerminalDisplay),
        (Terminal(), "auto", True, TerminalDisplay),
        (Terminal(), "json", False, JsonDisplay),
        (io.StringIO(), "auto", False, TextDisplay),
        (io.StringIO(), "auto", True, JsonDisplay),
        (io.StringIO(), "text", True, TextDisplay),
        (io.StringIO(), "json", False, JsonDisplay),
    ],
)
def test_one_switch_says_what_is_written(stream: Any, log_format: Any, for_machines: bool, kind: type) -> None:
    display = choose_display(stream, log_format, for_machines=for_machines)
    display.close()
    assert type(display) is kind


def test_remarks_carry_the_time_at_which_they_were_made() -> None:
    at = time.time() - 7200
    text, lines = io.StringIO(), io.StringIO()
    TextDisplay(text).note("warning", "careful", at)
    JsonDisplay(lines).note("info", "hello", at)
    assert text.getvalue() == f"{time.strftime('%H:%M:%S', time.localtime(at))} warning: careful\n"
    found = json.loads(lines.getvalue())
    assert (found["level"], found["message"]) == ("info", "hello")
    assert datetime.fromisoformat(found["timestamp"].replace("Z", "+00:00")).timestamp() == pytest.approx(at, abs=1e-3)
    terminal = Terminal()
    display = TerminalDisplay(terminal)
    display.note("info", "then", at)
    display.close()
    assert time.strftime("%H:%M:%S", time.localtime(at)) in terminal.getvalue()


def test_progress_is_told_as_text_or_as_json() -> None:
    text, lines = io.StringIO(), io.StringIO()
    TextDisplay(text).update(status())
    JsonDisplay(lines).update(status())
    assert "training  12,345,678 of 45,840,617 rows  123,456 rows/s  loss 0.4512  AUC 0.7901  1:10:33 left" in (
        text.getvalue()
    )
    found = json.loads(lines.getvalue())
    assert (found["message"], found["job"], found["rows"], found["auc"]) == ("progress", "j", 12_345_678, 0.7901)


@pytest.mark.parametrize("words", [["--log-format", "json"], ["--log-format=json"]])
def test_errors_are_json_where_the_log_is(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "/no/such/job.yaml", *words]) == 64
    told = capsys.readouterr()
    found = json.loads(told.err)
    assert (found["level"], found["exit_code"], told.out) == ("error", 64, "")
    assert "there is no such job file" in found["message"]
    assert run(["train", "/no/such/job.yaml", "--log-format", "text"]) == 64
    assert capsys.readouterr().err.startswith("paddlewheel: ")
