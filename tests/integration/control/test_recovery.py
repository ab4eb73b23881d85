"""Real processes, fake children: whatever is lost, the job goes on from its checkpoints and trains each row once.

What a fake trainer restores is the list of rows that its model has seen; fake_worker.py checks it against the cursor.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paddlewheel.trainer.checkpoint import manifest
from tests.integration.control.jobs import LONG, Job

SMALL = {"cluster": {"servers": 1}}
EVERY_10 = {"checkpoint": {"every_steps": 10}, **SMALL}
SLOW = {"*": {"steps": 100, "step_timeout_seconds": 0.05}}


def seen(path: Path) -> list[list[int]]:
    """The model: every row it has been trained on."""
    spans: list[list[int]] = json.loads((manifest.read(path).sparse / "seen.json").read_text())
    return sorted(spans)


def assert_each_row_once(job: Job, *, steps: int, epochs: int = 1) -> None:
    report = job.report()
    assert report.exact, report
    assert [proof.num_rows for proof in report.epochs] == [steps * 100] * epochs
    newest = manifest.latest(job.run_dir / "checkpoints")
    assert newest is not None
    rows = {(epoch, index, row) for epoch, index, start, n in seen(newest) for row in range(start, start + n)}
    assert len(rows) == sum(n for *_, n in seen(newest)) == steps * 100 * epochs
    assert not list((job.run_dir / "checkpoints").glob(".*"))


def test_a_job_goes_on_from_its_checkpoint_after_losses(start_job: Callable[..., Job]) -> None:
    """A trainer is killed in training; then trainer 0 in the middle of a save, and in the middle of a load."""
    plan = {
        "*": {"steps": 40},
        "trainer 1": {"at_step": 17, "do": "kill", "attempts": [1]},
        "trainer 0": {"at": "loading", "do": "kill", "attempts": [2]},
        "pserver 0": {"at": "start", "do": "kill", "attempts": [3]},
    }
    job = start_job(plan, {**EVERY_10, "train": {"epochs": 2}}, max_restarts=3)
    outcome = job.finish(100)
    assert outcome["exit_code"] == 0, outcome
    assert outcome["num_restarts"] == 3
    assert_each_row_once(job, steps=40, epochs=2)
    report = job.report()
    assert [story.number for story in report.attempts] == [1, 2, 3, 4]
    assert [story.restored for story in report.attempts] == [None, 10, 10, 10]
    assert "trainer 1 was killed by SIGKILL" in report.attempts[0].cause
    assert (report.attempts[0].rows_replayed or 0) > 0
    assert report.attempts[0].down_seconds > 0


@pytest.mark.parametrize("moment", ["saving", "committed"])
def test_a_trainer_lost_in_a_save(start_job: Callable[..., Job], moment: str) -> None:
    job = start_job({"trainer 0": {"at": moment, "do": "kill", "attempts": [1]}}, SMALL, max_restarts=1)
    assert job.finish(100)["exit_code"] == 0
    assert_each_row_once(job, steps=10)
    assert [story.restored for story in job.report().attempts] == [None, 6 if moment == "committed" else None]


def test_a_lost_coordinator_is_started_again(start_job: Callable[..., Job], eventually: Callable[..., None]) -> None:
    job = start_job(SLOW, EVERY_10, max_restarts=2)
    eventually(job.has("committed", 2), seconds=60)
    job.coordinator().kill()
    outcome = job.finish(100)
    assert outcome["exit_code"] == 0, outcome
    assert outcome["num_restarts"] == 1
    assert_each_row_once(job, steps=100)
    assert job.report().attempts[0].failed_role == "coordinator"


def test_a_failed_save_does_not_end_training_but_a_last_one_does(start_job: Callable[..., Job]) -> None:
    job = start_job(
        {"*": {"steps": 30}, "trainer 0": {"at": "saving", "do": "full", "attempts": [1]}}, EVERY_10, max_restarts=1
    )
    outcome = job.finish(100)
    assert outcome["exit_code"] == 0, outcome
    assert_each_row_once(job, steps=30)
    report = job.report()
    assert report.num_failed_checkpoints >= 2
    assert "No space left on device" in report.attempts[0].cause
    assert "No space left" in job.errors


def test_a_failed_save_ends_training_if_the_job_says_so(start_job: Callable[..., Job]) -> None:
    job = start_job(
        {"*": {"steps": 30}, "trainer 0": {"at": "saving", "do": "full"}},
        {"checkpoint": {"every_steps": 3, "on_failure": "stop"}, **SMALL},
    )
    outcome = job.finish(100)
    assert outcome["exit_code"] == 75
    assert "could not save the checkpoint of step 3" in outcome["cause"]
    assert manifest.latest(job.run_dir / "checkpoints") is None


def test_a_stopped_job_saves_goes_on_and_is_not_trained_twice(
    start_job: Callable[..., Job], eventually: Callable[..., None]
) -> None:
    first = start_job(SLOW, SMALL)
    eventually(first.has("running"), seconds=60)
    time.sleep(0.5)  # some rows, whatever the machine does
    first.process.send_signal(signal.SIGTERM)
    outcome = first.finish(60)
    assert outcome["exit_code"] == 143
    saved = manifest.latest(first.run_dir / "checkpoints")
    assert saved is not None
    assert 0 < len(seen(saved)) < 100
    # another number of trainers goes on
    second = start_job(SLOW, {"cluster": {"trainers": 1, "servers": 2}})
    assert second.finish(100)["exit_code"] == 0
    assert_each_row_once(second, steps=100)
    assert second.report().attempts[1].restored == int(saved.name[5:])
    third = start_job(SLOW, SMALL)
    outcome = third.finish(60)
    assert outcome["exit_code"] == 0
    assert "trained already" in third.errors
    assert len(third.records("attempt")) == 2
    # a job that was changed is refused, unless one says what is meant
    changed = {"train": {"dense_optimizer": {"learning_rate": 0.5}}, **SMALL}
    fourth = start_job(SLOW, changed)
    _, errors = fourth.process.communicate(timeout=60)
    assert "train.dense_optimizer.learning_rate: 0.001 before, 0.5 now" in errors
    fifth = start_job({"*": {"steps": 7}}, {**changed, "resume": "never"})
    assert fifth.finish(100)["exit_code"] == 0
    assert_each_row_once(fifth, steps=7)
    aside = list((fifth.run_dir / "checkpoints").glob("set-aside-*/step-*"))
    assert saved.name in {path.name for path in aside}


def test_a_damaged_checkpoint_is_put_aside(start_job: Callable[..., Job], eventually: Callable[..., None]) -> None:
    first = start_job(SLOW, EVERY_10)
    eventually(first.has("committed", 2), seconds=60)
    first.process.kill()
    first.process.communicate()
    newest = manifest.latest(first.run_dir / "checkpoints")
    assert newest is not None
    part = newest / "sparse" / "seen.json"
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    second = start_job(SLOW, EVERY_10)
    assert second.finish(100)["exit_code"] == 0
    assert f"put aside as {newest.name}.damaged" in second.errors
    assert (newest.parent / f"{newest.name}.damaged").is_dir()
    assert second.report().exact


@pytest.mark.parametrize("removed", [False, True], ids=["damaged", "removed"])
def test_the_newest_checkpoint_is_lost_while_the_job_runs(
    start_job: Callable[..., Job], eventually: Callable[..., None], removed: bool
) -> None:
    """The next attempt goes on from the one before, and no row is lost or trained twice."""
    job = start_job(SLOW, EVERY_10, max_restarts=2)
    eventually(job.has("committed", 2), seconds=60)
    worker = job.worker("trainer", 1)
    worker.suspend()  # no further checkpoint while this one is spoilt
    newest = manifest.latest(job.run_dir / "checkpoints")
    assert newest is not None
    if removed:
        shutil.rmtree(newest)
    else:
        part = newest / "sparse" / "seen.json"
        part.write_bytes(part.read_bytes().replace(b"[", b"{", 1))
    worker.kill()
    outcome = job.finish(100)
    assert outcome["exit_code"] == 0, outcome
    assert_each_row_once(job, steps=100)
    assert outcome["num_restarts"] == 2, "one to find out, one to go on"
    assert [story.restored for story in job.report().attempts] == [None, int(newest.name[5:]), 10]
    assert removed or (newest.parent / f"{newest.name}.damaged").is_dir()


def test_a_job_that_cannot_use_a_whole_checkpoint_is_told_so(
    start_job: Callable[..., Job], eventually: Callable[..., None]
) -> None:
    """The error of a restore is the job's when the checkpoint is as it was written."""
    failing = {"at": "loading", "do": "error", "kind": "checkpoint", "message": "other tables", "code": 75}
    plan = {**SLOW, "trainer 1": {"at_step": 15, "do": "kill", "attempts": [1]}}
    plan["trainer 0"] = {**failing, "attempts": [2]}
    outcome = start_job(plan, EVERY_10, max_restarts=3).finish(100)
    assert outcome["exit_code"] == 64
    assert outcome["cause"] == "trainer 0 failed: other tables"


