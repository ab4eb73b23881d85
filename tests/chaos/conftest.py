"""The data set and the undisturbed run that all chaos tests share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paddlewheel.data_pipeline import synthetic
from tests.chaos.driver import NUM_ROWS, ChaosJob, check_run, job_file


@pytest.fixture(scope="session")
def click_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks") / "data"
    synthetic.generate(folder, NUM_ROWS, 5)
    return folder


@pytest.fixture(scope="session")
def undisturbed_auc(click_data: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Of the same job when nothing happens to it: the mean of three runs, as pushes race (standard deviation 0.001)."""
    found = []
    for _ in range(3):
        job = ChaosJob(job_file(tmp_path_factory.mktemp("undisturbed"), click_data), seed=0)
        try:
            outcome = job.finish()
        finally:
            job.close()
        check_run(job, outcome, None)
        found.append(outcome["result"]["eval"]["auc"])
    return statistics.mean(found)


@pytest.fixture
def start_job(click_data: Path, tmp_path: Path) -> Iterator[Callable[..., ChaosJob]]:
    """`start_job(seed, arguments, prefix, **sections)`; every call uses the same run folder."""
    started: list[ChaosJob] = []

    def start(seed: int = 0, arguments: Sequence[str] = (), prefix: Sequence[str] = (), **sections: Any) -> ChaosJob:
        started.append(ChaosJob(job_file(tmp_path, click_data, **sections), seed, arguments, prefix))
        return started[-1]

    yield start
    for job in started:
        job.close()
