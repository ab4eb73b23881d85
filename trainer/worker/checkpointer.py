"""A trainer's model on disk: restored, begun from another job's, saved and committed. Trainer 0 does most of it."""

from __future__ import annotations

import copy
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paddlewheel.data_pipeline.signature import InputSignature
from paddlewheel.pserver.errors import PathError, ServerError
from paddlewheel.pserver.messages import Remark
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.checkpoint.manifest import CheckpointError
from paddlewheel.trainer.checkpoint.store import SavedModel, absolute
from paddlewheel.trainer.loop.span_log import Trained
from paddlewheel.trainer.loop.train import Progress
from paddlewheel.trainer.protocol.messages import CheckpointSaved, Committed, NotCommitted, PhaseChanged
from paddlewheel.trainer.worker import warm_start
from paddlewheel.trainer.worker.context import WorkerContext
from paddlewheel.trainer.worker.table_lifecycle import TableLifecycle

_COMMITTED, _STOP, _BESIDE = 1, 2, 3


class SaveError(RuntimeError):
    """A checkpoint could not be saved or committed, and the job is told to stop then."""


@dataclass(frozen=True)
class _Save:
    """What trainer 0 saves beside the tables, under the name of a draft; started: on the monotonic clock."""

    step: int
    draft: str
    cursor: dict[str, Any]
    started: float
    facts: Mapping[str, Any]
    state: Callable[[], Mapping[str, Any]]


