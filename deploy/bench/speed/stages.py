"""Parts of our system that run alone: `python -m paddlewheel.deploy.bench.speed.stages NAME SPEC RESULT`; see
`systems.stage`.

Each is the code that a trainer runs, without the other parts, in a process of its own: so none warms up for another.

Legend: B batch rows, U unique keys, W floats of a pulled row, N floats of the dense gradient.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.data_pipeline.dataset import Dataset, plan_epoch
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.local import local_servers
from paddlewheel.trainer.job.config import JobConfig

Told = dict[str, Any]
Spec = dict[str, Any]


def _batches(job: JobConfig, epoch: int) -> Iterator[Batch]:
    dataset = Dataset.open(job.data.train, job.data)
    with Loader(dataset, job.data, plan_epoch(dataset, job.seed, epoch), seed=job.seed, epoch=epoch) as loader:
        yield from loader


def _pass(work: Callable[[], int]) -> dict[str, float]:
    started = time.monotonic()
    rows = work()
    return {"rows": rows, "started": started, "ended": time.monotonic()}


def read(job: JobConfig, spec: Spec, _: Path) -> Told:
    """Parquet to batches, nothing else."""
    epochs = range(spec["passes"])
    return {"passes": [_pass(lambda: sum(batch.num_rows for batch in _batches(job, epoch))) for epoch in epochs]}  # noqa: B023


def iter_batches(job: JobConfig, spec: Spec, _: Path) -> Told:
    """The ceiling of `read`: pyarrow alone, all columns of every file to NumPy, one file after the other."""
    files = [file.source.path for file in Dataset.open(job.data.train, job.data).files]

    def once() -> int:
        rows = 0
        for path in files:
            with pq.ParquetFile(path) as parquet:
                for batch in parquet.iter_batches(job.data.batch_rows, use_threads=job.data.threads > 1):
                    for column in batch.columns:
                        column.to_numpy(zero_copy_only=False)
                    rows += batch.num_rows
        return rows

    return {"passes": [_pass(once) for _ in range(spec["passes"])]}


def to_batches(job: JobConfig, spec: Spec, _: Path) -> Told:
    """The same with `Dataset.to_batches` of pyarrow, which reads ahead."""
    files = [file.source.path for file in Dataset.open(job.data.train, job.data).files]

    def once() -> int:
        rows = 0
        found = pads.dataset(files).to_batches(batch_size=job.data.batch_rows, use_threads=job.data.threads > 1)
        for batch in found:
            for column in batch.columns:
                column.to_numpy(zero_copy_only=False)
            rows += batch.num_rows
        return rows

    return {"passes": [_pass(once) for _ in range(spec["passes"])]}


def exchange(job: JobConfig, spec: Spec, directory: Path) -> Told:
    """Pull and push of the job's batches against real servers, in two threads as in training; no dense part."""
    from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline

    kept = list(islice(_batches(job, 0), spec["max_batches"]))

    def once() -> int:
        rows = 0
        with EmbeddingPipeline(client, iter(kept), max_staleness_steps=job.train.max_staleness_steps) as pipeline:
            for item in pipeline:
                item.push(item.rows)
                rows += item.batch.num_rows
            pipeline.drain()
        return rows

    tables = {name: job.tables[name] for name in job.data.tables}
    with (
        local_servers(tables, job.cluster.servers, directory) as servers,
        Client(tables, servers.endpoints, seed=job.seed, pull_timeout_seconds=60.0) as client,
    ):
        return {"passes": [_pass(once) for _ in range(spec["passes"])]}


def dense(job: JobConfig, spec: Spec, _: Path) -> Told:
    """The dense part on the job's batches, kept in memory: forward, backward, Adam."""
    from paddlewheel.trainer.dense.backend import dense_program
    from paddlewheel.trainer.dense.inputs import layouts

    kept = list(islice(_batches(job, 0), spec["max_batches"]))
    tables = {name: job.tables[name] for name in job.data.tables}
    program = dense_program(job, layouts(job.data, tables), rank=0)
    buffer = program.buffer(2)
    rng = np.random.default_rng(job.seed)
    values = [
        {n: rng.normal(0, 0.01, (len(k.keys_U), tables[n].pull_width)).astype(np.float32) for n, k in b.tables.items()}
        for b in kept
    ]

    def once() -> int:
        for batch, rows in zip(kept, values, strict=True):
            buffer.take(program.gradients(batch, rows))
            buffer.apply(float(batch.num_rows))
        return sum(batch.num_rows for batch in kept)

    return {"passes": [_pass(once) for _ in range(spec["passes"])]}


