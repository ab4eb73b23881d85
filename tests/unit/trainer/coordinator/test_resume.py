"""Where a run begins: what is in its folders, whole or damaged, of the same job or another."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.checkpoint.folder_store import open_checkpoints
from paddlewheel.trainer.checkpoint.store import DirectoryBusyError
from paddlewheel.trainer.coordinator import resume
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.resume import ResumeError, StartPoint
from paddlewheel.trainer.coordinator.service import Journal
from paddlewheel.trainer.job.config import JobConfig
from tests.support.plans import record

JOB: dict[str, Any] = {
    "name": "j",
    "seed": 1,
    "data": {"train": "/a", "eval": "/b", "labels": ["click"], "threads": 2, "sparse": [{"name": "a"}]},
    "tables": {"default": {"width": 4}},
    "model": {"kind": "fm"},
    "train": {"epochs": 2, "dense_optimizer": {"learning_rate": 0.1}},
    "cluster": {"servers": 1},
}


def plan_of(run_dir: Path, job: dict[str, Any] = JOB, **fields: Any) -> JobPlan:
    return JobPlan(job=JobConfig.parse({**job, "run_dir": str(run_dir)}), **fields)


def finished_result(plan: JobPlan) -> dict[str, Any] | None:
    return resume.finished_result(plan, resume.find_start(plan))


def changed(**sections: Any) -> dict[str, Any]:
    return {**JOB, **{name: {**JOB[name], **values} for name, values in sections.items()}}


def save(run_dir: Path, step: int, *, epoch: int = 0, version: int = 1) -> Path:
    draft = manifest.Draft(run_dir / "checkpoints", f".step-{step}-x", step)
    (draft.sparse / "part").write_text("content")
    cursor = {
        "version": version,
        "step": step,
        "rows": step,
        "draft": draft.path.name,
        "parent": None,
        "attempt": 1,
        "spans": [],
        "position": {"epoch": epoch, "done": []},
        "job": resume.identity(JobConfig.parse(JOB)),
    }
    draft.finish(dense={"w": np.zeros(2, np.float32)}, cursor=cursor, facts={})
    return manifest.commit(draft.path, step, 10)


def prepare(plan: JobPlan) -> StartPoint:
    return resume.prepare_start(plan, open_checkpoints(plan.checkpoint_location))


def damage(path: Path) -> None:
    part = path / "sparse" / "part"
    part.write_text("CONTENT")


def test_nothing_there_is_a_beginning(tmp_path: Path) -> None:
    assert resume.find_start(plan_of(tmp_path)) == StartPoint()
    assert prepare(plan_of(tmp_path)) == StartPoint()
    with pytest.raises(ResumeError, match="holds no checkpoint to go on from"):
        resume.find_start(plan_of(tmp_path, resume="always"))


def test_the_newest_is_taken_unless_told_otherwise(tmp_path: Path) -> None:
    save(tmp_path, 9)
    newest = save(tmp_path, 10)
    assert resume.find_start(plan_of(tmp_path)).path == str(newest)
    assert resume.find_start(plan_of(tmp_path, resume="never")) == StartPoint()
    assert resume.find_start(plan_of(tmp_path, restore=str(tmp_path / "checkpoints" / "step-9"))).cursor["step"] == 9
    assert resume.find_start(plan_of(tmp_path, mode="evaluate")) == StartPoint()


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (
            changed(train={"dense_optimizer": {"learning_rate": 0.2}}),
            "train.dense_optimizer.learning_rate: 0.1 before, 0.2 now",
        ),
        (changed(tables={"default": {"width": 8}}), "tables.default.width: 4 before, 8 now"),
        ({**JOB, "seed": 2}, "seed: 1 before, 2 now"),
        (changed(data={"labels": ["buy"]}), "data.labels"),
    ],
)
def test_a_job_with_other_values_is_refused_unless_told_otherwise(tmp_path: Path, job: Any, words: str) -> None:
    newest = save(tmp_path, 3)
    for call in (resume.find_start, prepare, finished_result):
        with pytest.raises(ResumeError) as refusal:
            call(plan_of(tmp_path, job=job))
        assert words in str(refusal.value)
        assert "--resume" in str(refusal.value)
        assert "--from-scratch" in str(refusal.value)
    assert resume.find_start(plan_of(tmp_path, job=job, resume="always")).path == str(newest)
    assert resume.find_start(plan_of(tmp_path, job=job, resume="never")) == StartPoint()


@pytest.mark.parametrize(
    "job",
    [
        changed(data={"train": "/elsewhere", "threads": 7}),
        changed(train={"epochs": 9}),
        changed(cluster={"servers": 4}),
        {**JOB, "control": {"heartbeat_timeout_seconds": 9}},
    ],
)
def test_what_the_model_does_not_depend_on_may_change(tmp_path: Path, job: Any) -> None:
    newest = save(tmp_path, 3)
    assert resume.find_start(plan_of(tmp_path, job=job)).path == str(newest)


def test_a_cursor_of_another_version_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3, version=7)
    with pytest.raises(ResumeError, match="cursor of version 7"):
        resume.find_start(plan_of(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"position": {"epoch": 0, "done": [7]}},
        {"position": {"epoch": "x", "done": []}},
        {"position": {}},
        {"rows": None},
        {"step": []},
        {"draft": 7},
        {"days": 5, "position": {"epoch": 0, "done": [[0, 1]]}},
    ],
)
def test_a_cursor_that_is_not_ours_is_refused_with_a_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    path = save(tmp_path, 3)
    cursor = {**manifest.read_cursor(path), **change}
    draft = manifest.Draft(tmp_path / "checkpoints", ".again", 3)
    draft.finish(dense={}, cursor=cursor, facts={})
    manifest.commit(draft.path, 3, 9)
    with pytest.raises(manifest.CheckpointError, match="has a cursor that paddlewheel does not write"):
        resume.find_start(plan_of(tmp_path))


def test_damaged_ones_are_put_aside(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    damage(save(tmp_path, 2))
    damage(save(tmp_path, 3))
    start = prepare(plan_of(tmp_path))
    assert start.path == str(good)
    assert len(start.notes) == 2
    assert "step-3" in start.notes[0]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"LATEST", "step-1", "step-2.damaged", "step-3.damaged"}


def test_a_fresh_start_puts_all_aside(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    start = prepare(plan_of(tmp_path, resume="never"))
    assert start.path is None
    assert "2 checkpoints" in start.notes[0]
    assert {path.name for path in (tmp_path / "checkpoints").glob("set-aside-*/*")} == {"step-1", "step-2"}
    assert manifest.committed(tmp_path / "checkpoints") == []


def test_what_a_killed_coordinator_left_is_cleared(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    directory = tmp_path / "checkpoints"
    for name in (".step-5-attempt-1-draft-1", ".removed-step-0", ".step-4.draft", ".warm-start-x"):
        (directory / name).mkdir()
    (directory / ".LATEST.new").write_text("x")
    (good / "sparse" / ".default-staged").mkdir()
    save(tmp_path, 7).rename(directory / ".replaced-7")  # killed between two renames
    start = prepare(plan_of(tmp_path))
    assert start.path == str(directory / "step-7")
    assert {path.name for path in directory.iterdir()} == {"LATEST", "step-1", "step-7"}
    assert not list(good.rglob(".*"))


def test_two_coordinators_do_not_share_a_folder(tmp_path: Path) -> None:
    kept, same = open_checkpoints(str(tmp_path / "c")), open_checkpoints(str(tmp_path / "c"))
    for use in (same.sole_use, same.beside_owner):
        with kept.sole_use(), pytest.raises(DirectoryBusyError), use():
            pass
    with same.sole_use():
        pass


def test_two_coordinators_on_two_hosts_do_not_share_a_folder(tmp_path: Path) -> None:
    """NFS passes on a lock of a file, not one of a folder: the other host holds the first kind alone."""
    holder = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held'); input()"
    asker = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    kept = open_checkpoints(str(tmp_path / "c"))
    with kept.sole_use():
        with pytest.raises(manifest.CheckpointError, match=r"MANIFEST\.json cannot be read"):
            kept.commit(".none", 1, 3)  # looks at the owner, and must not lose the lock by that
        asked = subprocess.run([sys.executable, "-c", asker, str(tmp_path / "c" / "OWNER")], capture_output=True)
        assert b"BlockingIOError" in asked.stderr
    words = [sys.executable, "-c", holder, str(tmp_path / "c" / "OWNER")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(DirectoryBusyError), kept.sole_use():
            pass
        other.communicate("\n")
    with kept.sole_use():
        pass


def test_where_no_lock_holds_the_later_coordinator_is_right(tmp_path: Path) -> None:
    kept = open_checkpoints(str(tmp_path / "checkpoints"))
    with kept.sole_use():
        draft = manifest.Draft(tmp_path / "checkpoints", ".step-1-x", 1)
        draft.finish(dense={}, cursor={}, facts={})
        (tmp_path / "checkpoints" / "OWNER").write_text("another")
        with pytest.raises(manifest.CheckpointError, match="another coordinator has taken over"):
            kept.commit(draft.path.name, 1, 3)
    assert kept.committed() == []


def names_of(run_dir: Path) -> list[str]:
    return [path.name for path in manifest.committed(run_dir / "checkpoints")]


def test_what_is_later_than_the_checkpoint_asked_for_is_put_aside(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(tmp_path, step)
    asked = tmp_path / "checkpoints" / "step-100"
    start = prepare(plan_of(tmp_path, restore=str(asked)))
    assert start.path == str(asked)
    assert "2 checkpoints of later steps" in start.notes[0]
    assert names_of(tmp_path) == ["step-100"]
    assert {path.name for path in (tmp_path / "checkpoints").glob("set-aside-*/*")} == {"step-200", "step-300"}


def test_what_lies_beside_a_checkpoint_from_elsewhere_is_put_aside_too(tmp_path: Path) -> None:
    for step in (5, 7, 9):
        save(tmp_path, step)
    elsewhere = save(tmp_path / "elsewhere", 7)
    assert prepare(plan_of(tmp_path, restore=str(elsewhere))).path == str(elsewhere)
    assert names_of(tmp_path) == ["step-5"]


def test_nothing_is_put_aside_for_a_checkpoint_that_cannot_be_used(tmp_path: Path) -> None:
    older = save(tmp_path, 1)
    save(tmp_path, 2)
    damage(older)
    with pytest.raises(manifest.CheckpointError, match="is damaged"):
        prepare(plan_of(tmp_path, restore=str(older)))
    with pytest.raises(manifest.CheckpointError, match="no complete checkpoint"):
        prepare(plan_of(tmp_path, restore=str(tmp_path / "checkpoints" / "step-7")))
    assert names_of(tmp_path) == ["step-1", "step-2"]


def test_the_same_folder_by_another_path_is_not_put_aside(tmp_path: Path) -> None:
    asked = save(tmp_path, 4)
    (tmp_path / "link").symlink_to(asked.parent)
    start = prepare(plan_of(tmp_path, restore=str(tmp_path / "link" / "step-4")))
    assert start.path == str(tmp_path / "link" / "step-4")
    assert names_of(tmp_path) == ["step-4"]


@pytest.mark.parametrize("once", [False, True])
def test_a_role_that_is_started_again_goes_on_from_what_it_has_committed(tmp_path: Path, once: bool) -> None:
    """Its command still names the checkpoint that it began with; a person who names one again means it."""
    asked = save(tmp_path, 10)
    plan = plan_of(tmp_path, restore=str(asked), restore_once=once)
    journal = Journal(plan.journal)
    journal.write(record("run"))
    journal.write(record("committed", draft="d", path=str(asked)))
    assert prepare(plan).path == str(asked), "that was another run"
    journal.write(record("run", asked=str(asked)))
    journal.write(record("committed", draft="d", path=str(asked)))
    assert prepare(plan).path == str(asked), "nothing was committed since"
    newer = save(tmp_path, 12)
    journal.write(record("committed", draft="d", path=str(newer)))
    journal.write(record("run", asked=str(asked)))
    journal.close()
    assert prepare(plan).path == str(newer if once else asked)


def test_a_running_job_falls_back_as_a_new_start_does(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    kept = open_checkpoints(plan.checkpoint_location)
    good, newest = save(tmp_path, 1), save(tmp_path, 3)
    damage(save(tmp_path, 2))
    assert resume.fall_back(plan, kept, str(newest)) == StartPoint(str(newest)), "it is whole: the job is at fault"
    damage(newest)
    start = resume.fall_back(plan, kept, str(newest))
    assert start.path == str(good)
    assert start.cursor["step"] == 1
    assert "step-3.damaged" in start.notes[0]
    shutil.rmtree(good)
    assert resume.fall_back(plan, kept, str(good)).path is None
    fresh = plan_of(tmp_path, resume="never")
    kept_since = save(tmp_path, 4)
    assert resume.fall_back(fresh, kept, str(newest)).path == str(kept_since), "it has begun again already"
    with pytest.raises(manifest.CheckpointError, match="no complete checkpoint"):
        resume.fall_back(plan_of(tmp_path, restore=str(newest)), kept, str(newest))


def test_a_finished_job_is_known_by_its_journal(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert finished_result(plan) is None
    save(tmp_path, 5, epoch=2)
    assert finished_result(plan) is None  # saved, but not yet evaluated
    journal = Journal(plan.journal)
    journal.write(record("over", result={"rows": 5}))
    journal.close()
    assert finished_result(plan) == {"rows": 5}
    assert finished_result(plan_of(tmp_path, job=changed(train={"epochs": 3}))) is None
    assert finished_result(plan_of(tmp_path, resume="never")) is None


def test_a_journal_survives_a_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write(record("stop", reason="one"))
    journal.close()
    with path.open("a") as file:
        file.write('{"what": "tw')
    journal = Journal(path)
    journal.write(record("stop", reason="three"))
    journal.close()
    assert [found.reason for found in resume.read_journal(path)] == ["one", "three"]


def test_a_journal_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    write = os.write

    def half(fd: int, content: bytes) -> int:
        write(fd, bytes(content)[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        journal.write(record("stop", reason="lost"))
    monkeypatch.undo()
    journal.write(record("stop", reason="kept"))
    journal.close()
    assert [found.reason for found in resume.read_journal(path)] == ["kept"]
    assert json.loads(path.read_text().splitlines()[-1])["reason"] == "kept"


def test_a_finished_job_is_not_called_trained_with_values_that_it_was_not_trained_with(tmp_path: Path) -> None:
    save(tmp_path, 3, epoch=2)
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(record("over", result={"rows": 5}))
    journal.close()
    assert finished_result(plan_of(tmp_path, resume="always")) == {"rows": 5}
    wider = changed(tables={"default": {"width": 8}})
    with pytest.raises(
        ResumeError, match=r"trained already(.|\n)*tables.default.width: 4 before, 8 now(.|\n)*--from-scratch"
    ):
        finished_result(plan_of(tmp_path, job=wider, resume="always"))
    longer = {**wider, "train": {**JOB["train"], "epochs": 3}}
    assert finished_result(plan_of(tmp_path, job=longer, resume="always")) is None