class Checkpointer:
    """All trainers have one, and call it at the same steps. life: is told what each save holds."""

    def __init__(self, context: WorkerContext, life: TableLifecycle) -> None:
        self._spec, self._client, self._program = context.spec, context.client, context.program
        self._sync, self._coordinator, self._link = context.group, context.coordinator, context.link
        self._store, self._context, self._life = context.store, context, life
        self.restored_step = self.saved_step = -1
        self._beside: int | None = None  # step of the checkpoint that is being saved while training goes on
        self._saving: threading.Thread | None = None  # on trainer 0
        self._outcome = 0  # of that thread
        self._error: BaseException | None = None
        self._base: manifest.Base | None = None  # on trainer 0: what the next save may lead on from; None: it is full
        self.best: str | None = None
        """Address of the checkpoint that is marked as the best; None also where only trainer 0 knows."""
        self.saved: dict[str, Any] = {}
        """On trainer 0, of the newest checkpoint, saved or restored: `keys`, `checkpoint`, and of one that was saved in
        this attempt `checkpoint_seconds`."""

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step, as far as this attempt knows; waits for one under way.

        To be asked on all trainers.
        """
        if step == self._beside:
            self.settle()
        return step in {self.saved_step, self.restored_step}

    def address(self, step: int) -> str | None:
        """Of the checkpoint of a step that `has`; None: only trainer 0 knows."""
        return self.saved.get("checkpoint") if step == self.saved_step else self._spec.restore

    def keep_best(self, step: int, save: Callable[[], object]) -> None:
        """Mark the checkpoint of this step as the best, made by `save` if there is none yet. On all trainers."""
        if not self.has(step):
            save()
        self.mark_best(step)

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of this step as the best; one that failed leaves the best before it. On all trainers."""
        if not self.has(step):
            return
        self.best = self.address(step)
        if self.best is not None and self._context.is_first:
            store, address = self._context.store_of(self.best)
            store.mark_best(address)

    def restore_best(self, step: int | None) -> None:
        """Put the mark back at the checkpoint of this step, among those of the restored one, if it is there.

        It may stand at a later checkpoint, which is not part of what training goes on from, or have been lost with one
        that was damaged.
        """
        assert self._spec.restore is not None
        store, _ = self._context.store_of(self._spec.restore)
        marked, best = store.best(), f"{store.location}/step-{step}"
        if step is not None and best in store.committed():
            if best != marked and self._context.is_first and self._spec.mode == "train":
                store.mark_best(best)
            marked = best
        self.best = marked

    # -- loading

    def restore(self, address: str) -> SavedModel:
        """Tables and dense part as in a checkpoint.

        Raises:
            CheckpointError: it is damaged, or not of this model.
        """
        saved = self._load_tables(address)
        try:
            self._program.load_state(saved.dense())
        except ValueError as error:
            raise CheckpointError(f"{address}: {error}") from error
        self.restored_step = saved.cursor["step"]
        if self._context.is_first:
            tables = saved.manifest.get("tables", {})
            if absolute(address).rpartition("/")[0] != absolute(self._spec.job.checkpoint_location):
                self._base = None  # nothing there may lead on from what lies elsewhere
            self.saved = {"keys": {name: told["keys"] for name, told in tables.items()}, "checkpoint": address}
        return saved

    def warm_start_tables(self, inputs: InputSignature) -> dict[str, Any] | None:
        """Begin with another job's model: trainer 0 fills the servers, all take the dense part.

        Args:
            inputs: of this job's data.

        Returns (on trainer 0) what the checkpoints say of it.
        """
        job = self._spec.job
        start, record = warm_start.plan(job, inputs), None
        if self._context.is_first and start.tables:
            # the servers read it, so it lies where they see checkpoints, or else the run
            seen = self._store.folder_seen_by_servers(Path(job.run_dir))
            seen.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".warm-start-", dir=seen) as folder:
                keys = warm_start.write_tables(start, Path(folder), job, len(self._spec.servers))
                self._client.load(Path(folder), tables=keys)
            record = start.record(keys)
        elif self._context.is_first:
            record = start.record({})
        if start.dense:
            start.source.verify(dense=True)
            self._program.load_parameters(start.source.parameters())
        return record

    def _load_tables(self, address: str) -> SavedModel:
        """Trainer 0 has the servers load; all get the dense part."""
        store, address = self._context.store_of(address)
        saved = store.read_model(address, verify=self._context.is_first)  # one trainer reads all files through
        if self._context.is_first:
            self._lead_on_from(address, saved, store.load_tables(self._client, saved))
        return saved

    def _lead_on_from(self, address: str, saved: SavedModel, mark: str | None) -> None:
        if mark is not None and self._spec.job.checkpoint.full_every is not None:
            name, body = address.rpartition("/")[2], saved.manifest
            checksums = {name: table.checksum for name, table in saved.tables().items()}
            self._base = manifest.Base(name, manifest.identity(body), checksums, mark, manifest.num_links(body))

    def on_boundary(self, tables: Sequence[str]) -> None:
        """These tables have had a day boundary: where it decays counts, all their rows have changed."""
        configs = self._spec.job.tables
        if any(configs[name].lifecycle.show_click_decay != 1 for name in tables):
            self._base = None

    # -- saving

    def save(
        self,
        progress: Progress,
        trained: Trained,
        facts: Mapping[str, Any],
        advance_day: Sequence[str] = (),
        *,
        beside: bool = False,
    ) -> bool:
        """Save at a step that all trainers agreed on. This trainer's pushes are applied; all wait for each other.

        Args:
            progress: the step.
            trained: the rows since the last save, as `TrainedSpans.take` gives them.
            facts: what the manifest is to say beside the job, its tables and the rows.
            beside: with tables of our own engine alone, all wait only until the state has been marked; the checkpoint
                is written and committed while training goes on, and `settle` tells what became of it.
            advance_day: tables whose day ends here. Then a save that fails ends the attempt: some servers have
                advanced their days, and only a restore can tell which.

        Returns:
            True when the checkpoint is committed; False also when that is yet to come.

        Raises:
            SaveError: it is not, and the job cannot go on.
        """
        self.settle()
        self._link.send(PhaseChanged(phase="saving"))
        started = time.monotonic()
        cursor, draft = self._coordinator.cursor(progress.step, progress.epoch, trained)
        outcome = 0
        if self._context.is_first:
            incremental = self._spec.job.checkpoint.full_every is not None
            save = _Save(progress.step, draft, cursor, started, facts, self._program.state)
            if (incremental or (beside and not advance_day)) and self._client.can_mark():
                outcome = self._save_marked(save, advance_day, beside=beside)
            else:
                outcome = self._save_and_commit(save, advance_day)
        self._sync.long_barrier()  # trainer 0 may have saved for long
        outcome = max(self._sync.all_gather(outcome))
        if outcome == _BESIDE:
            self._beside = progress.step
        else:
            self._conclude(progress.step, outcome)
            if advance_day and outcome != _COMMITTED:
                raise SaveError(f"the checkpoint at a day boundary (step {progress.step}) failed: see trainer 0's log")
        self._link.send(PhaseChanged(phase="training"))
        return outcome == _COMMITTED

    def settle(self) -> bool:
        """Wait until a checkpoint that is being saved beside training has been committed, or has failed.

        To be called on all trainers. Returns True when there was one and it is committed. Raises SaveError as `save`.
        """
        if self._beside is None:
            return False
        step, self._beside = self._beside, None
        self._link.send(PhaseChanged(phase="saving"))  # the wait is limited as a save is, not as a step
        if self._saving is not None:
            self._saving.join()
            self._saving = None
            if self._error is not None:
                raise self._error
        self._sync.long_barrier()
        outcome = max(self._sync.all_gather(self._outcome if self._context.is_first else 0))
        self._conclude(step, outcome)
        self._link.send(PhaseChanged(phase="training"))
        return outcome == _COMMITTED

    def _conclude(self, step: int, outcome: int) -> None:
        if outcome == _STOP:
            raise SaveError("a checkpoint failed, and the coordinator ended the job: see trainer 0's log")
        if outcome == _COMMITTED:
            self.saved_step = step

    def _save_marked(self, save: _Save, advance_day: Sequence[str], *, beside: bool) -> int:
        """Trainer 0's part until training may go on: the state of tables and dense part is held on to."""
        try:
            mark = self._client.mark(advance_day=advance_day)
        except ServerError as error:  # told to the coordinator as any save that fails
            return self._failed(save.step, error)
        if not beside or advance_day:
            return self._save_and_commit(save, (), mark)
        state = {name: np.array(value) for name, value in save.state().items()}
        held = replace(save, facts=copy.deepcopy(dict(save.facts)), state=lambda: state)

        self._outcome, self._error = 0, None

        def write() -> None:
            try:
                self._outcome = self._save_and_commit(held, (), mark)
            except BaseException as error:  # noqa: BLE001  raised again where training settles it
                self._error = error

        self._saving = threading.Thread(target=write, name="checkpoint")
        self._saving.start()
        return _BESIDE

    def _save_and_commit(self, save: _Save, advance_day: Sequence[str], mark: str | None = None) -> int:
        """Trainer 0's part: _COMMITTED, _STOP, or 0 when it failed and training goes on."""
        job = self._spec.job
        keys: dict[str, int] = {}
        base, self._base = self._base_of(save.step, mark), None  # after a save that fails, the next one is full
        try:
            draft = self._store.new_draft(save.draft, save.step)
            tables = draft.save(self._client, advance_day=advance_day, mark=mark, base=base)
            self._life.on_saved(tables, readable=draft.readable)
            keys = {table: saved.num_keys for table, saved in tables.items()}
            body = draft.finish(
                dense=save.state(),
                cursor=save.cursor,
                facts={
                    "job": job.name,
                    "seed": job.seed,
                    "settings": job.model_dump(mode="json"),
                    **save.facts,
                    **({} if base is None else base.facts()),
                    "tables": {t: {"config": job.tables[t].model_dump(mode="json"), "keys": keys[t]} for t in keys},
                },
            )
        except (OSError, ValueError, RuntimeError) as error:
            return self._failed(save.step, error)
        reply = self._coordinator.commit(save.step, draft.address, time.monotonic() - save.started)
        if not isinstance(reply, Committed):
            return self._not_committed(save.step, reply)
        self.saved = {"keys": keys, "checkpoint": reply.path, "checkpoint_seconds": time.monotonic() - save.started}
        self._link.send(CheckpointSaved(step=save.step, **self.saved))
        if mark is not None and job.checkpoint.full_every is not None:
            checksums = {name: table.checksum for name, table in tables.items()}
            self._base = manifest.Base(
                f"step-{save.step}", manifest.identity(body), checksums, mark, manifest.num_links(body), base
            )
        return _COMMITTED

    def _base_of(self, step: int, mark: str | None) -> manifest.Base | None:
        """What the checkpoint of this step leads on from; None: it is a full one."""
        base, full_every = self._base, self._spec.job.checkpoint.full_every
        if base is not None and base.name == f"step-{step}":
            base = base.before  # the new one takes its place
        if base is None or mark is None or full_every is None or base.num_links >= full_every:
            return None
        return base

    def _failed(self, step: int, error: Exception) -> int:
        """Trainer 0 could not save. A folder that servers cannot use will never do."""
        kind: Literal["job", "runtime"] = "job" if isinstance(error, PathError) else "runtime"
        return self._not_committed(step, self._coordinator.save_failed(step, f"{type(error).__name__}: {error}", kind))

    def _not_committed(self, step: int, reply: NotCommitted) -> int:
        self._link.send(Remark(level="error", message=f"checkpoint of step {step} failed: {reply.error}"))
        return _STOP if reply.stop else 0

    def advance_unseen_days(self, tables: Sequence[str], step: int) -> None:
        """Only a save has the servers count a day; this one is thrown away. For trainer 0.

        Tables of our own count it at a mark, which needs no save.
        """
        if self._client.can_mark():
            self._client.drop_mark(self._client.mark(advance_day=tables))
            return
        name = f".step-{step}-attempt-{self._spec.attempt}-draft-boundary"
        self._store.new_draft(name, step).save(self._client, advance_day=tables)
        self._store.discard(name)
