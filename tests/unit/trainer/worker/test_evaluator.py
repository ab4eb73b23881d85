"""Evaluations, one after the other: what is evaluated, saved and marked, and whether training goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paddlewheel.trainer.checkpoint.folder_store import open_checkpoints
from paddlewheel.trainer.checkpoint.manifest import MANIFEST
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.loop.train import Progress, Signals
from paddlewheel.trainer.worker.checkpointer import Checkpointer
from paddlewheel.trainer.worker.context import WorkerContext
from paddlewheel.trainer.worker.evaluator import Evaluator
from tests.support.plans import trainer_spec

DATA = {"train": "x", "eval": "x", "labels": ["y"], "sparse": [{"name": "a"}]}


class Link:
    """Keeps the names of events, and the evaluations."""

    def __init__(self):
        self.evaluations = []

    def send(self, event):
        if event.event == "evaluation":
            self.evaluations.append(event.model_dump())


class Scored(Evaluator):
    """Judges reports that the test gives, instead of scoring rows."""

    def evaluate(self, data):
        return {"auc": data.pop(0)}


@dataclass
class Trainer:
    """One trainer's judge and saver. A save gives a folder as a checkpoint has it, and says so; or fails."""

    folder: Path
    rank: int = 0
    restored: int = -1
    scores: list[float | None] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=lambda: {"every_steps": 10, "save_best": True})
    saves_fail: bool = False

    def __post_init__(self):
        job = JobConfig.parse({"name": "j", "data": DATA, "train": {"evaluation": self.evaluation}})
        restore = str(self.folder / f"step-{self.restored}") if self.restored >= 0 else None
        spec = trainer_spec(job, self.rank, 2, restore=restore)
        self.link, self.saved = Link(), []
        store = open_checkpoints(str(self.folder))
        context = WorkerContext(spec, None, None, None, None, self.link, Signals(), store)
        self.saver = Checkpointer(context, None)
        self.saver.restored_step = self.restored
        self.judge = Scored(context, self.scores)
        self.progress = Progress()

    def save(self):
        self.saved.append(self.progress.step)
        if not self.saves_fail:
            self.saver.saved_step = self.progress.step
            if self.rank == 0:
                self.saver.saved = {"checkpoint": str(self.folder / f"step-{self.progress.step}")}

    def at(self, step):
        """Whether training goes on after this step."""
        self.progress.step = step
        if self.judge.judge(self.progress):
            self.saver.keep_best(step, self.save)
        return not self.judge.stopped_early

    def best_of_all(self, step, report):
        if self.judge.judge_final(step, report):
            self.saver.mark_best(step)
        return {**self.judge.best(), "checkpoint": self.saver.best}

    @property
    def marked(self):
        path = self.folder / "BEST"
        return path.read_text().strip() if path.exists() else None


def test_only_the_best_is_saved_and_marked(tmp_path: Path) -> None:
    one = Trainer(tmp_path, scores=[0.7, 0.6, None, 0.8])
    found = []
    for step in (10, 20, 30, 40):
        assert one.at(step)
        found.append((list(one.saved), one.marked))
    assert found == [([10], "step-10")] * 3 + [([10, 40], "step-40")]
    assert [(e["step"], e["best"]) for e in one.link.evaluations] == [(10, True), (20, False), (30, False), (40, True)]


def test_a_step_that_has_a_checkpoint_is_not_saved_again(tmp_path: Path) -> None:
    one = Trainer(tmp_path, scores=[0.7])
    one.saver.saved_step, one.saver.saved = 10, {"checkpoint": str(tmp_path / "step-10")}
    one.at(10)
    assert (one.saved, one.marked) == ([], "step-10")


def test_a_checkpoint_that_failed_leaves_the_mark_where_it_was(tmp_path: Path) -> None:
    one = Trainer(tmp_path, scores=[0.7, 0.8, 0.6])
    one.at(10)
    one.saves_fail = True
    one.at(20)
    assert (one.saved, one.marked) == ([10, 20], "step-10")
    assert one.best_of_all(30, {"auc": 0.6})["checkpoint"] == str(tmp_path / "step-10")


def test_without_keep_best_nothing_is_saved(tmp_path: Path) -> None:
    one = Trainer(tmp_path, scores=[0.7], evaluation={"every_steps": 10})
    assert one.at(10)
    assert (one.saved, one.marked) == ([], None)


def test_trainers_save_together_but_one_marks(tmp_path: Path) -> None:
    other = Trainer(tmp_path, rank=1, scores=[0.7])
    other.at(10)
    assert (other.saved, other.marked) == ([10], None)


def test_without_evaluation_rows_training_goes_on(tmp_path: Path) -> None:
    one = Trainer(tmp_path)
    one.judge._data = None
    assert one.at(10)
    assert one.judge.evaluations == []


