"""Structured log lines of the processes without Paddle: JSON on standard output."""

from __future__ import annotations

import contextlib
import os
import sys

import structlog


class _Unbuffered:
    """Standard output, where a disk that is full costs log lines but nothing else: not even the exit code."""

    def write(self, text: str) -> None:
        write_output(text.encode())

    def flush(self) -> None:
        pass


def write_output(content: bytes) -> None:
    """Writes to standard output as it is; what the disk does not take is lost."""
    with contextlib.suppress(OSError):
        while content:
            content = content[os.write(sys.stdout.fileno(), content) :]


def configure_logs() -> None:
    """Makes structlog write one JSON object a line to standard output."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(_Unbuffered()),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
