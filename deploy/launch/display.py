"""What is seen of a running job on standard error: a bar on a terminal, lines of text or JSON elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from datetime import datetime, timezone
from typing import Any, Literal, Protocol, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.protocol.messages import Progress as TrainerProgress

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


def progress_of(status: pb.JobStatus) -> TrainerProgress | None:
    """Trainer 0's last progress event; None before the first."""
    return wire.read(status.progress, TrainerProgress) if status.HasField("progress") else None


def phase_of(status: pb.JobStatus, told: TrainerProgress | None) -> str:
    """The job's phase, and while it runs what trainer 0 is doing."""
    if status.phase != "running" or told is None:
        return status.phase.replace("_", " ")
    return "training" if status.mode == "train" else "evaluating"


def _facts(told: TrainerProgress, width: int | None = None) -> str:
    """What trainer 0 tells of its progress; with a width, as much as that many letters hold."""
    parts: dict[str, str] = {}
    if told.total_rows:
        parts["rows"] = f"{told.rows:,} of {told.total_rows:,} rows"
    if told.rows_per_second is not None:
        parts["rate"] = f"{told.rows_per_second:,.0f} rows/s"
    if told.loss is not None:
        parts["loss"] = f"loss {told.loss:.4f}"
    if told.auc is not None:
        parts["auc"] = f"AUC {told.auc:.4f}"
    if told.bad_steps:
        parts["bad"] = f"{told.bad_steps} bad steps"
    if told.seconds_left is not None:
        parts["left"] = f"{duration(told.seconds_left)} left"
    for least in ("rows", "auc", "loss", "rate", "bad", "left"):
        if width is None or len("  ".join(parts.values())) <= width:
            break
        parts.pop(least, None)
    return "  ".join(parts.values())


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
        told = progress_of(status)
        phase = phase_of(status, told)
        rows, total = (told.rows, told.total_rows) if told is not None else (0, 0)
        width = self._console.width
        self._bar.bar_width = _WIDEST_BAR if width >= 100 else _NARROWEST_BAR
        # a spinner, the phase, the bar, a percentage, and a blank between each
        left = width - 1 - 1 - len(phase) - 1 - self._bar.bar_width - 1 - 4 - 1
        facts = _facts(told, left) if told is not None and total else ""
        self._progress.update(self._task, description=phase, completed=rows, total=total or None, facts=facts)

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
        self._shown: TrainerProgress | None = None

    def update(self, status: pb.JobStatus) -> None:
        """Tells progress if it is new and the last line old enough."""
        now = time.monotonic()
        if now - self._shown_at < _SECONDS_BETWEEN_LINES:
            return
        told = progress_of(status)
        if told is None or told == self._shown:
            return
        self._shown, self._shown_at = told, now
        self._progress(status, told)

    def note(self, level: str, text: str, at: float | None = None) -> None:
        """Tells the remark."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to give back."""

    def _progress(self, status: pb.JobStatus, told: TrainerProgress) -> None:
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

    def _progress(self, status: pb.JobStatus, told: TrainerProgress) -> None:
        self.note("info", f"{phase_of(status, told)}  {_facts(told)}")


_SHOWN = ("epoch", "step", "rows", "total_rows", "rows_per_second", "loss", "auc", "seconds_left", "bad_steps")
"""Fields of a progress event that log lines show."""


class JsonDisplay(_Lines):
    """One JSON object a line, as the roles' own logs."""

    def note(self, level: str, text: str, at: float | None = None) -> None:
        """Tells the remark."""
        self._tell(level, text, at)

    def _progress(self, status: pb.JobStatus, told: TrainerProgress) -> None:
        figures = told.model_dump(include=set(_SHOWN))
        shown = {name: figures[name] for name in _SHOWN if figures[name] is not None}
        rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in shown.items()}
        self._tell("info", "progress", None, job=status.name, **rounded)

    def _tell(self, level: str, message: str, at: float | None, **facts: Any) -> None:
        moment = datetime.fromtimestamp(time.time() if at is None else at, timezone.utc)
        stamp = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
        self._write(json.dumps({**facts, "level": level, "timestamp": stamp, "message": message}))
