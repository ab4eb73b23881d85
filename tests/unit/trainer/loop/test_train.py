"""The loop of one trainer, with its real exchange and dense program: what is counted, waited for and agreed on."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from paddlewheel.data_pipeline.batch import Batch, Span, TableKeys
from paddlewheel.trainer.dense.inputs import TableLayout
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.job.train import DenseOptimizerConfig
from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline
from paddlewheel.trainer.loop.train import (
    BadStepsError,
    BoundaryDue,
    CheckpointDue,
    EpochOver,
    EvaluationDue,
    NothingDue,
    Progress,
    RowsLostError,
    Schedule,
    Signals,
    StepTaken,
    Stopped,
    TrainLoop,
)
from paddlewheel.trainer.models import parse_model
from tests.support.fakes import CountingTables, EvaluationEveryStep, WritingGroup


def batch(rows: int, taken: int | None = None, *, dense: float = 0.5, start: int = 0) -> Batch:
    """taken: rows of its spans, those that cannot be used included."""
    single = np.ones((rows, 1), np.int32)
    keys = TableKeys(np.array([7] if rows else [], np.uint64), {"a": single[:, 0]}, single, ("a",))
    return Batch(
        num_rows=rows,
        dense_BD=np.full((rows, 1), dense, np.float32),
        labels_BL=np.ones((rows, 1), np.float32),
        tables={"default": keys},
        spans=(Span(0, start, rows if taken is None else taken),),
    )


class Table(CountingTables):
    """Writes down what is pushed."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(width=2)
        self.log = log

    def pull(self, table: str, keys_U: np.ndarray) -> np.ndarray:
        return 0 * super().pull(table, keys_U)

    def push(self, *arguments, rate: float = 1.0) -> None:
        super().push(*arguments, rate=rate)
        self.log.append("push")


class Run:
    """A loop over batches, from a given progress on."""

    def __init__(
        self, *, max_nonfinite_steps: int = 10, signals: Signals | None = None, schedule: Schedule | None = None
    ) -> None:
        self.log: list[str] = []
        self.table, self.signals = Table(self.log), signals or Signals()
        program = DenseProgram(
            [TableLayout("default", 2, True, ("a",))],
            num_dense=1,
            num_labels=1,
            model=parse_model({"kind": "lr"}),
            optimizer=DenseOptimizerConfig(),
            seed=1,
            rank=0,
        )
        self.loop = TrainLoop(
            program,
            WritingGroup(self.log),
            max_nonfinite_steps=max_nonfinite_steps,
            signals=self.signals,
            schedule=schedule or NothingDue(),
        )

    def epoch(self, batches, rows_left: int) -> bool:
        """Whether the epoch is over; what was due until then goes to the log."""
        words = {StepTaken: "step", CheckpointDue: "checkpoint", EvaluationDue: "evaluation"}
        due = None
        with EmbeddingPipeline(self.table, iter(batches), max_staleness_steps=1) as pipeline:
            for due in self.loop.run(pipeline, rows_left=rows_left, synchronous=False):
                self.log += [words[type(due)]] if type(due) in words else []
        assert isinstance(due, EpochOver | Stopped), due
        return isinstance(due, EpochOver)


def test_rows_at_the_end_that_cannot_be_used_count_as_taken() -> None:
    run = Run()
    assert run.epoch([batch(8), batch(8, 11), batch(0, 500)], rows_left=519)
    progress = run.loop.progress
    assert (progress.rows, progress.taken, progress.step) == (16, 519, 3)


def test_more_rows_than_a_float_holds_are_counted_exactly() -> None:
    """2**24 + 1 is the first whole number that float32 lacks."""
    run = Run()
    taken = [2**24 + 1, 3 * 2**24 + 5, 1]
    assert run.epoch([batch(2, n) for n in taken], rows_left=sum(taken))
    assert run.loop.progress.taken == sum(taken)


def test_another_number_of_rows_than_the_data_holds_is_no_end() -> None:
    with pytest.raises(RowsLostError, match="epoch 0 ended after 8 rows of 9"):
        Run().epoch([batch(8)], rows_left=9)