def test_a_folder_that_can_never_be_saved_to_ends_the_job_at_once(start_job: Callable[..., Job]) -> None:
    plan = {**SLOW, "trainer 0": {"at": "saving", "do": "refuse"}}
    job = start_job(plan, EVERY_10, max_restarts=3)
    outcome = job.finish(100)
    assert outcome["exit_code"] == 64, outcome
    assert outcome["num_restarts"] == 0
    assert "could not save the checkpoint of step 10" in outcome["cause"]


def test_a_job_that_began_with_an_older_checkpoint_keeps_what_it_commits(
    start_job: Callable[..., Job], eventually: Callable[..., None]
) -> None:
    """Later checkpoints of the run before neither push new ones out nor are gone on from after a loss."""
    first = start_job(
        {"*": {"steps": 60, "step_timeout_seconds": 0.05}}, {"checkpoint": {"every_steps": 10, "keep": 9}, **SMALL}
    )
    assert first.finish(100)["exit_code"] == 0
    kept = first.run_dir / "checkpoints"
    assert [path.name for path in manifest.committed(kept)] == ["step-10", "step-20", "step-30", "step-31"]
    plan = {
        "*": {"steps": 60, "step_timeout_seconds": 0.05},
        "trainer 1": {"at_step": 17, "do": "kill", "attempts": [2]},
    }
    changes = {"checkpoint": {"every_steps": 5, "keep": 1}, **SMALL, "restore": str(kept / "step-10")}
    second = start_job(plan, changes, max_restarts=3)
    outcome = second.finish(100)
    assert outcome["exit_code"] == 0, outcome
    assert outcome["num_restarts"] == 1
    assert_each_row_once(second, steps=60)
    assert [record["restore"] for record in second.records("attempt")][1:] == [
        str(kept / "step-10"),
        str(kept / "step-15"),
    ]


def test_a_checkpoint_on_demand(start_job: Callable[..., Job], eventually: Callable[..., None]) -> None:
    job = start_job({"*": {**LONG, "step_timeout_seconds": 0.05}}, {"checkpoint": {"every_minutes": 0.02}, **SMALL})
    eventually(job.has("running"), seconds=60)
    eventually(job.has("committed"), seconds=60)  # by the clock
    command = [sys.executable, "-m", "paddlewheel.deploy.cli", "checkpoint", "create", job.address(), "--json"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr
    path = Path(json.loads(asked.stdout)["path"])
    assert manifest.read(path).cursor["step"] == json.loads(asked.stdout)["step"]
    job.process.send_signal(signal.SIGINT)
    assert job.finish()["exit_code"] == 130
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 75
