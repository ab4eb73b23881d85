"""Structured log lines of the processes without Paddle: JSON on standard output."""

from __future__ import annotations

import sys

import structlog


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
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