def test_training_stops_after_evaluations_without_improvement(tmp_path: Path) -> None:
    one = Trainer(tmp_path, scores=[0.7, 0.6, 0.65], evaluation={"every_steps": 10, "patience": 2})
    assert [one.at(step) for step in (10, 20, 30)] == [True, True, False]
    assert one.judge.stopped_early


def test_the_final_evaluation_may_be_the_best(tmp_path: Path) -> None:
    one = Trainer(tmp_path, scores=[0.7])
    one.at(10)
    one.progress.step = 15
    one.save()
    best = one.best_of_all(15, {"auc": 0.9})
    assert best == {"step": 15, "auc": 0.9, "checkpoint": str(tmp_path / "step-15")}
    assert one.marked == "step-15"


def _restored(tmp_path, state, step, **kwargs):
    one = Trainer(tmp_path, restored=step, **kwargs)
    one.judge.load_state(state)
    one.saver.restore_best(one.judge.best_step)
    return one


def test_a_restored_evaluation_is_not_made_again_but_its_mark_is(tmp_path: Path) -> None:
    """A checkpoint of the best step is saved before it is marked; a loss in between must not lose the mark."""
    before = Trainer(tmp_path, scores=[0.6, 0.7])
    before.at(10)
    before.at(20)
    (tmp_path / "BEST").write_text("step-10\n")
    one = _restored(tmp_path, before.judge.state(), 20, scores=[])
    assert one.judge.is_owed(20, ended_epoch=None, epochs=3)
    assert one.at(20)
    assert (one.saved, one.marked, one.link.evaluations) == ([], "step-20", [])
    assert [e["step"] for e in one.judge.evaluations] == [10, 20]


def test_an_evaluation_that_was_lost_is_made_up_for(tmp_path: Path) -> None:
    before = Trainer(tmp_path, scores=[0.7])
    before.at(10)
    one = _restored(tmp_path, before.judge.state(), 20, scores=[0.6])
    assert one.judge.is_owed(20, ended_epoch=None, epochs=3)
    assert one.at(20)
    assert [e["step"] for e in one.link.evaluations] == [20]


@pytest.mark.parametrize(
    ("ended_epoch", "needs_evaluation"),
    [(None, False), (0, False), (1, True), (3, False)],  # within an epoch; an odd one; the second; the last
)
def test_an_epoch_s_evaluation_is_owed_after_its_end_alone(
    tmp_path: Path, ended_epoch: int | None, needs_evaluation: bool
) -> None:
    one = Trainer(tmp_path, restored=25, evaluation={"every_epochs": 2})
    assert one.judge.is_owed(25, ended_epoch=ended_epoch, epochs=4) is needs_evaluation
    assert not Trainer(tmp_path, evaluation={"every_epochs": 2}).judge.is_owed(0, ended_epoch=ended_epoch, epochs=4)


def test_training_that_had_stopped_stays_so_after_a_restart(tmp_path: Path) -> None:
    """Evaluations by epochs leave nothing at a step that would tell."""
    evaluation = {"every_epochs": 1, "patience": 1}
    before = Trainer(tmp_path, scores=[0.7, 0.6], evaluation=evaluation)
    assert [before.at(25), before.at(50)] == [True, False]
    one = _restored(tmp_path, before.judge.state(), 50, evaluation=evaluation)
    assert one.judge.is_owed(50, ended_epoch=None, epochs=9)
    assert not one.at(50)
    assert one.judge.stopped_early


def _committed(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"step-{step}").mkdir()
        (folder / f"step-{step}" / MANIFEST).write_text("{}")


@pytest.mark.parametrize("marked", ["step-30\n", "step-40\n", None])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_best_of_what_is_restored_is_marked_again(tmp_path: Path, marked: str | None, rank: int) -> None:
    """The mark stood at a later checkpoint (put aside as damaged, or of the line that was left), or was lost."""
    before = Trainer(tmp_path, scores=[0.7, 0.6])
    before.at(10)
    before.at(20)
    _committed(tmp_path, 10, 20, 40)
    (tmp_path / "BEST").unlink()
    if marked is not None:
        (tmp_path / "BEST").write_text(marked)
    one = _restored(tmp_path, before.judge.state(), 20, rank=rank)
    assert one.marked == ("step-10" if rank == 0 else marked and marked.strip())
    best = one.best_of_all(25, {"auc": 0.5})
    assert best == {"step": 10, "auc": 0.7, "checkpoint": str(tmp_path / "step-10")}


def test_a_best_step_without_a_checkpoint_leaves_the_mark_before_it(tmp_path: Path) -> None:
    """Its checkpoint had failed."""
    before = Trainer(tmp_path, scores=[0.7, 0.8])
    before.at(10)
    before.saves_fail = True
    before.at(20)
    _committed(tmp_path, 10, 30)
    one = _restored(tmp_path, before.judge.state(), 30)
    assert one.marked == "step-10"
    assert one.best_of_all(35, {"auc": 0.5})["checkpoint"] == str(tmp_path / "step-10")
