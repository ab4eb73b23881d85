"""What is seen of a running job on standard error: a bar on a terminal, lines of text or JSON elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Literal, Protocol, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb

_SECONDS_BETWEEN_LINES = 5.0
_WIDEST_BAR, _NARROWEST_BAR = 24, 8
_STYLES = {"warning": "yellow", "error": "bold red"}


class Unfailing(io.TextIOBase):
    """Writes to a stream as long as that takes anything.

    What is shown of a job must not end it: the reader of standard error may have gone (`2>&1 | head`, a log collector
    that died), the disk under it may be full. What is not taken then is lost; logs and journal have it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """All of it, or as much as is taken."""
        with contextlib.suppress(OSError, ValueError):  # the latter: closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """The same."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        """As the stream is."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream."""
        return self._stream.encoding


class Display(Protocol):
    """Shows a job while it runs."""

    def update(self, status: pb.JobStatus) -> None:
        """Shows where the job stands now."""

    def note(self, level: str, text: str, at: float | None = None) -> None:
        """Shows one remark about it, made at this Unix time; None: now."""

    def close(self) -> None:
        """Gives the terminal back."""


LogFormat = Literal["auto", "text", "json"]


def choose_display(
    stream: TextIO | None = None, log_format: LogFormat = "auto", *, for_machines: bool = False
) -> Display:
    """How a job is shown on the stream, standard error by default.

    Args:
        stream: where to.
        log_format: `auto`: a bar on a terminal, lines elsewhere; `text`, `json`: such lines in any case.
        for_machines: whether the lines of `auto` are JSON.
    """
    out: TextIO = stream or sys.stderr
    is_terminal = out.isatty()
    out = cast("TextIO", Unfailing(out))
    if log_format == "auto" and is_terminal:
        return TerminalDisplay(out)
    is_json = log_format == "json" or (log_format == "auto" and for_machines)
    return JsonDisplay(out) if is_json else TextDisplay(out)


def duration(seconds: float | None) -> str:
    """'7 s', '3:05', '1:02:03', or '?'."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def progress_of(status: pb.JobStatus) -> dict[str, Any]:
    """Trainer 0's last progress event; empty before the first."""
    said: dict[str, Any] = json.loads(status.progress_json) if status.progress_json else {}
    return said


def phase_of(status: pb.JobStatus, said: Mapping[str, Any]) -> str:
    """The job's phase, and while it runs what trainer 0 is doing."""
    if status.phase != "running" or not said:
        return status.phase.replace("_", " ")
    return str(said.get("phase", "training" if status.mode == "train" else "evaluating"))


def _facts(said: Mapping[str, Any], width: int | None = None) -> str:
    """What trainer 0 says of its progress; with a width, as much as that many letters hold."""
    found: dict[str, str] = {}
    if said.get("total_rows"):
        found["rows"] = f"{said['rows']:,} of {said['total_rows']:,} rows"
    if said.get("rows_per_second") is not None:
        found["rate"] = f"{said['rows_per_second']:,.0f} rows/s"
    if said.get("loss") is not None:
        found["loss"] = f"loss {said['loss']:.4f}"
    if said.get("auc") is not None:
        found["auc"] = f"AUC {said['auc']:.4f}"
    if said.get("bad_steps"):
        found["bad"] = f"{said['bad_steps']} bad steps"
    if said.get("seconds_left") is not None:
        found["left"] = f"{duration(said['seconds_left'])} left"
    for least in ("rows", "auc", "loss", "rate", "bad", "left"):
        if width is None or len("  ".join(found.values())) <= width:
            break
        found.pop(least, None)
    return "  ".join(found.values())


class TerminalDisplay:
    """A progress bar with the remarks above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._bar = BarColumn(bar_width=_WIDEST_BAR)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            self._bar,
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None, facts="")
        self._progress.start()

    def update(self, status: pb.JobStatus) -> None:
        """Moves the bar."""
        said = progress_of(status)
        phase = phase_of(status, said)
        rows, total = said.get("rows"), said.get("total_rows")
        width = self._console.width
        self._bar.bar_width = _WIDEST_BAR if width >= 100 else _NARROWEST_BAR
        # a spinner, the phase, the bar, a percentage, and a blank between each
        left = width - 1 - 1 - len(phase) - 1 - self._bar.bar_width - 1 - 4 - 1
        facts = _facts(said, left) if rows is not None and total else ""
        self._progress.update(self._task, description=phase, completed=rows or 0, total=total or None, facts=facts)

    def note(self, level: str, text: str, at: float | None = None) -> None:
        """Prints above the bar."""
        style = _STYLES.get(level)
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        self._console.print(
            f"[dim]{clock}[/] " + (f"[{style}]{escape(text)}[/]" if style else escape(text)), highlight=False
        )

    def close(self) -> None:
        """Removes the bar."""
        self._progress.stop()


class _Lines:
    """A line for each remark, and for progress at most every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_at = -_SECONDS_BETWEEN_LINES
        self._shown = ""

    def update(self, status: pb.JobStatus) -> None:
        """Tells progress if it is new and the last line old enough."""
        now = time.monotonic()
        if status.progress_json == self._shown or now - self._shown_at < _SECONDS_BETWEEN_LINES:
            return
        self._shown, self._shown_at = status.progress_json, now
        self._progress(status, progress_of(status))

    def note(self, level: str, text: str, at: float | None = None) -> None:
        """Tells the remark."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to give back."""

    def _progress(self, status: pb.JobStatus, said: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class TextDisplay(_Lines):
    """Lines for people: time of day, level where it is none of the usual, text."""

    def note(self, level: str, text: str, at: float | None = None) -> None:
        """Tells the remark."""
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        self._write(f"{clock} {f'{level}: ' if level in _STYLES else ''}{text}")

    def _progress(self, status: pb.JobStatus, said: Mapping[str, Any]) -> None:
        self.note("info", f"{phase_of(status, said)}  {_facts(said)}")


_SHOWN = (
    *("epoch", "step", "rows", "total_rows", "rows_per_second", "loss", "auc", "seconds_left", "bad_steps"),
    "phase",
)


class JsonDisplay(_Lines):
    """One JSON object a line, as the roles' own logs."""

    def note(self, level: str, text: str, at: float | None = None) -> None:
        """Tells the remark."""
        self._tell(level, text, at)

    def _progress(self, status: pb.JobStatus, said: Mapping[str, Any]) -> None:
        shown = {key: said[key] for key in _SHOWN if said.get(key) is not None}
        rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in shown.items()}
        self._tell("info", "progress", None, job=status.name, **rounded)

    def _tell(self, level: str, message: str, at: float | None, **facts: Any) -> None:
        moment = datetime.fromtimestamp(time.time() if at is None else at, timezone.utc)
        stamp = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
        self._write(json.dumps({**facts, "level": level, "timestamp": stamp, "message": message}))
