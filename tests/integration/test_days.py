"""Jobs day by day: decay and eviction against NumPy, whatever was killed; validation; published chains; refusals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.pserver import delta_chain
from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.export import export_table, read_groups
from paddlewheel.pserver.saved_tables import open_table, read_rows
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.coordinator import run_report
from paddlewheel.trainer.coordinator.resume import read_journal
from tests.support.command import Job

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]

DAYS = [f"2026-01-0{number}" for number in range(1, 6)]
ROWS = 1500
DECAY, LEAST, ADMISSION = np.float32(0.5), np.float32(4.0), 20
SETTINGS = {
    "tables": {
        "default": {
            "width": 4,
            "admission_threshold": ADMISSION,
            "optimizer": {"rule": "adagrad", "learning_rate": 0.1},
            "lifecycle": {"show_click_decay": float(DECAY), "delete_below_score": float(LEAST)},
        }
    },
    "model": {"kind": "deepfm", "tower": [8]},
    "train": {"max_staleness_steps": 0},
    "cluster": {"servers": 2, "trainers": 1},
    "control": {"max_restarts": 3, "backoff_seconds": 0.1},
    "checkpoint": {"every_steps": 4, "keep": 100},
    "metrics": {"enabled": False},
}


def _rows(number: int) -> dict[str, np.ndarray]:
    """Of one day: ids of `a` come and go, those of `b` stay; clicks depend on both."""
    rng = np.random.default_rng(number)
    weights = np.random.default_rng(99).normal(0, 1.5, 400)
    a = rng.integers(0, 60, ROWS) + 15 * number
    b = rng.integers(0, 20, ROWS) + 300
    chance = 1 / (1 + np.exp(-weights[a] - weights[b]))
    return {"click": (rng.random(ROWS) < chance).astype(np.int8), "a": a, "b": b}


@pytest.fixture(scope="module")
def by_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days") / "data"
    for number, day in enumerate(DAYS):
        place = folder / f"day={day}"
        place.mkdir(parents=True)
        pq.write_table(pa.table(_rows(number)), place / "part.parquet", row_group_size=500)
    return folder


def _data(folder: Path) -> dict:
    return {
        "train": str(folder),
        "labels": ["click"],
        "batch_rows": 250,
        "slice_assignment": "static",
        "sparse": [{"name": "a"}, {"name": "b"}],
    }


def _expected(num_days: int) -> tuple[np.ndarray, list[int], list[int]]:
    """Shows and clicks [keys, 2] after so many days, before the boundary of the last; keys by day; evicted by day."""
    counts: dict[tuple[str, int], np.ndarray] = {}
    keys, evicted = [], []
    for number in range(num_days):
        rows = _rows(number)
        for feature in ("a", "b"):
            shows = Counter(rows[feature].tolist())
            clicks = Counter(rows[feature][rows["click"] == 1].tolist())
            for value, count in shows.items():
                more = np.array([count, clicks[value]], np.float32)
                counts[feature, value] = counts.get((feature, value), np.zeros(2, np.float32)) + more
        keys.append(len(counts))
        if number + 1 < num_days:
            counts = {key: row * DECAY for key, row in counts.items()}
            gone = [key for key, row in counts.items() if row[0] < LEAST]
            for key in gone:
                del counts[key]
            evicted.append(len(gone))
    return np.array(sorted(row.tolist() for row in counts.values())), keys, evicted


def _saved_counts(run: Path) -> np.ndarray:
    newest = manifest.latest(run / "checkpoints")
    assert newest is not None
    pairs = [
        (show, click)
        for rows in read_rows(open_table(newest / "sparse" / "default"))
        for show, click in zip(rows.shows_N.tolist(), rows.clicks_N.tolist(), strict=True)
    ]
    return np.array(sorted(pairs))


def _assert_as_undisturbed(run: Path, num_days: int) -> None:
    counts, keys, evicted = _expected(num_days)
    np.testing.assert_allclose(_saved_counts(run), counts, rtol=1e-5)
    report = run_report.report(run)
    assert report.exact
    assert [proof.num_rows for proof in report.epochs] == [ROWS] * num_days
    assert list(report.day_names.values()) == DAYS[:num_days]
    assert [story.day for story in report.days] == DAYS[:num_days]
    sizes = [story.tables["default"] for story in report.days]
    assert [size["keys"] for size in sizes] == keys
    assert [size["evicted"] for size in sizes] == [*evicted, None]
    assert [size["new"] for size in sizes] == [
        now - (before - gone) for now, before, gone in zip(keys, [0, *keys], [0, *evicted], strict=False)
    ]
    assert num_days < 4 or sum(evicted) > 0
    assert sizes[-1]["admitted"] == np.count_nonzero(counts[:, 0] >= ADMISSION) < sizes[-1]["keys"]
    for number, story in enumerate(report.days):
        assert (story.validation is None) == (number == 0)
        if story.validation is not None:
            assert story.validation["rows"] == ROWS
            assert 0.55 < story.validation["auc"] < 1
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_days_are_trained_over_two_runs_and_published(tmp_path: Path, by_day: Path) -> None:
    job = Job(tmp_path, _data(by_day), {**SETTINGS, "train": {"days": {"publish": {"base_every_days": 3}}}})
    code, outcome = job.run("train", "--days", "2026-01-01..2026-01-02")
    assert (code, outcome["result"]["rows"]) == (0, 2 * ROWS), outcome
    _assert_as_undisturbed(tmp_path / "run", 2)
    job.settings["cluster"] = {"servers": 3, "trainers": 2}
    code, outcome = job.run("train", "--days", "2026-01-02..2026-01-05")  # the second is trained already
    assert (code, outcome["result"]["rows"]) == (0, 5 * ROWS), outcome
    _assert_as_undisturbed(tmp_path / "run", 5)
    code, outcome = job.run("train", "--days", "2026-01-04..2026-01-05")
    assert (code, outcome["result"]["rows"]) == (0, 5 * ROWS)
    assert len(read_journal(tmp_path / "run" / "journal.jsonl")) == len(_journal_before(tmp_path))
    said = _command("report", str(tmp_path / "run"))
    assert said.returncode == 0, said.stderr
    assert f"day 2026-01-05: each of {ROWS:,} rows once" in said.stdout
    assert "logloss" in said.stdout
    _check_chain(tmp_path)


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paddlewheel.deploy.cli", *arguments], capture_output=True, text=True, timeout=60
    )


def _journal_before(folder: Path) -> list[dict]:
    """Nothing was run, so nothing was written."""
    records = read_journal(folder / "run" / "journal.jsonl")
    assert [record.what for record in records].count("over") == 2
    return records


def _check_chain(folder: Path) -> None:
    """Base and deltas make what a full export is; a chain with a link missing or in another's place is refused."""
    directory = folder / "run" / "published" / "default"
    known = delta_chain.links(directory)
    assert [(link.number, link.kind, link.day) for link in known] == [
        (number + 1, "base" if number in {0, 3} else "delta", day) for number, day in enumerate(DAYS)
    ]
    assert known[1].num_removed == 0 or known[2].num_removed > 0
    listed = _command("deltas", "ls", str(directory))
    assert listed.stdout.splitlines()[3].startswith("000004  base   2026-01-04"), listed.stdout
    made = _command("deltas", "apply", str(directory), "--to", str(folder / "newest"), "--json")
    assert json.loads(made.stdout)["content_id"] == known[-1].content_id
    positions = {
        path: manifest.read_cursor(path)["position"] for path in manifest.committed(folder / "run/checkpoints")
    }
    ends = [path for path, position in positions.items() if position["epoch"] and not position["done"]]
    for day, end in zip(DAYS, ends, strict=True):
        followed, full = folder / f"followed-{day}", folder / f"full-{day}"
        delta_chain.follow(directory, followed, day=day)
        export_table(open_table(end / "sparse" / "default"), full)
        here, there = (pa.concat_tables(list(read_groups(place))).sort_by("key") for place in (followed, full))
        for column in ("key", "first_order", "embedding"):
            assert here[column].combine_chunks().equals(there[column].combine_chunks()), (day, column)
        for column in ("shows", "clicks"):
            np.testing.assert_allclose(here[column].to_numpy(), there[column].to_numpy(), rtol=2e-5)
    hidden = directory / known[1].folder
    hidden.rename(folder / "away")
    with pytest.raises(CheckpointError, match="link 2 is missing"):
        delta_chain.follow(directory, folder / "never", day=DAYS[2])
    shutil.copytree(directory / known[2].folder, hidden)  # out of order: another delta in its place
    refused = _command("deltas", "apply", str(directory), "--to", str(folder / "never"), "--day", DAYS[2])
    assert refused.returncode == 64
    with pytest.raises(CheckpointError, match="was renamed, or copied"):
        delta_chain.follow(directory, folder / "never", day=DAYS[2])
    shutil.rmtree(hidden)
    with pytest.raises(CheckpointError, match=r"no link of 2026-02-01: it has 000001-base-2026-01-01"):
        delta_chain.follow(directory, folder / "never", day="2026-02-01")
    assert not (folder / "never").exists()


