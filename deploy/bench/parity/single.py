"""One job in one process, without servers: `python -m paddlewheel.deploy.bench.parity.single JOB.json` prints the
result as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

from paddlewheel.data_pipeline.dataset import Dataset, assign, plan_epoch
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.deploy.bench.parity.memory import MemoryClient
from paddlewheel.pserver.client import Client
from paddlewheel.trainer.dense.backend import dense_program
from paddlewheel.trainer.dense.inputs import layouts
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.distributed.process_group import ProcessGroup
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.loop.early_stopping import due_after_epoch
from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline
from paddlewheel.trainer.loop.evaluate import evaluate
from paddlewheel.trainer.loop.lr_schedule import rate_factor
from paddlewheel.trainer.loop.negative_sampling import sample_negatives
from paddlewheel.trainer.loop.train import Signals, TrainLoop
from paddlewheel.trainer.worker.first_biases import first_biases


def run(job: JobConfig) -> dict[str, Any]:
    """Trains and evaluates; the fields of a run's `result` that a single process has.

    Every step sees all updates before it. Evaluations by steps, early stopping and checkpoints are left out.
    """
    tables = {name: job.tables[name] for name in job.data.tables}
    client = cast("Client", MemoryClient(tables, job.seed))
    sync = ProcessGroup(0, 1, "", interface=None)
    program = dense_program(job, layouts(job.data, tables), rank=0)
    data = Dataset.open(job.data.train, job.data)
    if job.train.start_at_label_rate:
        first_biases(program, client, data, job.data, tables)
    total_steps = -(-data.num_rows // job.data.batch_rows) * job.train.epochs
    loop = TrainLoop(
        program,
        sync,
        max_nonfinite_steps=job.train.max_nonfinite_steps,
        checkpoint_every_steps=None,
        signals=Signals(),
        on_step=lambda *_: None,
        rate_factor=lambda step: rate_factor(job.train.dense_optimizer.schedule, step, total_steps),
    )
    evaluations: list[dict[str, Any]] = []
    started = time.monotonic()
    for epoch in range(job.train.epochs):
        loop.progress.epoch = epoch
        slices = assign(plan_epoch(data, job.seed, epoch), 1, 0)
        with Loader(data, job.data, slices, seed=job.seed, epoch=epoch) as loader:
            batches = iter(loader)
            if job.train.negative_sampling is not None:
                batches = sample_negatives(batches, job.train.negative_sampling, seed=job.seed, epoch=epoch)
            with EmbeddingPipeline(
                client, batches, max_staleness_steps=0, embedding_l2=job.train.embedding_l2, tables=tables
            ) as exchange:
                loop.epoch(exchange, rows_left=data.num_rows, synchronous=False, on_checkpoint=lambda: None)
        if job.data.eval and due_after_epoch(job.train.evaluation, epoch, job.train.epochs):
            evaluations.append({"epoch": epoch, **_evaluate(job, program, client, sync)})
    progress, seconds = loop.progress, time.monotonic() - started
    result: dict[str, Any] = {
        "rows": progress.rows,
        "steps": progress.step,
        "seconds": seconds,
        "rows_per_second": progress.rows / seconds,
        "loss": progress.loss_sum / progress.weight_sum if progress.weight_sum else None,
        "bad_steps": progress.bad_steps,
        "evaluations": evaluations,
        "keys": cast("MemoryClient", client).num_keys(),
    }
    if job.data.eval:
        result["eval"] = _evaluate(job, program, client, sync)
    return result


def _evaluate(job: JobConfig, program: DenseProgram, client: Client, sync: ProcessGroup) -> dict[str, Any]:
    data = Dataset.open(job.data.eval, job.data)
    slices = assign(plan_epoch(data, job.seed, 0), 1, 0)
    with Loader(data, job.data, slices, seed=job.seed, epoch=0, training=False) as loader:
        weighted = job.data.sample_weight is not None
        return evaluate(
            program, client, sync, iter(loader), tables=job.tables, labels=job.data.labels, weighted=weighted
        )


def main() -> None:
    """Entry point."""
    job = JobConfig.parse(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), source=sys.argv[1])
    sys.stdout.write(json.dumps(run(job)) + "\n")


if __name__ == "__main__":
    main()
