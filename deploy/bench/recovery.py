"""A recovery drill: a real job whose server is killed after a checkpoint, and what that costs, by size of the tables.

Every row of the data brings keys that no other row has, so the tables hold exactly `num_keys` after the first epoch,
when the first checkpoint is made. A server is killed in the second epoch; the job recovers and goes on to its end.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddlewheel.deploy.launch.display import Unfailing
from paddlewheel.deploy.launch.launcher import run_local
from paddlewheel.pserver.config import Engine
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import run_report
from paddlewheel.trainer.coordinator.records import AttemptLost, CommitBegan, CommitDone, TrainersRunning
from paddlewheel.trainer.coordinator.resume import read_journal
from paddlewheel.trainer.job.config import JobConfig

_NUM_FEATURES = 8
_PROJECTED_KEYS = 1_000_000_000
_PROJECTED_SERVERS = (8, 32, 128)


class DrillError(RuntimeError):
    """The drill did not go as it should, so its figures would mean nothing."""


@dataclass(frozen=True)
class Cost:
    """What one loss has cost.

    Attributes:
        detect_seconds: from the kill until the coordinator knew.
        again_seconds: from the kill until a step was trained that had not been trained in this attempt before.
        load_seconds: of it, what trainer 0 took to restore: it reads and verifies the checkpoint, the servers load it.
        rows_replayed: trained again, because they came after the checkpoint.
        save_seconds: of the checkpoint: servers write, trainer 0 reads back and verifies; training waits.
        commit_seconds: until it has its name.
        num_bytes: of the checkpoint.
    """

    num_keys: int
    num_servers: int
    detect_seconds: float
    again_seconds: float
    load_seconds: float
    rows_replayed: int
    save_seconds: float
    commit_seconds: float
    num_bytes: int
    seconds: float

    @property
    def save_megabytes_per_second(self) -> float:
        return self.num_bytes / 1e6 / max(1e-9, self.save_seconds + self.commit_seconds)


@dataclass(frozen=True)
class Projection:
    """What a table of a billion keys would take, if every server were as fast as one was in the drill."""

    num_servers: int
    num_keys: int
    num_bytes: int
    save_seconds: float
    load_seconds: float


def drill(
    num_keys: int,
    *,
    seed: int = 0,
    width: int = 16,
    num_servers: int = 2,
    engine: Engine = "auto",
    work: Path | None = None,
) -> Cost:
    """Runs one drill. engine: whose table holds the rows, as `tables.*.engine` says it.

    Raises:
        DrillError: the job did not recover, or was over before its server could be killed.
    """
    with tempfile.TemporaryDirectory(prefix="paddlewheel-drill-", dir=work) as name:
        folder = Path(name)
        num_rows = -(-num_keys // _NUM_FEATURES)
        _write_rows(folder / "train", num_rows, seed)
        batch_rows = max(32, min(2048, num_rows // 60))
        steps_per_epoch = -(-num_rows // (2 * batch_rows))
        job = JobConfig.parse(
            {
                "name": "drill",
                "seed": seed,
                "run_dir": str(folder / "run"),
                "data": {
                    "train": str(folder / "train"),
                    "batch_rows": batch_rows,
                    "slice_assignment": "static",
                    "labels": ["click"],
                    "sparse": [{"name": f"f{i}"} for i in range(_NUM_FEATURES)],
                },
                "tables": {"default": {"width": width, "engine": engine}},
                "model": {"kind": "deepfm", "tower": [32]},
                "train": {"epochs": 3},
                "cluster": {"servers": num_servers, "trainers": 2},
                "checkpoint": {"every_steps": steps_per_epoch + 1, "keep": 2},
                "metrics": {"enabled": False},
                "control": {"backoff_seconds": 0.0},
            }
        )
        saboteur = _Saboteur(round(1.5 * steps_per_epoch) + 1)
        started = time.monotonic()
        outcome = run_local(job, display=saboteur)
        if outcome.exit_code != 0 or saboteur.again_at is None:
            raise DrillError(
                f"the job ended with {outcome.exit_code} ({outcome.cause or 'too early'}) instead of recovering"
            )
        return _cost(job, saboteur, num_servers, time.monotonic() - started)


def project(cost: Cost) -> list[Projection]:
    """From one drill to a billion keys: rates by server, bytes by key."""
    scale = _PROJECTED_KEYS / cost.num_keys
    return [
        Projection(
            servers,
            _PROJECTED_KEYS,
            round(cost.num_bytes * scale),
            (cost.save_seconds + cost.commit_seconds) * scale * cost.num_servers / servers,
            cost.load_seconds * scale * cost.num_servers / servers,
        )
        for servers in _PROJECTED_SERVERS
    ]


def to_json(costs: Sequence[Cost]) -> dict[str, Any]:
    """The whole result, with what it was measured on."""
    from paddlewheel.deploy.bench.speed.machine import describe

    return {
        "machine": describe(),
        "costs": [{**asdict(c), "save_megabytes_per_second": c.save_megabytes_per_second} for c in costs],
        "projection": [asdict(p) for p in project(max(costs, key=lambda c: c.num_keys))],
    }


def table(costs: Sequence[Cost]) -> Iterator[str]:
    """Markdown."""
    yield "| keys | detect s | training again s | of that load s | rows replayed | checkpoint s | MB | MB/s |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for c in costs:
        back = f"{c.detect_seconds:.2f} | {c.again_seconds:.1f} | {c.load_seconds:.1f} | {c.rows_replayed:,}"
        seconds = c.save_seconds + c.commit_seconds
        saved = f"{seconds:.2f} | {c.num_bytes / 1e6:,.1f} | {c.save_megabytes_per_second:,.1f}"
        yield f"| {c.num_keys:,} | {back} | {saved} |"
    yield ""
    most = max(costs, key=lambda c: c.num_keys)
    yield (
        f"If every server saves and loads as fast as one did with the most keys above (on shared cores): seconds *"
        f" {_PROJECTED_KEYS:,} / {most.num_keys:,} keys * {most.num_servers} / servers. Store and network are left out."
    )
    yield ""
    yield "| keys | servers | GB | checkpoint s | load s |"
    yield "|---:|---:|---:|---:|---:|"
    for p in project(most):
        size, times = f"{p.num_bytes / 1e9:,.0f}", f"{p.save_seconds:,.0f} | {p.load_seconds:,.0f}"
        yield f"| {p.num_keys:,} | {p.num_servers} | {size} | {times} |"


def plot(costs: Sequence[Cost], path: Path) -> bool:
    """Seconds by number of keys; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    keys = [cost.num_keys for cost in costs]
    for label, values in {
        "until the loss is known": [cost.detect_seconds for cost in costs],
        "until it trains again": [cost.again_seconds for cost in costs],
        "checkpoint": [cost.save_seconds + cost.commit_seconds for cost in costs],
    }.items():
        axes.plot(keys, values, marker="o", label=label)
    axes.set(xscale="log", xlabel="keys in the tables", ylabel="seconds", title="Loss of a server")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return True


