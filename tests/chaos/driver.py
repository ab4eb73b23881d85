"""A real job under fire: starts `paddlewheel train` on a small data set, waits for moments, breaks things, checks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml

from paddlewheel.trainer.checkpoint.folder_store import open_checkpoints
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
from paddlewheel.trainer.coordinator import run_report
from paddlewheel.trainer.coordinator.records import AttemptLost
from paddlewheel.trainer.coordinator.resume import read_journal
from paddlewheel.trainer.coordinator.security import CHANNEL_OPTIONS
from tests.chaos import oracle

ROOT = Path(__file__).parents[2]
NUM_ROWS = 40_000
EPOCHS = 3
_TRAIN_SHARE = 0.8
AUC_TOLERANCE = 0.003
_PATIENCE_SECONDS = 240.0  # for anything that a loaded machine may be slow at
ROLES = {pb.ROLE_PSERVER: "pserver", pb.ROLE_TRAINER: "trainer"}


def job_file(folder: Path, data: Path, /, **sections: Any) -> Path:
    """A job of about 90 steps on 2 servers and 2 trainers, with limits of seconds."""
    job: dict[str, Any] = {
        "name": "chaos",
        "seed": 5,
        "run_dir": str(folder / "run"),
        "data": {
            "train": str(data / "train"),
            "eval": str(data / "eval"),
            "batch_rows": 512,
            "labels": ["click"],
            "dense": {"columns": ["price", "age", "recency", "depth"], "fill": 0, "clip": [-5, 5]},
            "sparse": [
                *({"name": name} for name in ("user", "item", "site", "category")),
                {"name": "tags", "pooling": "mean", "max_length": 5},
            ],
            "threads": 1,
            "shuffle": {"interleave": 4},  # else each trainer hoards so many slices of so few that the steps vary
        },
        "tables": {"default": {"width": 4, "optimizer": {"rule": "adagrad", "learning_rate": 0.1}}},
        "model": {"kind": "deepfm", "tower": [16]},
        "train": {"epochs": EPOCHS, "dense_optimizer": {"learning_rate": 0.003}},
        "cluster": {"servers": 2, "trainers": 2, "trainer_threads": 1},
        "checkpoint": {"every_steps": 15},
        "metrics": {"enabled": False},
        "control": {
            "heartbeat_timeout_seconds": 4,
            "server_health_timeout_seconds": 5,
            "step_timeout_seconds": 30,
            "backoff_seconds": 0.2,
        },
    }
    for section, values in sections.items():
        job[section] = {**job[section], **values} if isinstance(values, dict) else values
    path = folder / "job.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


class ChaosJob:
    """One launcher with everything it started.

    Args:
        job: the job file.
        seed: of the moments and victims.
        arguments: more of the command line.
        prefix: a command that runs the launcher, such as `unshare`.
    """

    def __init__(self, job: Path, seed: int, arguments: Sequence[str] = (), prefix: Sequence[str] = ()) -> None:
        self.raw = yaml.safe_load(job.read_text())
        self.run_dir = Path(self.raw["run_dir"])
        self.random = random.Random(seed)
        self.started = time.monotonic()
        self.hit_at = 0.0
        command = [*prefix, sys.executable, "-m", "paddlewheel.deploy.cli", "train", str(job), "--json", *arguments]
        self._log = (job.parent / f"launcher-{time.monotonic_ns()}.log").open("w+")
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._channel: grpc.Channel | None = None
        self._address = ""

    # -- what it says

    def log(self) -> str:
        # opened anew: the launcher shares the position of `self._log`, and would go on writing where it is read
        return Path(self._log.name).read_text()

    def status(self) -> pb.JobStatus | None:
        """None while there is no coordinator, or it does not answer."""
        address = self._find_address()
        if address is None:
            return None
        if self._channel is None or address != self._address:
            self._close_channel()
            self._address, self._channel = address, grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        try:
            found: pb.JobStatus = pb_grpc.CoordinatorStub(self._channel).GetStatus(pb.StatusRequest(), timeout=1.0)
        except grpc.RpcError:
            return None
        return found

    def _find_address(self) -> str | None:
        for line in reversed(self.log().splitlines()):
            if "coordinator at " in line:
                return str(json.loads(line)["message"].split("coordinator at ")[1].split(";")[0])
        return None

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def wait_for(self, condition: Callable[[pb.JobStatus], object], what: str) -> pb.JobStatus:
        """Until the status says so."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.log()}"
            found = self.status()
            if found is not None and condition(found):
                return found
            time.sleep(0.02)
        raise AssertionError(f"never: {what}\n{self.log()}")

    def wait_for_step(self, step: int) -> pb.JobStatus:
        return self.wait_for(lambda s: s.progress.step >= step, f"step {step}")

    def random_moment(self) -> pb.JobStatus:
        """Somewhere in training, after the first checkpoint or before it."""
        return self.wait_for_step(self.random.randint(2, 70))

    def wait_for_phase(self, role: str, phase: str, attempt: int = 1) -> pb.JobStatus:
        """Until a worker of the role says that it is loading, saving..."""

        def there(found: pb.JobStatus) -> bool:
            states = [member.state for member in found.members if ROLES[member.role] == role]
            return found.attempt >= attempt and phase in states

        return self.wait_for(there, f"a {role} that is {phase}")

    def wait_for_commits(self, number: int) -> None:
        self.wait_for(lambda _: self.num_records("committed") >= number, f"{number} checkpoints")

    def num_records(self, what: str) -> int:
        return sum(record.what == what for record in read_journal(self.run_dir / "journal.jsonl"))

    # -- what is done to it

    def pid_of(self, role: str, rank: int, part: str) -> int:
        """part: agent or worker."""
        members = self.wait_for(lambda s: s.members, "members").members
        member = next(m for m in members if ROLES[m.role] == role and m.rank == rank)
        return int(member.pid if part == "agent" else member.worker_pid)

    def coordinator_pid(self) -> int:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(p.pid for p in children if "paddlewheel.trainer.coordinator" in p.cmdline())

    def hit(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends the signal and remembers when."""
        assert pid > 1
        self.hit_at = time.time()
        os.kill(pid, number)

    # -- its end

    def finish(self, code: int = 0) -> dict[str, Any]:
        """Waits for its end; the outcome that it prints."""
        try:
            out, _ = self.process.communicate(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end:\n{self.log()}") from None
        assert self.process.returncode == code, f"exit code {self.process.returncode}:\n{self.log()}\n{out}"
        outcome: dict[str, Any] = json.loads(out)
        return outcome

    def close(self) -> None:
        """Ends what a failed test has left."""
        self._close_channel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._log.close()

    def seconds_to_detect(self) -> float:
        """From the hit until the loss was written down, the grace for the survivors excluded."""
        lost = [r for r in read_journal(self.run_dir / "journal.jsonl") if isinstance(r, AttemptLost)]
        after = [r.time - r.halting_seconds - self.hit_at for r in lost if r.time > self.hit_at]
        return min(after) if after and self.hit_at else float("nan")


def check_run(
    job: ChaosJob, outcome: dict[str, Any], undisturbed_auc: float | None, directory: Path | str | None = None
) -> run_report.Report:
    """The promises that hold after any disturbance."""
    report = check_folder(job.run_dir, directory or job.run_dir / "checkpoints", job.raw["train"]["epochs"])
    if not any("lifecycle" in table for table in job.raw["tables"].values()):  # else shows decay
        kept = open_checkpoints(str(directory or job.run_dir / "checkpoints"))
        with kept.local_copy(kept.committed()[-1]) as newest:
            oracle.check(newest, job.raw)
    result = outcome["result"]
    assert result["dense_hash"], "trainers compare their dense parameters at the end and every restore"
    if undisturbed_auc is not None:
        assert abs(result["eval"]["auc"] - undisturbed_auc) < AUC_TOLERANCE, (result["eval"]["auc"], undisturbed_auc)
    return report


def check_folder(run_dir: Path, directory: Path | str, epochs: int) -> run_report.Report:
    """The journal proves that each row was trained once; the newest checkpoint is whole and the last of the line."""
    report = run_report.report(run_dir)
    assert report.exact, report
    assert [proof.num_rows for proof in report.epochs] == [round(NUM_ROWS * _TRAIN_SHARE)] * epochs
    assert all(proof.is_exact for proof in report.epochs), report
    kept = open_checkpoints(str(directory))
    newest = kept.committed()[-1]
    kept.verify(newest)
    assert kept.manifest(newest)["step"] == report.steps[-1]
    assert not list(Path(directory).glob(".step*"))
    return report
