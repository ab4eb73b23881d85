"""Small stand-ins for the seams of the trainer. mypy holds each to its protocol (`_conform`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from queue import Queue
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


class ThreadGroup:
    """A trainer's place among threads of this process: what each of them sends reaches the others."""

    @staticmethod
    def of(num_trainers: int) -> list[ThreadGroup]:
        """The places, by rank."""
        meeting = threading.Barrier(num_trainers, timeout=30)
        arrays: list[NDArray[Any]] = [np.zeros(0)] * num_trainers
        queues = [[Queue[NDArray[Any]]() for _ in range(num_trainers)] for _ in range(num_trainers)]
        return [ThreadGroup(rank, meeting, arrays, queues) for rank in range(num_trainers)]

    def __init__(
        self,
        rank: int,
        meeting: threading.Barrier,
        arrays: list[NDArray[Any]],
        queues: list[list[Queue[NDArray[Any]]]],
    ) -> None:
        self.rank, self.num_trainers = rank, len(queues)
        self._meeting, self._arrays, self._queues = meeting, arrays, queues
        self.num_sent_bytes = 0
        """By `all_to_all`."""

    def all_reduce(self, array: NDArray[Any]) -> NDArray[Any]:
        self._arrays[self.rank] = array.copy()
        self._meeting.wait()
        assert len({(a.shape, a.dtype) for a in self._arrays}) == 1
        array[...] = np.sum(self._arrays, axis=0)
        self._meeting.wait()
        return array

    def all_to_all(self, outgoing: Mapping[int, NDArray[Any]], incoming: Mapping[int, NDArray[Any]]) -> None:
        for peer, array in outgoing.items():
            self._queues[self.rank][peer].put(array.copy())
            self.num_sent_bytes += array.nbytes
        for peer, array in incoming.items():
            array[:] = self._queues[peer][self.rank].get(timeout=20)

    def all_gather(self, value: int) -> list[int]:
        slots_T = np.zeros(self.num_trainers, np.int64)
        slots_T[self.rank] = value
        return [int(v) for v in self.all_reduce(slots_T)]

    def barrier(self) -> None:
        self._meeting.wait()

    def long_barrier(self) -> None:
        self._meeting.wait()


class ToldGroup(SingleGroup):
    """One of two trainers, whose other one always answers the same. Counts the long waits."""

    num_trainers = 2

    def __init__(self, told: int) -> None:
        self.told, self.waited = told, 0

    def all_gather(self, value: int) -> list[int]:
        return [value, self.told]

    def long_barrier(self) -> None:
        self.waited += 1


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
        groups: list[ProcessGroup] = [gloo, SingleGroup(), WritingGroup([]), ToldGroup(0), *ThreadGroup.of(2)]
        return [cpu, gpu, exported, LabelPredictor()], groups, [job, NothingDue(), EvaluationEveryStep()]

    def _stores(folder: Folder, remote: ObjectStore) -> list[Checkpoints]:
        return [folder, remote]