def test_trainers_meet_when_each_has_its_first_batch_and_before_the_first_step() -> None:
    run, gate = Run(), threading.Event()

    def slow():
        assert gate.wait(20)
        run.log.append("read")
        yield batch(4)

    threading.Timer(0.05, gate.set).start()
    assert run.epoch(slow(), rows_left=4)
    assert run.log[:3] == ["read", "rendezvous", "step"]


def test_an_epoch_ends_when_all_pushes_of_all_trainers_are_applied() -> None:
    """Else an evaluation after it would see the tables of a moment before, each time other ones."""
    run = Run()
    run.table.gate.clear()
    threading.Timer(0.05, run.table.gate.set).start()
    assert run.epoch([batch(4), batch(4)], rows_left=8)
    assert run.log[-1] == "barrier"
    assert run.log.count("push") == 2


def test_who_is_to_stop_evaluates_no_more() -> None:
    run = Run(signals=Signals(stop=True, save_before_stop=True), schedule=EvaluationEveryStep())
    assert not run.epoch([batch(4), batch(4)], rows_left=8)
    counts = [run.log.count(what) for what in ("evaluation", "checkpoint")]
    assert (counts, run.loop.progress.step) == ([0, 1], 1)


def test_an_evaluation_follows_its_step_when_all_pushes_are_applied_and_training_waits_for_it() -> None:
    run = Run(schedule=EvaluationEveryStep())
    assert run.epoch([batch(4), batch(4)], rows_left=8)
    one = ["step", "push", "barrier", "evaluation"]
    assert [what for what in run.log if what != "rendezvous"] == [*one, *one, "step", "barrier"]


class BoundaryAfter(NothingDue):
    """A day boundary after so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def boundary(self, taken_rows: int) -> bool:
        return taken_rows == self.rows


def test_nothing_is_in_flight_at_a_boundary_and_training_sees_what_it_changed() -> None:
    run = Run(schedule=BoundaryAfter(4))
    found = []
    with EmbeddingPipeline(run.table, iter([batch(4), batch(4), batch(4)]), max_staleness_steps=1) as pipeline:
        for due in run.loop.run(pipeline, rows_left=12, synchronous=False):
            if isinstance(due, BoundaryDue):
                assert not pipeline._pulling
                found.append((run.loop.progress.step, len(run.table.pushes)))
                before = run.table.pulls
        assert run.table.pulls >= before + 2, "both batches after it are pulled, or pulled again"
    assert found == [(1, 1)]


def test_who_leaves_the_loop_at_an_evaluation_ends_training() -> None:
    run = Run(schedule=EvaluationEveryStep())
    with EmbeddingPipeline(run.table, iter([batch(4)] * 9), max_staleness_steps=1) as pipeline:
        for due in run.loop.run(pipeline, rows_left=36, synchronous=False):
            if isinstance(due, EvaluationDue):
                break
    assert (run.loop.progress.step, len(run.table.pushes)) == (1, 1)


def test_bad_steps_are_limited_over_restarts() -> None:
    """A checkpoint carries the count on, so an attempt does not begin with a clean sheet."""
    first = Run(max_nonfinite_steps=3)
    bad = [batch(4, dense=3e38), batch(4), batch(4, dense=3e38)]
    assert first.epoch(bad, rows_left=12)
    cursor = {"step": 3, "rows": 12, "position": {"epoch": 1}}
    kept = first.loop.progress.state()
    assert (kept["bad_steps"], kept["bad_rows"], kept["rows"]) == (2, 8, 12)
    second = Run(max_nonfinite_steps=3)
    second.loop.progress.load_state(kept, cursor)
    with pytest.raises(BadStepsError, match=r"4 steps \(16 rows\).*max_nonfinite_steps allows 3"):
        second.epoch([batch(4, dense=3e38), batch(4, dense=3e38)], rows_left=8)


def test_progress_goes_on_where_a_checkpoint_left_it() -> None:
    before = Progress(epoch=1, step=9, rows=700, taken=900, bad_steps=2, bad_rows=50, loss_sum=3.5, weight_sum=7.0)
    cursor = {"step": 9, "rows": 900, "position": {"epoch": 1}}
    after = Progress()
    after.load_state(before.state(), cursor)
    assert after == before
    older = Progress()
    older.load_state(None, cursor)  # of a checkpoint that says nothing of it
    assert (older.rows, older.taken, older.bad_steps) == (900, 900, 0)
