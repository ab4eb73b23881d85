"""The status page: what a person sees of a running job in a browser. Read-only, without anything from other servers.

    /              the page (static/index.html, page.js, page.css)
    /status.json   the status, with the curves so far
    /metrics       the coordinator's own metrics

`snapshot` and `Curves` are pure; `StatusPage` only joins them to the HTTP server.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any

from google.protobuf.message import Message

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.protocol.messages import Progress
from paddlewheel.trainer.telemetry import JobTelemetry, metrics_app
from paddlewheel.trainer.telemetry.web import App

_STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_ROLES = {pb.ROLE_PSERVER: "pserver", pb.ROLE_TRAINER: "trainer"}
_CURVES = ("rows", "loss", "auc", "rows_per_second")


def snapshot(status: pb.JobStatus) -> dict[str, Any]:
    """The status as plain data: every field present, roles by name."""
    result = _plain(status)
    result["progress"] = result["result"] = None
    if status.HasField("progress"):
        result["progress"] = wire.plain(status.progress)
        del result["progress"]["durations"]  # for the agents' metrics only
    if status.HasField("result"):
        result["result"] = wire.plain(status.result)["figures"]
    for member in result["members"]:
        member["role"] = _ROLES.get(member["role"], "unknown")
    if not status.HasField("checkpoint"):
        result["checkpoint"]["step"] = -1
    return result


def _plain(message: Message) -> dict[str, Any]:
    """Unlike protobuf's own MessageToDict: large and missing numbers are numbers, missing messages are there."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.name in {"progress", "result"}:
            continue
        value = getattr(message, field.name)
        if field.message_type is not None:
            found[field.name] = [_plain(item) for item in value] if field.is_repeated else _plain(value)
        else:
            absent = field.has_presence and not message.HasField(field.name)
            found[field.name] = None if absent else list(value) if field.is_repeated else value
    return found


class Curves:
    """Progress over time in bounded memory: when `limit` points are there, every other one goes, and so on.

    A step that goes back (a restart from a checkpoint) is kept as it was seen: the curve shows the repetition.
    """

    def __init__(self, limit: int = 480) -> None:
        assert limit % 2 == 0
        self._limit = limit
        self._stride_seconds = 0.0
        self._points: list[tuple[float, ...]] = []

    def add(self, seconds: float, progress: Progress | None) -> None:
        """Takes the progress at a time since the start, if the last point is old enough."""
        if progress is None:
            return
        if self._points and seconds - self._points[-1][0] < self._stride_seconds:
            return
        point = (seconds, *(_number(getattr(progress, name)) for name in _CURVES))
        if self._points and point[1:] == self._points[-1][1:]:
            return
        self._points.append(point)
        if len(self._points) == self._limit:
            self._points = self._points[1::2]
            span = self._points[-1][0] - self._points[0][0]
            self._stride_seconds = 0.9 * span / len(self._points)

    def to_json(self) -> dict[str, list[float | None]]:
        """One list for `seconds` and each curve; None where nothing was said."""
        names = ("seconds", *_CURVES)
        columns = zip(*self._points, strict=True) if self._points else ((),) * len(names)
        return {
            name: [None if math.isnan(value) else value for value in column]
            for name, column in zip(names, columns, strict=True)
        }


class StatusPage:
    """Routes for a `trainer.telemetry.WebServer`.

    Args:
        job: name of the job.
        status: the status of now; called from the HTTP server's threads.
        facts: what does not change: shown as it is (`tables`, `version`...).
        checkpoint_interval_seconds: see JobTelemetry.
    """

    def __init__(
        self,
        job: str,
        status: Callable[[], pb.JobStatus],
        *,
        facts: Mapping[str, Any] | None = None,
        checkpoint_interval_seconds: float | None = None,
    ) -> None:
        self.curves = Curves()
        self._status = status
        self._facts = dict(facts or {})
        self._telemetry = JobTelemetry(
            job, lambda: snapshot(status()), checkpoint_interval_seconds=checkpoint_interval_seconds
        )

    def routes(self) -> dict[str, App]:
        """Path to application."""
        folder = resources.files("paddlewheel.trainer.coordinator") / "static"
        pages = {path: _fixed((folder / name).read_bytes(), kind) for path, (name, kind) in _STATIC.items()}
        return {**pages, "/status.json": self._answer, "/metrics": metrics_app(self._telemetry.registry)}

    def to_json(self) -> dict[str, Any]:
        """What /status.json says."""
        return {**snapshot(self._status()), "curves": self.curves.to_json(), "facts": self._facts}

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = json.dumps(_finite(self.to_json()), allow_nan=False).encode()
        headers = [("Content-Type", "application/json")]
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            body = gzip.compress(body, compresslevel=1)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [body]


def _fixed(body: bytes, kind: str) -> App:
    def app(_environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    return app


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _finite(value: Any) -> Any:
    """JSON has no NaN: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
