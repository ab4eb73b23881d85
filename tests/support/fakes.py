"""Small stand-ins for the seams of the trainer. mypy holds each to its protocol (`_conform`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.pserver.client import Pulled
from paddlewheel.trainer.distributed.process_group import SingleGroup
from paddlewheel.trainer.loop.train import NothingDue

Floats = NDArray[np.float32]
Keys = NDArray[np.uint64]


class CountingTables:
    """Embedding tables whose every value is the number of pushes so far; a push can be held back or fail.

    Args:
        width: floats of a pulled row.
        fail_pull_at: number of the pull that fails; the first is 0.
        fail_push: whether every push fails.
    """

    def __init__(self, width: int = 1, *, fail_pull_at: int | None = None, fail_push: bool = False) -> None:
        self.width, self.fail_pull_at, self.fail_push = width, fail_pull_at, fail_push
        self.pushes: list[tuple[NDArray[Any], ...]] = []
        self.pulls = 0
        self.gate = threading.Event()
        """Pushes wait for it."""
        self.gate.set()

    def pull(self, table: str, keys_U: Keys) -> Floats:
        self.pulls += 1
        if self.pulls - 1 == self.fail_pull_at:
            raise ConnectionError("no server")
        return np.full((len(keys_U), self.width), len(self.pushes), np.float32)

    def pull_with_counts(self, table: str, keys_U: Keys) -> Pulled:
        ones_U = np.ones(len(keys_U), np.float32)
        return Pulled(self.pull(table, keys_U), ones_U, ones_U, np.ones(len(keys_U), np.bool_))

    def push(
        self, table: str, keys_U: Keys, grads_UW: Floats, shows_U: Floats, clicks_U: Floats, *, rate: float = 1.0
    ) -> None:
        assert self.gate.wait(20)
        if self.fail_push:
            raise ConnectionError("push refused")
        self.pushes.append((keys_U, grads_UW, shows_U, clicks_U))


class LabelPredictor:
    """Scores a row by its labels: log-odds 1 for a positive one, -1 for another."""

    def predict(self, batch: Batch, rows: Mapping[str, Floats]) -> Floats:
        assert batch.num_rows, "a batch without rows has nothing to score"
        return (2 * batch.labels_BL - 1).astype(np.float32)


class WritingGroup(SingleGroup):
    """The group of one, which writes down when it would wait for others."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def long_barrier(self) -> None:
        self.log.append("rendezvous")

    def barrier(self) -> None:
        self.log.append("barrier")


class EvaluationEveryStep(NothingDue):
    """A schedule with an evaluation after every step."""

    def evaluation(self, step: int) -> bool:
        return True


if TYPE_CHECKING:
    from paddlewheel.deploy.bench.parity.memory import MemoryClient
    from paddlewheel.pserver.client import Client
    from paddlewheel.pserver.lookup import Lookup
    from paddlewheel.trainer.checkpoint.folder_store import Folder
    from paddlewheel.trainer.checkpoint.object_store import ObjectStore
    from paddlewheel.trainer.checkpoint.store import Checkpoints
    from paddlewheel.trainer.dense.gpu_program import GpuProgram
    from paddlewheel.trainer.dense.program import DenseProgram
    from paddlewheel.trainer.dense.protocols import DenseBackend, Predictor
    from paddlewheel.trainer.distributed.process_group import GlooGroup, ProcessGroup
    from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingTables
    from paddlewheel.trainer.loop.pull_ahead import EmbeddingSource
    from paddlewheel.trainer.loop.train import Schedule
    from paddlewheel.trainer.serving.exported_program import ExportedProgram
    from paddlewheel.trainer.worker.schedule import JobSchedule

    def _conform(
        client: Client, lookup: Lookup, memory: MemoryClient, tables: CountingTables, cpu: DenseProgram, gpu: GpuProgram
    ) -> tuple[list[EmbeddingSource], list[EmbeddingTables], list[DenseBackend]]:
        return [client, lookup, memory, tables], [client, memory, tables], [cpu, gpu]

    def _conform_too(
        cpu: DenseProgram, gpu: GpuProgram, exported: ExportedProgram, gloo: GlooGroup, job: JobSchedule
    ) -> tuple[list[Predictor], list[ProcessGroup], list[Schedule]]:
        groups: list[ProcessGroup] = [gloo, SingleGroup(), WritingGroup([])]
        return [cpu, gpu, exported, LabelPredictor()], groups, [job, NothingDue(), EvaluationEveryStep()]

    def _stores(folder: Folder, remote: ObjectStore) -> list[Checkpoints]:
        return [folder, remote]
