"""Metrics of every process without Paddle, and the HTTP server that shows them. See deploy/monitoring/README.md."""

from paddlewheel.trainer.telemetry.agent import Telemetry
from paddlewheel.trainer.telemetry.job import JobTelemetry
from paddlewheel.trainer.telemetry.series import DurationHistogram, Series
from paddlewheel.trainer.telemetry.web import WebSecurity, WebSecurityError, WebServer, metrics_app

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
