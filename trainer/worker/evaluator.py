"""Evaluations of one attempt: which was the best, where its checkpoint is, and whether to go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from paddlewheel.data_pipeline.dataset import Dataset, assign, plan_epoch
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.pserver.client import Client
from paddlewheel.trainer.checkpoint.folder_store import open_address
from paddlewheel.trainer.checkpoint.store import Checkpoints
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.distributed.process_group import ProcessGroup
from paddlewheel.trainer.loop.early_stopping import EarlyStopping, due, due_after_epoch
from paddlewheel.trainer.loop.evaluate import evaluate
from paddlewheel.trainer.loop.train import Progress, Signals
from paddlewheel.trainer.worker.agent_channel import AgentChannel
from paddlewheel.trainer.worker.checkpointer import Checkpointer
from paddlewheel.trainer.worker.spec import Spec

_SECONDS_BETWEEN_PROGRESS = 0.5


class Evaluator:
    """All trainers have one, and call it at the same steps; each reads its share of the rows.

    Args:
        spec, program, client, sync, link: of this trainer.
        data: the job's evaluation rows; None: there are none, and nothing is judged.
        saver: knows which steps have a checkpoint.
        signals: an evaluation is broken off when they ask to stop.
    """

    def __init__(
        self,
        spec: Spec,
        data: Dataset | None,
        program: DenseProgram,
        client: Client,
        sync: ProcessGroup,
        link: AgentChannel,
        saver: Checkpointer,
        signals: Signals,
    ) -> None:
        self._spec, self._data, self._program, self._client = spec, data, program, client
        self._sync, self._link, self._saver, self._signals = sync, link, saver, signals
        self._config = spec.job.train.evaluation
        self._best = EarlyStopping(self._config)
        self._best_checkpoint: str | None = None
        self.evaluations: list[dict[str, Any]] = []
        self.stopped_early = False

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON values."""
        return {"best": self._best.state(), "all": self.evaluations}

    def load_state(self, state: Mapping[str, Any], kept: Checkpoints) -> None:
        """Continue from `state()`; kept: the checkpoints that the restored one is among.

        The mark is put back where this state has its best: it may stand at a later checkpoint, which is not part of
        what training goes on from, or have been lost with one that was damaged.
        """
        self._best.load_state(state["best"])
        self.evaluations = list(state["all"])
        marked, best = kept.best(), f"{kept.location}/step-{self._best.step}"
        if self._best.step is not None and best in kept.committed():
            if best != marked and self._spec.rank == 0 and self._spec.mode == "train":
                kept.mark_best(best)
            marked = best
        self._best_checkpoint = marked

    def needs_evaluation(self, step: int, *, ended_epoch: int | None, epochs: int) -> bool:
        """True if the run crashed between saving this checkpoint and finishing its evaluation (best mark, early stop).

        ended_epoch: the epoch that ended at this step, if one did.
        """
        return self._saver.restored_step >= 0 and (
            due(self._config, step)
            or (ended_epoch is not None and due_after_epoch(self._config, ended_epoch, epochs))
            or self._best.step == step
            or self._best.exhausted
        )

    def judge(self, progress: Progress, save: Callable[[], object]) -> bool:
        """Evaluate this step, if that has not been done, and tell whether to go on.

        save: makes a checkpoint of this step, if the best one is to be kept.
        """
        if self._data is None:
            return True
        if not self.evaluations or self.evaluations[-1]["step"] != progress.step:
            report = self.evaluate(self._data)
            verdict = self._best.observe(progress.step, report)
            at = {"step": progress.step, "epoch": progress.epoch, "trained_rows": progress.rows}
            self.evaluations.append({**at, "loss": progress.last_loss, "best": verdict.best, **report})
            self._link.event("evaluation", **self.evaluations[-1])
            self._link.event("phase", phase="training")
        if self._best.step == progress.step and self._config.save_best:
            if not self._saver.has(progress.step):
                save()
            self._mark_best(progress.step)
        self.stopped_early = self._best.exhausted
        return not self.stopped_early

    def best_of_all(self, step: int, final: Mapping[str, Any]) -> dict[str, Any]:
        """The best evaluation, the final one (of the checkpoint just saved) included."""
        if self._best.observe(step, final).best:
            self._mark_best(step)
        return {"step": self._best.step, self._config.metric: self._best.value, "checkpoint": self._best_checkpoint}

    def _mark_best(self, step: int) -> None:
        """Keep the checkpoint of this step as the best; a checkpoint that failed leaves the one before."""
        if not self._saver.has(step):
            return
        self._best_checkpoint = self._saver.address(step)
        if self._best_checkpoint is not None and self._spec.rank == 0:
            kept, address = open_address(self._best_checkpoint)
            kept.mark_best(address)

    def evaluate(self, data: Dataset) -> dict[str, Any]:
        """Scores all rows, with the others; the report, and its `seconds`.

        Raises:
            BrokenOffError: the job is to stop; on all trainers.
        """
        job = self._spec.job
        self._link.event("phase", phase="evaluating")
        slices = assign(plan_epoch(data, job.seed, 0), self._spec.num_trainers, self._spec.rank)
        started = reported = time.monotonic()
        scored = 0

        def on_rows(rows: int) -> None:
            nonlocal scored, reported
            scored += rows
            if time.monotonic() - reported > _SECONDS_BETWEEN_PROGRESS:
                reported = time.monotonic()
                self._link.event("phase", phase="evaluating", rows=scored)

        with Loader(data, job.data, slices, seed=job.seed, epoch=0, training=False) as loader:
            report = evaluate(
                self._program,
                self._client,
                self._sync,
                iter(loader),
                tables=job.tables,
                labels=job.data.labels,
                weighted=job.data.sample_weight is not None,
                on_rows=on_rows,
                is_to_stop=lambda: self._signals.stop,
            )
        return {**report, "seconds": time.monotonic() - started}