def matmul(job: JobConfig, spec: Spec, _: Path) -> Told:
    """The tower's matrix products alone, forward and backward, by NumPy's BLAS in fp32: a ceiling for `dense`."""
    rng = np.random.default_rng(job.seed)
    num_rows, num_rounds = job.data.batch_rows, int(spec["max_batches"])
    layers = [
        (
            rng.random((num_rows, a), np.float32),
            rng.random((a, b), np.float32),
            rng.random((num_rows, b), np.float32),
        )
        for a, b in pairwise(spec["tower_sizes"])
    ]

    def once() -> int:
        for _ in range(num_rounds):
            for x_BI, weight_IO, gradient_BO in layers:
                np.matmul(x_BI, weight_IO)
                np.matmul(x_BI.T, gradient_BO)
                np.matmul(gradient_BO, weight_IO.T)
        return num_rows * num_rounds

    return {"passes": [_pass(once) for _ in range(spec["passes"])]}


def calls(job: JobConfig, spec: Spec, directory: Path) -> Told:
    """Pulls or pushes of so many keys, one call after the other; counts keys.

    The spec adds {"operation", "keys_per_call", "num_calls", "num_keys"}; table and servers are the job's.
    """
    name = job.data.tables[0]
    table, count, num_calls = job.tables[name], int(spec["keys_per_call"]), int(spec["num_calls"])
    rng = np.random.default_rng(job.seed)
    known = np.unique(rng.integers(1, 2**63, spec["num_keys"], np.uint64))
    picked = [rng.choice(known, count, replace=False) for _ in range(16)]
    gradients_UW = rng.normal(0, 0.01, (count, table.pull_width)).astype(np.float32)
    ones_U = np.ones(count, np.float32)
    with (
        local_servers({name: table}, job.cluster.servers, directory) as servers,
        Client({name: table}, servers.endpoints, pull_timeout_seconds=60.0) as client,
    ):
        for start in range(0, len(known), 100_000):  # all keys exist before anything is timed
            part = known[start : start + 100_000]
            zeros_UW = np.zeros((len(part), table.pull_width), np.float32)
            client.push(name, part, zeros_UW, np.ones(len(part), np.float32), np.zeros(len(part), np.float32))

        def once() -> int:
            for number in range(num_calls):
                keys_U = picked[number % len(picked)]
                if spec["operation"] == "pull":
                    client.pull(name, keys_U)
                else:
                    client.push(name, keys_U, gradients_UW, ones_U, ones_U)
            return count * num_calls

        return {"passes": [_pass(once) for _ in range(spec["passes"])]}


def loopback(job: JobConfig, spec: Spec, _: Path) -> Told:
    """The bytes of `calls` over a TCP connection of this machine: the ceiling of any client and server."""
    width = job.tables[job.data.tables[0]].width
    there, back = (12, 4 * (width + 3)) if spec["operation"] == "pull" else (8 + 4 * (width + 4), 0)
    there, back = there * spec["keys_per_call"], back * spec["keys_per_call"] + 1

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        request, reply = bytearray(there), bytes(back)
        with connection:
            while _receive(connection, request):
                connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        with socket.create_connection(listener.getsockname()) as connection:
            num_keys, num_calls = int(spec["keys_per_call"]), int(spec["num_calls"])
            request, reply = bytes(there), bytearray(back)

            def once() -> int:
                for _ in range(num_calls):
                    connection.sendall(request)
                    _receive(connection, reply)
                return num_keys * num_calls

            return {"passes": [_pass(once) for _ in range(spec["passes"])]}


def _receive(connection: socket.socket, buffer: bytearray) -> bool:
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            return False
        view = view[count:]
    return True


STAGES: dict[str, Callable[[JobConfig, Spec, Path], Told]] = {
    "read": read,
    "iter_batches": iter_batches,
    "to_batches": to_batches,
    "exchange": exchange,
    "dense": dense,
    "matmul": matmul,
    "calls": calls,
    "loopback": loopback,
}


def main() -> None:
    """One stage."""
    name, spec, result = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    job = JobConfig.load(spec["job"], spec["overrides"])
    result.write_text(json.dumps(STAGES[name](job, spec, result.parent)))


if __name__ == "__main__":
    main()