class _Saboteur:
    """Follows the job as a display does, and kills server 0 at a step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.hit_at: float | None = None
        self.again_at: float | None = None

    def update(self, status: pb.JobStatus) -> None:
        step = status.progress.step
        if self.hit_at is None:
            if step >= self._step and status.checkpoint.num_committed and status.checkpoint.state == "idle":
                victim = next(m for m in status.members if m.role == pb.ROLE_PSERVER and m.rank == 0)
                self.hit_at = time.time()
                os.kill(victim.worker_pid, signal.SIGKILL)
        elif self.again_at is None and status.attempt > 1 and step > status.checkpoint.step:
            self.again_at = time.time()

    def note(self, level: str, text: str, at: float | None = None) -> None:
        Unfailing(sys.stderr).write(f"{level}: {text}\n")

    def close(self) -> None:
        pass


def _cost(job: JobConfig, saboteur: _Saboteur, num_servers: int, seconds: float) -> Cost:
    assert saboteur.hit_at is not None
    assert saboteur.again_at is not None
    run_dir = Path(job.run_dir)
    records = read_journal(run_dir / "journal.jsonl")
    report = run_report.report(run_dir)
    if not report.exact:
        raise DrillError("; ".join(report.reasons) or "a row was trained twice or left out")
    losses = [record for record in records if isinstance(record, AttemptLost)]
    causes = [record.cause for record in losses]
    if len(causes) != 1:
        raise DrillError(f"one loss was planned, there were {len(causes)}: {'; '.join(causes)}")
    lost = losses[0]
    again = [record for record in records if isinstance(record, TrainersRunning)][1]
    committed = next(record for record in records if isinstance(record, CommitDone))
    first = report.attempts[0]
    cursor = next(record.cursor for record in records if isinstance(record, CommitBegan))
    num_keys = _NUM_FEATURES * min(cursor["rows"], sum(rows for epoch, _, _, rows in cursor["spans"] if epoch == 0))
    return Cost(
        num_keys=num_keys,
        num_servers=num_servers,
        detect_seconds=lost.time - lost.halting_seconds - saboteur.hit_at,
        again_seconds=saboteur.again_at - saboteur.hit_at,
        load_seconds=again.load_seconds or 0.0,
        rows_replayed=first.rows_replayed or 0,
        save_seconds=committed.save_seconds or 0.0,
        commit_seconds=committed.commit_seconds or 0.0,
        num_bytes=committed.bytes or 0,
        seconds=seconds,
    )


def _write_rows(folder: Path, num_rows: int, seed: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    random = np.random.RandomState(seed)
    files = 4
    for number, rows in enumerate(np.array_split(np.arange(num_rows, dtype=np.int64), files)):
        columns: dict[str, Any] = {"click": random.randint(0, 2, len(rows)).astype(np.int8)}
        columns |= {f"f{i}": 1 + rows * _NUM_FEATURES + i for i in range(_NUM_FEATURES)}
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=1 << 16)