def _worker(process: subprocess.Popen, module: str) -> psutil.Process | None:
    below = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        return next((worker for worker in below if module in worker.cmdline()), None)
    return None


def _kill(process: subprocess.Popen, module: str) -> None:
    worker = _worker(process, module)
    assert worker is not None
    worker.kill()


def _wait(condition, process: subprocess.Popen):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1][-3000:]
        if found := condition():
            return found
        time.sleep(0.0005)
    raise AssertionError("it never happened")


def _kill_between_commit_and_boundary(process: subprocess.Popen, run: Path, step: int) -> None:
    """Lets the trainer run in small steps from when it begins to save; kills it when the commit is there.

    Once its draft is whole, it runs a millisecond at a time: the coordinator needs longer, from giving the checkpoint
    its name, to write its journal and answer the trainer.
    """
    worker = _wait(lambda: _worker(process, "paddlewheel.trainer.worker"), process)
    directory, committed = run / "checkpoints", run / "checkpoints" / f"step-{step}"
    _wait(lambda: list(directory.glob(f".step-{step}-*")) or committed.exists(), process)
    worker.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not committed.exists():
        assert time.monotonic() < deadline
        is_whole = bool(list(directory.glob(f".step-{step}-*/MANIFEST.json")))
        worker.send_signal(signal.SIGCONT)
        time.sleep(0.001 if is_whole else 0.002)
        worker.send_signal(signal.SIGSTOP)
        answer_by = time.monotonic() + (0.03 if is_whole else 0.001)
        while not committed.exists() and time.monotonic() < answer_by:
            time.sleep(0.0005)
    worker.kill()


