"""What a trainer worker makes of an error: the kind that its coordinator hears, and its exit code."""

from __future__ import annotations

from typing import Any

import pytest

from paddlewheel.data_pipeline.errors import ChangedError, DataError, UnavailableError
from paddlewheel.trainer.loop.train import Signals
from paddlewheel.trainer.protocol.messages import Ready, WorkerEvent, to_line
from paddlewheel.trainer.worker import __main__
from tests.support.plans import job, trainer_spec


class _Link:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def send(self, event: WorkerEvent) -> None:
        self.events.append(event.model_dump())


class _Trained:
    ready = Ready(step=0, bad_steps=0, bad_rows=0, load_seconds=0.0)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self) -> None:
        raise self._error


@pytest.mark.parametrize("when", ["built", "training"])
@pytest.mark.parametrize(
    ("error", "kinds", "code"),
    [
        (UnavailableError("s3://x/a.parquet: row group 0 cannot be read now"), {"runtime"}, 75),
        (ChangedError("a.parquet: is not the file that was there"), {"data", "job"}, 64),
        (DataError("a.parquet: row 3: label 2"), {"data", "job"}, 64),
    ],
)
def test_what_may_pass_is_a_loss_and_what_stays_is_the_job_s(monkeypatch, when, error, kinds, code):
    def build(*_: Any) -> _Trained:
        if when == "built":
            raise error
        return _Trained(error)

    monkeypatch.setattr(__main__, "Trainer", build)
    monkeypatch.setattr(__main__, "check", lambda: None)
    link = _Link()
    assert __main__.run(to_line(trainer_spec(job())), link, Signals()) == code  # type: ignore[arg-type]
    [said] = [event for event in link.events if event["event"] == "error"]
    assert said["kind"] in kinds
    assert str(error) in said["message"]
