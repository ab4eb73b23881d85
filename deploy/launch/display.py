"""What a person sees of a running job on standard error: a bar on a terminal, structured log lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from typing import Protocol, TextIO, cast

import structlog
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.protocol.messages import Progress as TrainerProgress

_SECONDS_BETWEEN_LINES = 5.0
_LOGGED = ("epoch", "step", "rows", "total_rows", "rows_per_second", "loss", "auc", "seconds_left", "bad_steps")
"""Fields of a progress event that log lines show."""
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

    def note(self, level: str, text: str) -> None:
        """Shows one remark about it."""

    def close(self) -> None:
        """Gives the terminal back."""


def choose_display(stream: TextIO | None = None) -> Display:
    """A bar if the stream (standard error by default) is a terminal, else log lines."""
    out: TextIO = stream or sys.stderr
    is_terminal = out.isatty()
    out = cast("TextIO", Unfailing(out))
    return TerminalDisplay(out) if is_terminal else LogDisplay(out)


def duration(seconds: float | None) -> str:
    """'7 s', '3:05', '1:02:03', or '?'."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def progress_of(status: pb.JobStatus) -> TrainerProgress | None:
    """Trainer 0's last progress event; None before the first."""
    return wire.read(status.progress, TrainerProgress) if status.HasField("progress") else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _facts(told: TrainerProgress) -> str:
    parts = [f"{_number(told.rows_per_second, ',.0f')} rows/s", f"loss {_number(told.loss, '.4f')}"]
    if told.auc is not None:
        parts.append(f"AUC {told.auc:.4f}")
    if told.bad_steps:
        parts.append(f"{told.bad_steps} bad steps")
    if told.seconds_left is not None:
        parts.append(f"{duration(told.seconds_left)} left")
    return "  ".join(parts)


class TerminalDisplay:
    """A progress bar with the remarks above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None, facts="")
        self._progress.start()

    def update(self, status: pb.JobStatus) -> None:
        """Moves the bar."""
        told, phase = progress_of(status), status.phase
        if told is None:
            self._progress.update(self._task, description=phase, completed=0, total=None, facts="")
            return
        if phase == "running":
            phase = "training" if status.mode == "train" else "evaluating"
        rows, total = told.rows, told.total_rows
        facts = f"{rows:,} of {total:,} rows  {_facts(told)}" if total else ""
        self._progress.update(self._task, description=phase, completed=rows, total=total or None, facts=facts)

    def note(self, level: str, text: str) -> None:
        """Prints above the bar."""
        style = _STYLES.get(level)
        clock = time.strftime("%H:%M:%S")
        self._console.print(
            f"[dim]{clock}[/] " + (f"[{style}]{escape(text)}[/]" if style else escape(text)), highlight=False
        )

    def close(self) -> None:
        """Removes the bar."""
        self._progress.stop()


class LogDisplay:
    """One JSON object a line; progress at most every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._log = structlog.wrap_logger(
            structlog.PrintLogger(stream),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.EventRenamer("message"),
                structlog.processors.JSONRenderer(),
            ],
        )
        self._shown_at = -_SECONDS_BETWEEN_LINES
        self._shown: TrainerProgress | None = None

    def update(self, status: pb.JobStatus) -> None:
        """Logs progress if it is new and the last line old enough."""
        now = time.monotonic()
        if now - self._shown_at < _SECONDS_BETWEEN_LINES:
            return
        told = progress_of(status)
        if told is None or told == self._shown:
            return
        self._shown, self._shown_at = told, now
        figures = told.model_dump(include=set(_LOGGED))
        shown = {name: figures[name] for name in _LOGGED if figures[name] is not None}
        rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in shown.items()}
        self._log.info("progress", job=status.name, **rounded)

    def note(self, level: str, text: str) -> None:
        """Logs the remark."""
        getattr(self._log, level if level in {"debug", "info", "warning", "error"} else "info")(text)

    def close(self) -> None:
        """Nothing to give back."""