@pytest.mark.slow
def test_a_boundary_is_neither_lost_nor_doubled_when_the_trainer_dies_around_it(tmp_path: Path, by_day: Path) -> None:
    """Killed between the commit and the boundary; killed in the middle of a day after one; a server killed, too."""
    # a worker that is stopped at two heartbeats in a row counts as lost
    patient = {**SETTINGS["control"], "heartbeat_seconds": 4, "heartbeat_timeout_seconds": 30}
    job = Job(tmp_path, _data(by_day), {**SETTINGS, "control": patient})
    run = tmp_path / "run"
    process = job.start("train", "--days", f"{DAYS[0]}..{DAYS[-1]}")
    try:
        _kill_between_commit_and_boundary(process, run, 6)
        records = _wait(lambda: _told(run, "boundary", 1), process)
        assert records[0]["redone"]  # nobody had carried it out
        assert records[0]["day"] == DAYS[0]
        _wait((run / "checkpoints" / "step-16").exists, process)  # of the third day, after its boundary
        _kill(process, "paddlewheel.trainer.worker")
        _wait((run / "checkpoints" / "step-24").exists, process)  # the fourth day's end
        _kill(process, "paddlewheel.pserver.server_process")
        output, errors = process.communicate(timeout=200)
    finally:
        _end(process)
    assert process.returncode == 0, errors[-3000:]
    assert json.loads(output)["result"]["rows"] == 5 * ROWS
    _assert_as_undisturbed(run, 5)


