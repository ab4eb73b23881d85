"""Jobs that tests start are ended with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.control.jobs import Job


@pytest.fixture(name="start_job")
def fixture_start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`start_job(plan, changes, **control)`: see fake_worker.py and run_fake_job.py."""
    started: list[Job] = []

    def start(plan: dict[str, Any], changes: dict[str, Any] | None = None, **control: Any) -> Job:
        job = Job(tmp_path / "run", {"*": {"steps": 10}, **plan}, {"control": control, **(changes or {})})
        started.append(job)
        return job

    yield start
    for job in started:
        if job.process.poll() is None:
            job.process.kill()
        job.process.communicate()
