"""Metrics of every process without Paddle, and the HTTP server that shows them. See deploy/monitoring/README.md."""

from trainer.telemetry.agent import Telemetry
from trainer.telemetry.job import JobTelemetry
from trainer.telemetry.series import DurationHistogram, Series
from trainer.telemetry.web import WebSecurity, WebSecurityError, WebServer, metrics_app

__all__ = [
    "DurationHistogram",
    "JobTelemetry",
    "Series",
    "Telemetry",
    "WebSecurity",
    "WebSecurityError",
    "WebServer",
    "metrics_app",
]
