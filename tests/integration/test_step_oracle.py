"""Servers and trainers as processes reproduce a float64 NumPy job: every table row and every dense weight.

The data has ids that stand several times in a batch, multi-valued features, empty lists and nulls; the last step of an
epoch is smaller, and one of two trainers runs out of rows before the other.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.data_pipeline.dataset import Dataset, assign, plan_epoch
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.local import local_servers
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.dense.inputs import layouts
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.job.config import JobConfig
from tests.support.reference_system import ReferenceJob
from tests.support.trainers import result_of, run_trainers

ROWS = 44
ADMISSION = {  # by rule and table
    "adagrad": {
        "default": {"admission_by_feature": {"user": 9}},
        "things": {"admission_threshold": 20, "admission_by_feature": {"tags": None}},
    }
}
RULES = {
    "sgd": {"rule": "sgd", "learning_rate": 0.05},
    "adagrad": {"rule": "adagrad", "learning_rate": 0.1, "initial_accumulator": 0.5},
    "adagrad_elementwise": {"rule": "adagrad_elementwise", "learning_rate": 0.1, "initial_accumulator": 0.5},
    "adam": {"rule": "adam", "learning_rate": 0.02, "epsilon": 1e-3},
    "adam_shared": {"rule": "adam_shared", "learning_rate": 0.02, "epsilon": 1e-3},
}


def _write(path: Path) -> None:
    rng = np.random.default_rng(4)
    draw = rng.integers
    table = pa.table(
        {
            "click": pa.array(draw(0, 2, ROWS), pa.int8()),
            "x": pa.array(rng.standard_normal(ROWS), pa.float32()),
            "y": pa.array([None if i % 9 == 0 else float(i % 5) for i in range(ROWS)], pa.float64()),
            "user": pa.array([None if i % 7 == 0 else int(draw(0, 6)) for i in range(ROWS)], pa.int64()),
            "site": pa.array([f"s{draw(0, 4)}" for _ in range(ROWS)]),
            "tags": pa.array([[f"t{draw(0, 5)}" for _ in range(draw(0, 5))] for _ in range(ROWS)]),
            "seen": pa.array([None if i % 8 == 0 else [int(k) for k in draw(0, 5, draw(0, 4))] for i in range(ROWS)]),
        }
    )
    path.mkdir()
    pq.write_table(table.slice(0, 30), path / "a.parquet", row_group_size=11)
    pq.write_table(table.slice(30), path / "b.parquet")


def _job(tmp_path: Path, rule: str, trainers: int, servers: int) -> JobConfig:
    _write(tmp_path / "train")
    admission = ADMISSION.get(rule, {})
    return JobConfig.parse(
        {
            "name": "oracle",
            "seed": 9,
            "run_dir": str(tmp_path / "run"),
            "data": {
                "train": str(tmp_path / "train"),
                "batch_rows": 7,
                "labels": ["click"],
                "dense": [{"columns": ["x"]}, {"columns": ["y"], "fill": 0.5, "transform": "log1p"}],
                "sparse": [
                    {"name": "user"},
                    {"name": "site"},
                    {"name": "tags", "pooling": "mean", "max_length": 4, "table": "things", "key_space": "tags"},
                    {"name": "seen", "pooling": "sum", "max_length": 3, "table": "things", "key_space": "seen"},
                ],
                "shuffle": {"slice_rows": 8},
                "slice_assignment": "static",
            },
            "tables": {
                name: {"width": 3, "initial_range": 0.3, "optimizer": RULES[rule], **more, **admission.get(name, {})}
                for name, more in {"default": {}, "things": {"first_order": False}}.items()
            },
            "model": {"kind": "deepfm", "tower": [6, 4]},
            "train": {
                "epochs": 2,
                "start_at_label_rate": False,  # the reference begins at zero
                "max_staleness_steps": 0,
                "embedding_l2": 0.01,
                "precision": "float32",
                "dense_optimizer": {"learning_rate": 0.01, "epsilon": 1e-3, "weight_decay": 0.1},
            },
            "cluster": {"servers": servers, "trainers": trainers},
        }
    )


def _batches(job: JobConfig) -> list[list[list[Batch]]]:
    """By epoch and trainer: what the job will read."""
    dataset = Dataset.open(job.data.train, job.data)
    found: list[list[list[Batch]]] = []
    for epoch in range(job.train.epochs):
        plan = plan_epoch(dataset, job.seed, epoch)
        found.append([])
        for rank in range(job.cluster.trainers):
            mine = assign(plan, job.cluster.trainers, rank)
            with Loader(dataset, job.data, mine, seed=job.seed, epoch=epoch) as loader:
                found[-1].append(list(loader))
    return found


def _reference(job: JobConfig) -> ReferenceJob:
    program = DenseProgram(
        layouts(job.data, job.tables),
        num_dense=2,
        num_labels=1,
        model=job.model,
        optimizer=job.train.dense_optimizer,
        seed=job.seed,
        rank=0,
    )
    return ReferenceJob(job, program.parameters())


def _create(job: JobConfig, reference: ReferenceJob, client: Client, epochs: list[list[list[Batch]]]) -> None:
    """Gives every key its row in both worlds, by a push of zeros."""
    for name in job.data.tables:
        keys_U = np.unique(np.concatenate([b.tables[name].keys_U for e in epochs for t in e for b in t]))
        zeros_UW = np.zeros((len(keys_U), job.tables[name].pull_width), np.float32)
        ones_U = np.ones(len(keys_U), np.float32)
        client.push(name, keys_U, zeros_UW, ones_U, 0 * ones_U)
        for key in keys_U:
            reference.tables[name].push(int(key), zeros_UW[0], 1.0, 0.0)


def _marks(rule: str) -> list[pytest.MarkDecorator]:
    slow = [pytest.mark.slow] if rule in {"adagrad_elementwise", "adam_shared"} else []
    return slow + ([pytest.mark.needs("our own tables")] if rule in ADMISSION else [])


@pytest.mark.parametrize(
    ("rule", "trainers", "servers"),
    [
        *(
            # servers alone are held against each rule's formula in pserver/test_update_rules.py
            pytest.param(rule, 1, 2, marks=_marks(rule))
            for rule in RULES
        ),
        ("sgd", 2, 1),
        ("sgd", 2, 2),
    ],
)
def test_processes_do_what_the_formulas_say(tmp_path: Path, rule: str, trainers: int, servers: int) -> None:
    # With two trainers the servers see the pushes of a step in either order. SGD's result does not depend on it, once
    # the rows exist (the first push of a key creates its embedding and does not train it).
    job = _job(tmp_path, rule, trainers, servers)
    reference, epochs = _reference(job), _batches(job)
    with local_servers(dict(job.tables), servers, tmp_path) as running:
        if trainers > 1:
            with Client(dict(job.tables), running.endpoints, seed=job.seed) as client:
                _create(job, reference, client, epochs)
        for by_trainer in epochs:
            for step in range(max(map(len, by_trainer))):
                reference.step([batches[step] for batches in by_trainer if step < len(batches)])
        outcomes = run_trainers(job, running.endpoints, tmp_path)
        assert [code for code, _ in outcomes] == [0] * trainers, outcomes
        result = result_of(outcomes[0][1])
        assert result["rows"] == 2 * ROWS
        with Client(dict(job.tables), running.endpoints, seed=job.seed) as client:
            for name, table in reference.tables.items():
                keys_U = np.array(sorted(table.rows), np.uint64)
                assert sum(client.num_keys()[name]) == len(keys_U)
                kinds = job.tables[name].admission_thresholds
                class_U = np.array([kinds.index(table.threshold(key)) for key in keys_U], np.uint8)
                pulled = client.pull_with_counts(name, keys_U, class_U=class_U)
                if rule in ADMISSION:
                    assert 0 < pulled.admitted_U.sum() < len(keys_U)
                expected_UW = np.array([reference.value(name, key) for key in keys_U])
                np.testing.assert_allclose(pulled.values_UW, expected_UW, rtol=2e-4, atol=2e-5, err_msg=name)
                np.testing.assert_allclose(pulled.shows_U, [table.rows[int(k)]["show"] for k in keys_U])
                np.testing.assert_allclose(pulled.clicks_U, [table.rows[int(k)]["click"] for k in keys_U])
    saved = manifest.read(manifest.latest(Path(job.checkpoint_location))).dense()
    for name, expected in reference.dense.items():
        np.testing.assert_allclose(saved[name], expected, rtol=2e-4, atol=2e-5, err_msg=name)
    if trainers == 2:
        assert len({result_of(events)["dense_hash"] for _, events in outcomes}) == 1