def _end(process: subprocess.Popen[str]) -> None:
    """A job that a failed test has left running."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=30)


def _told(run: Path, what: str, at_least: int) -> list[dict]:
    found = [record.model_dump() for record in read_journal(run / "journal.jsonl") if record.what == what]
    return found if len(found) >= at_least else []


@pytest.mark.slow
def test_boundaries_by_rows(tmp_path: Path) -> None:
    """Every so many rows of a stream, on two trainers that pull ahead; a kill loses and doubles none."""
    rows = _rows(0)
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table(rows), tmp_path / "train" / "part.parquet", row_group_size=500)
    table = {**SETTINGS["tables"]["default"], "lifecycle": {"show_click_decay": 0.5, "every_rows": 1000}}
    settings = {
        **SETTINGS,
        "tables": {"default": table},
        "train": {"epochs": 3, "max_staleness_steps": 2},
        "cluster": {"servers": 2, "trainers": 2},
    }
    data = {**_data(tmp_path / "train"), "shuffle": {"enabled": False}}
    job = Job(tmp_path, data, settings)
    run = tmp_path / "run"
    process = job.start("train")
    try:
        _wait(lambda: _told(run, "boundary", 2), process)
        _kill(process, "paddlewheel.trainer.worker")
        output, errors = process.communicate(timeout=200)
    finally:
        _end(process)
    assert process.returncode == 0, errors[-3000:]
    assert json.loads(output)["result"]["rows"] == 3 * ROWS
    report = run_report.report(run)
    assert report.exact
    # Boundaries follow the first step that reaches 1000, 2000, ...; what was trained before is halved each time.
    positions = [story.rows for story in report.days]
    assert [position // 1000 for position in positions] == [1, 2, 3, 4]
    bounds = [0, *positions, 3 * ROWS]
    weights = [0.5 ** (len(bounds) - 2 - place) for place in range(len(bounds) - 1)]
    total = sum(weight * (after - before) for weight, after, before in zip(weights, bounds[1:], bounds, strict=False))
    np.testing.assert_allclose(_saved_counts(run)[:, 0].sum(), 2 * total, rtol=1e-5)  # two features a row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--days", "2026-01-04..2026-01-08"], "no data for 2026-01-06, 2026-01-07, 2026-01-08"),
        (["--days", "2026-01-05..2026-01-01"], "ends before it begins"),
        (["--days", "yesterday"], "'yesterday' is no day: write 2026-01-31"),
        (["--days", "2026-02-01..2026-02-02", "--skip-missing-days"], "none of these days has data"),
        (["--days", "2026-01-01", "--set", "train.epochs=2"], "with train.days each day is trained once"),
        (["--days", "2026-01-01", "--set", "train.days.column=date"], "lies in no folder date=<day>"),
        (
            ["--days", "2026-01-01", "--set", "tables.default.lifecycle.every_rows=1000"],
            "is for data without days",
        ),
        (["--set", "tables.default.lifecycle.every_rows=100"], "less than the 250 rows of a step"),
        ([], "decays or deletes keys at day boundaries, but this job has none"),
        (["--set", "train.days.column=day"], "say which days to train, such as --days 2026-01-01..2026-01-07"),
    ],
)
def test_what_cannot_be_trained_by_days_is_refused_before_anything_starts(
    tmp_path: Path, by_day: Path, arguments: list[str], message: str
) -> None:
    job = Job(tmp_path, _data(by_day), SETTINGS)
    done = subprocess.run(job.command("train", *arguments), capture_output=True, text=True, timeout=60)
    assert done.returncode == 64, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_a_missing_day_may_be_left_out_and_an_earlier_one_may_not_come_later(tmp_path: Path, by_day: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(by_day, data)
    (data / f"day={DAYS[1]}").rename(tmp_path / "late")
    job = Job(tmp_path, _data(data), SETTINGS)
    code, outcome = job.run("train", "--days", "2026-01-01..2026-01-03", "--skip-missing-days")
    assert (code, outcome["result"]["rows"]) == (0, 2 * ROWS), outcome
    (tmp_path / "late").rename(data / f"day={DAYS[1]}")
    for arguments, message in (
        (["--days", "2026-01-02..2026-01-04"], "2026-01-02 lies before 2026-01-03, the last day that was trained"),
        (["--set", "tables.default.lifecycle.every_rows=1000", "--resume"], "was trained by days"),
    ):
        done = subprocess.run(job.command("train", *arguments), capture_output=True, text=True, timeout=60)
        assert done.returncode == 64
        assert message in done.stderr


@pytest.mark.slow
def test_a_stopped_job_goes_on_in_the_middle_of_a_day(tmp_path: Path, by_day: Path) -> None:
    # 300 steps a day, so that most of its time is between its boundaries
    settings = {**SETTINGS, "checkpoint": {"every_steps": 20, "keep": 100}}
    job = Job(tmp_path, {**_data(by_day), "batch_rows": 5}, settings)
    run = tmp_path / "run"
    process = job.start("train", "--days", f"{DAYS[0]}..{DAYS[3]}")
    try:
        _wait((run / "checkpoints" / "step-340").exists, process)  # of the second day
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 143, errors[-3000:]
    newest = manifest.latest(run / "checkpoints")
    assert newest is not None
    position = manifest.read_cursor(newest)["position"]
    assert position["done"], "it was stopped between two days: another moment tests nothing"
    done = _command("train", str(job.path), "--days", "2026-01-05")
    assert done.returncode == 64
    current = DAYS[position["epoch"]]
    assert f"stands in the middle of {current}" in done.stderr
    assert f"--days {current}..2026-01-05" in done.stderr
    code, outcome = job.run("train", "--days", f"{current}..{DAYS[3]}")
    assert (code, outcome["result"]["rows"]) == (0, 4 * ROWS), outcome
    _assert_as_undisturbed(run, 4)
