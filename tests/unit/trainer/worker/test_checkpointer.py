"""Saving: who does what, what is kept in mind after success and after each kind of failure."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from paddlewheel.pserver.errors import PathError, ServerError
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.checkpoint.folder_store import open_checkpoints
from paddlewheel.trainer.checkpoint.manifest import CheckpointError
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.loop.span_log import Trained
from paddlewheel.trainer.loop.train import Progress, Signals
from paddlewheel.trainer.protocol.messages import Committed, NotCommitted
from paddlewheel.trainer.worker.checkpointer import Checkpointer, SaveError
from paddlewheel.trainer.worker.context import WorkerContext
from tests.support.fakes import ToldGroup
from tests.support.plans import trainer_spec

DATA = {"train": "x", "labels": ["y"], "sparse": [{"name": "a"}]}
CURSOR = {"step": 7, "rows": 70}
TRAINED = Trained(((0, 0, 0, 70),), ())
FACTS = {"lifecycle": {"days": 1}}
COMMITTED, FAILED, STOP = 1, 0, 2
"""What trainer 0 tells the others."""


class Servers:
    """Write one file for their table where they are told to; or fail."""

    def __init__(self):
        self.error, self.advanced, self.loaded = None, [], []
        self.marks, self.may_write = True, threading.Event()
        self.led_on_from = []

    def can_mark(self):
        return self.marks

    def mark(self, *, advance_day=()):
        self.advanced += [list(advance_day)] if advance_day else []
        if self.error is not None:
            raise self.error
        return "m"

    def save_marked(self, folder, mark, *, since=None):
        assert mark == "m"
        assert self.may_write.wait(20)
        self.led_on_from.append(None if since is None else since.tables["default"].path)
        return self.save(folder)

    def drop_mark(self, mark):
        assert mark == "m"

    def save(self, folder, *, advance_day=()):
        self.advanced.append(list(advance_day))
        (folder / "default").mkdir()
        (folder / "default" / "table.json").write_bytes(b"rows")
        if self.error is not None:
            raise self.error
        return {"default": SimpleNamespace(num_keys=3, checksum="c")}

    def load(self, folder):
        self.loaded.append(folder)


class Program:
    def __init__(self):
        self.value = 1.0

    def state(self):
        return {"w": np.full(2, self.value, np.float32)}

    def load_state(self, state):
        if "w" not in state:
            raise ValueError("the model has w, the checkpoint has not")
        self.value = float(state["w"][0])


class Coordinator:
    """Commits, or answers as it is told to."""

    def __init__(self):
        self.refusal, self.cursors, self.commits = None, [], []

    def cursor(self, step, epoch, trained):
        self.cursors.append((step, epoch, trained))
        return CURSOR, f".step-{step}-attempt-1-draft-{len(self.cursors)}"

    def commit(self, step, draft, seconds):
        self.commits.append({"draft": draft, "seconds": seconds})
        if self.refusal is not None:
            return NotCommitted(error="no", **self.refusal)
        return Committed(path=str(manifest.commit(Path(draft), step, 5)))

    def save_failed(self, step, error, kind):
        self.commits.append({"error": error, "kind": kind})
        return NotCommitted(error=error, stop=False)


class Trainer:
    """One of two trainers, at step 7 of its second epoch."""

    def __init__(self, run, rank=0, told=FAILED, **sections):
        job = JobConfig.parse({"name": "j", "data": DATA, "run_dir": str(run), **sections})
        spec = trainer_spec(job, rank, 2)
        self.servers, self.program, self.others, self.coordinator = Servers(), Program(), ToldGroup(told), Coordinator()
        self.events, self.life = [], []
        link = SimpleNamespace(send=lambda event: self.events.append((event.event, event.model_dump())))
        life = SimpleNamespace(on_saved=lambda tables, readable: self.life.append((sorted(tables), readable)))
        store = open_checkpoints(job.checkpoint_location)
        context = WorkerContext(spec, self.others, self.servers, self.program, self.coordinator, link, Signals(), store)
        self.saver = Checkpointer(context, life)
        self.folder = Path(run, "checkpoints")

    def save(self, advance_day=(), **how):
        return self.saver.save(Progress(step=7, epoch=1), TRAINED, FACTS, advance_day, **how)

    @property
    def phases(self):
        return [fields["phase"] for name, fields in self.events if name == "phase"]


def test_a_save_that_is_committed(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    assert one.save(advance_day=["default"])
    kept = manifest.read(one.folder / "step-7")
    assert (kept.cursor, kept.manifest["step"], kept.manifest["lifecycle"]) == (CURSOR, 7, FACTS["lifecycle"])
    assert kept.manifest["tables"]["default"]["keys"] == 3
    assert kept.dense()["w"].tolist() == [1, 1]
    assert one.coordinator.cursors == [(7, 1, TRAINED)]
    assert (one.servers.advanced, one.life) == ([["default"]], [(["default"], True)])
    assert one.saver.has(7)
    assert one.saver.saved["keys"] == {"default": 3}
    assert one.saver.address(7) == str(kept.path)
    assert [fields["checkpoint"] for name, fields in one.events if name == "checkpoint"] == [str(kept.path)]
    assert (one.phases, one.others.waited) == (["saving", "training"], 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("disk full"), "runtime"),
        (ValueError("a bad row"), "runtime"),
        (RuntimeError("a server is gone"), "runtime"),
        (PathError("a folder that servers cannot be told"), "job"),
    ],
)
def test_servers_that_cannot_save_are_told_of_and_training_goes_on(tmp_path: Path, error: Exception, kind: str) -> None:
    one = Trainer(tmp_path)
    one.servers.error = error
    assert not one.save()
    assert one.coordinator.commits == [{"error": f"{type(error).__name__}: {error}", "kind": kind}]
    assert not one.saver.has(7)
    assert one.saver.saved == {}
    (log,) = [fields for name, fields in one.events if name == "log"]
    assert log["level"] == "error"
    assert str(error) in log["message"]
    assert one.phases == ["saving", "training"]
    one.servers.error = None
    assert one.save()


def test_a_commit_that_fails_keeps_what_was_saved_before(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    one.save()
    before = dict(one.saver.saved)
    one.coordinator.refusal = {"stop": False}
    assert not one.saver.save(Progress(step=9), TRAINED, FACTS)
    assert one.saver.saved == before
    assert (one.saver.has(7), one.saver.has(9)) == (True, False)


def test_a_coordinator_that_ends_the_job_ends_training(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    one.coordinator.refusal = {"stop": True}
    with pytest.raises(SaveError, match="the coordinator ended the job"):
        one.save()
    assert one.phases == ["saving"]


def test_a_day_that_ends_without_its_checkpoint_ends_the_attempt(tmp_path: Path) -> None:
    """Some servers have counted the day, others not: only a restore can tell."""
    one = Trainer(tmp_path)
    one.servers.error = OSError("disk full")
    with pytest.raises(SaveError, match=r"day boundary \(step 7\) failed"):
        one.save(advance_day=["default"])


@pytest.mark.parametrize(("told", "committed"), [(COMMITTED, True), (FAILED, False)])
def test_another_trainer_reports_its_rows_and_takes_trainer_0_s_word(
    tmp_path: Path, told: int, committed: bool
) -> None:
    other = Trainer(tmp_path, rank=1, told=told)
    assert other.save() is committed
    assert other.saver.has(7) is committed
    assert other.saver.address(7) is None
    assert other.coordinator.cursors == [(7, 1, TRAINED)]
    assert (other.coordinator.commits, other.servers.advanced, other.folder.exists()) == ([], [], False)


def test_another_trainer_stops_with_trainer_0(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="see trainer 0's log"):
        Trainer(tmp_path, rank=1, told=STOP).save()


@pytest.mark.parametrize(("rank", "loads"), [(0, 1), (1, 0)])
def test_restoring_loads_tables_once_and_the_dense_part_everywhere(tmp_path: Path, rank: int, loads: int) -> None:
    first = Trainer(tmp_path)
    first.program.value = 5.0
    first.save()
    address = first.saver.address(7)
    one = Trainer(tmp_path, rank=rank)
    assert one.saver.restore(address).cursor == CURSOR
    assert (one.program.value, one.servers.loaded) == (5.0, [Path(address, "sparse")] * loads)
    assert one.saver.has(7)
    assert not one.saver.has(8)


def test_a_checkpoint_of_another_model_is_refused_by_its_name(tmp_path: Path) -> None:
    first = Trainer(tmp_path)
    first.program.state = lambda: {"v": np.zeros(2, np.float32)}
    first.save()
    address = first.saver.address(7)
    one = Trainer(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-7: the model has w"):
        one.saver.restore(address)
    assert not one.saver.has(7)


@pytest.mark.parametrize("marks", [True, False])
def test_counting_a_day_leaves_no_draft(tmp_path: Path, marks: bool) -> None:
    one = Trainer(tmp_path)
    one.servers.marks = marks
    one.saver.advance_unseen_days(["default"], 7)
    assert one.servers.advanced == [["default"]]
    assert list(one.folder.glob("*")) == []
    assert not one.saver.has(7)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_restored_checkpoint_is_one_that_there_is(tmp_path: Path, rank: int) -> None:
    """Nobody needs to save its step again, and trainer 0 can say where it is and what it holds."""
    Trainer(tmp_path).save()
    path = str(tmp_path / "checkpoints" / "step-7")
    one = Trainer(tmp_path, rank=rank)
    one.saver._load_tables = lambda address: manifest.read(Path(address))
    one.saver.restore(path)
    assert one.saver.has(7)
    assert one.saver.saved == ({"keys": {"default": 3}, "checkpoint": path} if rank == 0 else {})


def test_a_save_beside_training_holds_the_state_of_its_moment(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    assert not one.save(beside=True)  # training goes on; nothing is committed
    assert (one.phases, one.coordinator.commits, one.saver.saved_step) == (["saving", "training"], [], -1)
    one.program.value = 2.0
    one.servers.may_write.set()
    assert one.saver.settle()
    assert not one.saver.settle()  # there is no other
    assert one.saver.saved_step == 7
    assert manifest.read(one.folder / "step-7").dense()["w"].tolist() == [1, 1]
    assert [name for name, _ in one.events].count("checkpoint") == 1


def test_whoever_asks_for_the_checkpoint_under_way_waits_for_it(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    one.save(beside=True)
    assert not one.saver.has(6)
    one.servers.may_write.set()
    assert one.saver.has(7)


def test_a_next_save_waits_for_the_one_beside_training(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    one.save(beside=True)
    one.servers.may_write.set()
    assert one.saver.save(Progress(step=8, epoch=1), TRAINED, FACTS)
    assert [f"step-{step}" in fields["draft"] for step, fields in zip((7, 8), one.coordinator.commits, strict=True)]
    assert one.saver.saved_step == 8


@pytest.mark.parametrize("at", ["mark", "write"])
def test_a_save_beside_training_that_fails_is_told_and_training_goes_on(tmp_path: Path, at: str) -> None:
    one = Trainer(tmp_path)
    one.servers.may_write.set()
    error = ServerError("the disk is full")
    if at == "mark":
        one.servers.error = error
        assert not one.save(beside=True)
    else:
        one.servers.may_write.clear()
        one.save(beside=True)
        one.servers.error = error
        one.servers.may_write.set()
    assert not one.saver.settle()
    assert one.saver.saved_step == -1
    assert [fields.get("error") for fields in one.coordinator.commits] == ["ServerError: the disk is full"]
    one.servers.error = None
    assert one.save()


def test_what_the_writing_thread_did_not_expect_is_raised_when_the_save_settles(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    one.save(beside=True)
    one.servers.error = KeyError("never thought of")
    one.servers.may_write.set()
    with pytest.raises(KeyError, match="never thought of"):
        one.saver.settle()


def test_a_coordinator_that_ends_the_job_is_heard_when_the_save_settles(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    one.coordinator.refusal = {"stop": True}
    one.save(beside=True)
    one.servers.may_write.set()
    with pytest.raises(SaveError):
        one.saver.settle()


def test_tables_of_paddle_are_saved_while_training_waits(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    one.servers.marks = False
    assert one.save(beside=True)
    assert one.saver.saved_step == 7


def test_a_day_boundary_waits_for_its_checkpoint(tmp_path: Path) -> None:
    assert Trainer(tmp_path).save(advance_day=["default"], beside=True)


def test_the_other_trainers_learn_that_it_is_saved_beside(tmp_path: Path) -> None:
    other = Trainer(tmp_path, rank=1, told=3)
    assert not other.save(beside=True)
    other.others.told = COMMITTED
    assert other.saver.settle()
    assert other.saver.has(7)


DECAYING = {"tables": {"default": {"lifecycle": {"show_click_decay": 0.5}}}}


def test_which_checkpoints_are_full(tmp_path: Path) -> None:
    """Every third; the next one after a save or a commit that failed; the next one after all rows decayed."""
    one = Trainer(tmp_path, checkpoint={"full_every": 3}, **DECAYING)
    one.servers.may_write.set()

    def save(step, *, beside=False):
        one.saver.save(Progress(step=step), TRAINED, FACTS, beside=beside)
        one.saver.settle()
        base = one.servers.led_on_from[-1]
        path = one.folder / f"step-{step}"
        if path.exists():
            told = manifest.read_manifest(path).get("base")
            assert base == (None if told is None else f"../../../{told['checkpoint']}/sparse/default")
        return None if base is None else base.split("/")[3]

    assert [save(1), save(2, beside=True), save(3), save(4), save(5)] == [None, "step-1", "step-2", None, "step-4"]
    one.coordinator.refusal = {"stop": False}
    assert save(6) == "step-5"
    one.coordinator.refusal = None
    assert [save(7), save(8)] == [None, "step-7"]
    one.servers.error = ServerError("no mark can be made")
    save(9)
    one.servers.error = None
    assert save(9) == "step-8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.servers, "save", Mock(side_effect=OSError("disk full")))
        save(10)
    assert [save(10), save(11)] == [None, "step-10"]
    one.saver.on_boundary(["default"])
    assert [save(12), save(13)] == [None, "step-12"]
    one.saver.on_boundary([])
    assert save(14) == "step-13"
    assert save(14) == "step-13", "one that takes the place of another leads on from where that did"
    assert save(15) is None
    assert [save(15), save(16)] == [None, "step-15"]


@pytest.mark.parametrize(("elsewhere", "mark", "expected"), [(False, "m", 2), (False, None, 0), (True, "m", 0)])
def test_what_is_saved_after_a_restore_leads_on_from_it(
    tmp_path: Path, elsewhere: bool, mark: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the servers cannot (text, or Paddle's tables), or it lies in another folder."""
    first = Trainer(tmp_path / "other" if elsewhere else tmp_path, checkpoint={"full_every": 3})
    first.servers.may_write.set()
    first.saver.save(Progress(step=1), TRAINED, FACTS)
    address = first.saver.saved["checkpoint"]
    one = Trainer(tmp_path, checkpoint={"full_every": 3, "directory": f"{tmp_path}/checkpoints/"})
    one.servers.may_write.set()
    one.servers.load = lambda folder: mark
    monkeypatch.setattr(manifest.Checkpoint, "tables", lambda _: {"default": SimpleNamespace(checksum="c")})
    one.saver.restore(address)
    for step in (8, 9, 10):
        one.saver.save(Progress(step=step), TRAINED, FACTS)
    firsts = ["../../../step-1/sparse/default", "../../../step-8/sparse/default", None]
    assert one.servers.led_on_from == (firsts if expected else [None, firsts[1], "../../../step-9/sparse/default"])


def test_without_the_key_all_checkpoints_are_full(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    one.servers.may_write.set()
    for step in (1, 2):
        one.saver.save(Progress(step=step), TRAINED, FACTS, beside=True)
        one.saver.settle()
    assert one.servers.led_on_from == [None, None]
